"""`summary.json` of a run in progress: brought up to date as it goes, true whenever it is read."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from optrun.artifacts import provenance
from optrun.artifacts.metrics import SUMMARY_FORMAT, read_summary, write_summary
from optrun.artifacts.run_dir import MANIFEST, RunDir
from optrun.config.request import Request
from optrun.config.saved import flat
from optrun.errors import EXIT_DONE
from optrun.origins import records
from optrun.plugins import OPTION, options
from optrun.training.device import peak_memory_bytes
from optrun.training.state import TrainState

_TAKEN_UP = (
    *("started_at", "command", "config_name", "overrides", "resumes", "config_sha256"),
    *("global_step", "max_steps", "epoch", "wall_seconds", "metrics", "perf"),
    *("main_metric", "model", "data", "versions", "hardware", "git"),
)


def now() -> str:
    """The time as ISO 8601, UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Summary:
    """What is known of a run.

    Args:
        run: The run directory.
        request: Configuration and command line.
        run_id: Its identity.
    """

    def __init__(self, run: RunDir, request: Request, run_id: str) -> None:
        self.run = run
        self.config = config = request.config
        self.config_values = dict(request.values)
        self.begun = False
        self.finished_before = False
        """Whether the run came to its good end at an earlier start."""
        self.state: TrainState | None = None
        self.device = torch.device("cpu")
        self.optimizer: torch.optim.Optimizer | None = None
        used = records(request.values)
        self.values: dict[str, Any] = {
            "format": SUMMARY_FORMAT,
            "run_id": run_id,
            "manifest": MANIFEST,
            "run_name": config.run_name or run.path.name,
            "status": "running",
            "message": "",
            "exit_code": None,
            "global_step": 0,
            "max_steps": None,
            "epoch": 0.0,
            "started_at": now(),
            "updated_at": now(),
            "wall_seconds": 0.0,
            "command": shlex.join(["optrun", *(() if OPTION in request.argv else options(used)), *request.argv]),
            "config_name": request.config_name,
            "overrides": list(request.overrides),
            "plugins": used,
            "config_digest": provenance.config_digest(request.values),
            "metrics": {"last": {}, "best": {}},
            "resumes": [],
        }

    def take_up(self) -> None:
        """Go on with the summary that is there: when it was started, by which command, how often it was resumed."""
        try:
            before = read_summary(self.run.summary)
        except (OSError, ValueError):
            return  # torn away with the process that wrote it: what it knew is in the checkpoint
        command = self.values["command"]
        for key in _TAKEN_UP:
            if key in before:
                self.values[key] = before[key]
        self.values["resume_command"] = command
        self.finished_before = before.get("status") == "finished"

    def flat_config(self) -> dict[str, Any]:
        """Dotted names to values."""
        return flat(self.config_values)

    def begin(
        self,
        *,
        model: Any,
        task: Any,
        total: int,
        ranking: Any,
        state: TrainState,
        device: torch.device,
        fingerprint: str,
    ) -> None:
        """Everything is built; training is about to start."""
        self.begun = True
        self.state = state
        self.device = device
        self.steps_per_epoch = -(
            -len(task.train)
            // (self.config.training.per_device_train_batch_size * self.config.training.gradient_accumulation_steps)
        )
        self.values.update(
            max_steps=total,
            main_metric={"name": ranking.metric, "mode": ranking.mode} if len(task.eval) else None,
            model={
                "class": type(model).__name__,
                "parameters": sum(p.numel() for p in model.parameters()),
                "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            },
            data={"train_examples": len(task.train), "eval_examples": len(task.eval), "fingerprint": fingerprint},
            versions=provenance.versions(),
            hardware=provenance.hardware(_device_name(device), torch.get_num_threads()),
            git=provenance.git_revision(Path.cwd()),
        )
        self.write()

    def resumed(self, step: int, changes: Mapping[str, tuple[Any, Any]], notes: Sequence[str] = ()) -> None:
        """Record one more start: from which step, with what changed, and what else was to be said of it."""
        self.values["resumes"].append(
            {
                "at": now(),
                "from_step": step,
                "command": self.values.pop("resume_command", ""),
                "changes": {key: list(pair) for key, pair in changes.items()},
                "notes": list(notes),
            }
        )
        self.write()

    def write(self) -> None:
        """Bring the file up to date."""
        self.values["updated_at"] = now()
        if self.state is not None:
            state = self.state
            seconds = max(state.seconds, 1e-9)
            self.values.update(
                global_step=state.global_step,
                epoch=round(state.global_step / self.steps_per_epoch, 6),
                wall_seconds=round(state.seconds, 3),
                metrics={"last": dict(state.last), "best": dict(state.best)},
                perf={
                    "tokens_per_second": state.tokens / seconds,
                    "samples_per_second": state.samples / seconds,
                    "peak_memory_bytes": peak_memory_bytes(self.device),
                    "optimizer_state_bytes": self._state_bytes(),
                    "skipped_steps": state.skipped_steps,
                },
            )
        write_summary(self.run.summary, self.values)

    def _state_bytes(self) -> int:
        if self.optimizer is None:
            return 0
        tensors = (value for state in self.optimizer.state.values() for value in state.values())
        return sum(value.numel() * value.element_size() for value in tensors if isinstance(value, torch.Tensor))

    def end(self, status: str, message: str, exit_code: int = EXIT_DONE) -> None:
        """The run is over, one way or another."""
        self.values.update(status=status, message=message, exit_code=exit_code)
        self.write()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
