"""How long a rank may be silent.

Which key says so, what comes first, and what a group waits for.
"""

from __future__ import annotations

import itertools
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import HashStore

from optrun.artifacts.run_dir import RunDir
from optrun.config.compose import compose_request
from optrun.config.request import CommandLine
from optrun.config.store import open_hydra
from optrun.distributed.heartbeat import Heartbeat, Heartbeats, Phase
from optrun.distributed.join import Launched
from optrun.distributed.limits import Limits
from optrun.distributed.meeting import Meeting
from optrun.distributed.rank_signals import RankSignals
from optrun.distributed.verdict import COLLECTIVES
from optrun.distributed.world import ALONE, World
from optrun.launch.rank import Rank, _recorded, _world


def at(phase: Phase, *, done: int = 2) -> Heartbeat:
    return Heartbeat(1, 0, phase, 3, 0.0, done)


def test_one_key_is_the_default_of_all() -> None:
    found = Limits.of({"timeout_seconds": 1800})
    assert found.meeting == found.longest == found.shortest == 1800
    short = Limits.of({"timeout_seconds": 5, "train_timeout_seconds": None})
    assert (short.meeting, short.step.seconds, short.save.seconds) == (5, 5, 5)
    assert short.first_step.seconds == 300, "a kernel is compiled, whatever a step may take"


@pytest.mark.parametrize(
    ("given", "last", "facts"),
    [
        (
            {},
            at(Phase.training),
            ["40 s (distributed.timeout_seconds, the limit of a step)", "train_timeout_seconds"],
        ),
        (
            {},
            at(Phase.preparing, done=0),
            [
                (
                    "300 s (distributed.timeout_seconds, 300 s at least, the limit until the first"
                    " step is done)"
                ),
                "init_",
            ],
        ),
        (
            {"init_timeout_seconds": 9},
            at(Phase.training, done=0),
            ["9 s (distributed.init_timeout_seconds"],
        ),
        (
            {"train_timeout_seconds": 9.5},
            at(Phase.loading),
            ["9.5 s (distributed.train_timeout_seconds"],
        ),
        (
            {"save_timeout_seconds": 9},
            at(Phase.saving),
            ["9 s (distributed.save_timeout_seconds, the limit of a save"],
        ),
        (
            {"save_timeout_seconds": 999},
            at(Phase.waiting),
            ["999 s", "save_timeout_seconds", "what other ranks do"],
        ),
    ],
)
def test_a_limit_names_what_says_so_and_what_raises_it(
    given: dict[str, float], last: Heartbeat, facts: list[str]
) -> None:
    limit = Limits.of({"timeout_seconds": 40, **given}).at(last)
    for fact in facts:
        assert fact in f"{limit} {limit.key}"


KEYS = ("timeout_seconds", "init_timeout_seconds", "train_timeout_seconds", "save_timeout_seconds")


@pytest.mark.parametrize("longest", KEYS)
def test_the_record_comes_before_the_end_and_the_end_before_a_group_gives_up(
    monkeypatch: pytest.MonkeyPatch, longest: str
) -> None:
    values = {key: 1000.0 if key == longest else 400.0 for key in KEYS}
    limits, early = Limits.of(values), Limits.of(values, share=0.9)
    groups: list[timedelta] = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda *_, timeout, **__: groups.append(timeout)
    )
    monkeypatch.setattr(World, "join", lambda _, timeout: groups.append(timeout) or ALONE)
    given = [f"distributed.{key}={value}" for key, value in values.items()]
    request = compose_request(open_hydra(None), CommandLine(overrides=["distributed=ddp", *given]))
    _world(request.config.distributed, Meeting(HashStore(), 0, 2, 1.0))
    for phase, done in itertools.product(Phase, (0, 1, 2)):
        last = at(phase, done=done)
        assert (
            early.at(last).seconds
            < limits.at(last).seconds
            <= limits.longest
            < groups[0].total_seconds()
        )
    assert len(groups) == 2
    # A rank that waits is not ended while the one that it waits for may be at work; its record is
    # there by then. Others are at most one step behind.
    for phase, done in itertools.product(set(Phase) - {Phase.waiting}, (0, 1, 2)):
        other = limits.at(at(phase, done=done)).seconds
        for own in (done, done + 1):
            waiting = at(Phase.waiting, done=own)
            assert early.at(waiting).seconds < other <= limits.at(waiting).seconds


def test_a_silent_rank_leaves_what_torch_recorded_of_gloo_and_of_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds for CUDA have a second recorder, with NCCL's collectives."""
    monkeypatch.setattr(
        _distributed_c10d, "_dump_nccl_trace_json", lambda: b'{"nccl": []}', raising=False
    )
    heartbeats = Heartbeats.create(1, tmp_path / "heartbeats")
    heartbeats.write(0, Heartbeat(1, 0, Phase.training, 3, 0.0, 1))
    rank, run = (
        Rank(Launched("torchrun", 5, 8, 0, 1, ""), RankSignals(), tmp_path, heartbeats),
        RunDir(tmp_path),
    )
    with _recorded(rank, run, Limits.of({"timeout_seconds": 1.0}, share=0.9)):
        deadline = time.monotonic() + 60
        while (
            not (run.logs / "rank-5-nccl-collectives.json").is_file()
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
    told: dict[str, Any] = {
        path.name: json.loads(path.read_bytes()) for path in run.logs.glob(COLLECTIVES)
    }
    assert set(told) == {"rank-5-collectives.json", "rank-5-nccl-collectives.json"}
    assert told["rank-5-nccl-collectives.json"] == {"nccl": []}
