"""Write `summary.json` of a run, and keep it up to date during training."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from optrun.artifacts import provenance
from optrun.artifacts.generalisation import generalisation_of
from optrun.artifacts.metrics import SUMMARY_FORMAT, try_read_summary, write_summary
from optrun.artifacts.run_dir import RunDir
from optrun.base import shell
from optrun.base.errors import EXIT_DONE
from optrun.config.registry.origins import ALLOW, records
from optrun.config.registry.plugins import OPTION, options
from optrun.config.request import Request
from optrun.distributed.shard import model_class
from optrun.model.quantization import tensor_sizes
from optrun.runner.class_tables import as_values
from optrun.runner.outcome import SummaryValues
from optrun.task.data_facts import DataFacts
from optrun.task.evaluation import MetricAccumulator
from optrun.training.callback import Callback, StopRequest, TrainingContext
from optrun.training.device import device_name, peak_memory_bytes
from optrun.training.metrics_log import Refused
from optrun.training.setup import TrainingSetup

MOST_CONFUSED = 50
"""Most classes of a confusion matrix in the summary; `optrun evaluate` writes larger ones."""
_OF_THIS_START = (
    "format",
    "run_id",
    "run_name",
    "status",
    "message",
    "exit_code",
    "disk_refused",
    "updated_at",
    "plugins",
    "config_digest",
)
"""Keys that belong to one start, and are not taken over by the next one."""


def _code(plugins: Sequence[Mapping[str, object]]) -> dict[str, str]:
    """Return a digest of optrun's code, and of each plugin by its name.

    Such as {"optrun": "3f0c9a...", "my_optimizer.py": "aa41..."}, 12 hexadecimal digits each.

    Args:
        plugins: Records of the run's plugins; a plugin is named by its file, else by its
            distribution or module.
    """
    digests = {"optrun": provenance.code_digest()}
    for plugin in plugins:
        origin = plugin.get("plugin") or plugin.get("distribution") or plugin.get("module")
        digests[Path(str(origin)).name] = str(plugin.get("sha256"))[:12]
    return digests


def now() -> str:
    """Return the time as ISO 8601, UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Summary:
    """`summary.json` of one run.

    Args:
        run: The run directory.
        request: Configuration and command line.
        run_id: Id of the run.
    """

    def __init__(self, run: RunDir, request: Request, run_id: str) -> None:
        self.run = run
        self.config_values = dict(request.values)
        self.finished_before = False
        """Whether the run had finished before this start."""
        self.setup: TrainingSetup | None = None
        used = records(request.values)  # the plugins and packages of others, with their digests
        self.values: SummaryValues = {
            "format": SUMMARY_FORMAT,
            "run_id": run_id,
            "run_name": request.values["run_name"] or run.path.name,
            "status": "running",
            "message": "",
            "exit_code": None,
            "global_step": 0,
            "max_steps": None,
            "epoch": 0.0,
            "started_at": now(),
            "updated_at": now(),
            "wall_seconds": 0.0,
            "command": shell.join(
                ["optrun", *(() if OPTION in request.argv else options(used)), *request.argv]
            ),
            "config_name": request.config_name,
            "config_file": request.config_file,
            "overrides": list(request.overrides),
            "plugins": used,
            "config_digest": provenance.config_digest(request.values),
            "metrics": {"last": {}, "best": {}},
            "resumes": [],
        }

    def command(self, *overrides: str, mended: bool = False) -> str:
        """Write an `optrun` command line for this run, with its plugins, quoted for a shell.

        Args:
            overrides: Overrides at the end of the command.
            mended: Whether a plugin was edited since it was recorded; then the command allows it.

        Returns:
            Such as "optrun --plugin mine.py resume=auto".
        """
        needed = options(self.values["plugins"])  # `--plugin FILE` of each
        return shell.join(["optrun", *needed, *([ALLOW] if mended and needed else []), *overrides])

    def inherit_earlier_starts(self) -> None:
        """Take over the values of earlier starts from `summary.json`, for a run that resumes.

        Such as the first command and the resumes, but not the keys of `_OF_THIS_START`; this
        start's command is kept for the next entry of `resumes`. `finished_before` is set: whether
        the run had finished. Does nothing if the summary is missing or cannot be read.
        """
        before = try_read_summary(self.run.summary)
        if not before:
            return
        command = self.values["command"]
        for key, value in before.items():
            if key not in _OF_THIS_START:
                self.values[key] = value
        self.values["resume_command"] = command
        self.finished_before = before.get("status") == "finished"

    def begin(self, setup: TrainingSetup, facts: DataFacts, *, fingerprint: str) -> None:
        """Record the model, data and environment before training, and write the summary.

        Results of an earlier end of the run are removed.

        Args:
            setup: Model, optimizer, state and evaluation sets.
            facts: Facts of the data.
            fingerprint: Digests of training and evaluation examples.
        """
        self.setup = setup
        model = setup.model
        task = setup.task
        ranking = setup.ranking
        device = setup.train_step.device
        for end in ("stopped", "generalisation"):
            self.values.pop(end, None)
        self.values.update(
            max_steps=setup.total_steps,
            main_metric={"name": ranking.metric, "mode": ranking.mode} if len(task.eval) else None,
            model={
                "class": model_class(model).__name__,
                "parameters": sum(tensor_sizes(model).values()),
                "trainable_parameters": sum(
                    p.numel() for p in model.parameters() if p.requires_grad
                ),
            },
            data={
                "train_examples": len(task.train),
                "eval_examples": sum(map(len, task.eval_sets.values())),
                "fingerprint": fingerprint,
                "eval_seen": {
                    name: [examples.texts_in_train, examples.texts]
                    for name, examples in facts.eval_sets.items()
                    if examples.texts_in_train
                },
            },
            versions=provenance.versions(),
            hardware={
                **provenance.hardware(device_name(device), torch.get_num_threads()),
                "ranks": setup.train_step.world.size,
            },
            code=_code(self.values["plugins"]),
            device=_device(device),
        )
        self.write()

    @property
    def begun(self) -> bool:
        """Whether `begin` was called: training was about to start."""
        return self.setup is not None

    def resumed(
        self, step: int, changes: Mapping[str, tuple[object, object]], notes: Sequence[str] = ()
    ) -> None:
        """Add this resume to the list `resumes`, with its time and command, and write the summary.

        Args:
            step: Optimizer step of the checkpoint.
            changes: Changed keys -> value in the checkpoint, value now.
            notes: Notes that were shown to the user.
        """
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

    def keep_classes(self, name: str, metrics: MetricAccumulator) -> None:
        """Store the metrics by class of an evaluation set, if it has any, for the next write.

        Metrics of an earlier step, of all sets, are dropped. Does nothing before `begin`.

        Args:
            name: Name of the evaluation set; empty if there is only one.
            metrics: Its metrics, after all batches.
        """
        table = metrics.table()
        if table is None or self.setup is None:
            return
        step = self.setup.state.global_step
        # The other sets of the same evaluation stay.
        classes = self.values.get("classes") or {}
        sets = classes["sets"] if classes.get("step") == step else {}
        self.values["classes"] = {
            "step": step,
            "sets": {**sets, name: as_values(table, MOST_CONFUSED)},
        }

    def present(self) -> SummaryValues:
        """Return the current values of the summary of a run in progress, to be written.

        Step, epoch, metrics and speed are read from the state of training; before `begin` only the
        time is new. Nothing is written or changed.
        """
        values = {**self.values, "updated_at": now()}
        if self.setup is None:
            return values
        state = self.setup.state
        train_step = self.setup.train_step
        seconds = max(state.seconds, 1e-9)
        return values | {
            "global_step": state.global_step,
            "epoch": round(state.position / self.setup.plan.steps_per_epoch, 6),
            "wall_seconds": round(state.seconds, 3),
            "metrics": {
                "last": dict(state.last),
                "best": dict(state.best),
                "before_training": dict(state.before_training),
            },
            "perf": {
                "tokens_per_second": state.tokens / seconds,
                "samples_per_second": state.samples / seconds,
                "peak_memory_bytes": peak_memory_bytes(train_step.device),
                "optimizer_state_bytes": _state_bytes(train_step.optimizer),
                "skipped_steps": state.skipped_steps,
            },
        }

    def write(self) -> None:
        """Write the current values to `summary.json`."""
        self.values = self.present()
        write_summary(self.run.summary, self.values)

    def end(
        self,
        status: str,
        message: str,
        exit_code: int = EXIT_DONE,
        *,
        disk_refused: bool = False,
    ) -> None:
        """Record how the run ended, and whether a full or broken disk ended it."""
        self.values.update(
            status=status, message=message, exit_code=exit_code, disk_refused=disk_refused
        )
        self.write()

    def finished(self, stop: StopRequest | None) -> SummaryValues:
        """Return the values of the summary if the run finished now; nothing is written.

        The model card is written from them first, and then `finish` writes them to the summary: a
        run whose model could not be written is not finished.

        Args:
            stop: The request that ended training early; None: all steps are done.

        Returns:
            The values with status, message and the verdict on generalisation.
        """
        values = {**self.present(), "status": "finished", "message": "", "exit_code": EXIT_DONE}
        values.pop("disk_refused", None)
        if stop is not None:
            end = f"step {stop.step} of {values['max_steps']}: {stop.reason}"
            values |= {"message": f"{stop.by} ended training after {end}", "stopped": asdict(stop)}
        generalisation = generalisation_of(values)
        return values | {
            "generalisation": None if generalisation is None else asdict(generalisation)
        }

    def finish(self, values: SummaryValues) -> None:
        """Write the values of a finished run to `summary.json`, and keep them.

        Args:
            values: The values that `finished` returned.
        """
        self.values = {**values, "updated_at": now()}
        write_summary(self.run.summary, self.values)


class SummaryCallback(Callback):
    """Writes the summary after a line of metrics, at most once a second.

    Writing takes a millisecond.

    Args:
        summary: Summary of the run.
        refused: Called with the error if the disk refuses.
    """

    def __init__(self, summary: Summary, refused: Refused) -> None:
        self.summary = summary
        self.refused = refused
        self._written = -math.inf

    def on_log(self, training: TrainingContext, record: Mapping[str, object]) -> None:  # noqa: ARG002
        """Write the summary, unless it was written less than a second ago."""
        if time.monotonic() - self._written < 1:
            return
        try:
            self.summary.write()
            self._written = time.monotonic()
        except OSError as error:
            self.refused(self.summary.run.summary, "it is written again later", error)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    count = 0
    for state in optimizer.state.values():
        count += sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    return count


def _device(device: torch.device) -> dict[str, str]:
    """Return facts that tell one GPU from another: type, UUID, and the visible CUDA devices.

    `cuda_visible_devices` only if that variable is set, `uuid` only for a CUDA device.
    """
    facts = {"type": device.type}
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        facts["cuda_visible_devices"] = os.environ["CUDA_VISIBLE_DEVICES"]
    if device.type == "cuda":
        facts["uuid"] = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return facts
