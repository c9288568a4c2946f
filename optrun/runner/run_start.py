"""One start of a run: its request and its resources."""

from __future__ import annotations

from dataclasses import dataclass

from optrun.artifacts.atomic import replace_text
from optrun.artifacts.run_dir import RunDir
from optrun.config.request import Request
from optrun.config.schema.run import RunConfig
from optrun.distributed.world import World
from optrun.runner.resume.saved_config import as_text, digest_of
from optrun.runner.summary import Summary
from optrun.training.display import Display
from optrun.training.signals import SignalHandler


@dataclass
class RunStart:
    """One start of a run; rank 0 holds its lock."""

    request: Request
    run: RunDir
    """The run directory."""
    display: Display
    summary: Summary
    signal_handler: SignalHandler
    started: float
    """Time of the start on the monotonic clock."""
    world: World
    """The ranks that share the run."""
    _written: dict[str, object] | None = None
    """Values of `config.yaml` as this start wrote it; None: not written yet."""

    @property
    def config(self) -> RunConfig:
        """The configuration of the run."""
        return self.request.config

    def replace_request(self, request: Request) -> None:
        """Replace the request by one with the batch sizes derived from the ranks."""
        self.request = request
        self.summary.config_values = dict(request.values)

    def write_config(self) -> None:
        """Write `config.yaml`, and its digest into the summary.

        Does nothing if this start has written the same values. If there is no summary yet, the
        digest is only set in its values, and written with them.
        """
        if self._written == self.request.values:
            return
        self._written = dict(self.request.values)
        text = as_text(self._written)
        self.summary.values["config_sha256"] = digest_of(text)
        # The digest comes first: if the process is killed in between, the old file does not match
        # it, and a resume takes the configuration from a checkpoint.
        if self.run.summary.exists():
            self.summary.write()
        replace_text(self.run.config, text)
