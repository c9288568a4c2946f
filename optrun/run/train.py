"""Configuration to finished run directory: the one module that knows how the parts fit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from optrun.artifacts.checkpoint import Snapshot, make_checkpoints_dir
from optrun.artifacts.identity import new_run_id, run_id_of
from optrun.artifacts.lock import RunLock
from optrun.artifacts.metrics import take_up, truncate_after
from optrun.artifacts.retention import clean_leftovers
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.run_manifest import RunManifest
from optrun.config.request import Request
from optrun.config.schema.run import RunConfig
from optrun.config.schema.training import OnNonfinite
from optrun.data.cache import discarded
from optrun.errors import EXIT_DONE, EXIT_FAILED, ConfigError, StoppedEarly
from optrun.optimizer.build import require_optimizer
from optrun.report.curves import draw_curves
from optrun.run.assemble import Assembled, assemble
from optrun.run.disk_space import checkpoint_bytes, space_warning
from optrun.run.export import publish, write_tokenizer
from optrun.run.prepare import Prepared, prepare
from optrun.run.resume.checkpoint import (
    OpenedCheckpoint,
    ResumePoint,
    open_checkpoint,
    open_manifest,
    refuse_links,
    refuse_newer_run,
)
from optrun.run.resume.config_diff import refuse_idle
from optrun.run.resume.restore import go_back
from optrun.run.resume.saved_config import as_text, digest_of
from optrun.run.snapshot import Snapshots
from optrun.run.summary import Summary
from optrun.task import Task
from optrun.task.data_check import data_check
from optrun.tracking import build_tracker, require_tracker
from optrun.training.device import pick_device
from optrun.training.display import Display
from optrun.training.loop import Loop
from optrun.training.signals import SignalHandler, Stopped
from optrun.training.state import restore_random_states, seed_random_states


@dataclass
class Outcome:
    """How a run ended well."""

    run: RunDir
    summary: dict[str, Any]
    sample: tuple[str, str] | None = None
    """Prompt and continuation."""


def train(
    request: Request,
    run: RunDir,
    display: Display,
    resume: ResumePoint | None = None,
    *,
    stop_at: int | None = None,
    owns_process: bool = True,
) -> Outcome:
    """Train, evaluate, checkpoint, and write the run directory.

    Args:
        request: Configuration and command line.
        run: Where to write; exists.
        display: Shows progress and notes.
        resume: Where to go on; None: from the start.
        stop_at: Pause after this many optimizer steps, evaluated and saved; the schedule stays that of the whole run.
        owns_process: Whether a second signal may end the process.

    Raises:
        StoppedEarly: At `stop_at`, by a signal, or because the time is up.
        OptrunError: With the exit code that belongs to it; `summary.json` tells the same.
    """
    begun = time.monotonic()
    with RunLock(run.lock), SignalHandler(owns_process=owns_process) as signal_handler:
        refuse_links(run)
        if resume is None and (run.metrics.exists() or run.checkpoints.exists()):
            raise ConfigError(f"{run.path}: another process has run in this directory meanwhile. Choose another one.")
        refuse_newer_run(run)
        run_id = run_id_of(run) or new_run_id()
        manifest, believed = RunManifest(run), True
        if resume is not None:
            manifest, believed = open_manifest(run, display.note)
        manifest.run_id = run_id
        manifest.seal()
        summary = Summary(run, request, run_id)
        if resume is not None and believed:
            summary.take_up()
        try:
            with _status(summary, display):
                work = _Training(request, manifest, display, summary, signal_handler, begun)
                return work.train(resume, stop_at)
        finally:
            if run.metrics.is_file():
                with contextlib.suppress(OSError):  # a picture less; what ended the run is what counts
                    draw_curves(run.path)
            try:
                manifest.close()
            except OSError as error:
                display.note(f"{run.manifest}: {error.strerror or error}; what was written last is not covered.")


@contextmanager
def _status(summary: Summary, display: Display) -> Iterator[None]:
    """However it ends, the summary says how; but that of a finished run stays while nothing was done to it."""

    def end(status: str, error: BaseException) -> None:
        if summary.finished_before and not summary.begun:
            return
        try:
            summary.end(status, str(error) or type(error).__name__, getattr(error, "exit_code", EXIT_FAILED))
        except OSError as error:  # a full disk must not hide why the run ended
            display.note(f"{summary.run.summary}: {error.strerror or error}; status {status} is not in it.")

    try:
        yield
    except StoppedEarly as error:
        end("interrupted", error)
        raise
    except BaseException as error:
        if not (isinstance(error, ConfigError) and not summary.begun):
            end("failed", error)
        raise


@dataclass
class _Training:
    """One start of a run, its lock held."""

    request: Request
    manifest: RunManifest
    display: Display
    summary: Summary
    signal_handler: SignalHandler
    begun: float

    @property
    def config(self) -> RunConfig:
        """What is trained."""
        return self.request.config

    @property
    def run(self) -> RunDir:
        """Where everything is written."""
        return self.manifest.run

    def train(self, resume: ResumePoint | None, stop_at: int | None) -> Outcome:
        """From the checkpoint, or the start, to the end.

        Args:
            resume: Where to go on; None: from the start.
            stop_at: Pause after this step.
        """
        config, run, display = self.config, self.run, self.display
        require_tracker(config.tracking)
        require_optimizer(config.optimizer)
        if config.training.on_nonfinite is OnNonfinite.rollback and not config.checkpoint.enabled:
            raise ConfigError("training.on_nonfinite=rollback: there is nothing to go back to with checkpoint=none.")
        device = pick_device(config.training.device)
        opened = self._open(resume)
        snapshot = opened.snapshot
        prepared = self._prepare(snapshot)
        began = None if resume is None else resume.began
        start = assemble(self.request, prepared, snapshot, device, began)
        start.constants["run_id"] = self.summary.values["run_id"]
        state, total = start.state, start.total
        if snapshot is not None and state.global_step >= total and not state.unfinished:
            refuse_idle(start.changes, state.global_step)
            if self.summary.finished_before:
                return self._leave(start, mended=resume is not None and bool(resume.said))
        for sentence in [
            *start.notes,
            *opened.set_aside_skipped(),
            *discarded(),
            *prepared.notes,
            *data_check(prepared.facts),
        ]:
            display.note(sentence)
        self._write_config()
        if prepared.tokenizer is not None:
            write_tokenizer(self.manifest, prepared.tokenizer)
        self.summary.begin(
            model=prepared.model,
            task=prepared.task,
            total=total,
            ranking=start.ranking,
            state=state,
            device=device,
            fingerprint=start.constants["plan"]["fingerprint"],
        )
        self.summary.optimizer = start.setup.train_step.optimizer
        if resume is not None:
            self.summary.resumed(state.global_step, start.changes, start.notes)
        if state.global_step < total or state.unfinished:
            # The line of an unfinished step is still to be written; those of the end of a shorter run go.
            take_up(run.metrics, state.global_step - state.unfinished, self.manifest.replace)
        else:
            truncate_after(run.metrics, state.global_step, self.manifest.replace)
        self._loop(start, snapshot, device, stop_at)
        with start.setup.evaluation_weights():
            sample = _sample(config, prepared.task, prepared, display)
            publish(
                self.manifest,
                prepared.model,
                prepared.tokenizer,
                self.summary.values,
                dict(self.request.values),
                sample,
            )
        self.summary.end("finished", "")
        return Outcome(run, self.summary.values, sample)

    def _leave(self, start: Assembled, *, mended: bool) -> Outcome:
        """Nothing is computed for a finished run; harmless changes are recorded."""
        for sentence in start.notes:
            self.display.note(sentence)
        self.display.note(f"all {start.total} steps are done; nothing to train. training.max_steps=N prolongs the run.")
        self.summary.values.update(status="finished", exit_code=EXIT_DONE)
        if start.changes or mended:
            self._write_config()
        if start.changes:
            self.summary.resumed(start.state.global_step, start.changes, start.notes)
        return Outcome(self.run, self.summary.values)

    def _open(self, resume: ResumePoint | None) -> OpenedCheckpoint:
        for name in clean_leftovers(self.run):
            self.display.note(f"{name} was removed: left by a process that was killed while it wrote")
        opened = OpenedCheckpoint(None, [])
        if resume is not None:
            opened = open_checkpoint(self.run, resume, allow_nonfinite=self.config.checkpoint.allow_nonfinite)
        for sentence in [*(resume.said if resume is not None else ()), *opened.said]:
            self.display.note(sentence)
        if opened.snapshot is None:
            self._write_config()  # a run that is killed before its first step can be started over from this
        return opened

    def _prepare(self, snapshot: Snapshot | None) -> Prepared:
        """Data and model; a request to stop ends it at once."""
        try:
            with self.signal_handler.immediate():
                return prepare(self.config)
        except Stopped:
            signal = self.signal_handler.stop_signal
            assert signal is not None
            where = "there is nothing to save yet" if snapshot is None else "the checkpoints are as they were"
            raise StoppedEarly(
                f"{signal.name} received while data and model were made ready: {where}. Go on with: "
                f"optrun resume=auto hydra.run.dir={self.run.path}"
            ) from None

    def _loop(self, start: Assembled, snapshot: Snapshot | None, device: torch.device, stop_at: int | None) -> None:
        config, run, setup, display = self.config, self.run, start.setup, self.display
        model, train_step = setup.model, setup.train_step
        if config.checkpoint.enabled:
            make_checkpoints_dir(run)
            each = checkpoint_bytes(model, train_step.optimizer)
            warning = space_warning(run, config.checkpoint, each)
            if warning is not None:
                display.note(warning)
        tracker = build_tracker(
            config.tracking,
            run.path,
            config.run_name,
            self.summary.flat_config(),
            start=start.state.global_step,
            complain=display.note,
        )
        loop = Loop(
            setup=setup,
            manifest=self.manifest,
            training=config.training,
            saving=config.checkpoint,
            ranking=start.ranking,
            total=start.total,
            state=start.state,
            snapshot=Snapshots(
                model=model,
                train_step=train_step,
                state=start.state,
                plan=setup.plan,
                constants=start.constants,
                allow_nonfinite=config.checkpoint.allow_nonfinite,
            ),
            restore=lambda step: go_back(
                run, step, config.checkpoint.save_steps, model, train_step, device, start.ranking
            ),
            display=display,
            track=tracker.log,
            summarise=self.summary.write,
            signal_handler=self.signal_handler,
            stop_at=stop_at,
            begun=self.begun,
        )
        if snapshot is not None:
            restore_random_states(snapshot.state["random"], device)
            snapshot.model, snapshot.optimizer = {}, {}  # they are in use as copies
        else:
            seed_random_states(config.seed)
        status = "failed"
        try:
            loop()
            status = "finished"
        except StoppedEarly:
            status = "interrupted"
            raise
        finally:
            tracker.close(status)

    def _write_config(self) -> None:
        text = as_text(self.request.values)
        self.summary.values["config_sha256"] = digest_of(text)
        if self.run.summary.exists():  # first: a start that is killed in between left the file as a checkpoint has it
            self.summary.write()
        self.manifest.replace(self.run.config, text.encode())


def _sample(config: RunConfig, task: Task, prepared: Prepared, display: Display) -> tuple[str, str] | None:
    """Prompt and continuation; None where there is no prompt, or the model cannot continue it."""
    from optrun.task.causal_lm import CausalLm, continue_text

    if not isinstance(task, CausalLm) or not task.prompt or task.sample_tokens == 0:
        return None
    model, tokenizer = prepared.model, prepared.tokenizer
    try:
        return task.prompt, continue_text(model, tokenizer, task.prompt, task.sample_tokens, seed=config.seed)
    except Exception as error:  # whatever it is: the model is trained, and is published without a sample
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        display.note(f"warning: task.prompt could not be continued ({said}); the model is published without a sample.")
        return None
