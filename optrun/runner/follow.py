"""A rank other than 0: builds what rank 0 builds, and steps along; it writes no file but its shards of checkpoints."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from optrun.artifacts.checkpoint import open_verified
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.trunk import Trunk, reading
from optrun.base import garbage
from optrun.config.request import Request
from optrun.config.schema.distributed import FsdpConfig
from optrun.distributed.heartbeat import Phase, beat
from optrun.distributed.world import World
from optrun.model.forward import lean_forward
from optrun.runner.assemble import assemble
from optrun.runner.components import build_loop
from optrun.runner.prepare import artifacts_to_resume, prepare
from optrun.runner.resume.data_position import pinned
from optrun.runner.session import Session
from optrun.runner.summary import Summary
from optrun.runner.whole_model import whole_model
from optrun.training.device import pick_device
from optrun.training.display import Display
from optrun.training.signals import SignalHandler
from optrun.training.state import restore_random_states, seed_random_states


@dataclass
class Start:
    """What rank 0 tells the others before they build anything."""

    checkpoint: Path | None
    """Folder of the checkpoint that the run goes on from; None: from the start."""
    started_from: Path | None
    """Folder that relative paths of its configuration start from; None: the current one."""
    trunk: Trunk | None = None
    """Where that checkpoint lies, if a branch begins with it."""


def follow(
    request: Request,
    run: RunDir,
    display: Display,
    world: World,
    *,
    stop_at: int | None = None,
    owns_process: bool = True,
) -> None:
    """Take part in a run that rank 0 trains with `optrun.runner.train.train`.

    Args:
        request: Configuration and command line, as rank 0 has them.
        run: The run directory.
        display: Shows notes.
        world: The ranks.
        stop_at: Pause after this many optimizer steps.
        owns_process: Whether a second signal may end the process.

    Raises:
        StoppedEarly: As on rank 0.
        OptrunError: As on rank 0, or what went wrong on this rank alone.
        RuntimeError: Another rank is gone, or does not answer.
    """
    with SignalHandler(owns_process=owns_process) as signal_handler:
        config, started = request.config, time.monotonic()
        device = pick_device(config.training.device, world.local_rank)
        start: Start = world.broadcast(None)
        sharded = isinstance(config.distributed, FsdpConfig)
        with nullcontext() if start.trunk is None else reading(start.trunk.folder):
            snapshot = None if start.checkpoint is None else open_verified(start.checkpoint, lazy=sharded)
            beat(Phase.preparing)
            world.agree(lambda: None)  # rank 0 finds out at which commit a stream of the hub is read
            revision = world.broadcast(None)
            prepared = world.agree(
                lambda: prepare(
                    pinned(config, revision),
                    artifacts_to_resume(start.checkpoint, snapshot, config.model),
                    meta=sharded,
                )
            )
            garbage.resume()
            assembled = assemble(request, prepared, snapshot, device, start.started_from, world, start.trunk)
        if snapshot is not None and assembled.is_done and world.broadcast(None):
            return
        summary = Summary(run, request, "")
        session = Session(request, run, display, summary, signal_handler, started, world)
        loop = build_loop(session, assembled, snapshot, stop_at)
        if snapshot is not None:
            restore_random_states(snapshot.metadata.random, device)
            snapshot.model, snapshot.optimizer = {}, {}  # they are in use as copies
        else:
            seed_random_states(config.seed, device)
        if start.trunk is not None and loop.checkpoints.enabled:
            loop.checkpoints.save()
        with lean_forward(assembled.setup.model):
            loop()
        beat(Phase.publishing)
        with assembled.setup.evaluation_weights():
            whole_model(prepared.model)
