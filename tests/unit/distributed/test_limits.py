"""How long a group waits, against how long a rank may be silent."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from optrun.config.compose import compose_request
from optrun.config.request import CommandLine
from optrun.config.store import open_hydra
from optrun.distributed.heartbeat import Phase, RankStatus
from optrun.distributed.limits import allowed_silence, longest_silence
from optrun.distributed.rendezvous import Rendezvous
from optrun.distributed.world import ALONE, World
from optrun.launch.rank import _join_groups


def at(phase: Phase, done: int) -> RankStatus:
    return RankStatus(1, 0, phase, 3, 0.0, done)


@pytest.mark.parametrize("seconds", [5.0, 400.0])
def test_a_rank_is_named_before_a_group_gives_up(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    groups: list[timedelta] = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda *_, timeout, **__: groups.append(timeout)
    )
    monkeypatch.setattr(World, "join", lambda _, timeout: groups.append(timeout) or ALONE)
    given = ["distributed=ddp", f"distributed.timeout_seconds={seconds}"]
    request = compose_request(open_hydra(None), CommandLine(overrides=given))
    _join_groups(request.config.distributed, Rendezvous(HashStore(), 0, 2, 1.0))
    assert len(groups) == 2
    for phase, done in itertools.product(Phase, (0, 1, 2)):
        allowed = allowed_silence(at(phase, done), seconds)
        assert allowed <= longest_silence(seconds) < groups[0].total_seconds()
    # A rank that waits is not ended while the one that it waits for may be at work. Others are at
    # most one step behind.
    for phase, done in itertools.product(set(Phase) - {Phase.waiting}, (0, 1, 2)):
        for own in (done, done + 1):
            waiting = allowed_silence(at(Phase.waiting, own), seconds)
            assert allowed_silence(at(phase, done), seconds) <= waiting
