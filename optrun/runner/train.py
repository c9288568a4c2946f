"""Train one run: prepare, assemble, loop, publish."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.artifacts.checkpoint import make_checkpoints_dir
from optrun.artifacts.identity import run_id_of
from optrun.artifacts.lock import RunLock
from optrun.artifacts.metrics import rewind_for_resume, truncate_after
from optrun.artifacts.run_dir import RunDir
from optrun.base.errors import EXIT_DONE, EXIT_FAILED, ConfigError, StoppedEarly, is_refused_by_disk
from optrun.config.request import Request
from optrun.config.schema.distributed import FsdpConfig
from optrun.config.schema.training import OnNonfinite
from optrun.data.cache import pop_discard_messages
from optrun.data.heartbeat import receive_heartbeats
from optrun.distributed.heartbeat import Phase, beat
from optrun.distributed.shard import is_sharded
from optrun.distributed.world import ALONE, World
from optrun.model.attention import plain_attention
from optrun.model.forward import without_cache_and_padding_check
from optrun.optimizer.build import require_optimizer
from optrun.optimizer.evaluation_weights import has_evaluation_weights
from optrun.runner.assemble import Assembled, assemble
from optrun.runner.checkpoint_space import checkpoint_bytes, space_warning
from optrun.runner.components import build_loop
from optrun.runner.console import shown_path
from optrun.runner.export import gather_model, publish, write_tokenizer
from optrun.runner.outcome import Outcome
from optrun.runner.prepare import Prepared, artifacts_to_resume, prepare
from optrun.runner.resume.checkpoint import (
    OpenedCheckpoint,
    ResumePoint,
    open_checkpoint_to_resume,
    refuse_links,
    refuse_other_formats,
)
from optrun.runner.resume.config_diff import refuse_change_without_effect
from optrun.runner.resume.data_position import pinned_revision, with_revision
from optrun.runner.resume.global_batch import requested_changes
from optrun.runner.run_start import RunStart
from optrun.runner.summary import Summary
from optrun.task.data_check import describe_data
from optrun.training.device import pick_device
from optrun.training.display import Display
from optrun.training.signals import SignalHandler, Stopped
from optrun.training.state import RandomStates, seed_random_states
from optrun.training.trackers import require_tracker

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def train(
    request: Request,
    run: RunDir,
    display: Display,
    resume: ResumePoint | None = None,
    *,
    stop_at: int | None = None,
    owns_process: bool = True,
    world: World = ALONE,
) -> Outcome:
    """Train, evaluate, checkpoint, and write the run directory.

    Rank 0 writes all files; other ranks only write their shards of checkpoints.

    Args:
        request: Configuration and command line.
        run: The run directory; it exists.
        display: Shows progress and notes.
        resume: The run and checkpoint to resume; None: a new run. Other ranks than 0 get None, and
            do what rank 0 does.
        stop_at: Pause after this many optimizer steps, evaluated and saved. The schedule stays that
            of the whole run.
        owns_process: Whether a second signal may end the process.
        world: The ranks that share the run.

    Returns:
        The run, the values of its summary and a generated sample, if the task has a prompt.

    Raises:
        StoppedEarly: `stop_at` was reached, a signal arrived, or the time is up.
        OptrunError: Any other failure; `summary.json` records message and exit code, too.
    """
    started = time.monotonic()
    with (
        RunLock(run.lock) if world.is_main else nullcontext(),
        SignalHandler(owns_process=owns_process, is_rank=world.size > 1) as signal_handler,
    ):
        # 1. Other ranks than 0: their summary is never written.
        if not world.is_main:
            silent = Summary(run, request, "")
            return _train(
                RunStart(request, run, display, silent, signal_handler, started, world),
                None,
                stop_at,
            )
        # 2. Rank 0: refuse a directory that it must not write to.
        refuse_links(run)
        if resume is None and (run.metrics.exists() or run.checkpoints.exists()):
            raise ConfigError(
                f"{run.path}: another process has run in this directory meanwhile. Choose another"
                " directory (hydra.run.dir=DIR)."
            )
        refuse_other_formats(run)
        # 3. Train, and record how the run ended.
        run_id = run_id_of(run) or secrets.token_hex(16)
        summary = Summary(run, request, run_id)
        if resume is not None:
            summary.inherit_earlier_starts()
        try:
            with _record_end(summary, display):
                run_start = RunStart(request, run, display, summary, signal_handler, started, world)
                return _train(run_start, resume, stop_at)
        finally:
            if run.metrics.is_file():
                with contextlib.suppress(OSError):  # must not hide why the run ended
                    draw_curves(run.path)


def draw_curves(path: Path) -> None:
    """Draw `curves.png`; matplotlib is imported only here, since it is slow to load."""
    from optrun.report import curves

    curves.draw_curves(path)


@contextmanager
def _record_end(summary: Summary, display: Display) -> Iterator[None]:
    """Record an error of the block in the summary of the run, and raise it again.

    The status is `interrupted` after StoppedEarly, else `failed`. Before training begins, two
    things are not recorded: any error of a finished run, whose summary stays as it is, and a
    refused configuration.
    """

    def end(status: str, error: BaseException) -> None:
        if summary.finished_before and not summary.begun:
            return
        try:
            summary.end(
                status,
                str(error) or type(error).__name__,
                getattr(error, "exit_code", EXIT_FAILED),
                disk_refused=is_refused_by_disk(error),
            )
        except OSError as error:  # a full disk must not hide why the run ended
            display.note(
                f"{summary.run.summary}: {error.strerror or error}; status {status} is not in it."
            )

    try:
        yield
    except StoppedEarly as error:
        end("interrupted", error)
        raise
    except BaseException as error:
        if not (isinstance(error, ConfigError) and not summary.begun):
            end("failed", error)
        raise


def _train(run_start: RunStart, resume: ResumePoint | None, stop_at: int | None) -> Outcome:
    """Train from a checkpoint, or from step 0, to the end of the run, on every rank.

    A run whose steps are all done only returns its outcome, see `_report_finished`.

    Args:
        run_start: The start of the run.
        resume: The run and checkpoint to resume; None: from the start, or on other ranks.
        stop_at: Pause after this many optimizer steps; None: no pause.

    Returns:
        The outcome; its summary is complete on rank 0 only, and only rank 0 has a sample.

    Raises:
        StoppedEarly: `stop_at` was reached, a signal arrived, or the time is up.
        ConfigError: The run cannot start as configured, or `assemble` finds ranks with different
            configurations, data or models.
        OptrunError: Any other failure.
    """
    config = run_start.config
    note = run_start.display.note
    summary = run_start.summary
    world = run_start.world
    # 1. Refuse what cannot run.
    require_tracker(config.tracking)
    require_optimizer(config.optimizer)
    if config.training.on_nonfinite is OnNonfinite.rollback and not config.checkpoint.enabled:
        raise ConfigError(
            "training.on_nonfinite=rollback: there is nothing to go back to with checkpoint=none."
            " Leave checkpoint=none out, or choose training.on_nonfinite=skip."
        )
    device = pick_device(config.training.device, world.local_rank if world.size > 1 else None)
    # 2. Open the checkpoint, prepare data and model, and assemble optimizer, schedule and state.
    # An error on one rank is raised on all of them, so that none waits for it: by `call_on_main`,
    # which asks the hub on rank 0 and sends the commit to the others, and by `call_on_all`. Neither
    # compares the ranks: `assemble` refuses ranks with different configurations, data or models.
    # `beat` writes a heartbeat. `opened.snapshot` is None for a run that begins at step 0.
    with open_checkpoint_to_resume(run_start, resume) as opened, receive_heartbeats(beat, note):
        revision = world.call_on_main(lambda: pinned_revision(config, opened.saved))
        prepared = world.call_on_all(lambda: _prepare(run_start, opened, revision))
        assembled = assemble(run_start.request, prepared, device, opened, world)
    assembled.constants.run_id = summary.values["run_id"]
    run_start.replace_request(assembled.request)
    snapshot = opened.snapshot
    setup = assembled.setup
    state = setup.state
    if snapshot is not None and assembled.is_done:
        refuse_change_without_effect(
            requested_changes(assembled.start.changes, assembled.derived), state.global_step
        )
        if world.call_on_main(lambda: summary.finished_before):
            return _report_finished(
                run_start, assembled, mended=resume is not None and bool(resume.notes)
            )
    # 3. Write everything that precedes the first step.
    for line in (
        *assembled.notes,
        *opened.set_aside_skipped(),
        *pop_discard_messages(),
        *prepared.notes,
        *describe_data(prepared.facts),
    ):
        note(line)
    if world.is_main:
        _write_before_first_step(run_start, prepared, assembled, resume)
    # 4. Train.
    loop = build_loop(run_start, assembled, snapshot, stop_at)
    if snapshot is not None:
        RandomStates.unpack(snapshot.metadata.random, device).restore()
        snapshot.model = {}  # free the memory: model and optimizer have copies
        snapshot.optimizer = {}
    else:
        seed_random_states(config.seed, device)
    if opened.trunk is not None and loop.checkpoints.enabled:
        loop.checkpoints.save()  # from now on the branch does not need its trunk
    with without_cache_and_padding_check(setup.model):
        loop()
    # 5. Publish the model.
    beat(Phase.publishing, state.global_step)
    optimizer = setup.train_step.optimizer
    if is_sharded(prepared.model) and not has_evaluation_weights(optimizer):
        optimizer.state.clear()  # no step follows, and the gathered weights need memory
    with setup.evaluation_weights():
        model = gather_model(prepared.model, run_start.run.path)
        if model is None or not world.is_main:
            return Outcome(run_start.run, summary.values)
        sample = _generate_sample(prepared, model, note, seed=config.seed)
        end = summary.finished(
            loop.training.stop if state.global_step < setup.total_steps else None
        )
        publish(
            run_start.run, model, prepared.tokenizer, end, dict(run_start.request.values), sample
        )
    summary.finish(end)
    return Outcome(run_start.run, summary.values, sample)


def _prepare(run_start: RunStart, opened: OpenedCheckpoint, revision: str | None) -> Prepared:
    """Prepare data and model; a signal ends it at once and loses no step.

    Args:
        run_start: The start of the run.
        opened: The checkpoint to continue from, whose tokenizer is reused.
        revision: Commit of a hub stream, see `pinned_revision`.

    Raises:
        StoppedEarly: A signal arrived; the preparation is ended at once.
        ConfigError: Data or model do not fit the configuration.
    """
    beat(Phase.preparing)
    try:
        with run_start.signal_handler.immediate():
            artifacts = artifacts_to_resume(opened, run_start.config.model)
            sharded = isinstance(run_start.config.distributed, FsdpConfig)
            meta = sharded and not run_start.world.is_main
            return prepare(
                with_revision(run_start.config, revision), artifacts, meta=meta, sharded=sharded
            )
    except Stopped:
        signal = run_start.signal_handler.stop_signal
        assert signal is not None
        saved = "the checkpoints are as they were"
        if opened.snapshot is None:
            saved = "there is nothing to save yet"
        raise StoppedEarly(
            f"{signal.name} received while data and model were prepared: {saved}. Go on with: "
            + run_start.summary.command("resume=auto", f"hydra.run.dir={run_start.run.path}")
        ) from None


def _report_finished(run_start: RunStart, assembled: Assembled, *, mended: bool) -> Outcome:
    """Return the outcome of a finished run that was resumed with no step left to train.

    Args:
        run_start: The start of the run.
        assembled: Its setup, and the changes since the last checkpoint, which are harmless.
        mended: Whether `config.yaml` was damaged, and is written again.

    Returns:
        The outcome without a sample. Rank 0 also notes how to continue, and records the changes.
    """
    summary = run_start.summary
    setup = assembled.setup
    start = assembled.start
    step = setup.state.global_step
    if not run_start.world.is_main:
        return Outcome(run_start.run, summary.values)
    done = (
        f"all {setup.total_steps} steps are done; nothing to train. To continue, add"
        f" training.max_steps=N above {setup.total_steps}."
    )
    if start.stop is not None:
        done = (
            f"{start.stop.by} ended training at step {step}: {start.stop.reason}; nothing to train."
            " To continue, change the option that ended it, such as"
            " training.early_stopping_patience=N."
        )
    for note in (*assembled.notes, done):
        run_start.display.note(note)
    summary.values.update(status="finished", exit_code=EXIT_DONE)
    if start.changes or mended:
        run_start.write_config()
    if start.changes:
        summary.resumed(step, start.changes, assembled.notes)
    return Outcome(run_start.run, summary.values)


def _write_before_first_step(
    run_start: RunStart, prepared: Prepared, assembled: Assembled, resume: ResumePoint | None
) -> None:
    """Write the files of a run before its first step, on rank 0.

    These are `config.yaml`, `tokenizer/`, the summary and the folder of checkpoints. Lines of
    `metrics.jsonl` after the step to continue from are removed. Notes warn of too little disk space
    for checkpoints, and of lost metrics.
    """
    run = run_start.run
    summary = run_start.summary
    setup = assembled.setup
    start = assembled.start
    checkpoint = run_start.config.checkpoint
    state = setup.state
    # 1. Configuration, tokenizer and summary.
    if start.fork is not None:
        summary.values["branch"] = start.fork.summary()
    run_start.write_config()
    run_start.display.note(f"-> {shown_path(run.path)}")
    if prepared.tokenizer is not None:
        write_tokenizer(run, prepared.tokenizer)
    summary.begin(setup, prepared.facts, fingerprint=assembled.constants.plan["fingerprint"])
    # 2. The folder of checkpoints.
    if checkpoint.enabled:
        make_checkpoints_dir(run)
        warning = space_warning(
            run, checkpoint, checkpoint_bytes(setup.model, setup.train_step.optimizer)
        )
        if warning is not None:
            run_start.display.note(warning)
    if resume is not None:
        summary.resumed(state.global_step, start.changes, assembled.notes)
    # 3. The metrics: those of the steps that are done are kept.
    if state.global_step and start.fork is None and not run.metrics.exists():
        run_start.display.note(
            f"warning: {run.metrics}: missing: its lines up to step {state.global_step:,} are lost"
        )
    if assembled.is_done:
        truncate_after(run.metrics, state.global_step)
    else:
        # Keep the lines up to the last one that is not written again: that of an unfinished step is
        # still to come, and so is that of step 0 before the first evaluation.
        last_step = state.global_step
        if state.unfinished:
            last_step -= 1
        if state.is_before_first_step:
            last_step = -1
        rewind_for_resume(run.metrics, last_step)


def _generate_sample(
    prepared: Prepared, model: PreTrainedModel, note: Callable[[str], None], *, seed: int
) -> tuple[str, str] | None:
    """Generate a sample: the task's prompt and its continuation.

    None if the task has no prompt, or if generation fails: then `note` gets a warning.
    """
    try:
        with plain_attention(model):
            return prepared.task.sample(model, prepared.tokenizer, seed=seed)
    except Exception as error:  # the model is trained, and is published without a sample
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        note(
            f"warning: task.prompt could not be continued ({line}); the model is published without"
            " a sample."
        )
        return None
