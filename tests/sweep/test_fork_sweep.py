"""A sweep of branches is a set: repeated it runs what is missing, killed it goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.running import optrun, records, summary, tensors
from tests.sweep import forked
from tests.sweep.forked import SAVE, STEPS, ForkServer, jobs, sweep


@pytest.mark.slow
def test_branches_of_a_trunk(place: Path) -> None:
    assert optrun(*forked.JOB, "checkpoint.keep_last=9", "hydra.run.dir=trunk") == 0
    words = [f"branch_from=trunk/checkpoints/step-{SAVE:08d}", "optimizer=adamw,lamb,sgd"]
    assert sweep(*words) == 0
    assert ForkServer.launches == [3]
    found = {summary(job)["branch"]["optimizer_state"].split(":")[0]: job for job in jobs()}
    same = found["the trunk's, by parameter name (AdamW)"]
    assert tensors(same, STEPS) == tensors(place / "trunk", STEPS)
    assert records(same) == [record for record in records(place / "trunk") if record["step"] > SAVE]
    shutil.move("trunk", "elsewhere")
    words[0] = words[0].replace("trunk/", "elsewhere/")
    assert sweep(*words) == 0
    assert ForkServer.launches == [3], "what the trunk holds is the identity, not its place"
    shutil.rmtree(found["anew"])
    assert sweep(*words) == 0
    assert ForkServer.launches == [3, 1]
