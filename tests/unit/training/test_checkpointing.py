"""When the outcome of a save is looked at."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from optrun.artifacts.checkpoint import Snapshot
from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.run_dir import RunDir
from optrun.config import store
from optrun.training.checkpointing import CheckpointManager
from optrun.training.state import RandomStates


def test_a_save_of_the_present_step_waits_for_the_next_look_of_all_ranks(tmp_path: Path) -> None:
    """A refused save may have ended on one rank and not on the other: one would try again a step before the other."""
    config = store.typed(store.without_hydra(store.compose(store.open_hydra(), "config", [])))
    state = SimpleNamespace(global_step=3, ranking={})
    setup: Any = SimpleNamespace(
        ranking=SimpleNamespace(best=lambda _: []),
        state=state,
        train_step=SimpleNamespace(device=torch.device("cpu")),
        config=config.training,
    )
    said: list[str] = []
    manager = CheckpointManager(
        manifest=RunDir(tmp_path),  # there is no folder of checkpoints: the disk refuses
        config=config.checkpoint,
        setup=setup,
        snapshot=lambda _: Snapshot(state.global_step, {}, {}, CheckpointMetadata(global_step=state.global_step)),
        sync=lambda: None,
        note=said.append,
    )
    manager.save(RandomStates(torch.device("cpu")))
    thread = manager._writer._thread
    assert thread is not None
    thread.join()
    manager.poll(together=True)
    assert not said
    assert manager._writer.busy
    state.global_step = 4
    manager.poll(together=True)
    assert "Training goes on without it" in said[0]
    assert not manager._writer.busy
