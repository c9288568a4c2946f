"""When the outcome of a save is looked at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from optrun.artifacts.checkpoint import Snapshot
from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.run_dir import RunDir
from optrun.config import store
from optrun.distributed import heartbeat
from optrun.distributed.heartbeat import Heartbeats, Phase, beat
from optrun.training.checkpointing import CheckpointManager
from optrun.training.state import RandomStates


def _manager(
    folder: Path, said: list[str], snapshot: Callable[[], object] = lambda: None
) -> tuple[CheckpointManager, Any]:
    """A manager whose disk refuses, for there is no folder of checkpoints.

    And the state that it saves.
    """
    config = store.typed(store.without_hydra(store.compose(store.open_hydra(), "config", [])))
    state = SimpleNamespace(global_step=3, ranking={})
    setup: Any = SimpleNamespace(
        ranking=SimpleNamespace(ranked_steps=lambda _: []),
        state=state,
        train_step=SimpleNamespace(device=torch.device("cpu")),
        config=config.training,
    )

    def copied(*_: object) -> Snapshot:
        snapshot()
        return Snapshot(
            state.global_step, {}, {}, CheckpointMetadata(global_step=state.global_step)
        )

    manager = CheckpointManager(
        run=RunDir(folder),
        config=config.checkpoint,
        setup=setup,
        snapshot=copied,
        sync=lambda: None,
        note=said.append,
    )
    return manager, state


def test_a_save_of_the_present_step_waits_for_the_next_look_of_all_ranks(tmp_path: Path) -> None:
    """A refused save may have ended on one rank and not on the other.

    One would try again a step before the other.
    """
    said: list[str] = []
    manager, state = _manager(tmp_path, said)
    manager.save(RandomStates(torch.device("cpu")))
    thread = manager._writer._thread
    assert thread is not None
    thread.join()
    manager.poll(together=True)
    assert not said
    assert manager._writer.busy
    state.global_step = 4
    manager.poll(together=True)
    assert "Training continues without it" in said[0]
    assert not manager._writer.busy


def test_training_that_stands_still_for_a_save_says_so(tmp_path: Path) -> None:
    """While it copies, and while it waits for the one before, whoever asks for it.

    So its own limit counts.
    """
    table, phases = Heartbeats.create(1), list[Phase]()
    heartbeat.begin(table)
    try:
        beat(Phase.loading, 3)
        manager, state = _manager(tmp_path, [], lambda: phases.append(table[0].phase))
        take = manager._writer.result
        manager._writer.result = lambda *, wait: phases.append(table[0].phase) or take(wait=wait)  # type: ignore[method-assign]
        manager.save(RandomStates(torch.device("cpu")))
        state.global_step = 4
        manager.wait()
        manager.close()
        assert phases == [Phase.saving] * 4
        assert table[0].phase is Phase.loading
    finally:
        heartbeat.end()
