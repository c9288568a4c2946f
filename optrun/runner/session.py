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
    """One start of a run, its lock held."""

    request: Request
    manifest: RunManifest
    display: Display
    summary: Summary
    signal_handler: SignalHandler
    started: float
    """When, on the monotonic clock."""
    world: World = ALONE
    """The ranks that share the run; this one writes for all of them."""

    @property
    def config(self) -> RunConfig:
        """What is trained."""
        return self.request.config

    @property
    def run(self) -> RunDir:
        """Where everything is written."""
        return self.manifest.run

    def write_config(self) -> None:
        """Write `config.yaml`, and its digest into the summary."""
        text = as_text(self.request.values)
        self.summary.values["config_sha256"] = digest_of(text)
        if self.run.summary.exists():  # first: a start that is killed in between left the file as a checkpoint has it
            self.summary.write()
        self.manifest.replace(self.run.config, text.encode())
