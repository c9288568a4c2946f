"""One start of a run: what was asked for, and what it holds while it lasts."""

from __future__ import annotations

from dataclasses import dataclass

from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.run_manifest import RunManifest
from optrun.config.request import Request
from optrun.config.schema.run import RunConfig
from optrun.distributed.world import ALONE, World
from optrun.runner.resume.saved_config import as_text, digest_of
from optrun.runner.summary import Summary
from optrun.training.display import Display
from optrun.training.signals import SignalHandler


@dataclass
class Session:
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
    held_manifest: RunManifest | None = None
    """Of the run directory, on the rank that writes there; None on the others."""
    _written: dict[str, object] | None = None
    """What `config.yaml` holds since this start wrote it."""

    @property
    def config(self) -> RunConfig:
        """What is trained."""
        return self.request.config

    @property
    def manifest(self) -> RunManifest:
        """Of the run directory; rank 0 has it."""
        assert self.held_manifest is not None, "another rank writes"
        return self.held_manifest

    def settle(self, request: Request) -> None:
        """Take the numbers that follow from the ranks for those that were asked for."""
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
        self.manifest.replace(self.run.config, text.encode())
