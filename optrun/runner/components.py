"""Build the training loop with its components, in the order of their calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields

from optrun.artifacts.checkpoint import Snapshot
from optrun.base.errors import ConfigError, did_you_mean
from optrun.base.plain import flat
from optrun.config import registry
from optrun.config.registry.origins import records
from optrun.config.schema.callbacks import callback_configs
from optrun.distributed.shard import is_sharded
from optrun.runner.assemble import Assembled
from optrun.runner.resume.restore import restore_scheduled_checkpoint, stop_request
from optrun.runner.run_start import RunStart
from optrun.runner.snapshot import Snapshots
from optrun.runner.summary import SummaryCallback
from optrun.training.callback import HOOKS, Callback, TrainingContext
from optrun.training.checkpointing import CheckpointManager, NonWritingManager
from optrun.training.divergence import Divergence
from optrun.training.early_stopping import EarlyStopping
from optrun.training.evaluate import Evaluator
from optrun.training.hooks import Hooks
from optrun.training.loop import Loop
from optrun.training.metrics_log import MetricsLogger, refusal_handler
from optrun.training.setup import TrainingSetup
from optrun.training.state import RandomStates, TrainState
from optrun.training.trackers import Tracker, build_tracker


class TrackerCallback(Callback):
    """Sends each line of metrics to a tracker.

    Args:
        tracker: The tracker of the choice `tracking=`.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def on_log(self, training: TrainingContext, record: Mapping[str, object]) -> None:  # noqa: ARG002
        """Send the line."""
        self.tracker.log(record)

    def on_train_end(self, training: TrainingContext, status: str) -> None:  # noqa: ARG002
        """End the tracker's run."""
        self.tracker.close(status)


def build_loop(
    run_start: RunStart,
    assembled: Assembled,
    snapshot: Snapshot | None,
    stop_at: int | None,
) -> Loop:
    """Build the training loop with its components.

    Args:
        run_start: The start of the run.
        assembled: Model, optimizer, data and state.
        snapshot: Snapshot of the checkpoint to continue from; None: from the start.
        stop_at: Pause after this many optimizer steps.

    Raises:
        ConfigError: A tracker or a callback cannot start.
        OptrunError: A callback raised while its state was loaded.
    """
    config = run_start.config
    run = run_start.run
    setup = assembled.setup
    note = run_start.display.note
    world = setup.train_step.world
    components: list[Callback] = []
    sync: Callable[[], None] = lambda: None  # noqa: E731  # a rank that writes no lines has none to flush
    if world.is_main:
        metrics_log = MetricsLogger(
            run.metrics, refusal_handler(config.checkpoint.on_storage_error, note)
        )
        components = _metrics_writers(run_start, setup, metrics_log)
        sync = metrics_log.sync
    if config.training.early_stopping_patience is not None:  # all ranks decide the same
        components.append(EarlyStopping(config.training, setup.ranking))
    training = TrainingContext(setup, run, note, run_start.summary.command)
    callbacks = _build_callbacks(config.callbacks) if world.is_main else {}
    hooks = Hooks(training, components, callbacks, may_request=bool(config.callbacks))
    if snapshot is not None:
        hooks.load_state_dict(snapshot.metadata.callbacks or {}, assembled.start.stop)
    snapshots = Snapshots(
        setup, assembled.constants, allow_nonfinite=config.checkpoint.allow_nonfinite
    )

    def take_snapshot(random: RandomStates, in_place: bool) -> Snapshot:
        # Plugins may have imported further files meanwhile.
        snapshots.constants.plugins = records(run_start.request.values)
        stop = None if training.stop is None else asdict(training.stop)
        return snapshots(random.packed(), hooks.state_dict(), stop, in_place=in_place)

    def restore(step: int) -> TrainState:
        state, saved = restore_scheduled_checkpoint(
            run, step, config.checkpoint.save_steps, setup, world
        )
        stop = None
        if saved.config_digest == assembled.constants.config_digest:
            stop = stop_request(saved, {})  # with another one this start has dealt with it already
        hooks.load_state_dict(saved.callbacks or {}, stop)
        return state

    checkpoints = (
        CheckpointManager if world.is_main or is_sharded(setup.model) else NonWritingManager
    )(
        run=run,
        deletes_older=world.is_main,
        config=config.checkpoint,
        setup=setup,
        snapshot=take_snapshot,
        sync=sync,
        note=note,
        saving=world.saving if is_sharded(setup.model) and world.size > 1 else None,
    )
    return Loop(
        setup,
        hooks,
        Evaluator(
            setup,
            run_start.signal_handler,
            run_start.display.evaluating,
            run_start.summary.keep_classes,
        ),
        checkpoints,
        Divergence(setup, run, checkpoints, restore, note),
        run_start.signal_handler,
        stop_at=stop_at,
        started=run_start.started,
    )


def _build_callbacks(configs: Mapping[str, object]) -> dict[str, object]:
    """Build the callbacks of a configuration, in its order.

    Args:
        configs: Configuration key -> options; checked against the schema of the callback with that
            name.

    Returns:
        Configuration key -> callback.

    Raises:
        ConfigError: A callback cannot be built, or has an unknown hook.
    """
    callbacks: dict[str, object] = {}
    for name, config in callback_configs(configs).items():
        key = f"callbacks.{name}"
        options = {field.name: getattr(config, field.name) for field in fields(config)}
        # `load` imports and returns the class of the callback.
        try:
            callback = registry.choices("callback")[name].load()(**options)
        except ConfigError:
            raise
        except Exception as error:  # whatever a user's class raises
            raise ConfigError(f"{key}: cannot be built: {type(error).__name__}: {error}") from error
        for hook in dir(callback):
            if hook.startswith("on_") and hook not in HOOKS:
                raise ConfigError(
                    f"{key}: {hook} is no hook of the training loop. {did_you_mean(hook, HOOKS)}"
                )
        callbacks[key] = callback
    return callbacks


def _metrics_writers(
    run_start: RunStart,
    setup: TrainingSetup,
    metrics_log: MetricsLogger,
) -> list[Callback]:
    """List the components that get each line of metrics, in the order of their calls.

    `metrics.jsonl` comes first: a line is on disk before anything else shows it. Then come the
    display, the tracker of `tracking`, and the summary.
    """
    config = run_start.config
    note = run_start.display.note
    tracker = build_tracker(
        config.tracking,
        run_start.run.path,
        config.run_name,
        flat(run_start.summary.config_values),
        start=setup.state.global_step,
        note=note,
    )
    return [
        metrics_log,
        run_start.display,
        TrackerCallback(tracker),
        SummaryCallback(run_start.summary, metrics_log.refused),
    ]
