"""One start of a run: its request and its resources."""

from __future__ import annotations

from dataclasses import dataclass

from optrun.artifacts.atomic import replace_text
from optrun.artifacts.run_dir import RunDir
from optrun.config.request import Request
from optrun.config.schema.run import RunConfig
from optrun.distributed.world import ALONE, World
from optrun.runner.resume.saved_config import as_text, digest_of
from optrun.runner.summary import Summary
from optrun.training.display import Display
from optrun.training.signals import SignalHandler


@dataclass
class RunStart:
    """One start of a run; rank 0 holds its lock."""

    request: Request
    run: RunDir
    """Where everything is written."""
    display: Display
    summary: Summary
    signal_handler: SignalHandler
    started: float
    """When, on the monotonic clock."""
    world: World = ALONE
    """The ranks that share the run."""
    _written: dict[str, object] | None = None
    """What `config.yaml` holds since this start wrote it."""

    @property
    def config(self) -> RunConfig:
        """The configuration that is trained."""
        return self.request.config

    def settle(self, request: Request) -> None:
        """Replace the request by the one with the batch sizes settled for the ranks."""
        self.request = request
        self.summary.config_values = dict(request.values)

    def write_config(self) -> None:
        """Write `config.yaml`, and its digest into the summary; once for the same values."""
        if self._written == self.request.values:
            return
        self._written = dict(self.request.values)
        text = as_text(self._written)
        self.summary.values["config_sha256"] = digest_of(text)
        if (
            self.run.summary.exists()
        ):  # first: a start that is killed in between left the file as a checkpoint has it
            self.summary.write()
        replace_text(self.run.config, text)
