"""The process in which the jobs of a sweep follow each other."""

from __future__ import annotations

import gc
import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import mode

from omegaconf import DictConfig

from optrun.sweeper import launch
from optrun.sweeper.command import Launch, SweepCommand
from optrun.sweeper.folder import SweepDir


def test_a_job_leaves_nothing_in_its_process(
    tmp_path: Path,
) -> None:
    """Hydra's launcher and our loader kept the configuration of every job, 0.4 MB each."""
    counts: list[int] = []

    def train_nothing(*job: object) -> None:
        gc.collect()
        # `isinstance` asks the object; a weak proxy that another test left may raise.
        counts.append(sum(type(thing) is DictConfig for thing in gc.get_objects()))

    sweep = SweepDir(tmp_path)
    sweep.prepare()
    asked = Launch(
        folder=str(tmp_path),
        token="token",
        command=SweepCommand(),
        jobs={f"job{seed}": [f"seed={seed}"] for seed in range(12)},
        stop_at={},
        retry={},
        devices=[],
    )
    spec = sweep.spec_file("token-1")
    spec.write_text(json.dumps(asdict(asked)))
    assert launch.main(spec, train_nothing) == 0
    assert len(counts) == 12, [sweep.summary(name).get("message") for name in asked.jobs]
    growth = [after - before for before, after in pairwise(counts[2:])]
    # A cache of another test in this process may be emptied meanwhile; a leak is of every job.
    assert mode(growth) == 0, counts
