"""Branches of a trunk in a report: one line that forks, one seed for one trunk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optrun.artifacts.forks import Fork
from optrun.base.errors import ConfigError
from optrun.report.confirmation_plan import load_or_make_plan
from optrun.report.figures import pictures
from optrun.report.findings import analyse_runs
from optrun.report.runs import Run, load_run, load_runs
from optrun.report.tables import runs_table
from optrun.report.warnings import find_warnings
from tests.unit.report.conftest import write_run

FORK = 100


def branch(
    path: Path, trunk: Path, optimizer: str, *, seed: int = 0, step: int = FORK, kind: str = "k"
) -> Path:
    """A run from a step of a trunk on: its metrics have no line before."""
    folder = trunk / "checkpoints" / f"step-{step:08d}"
    said: dict[str, Any] = {
        "folder": str(folder),
        "run_id": trunk.name,
        "step": step,
        "trunk_config": kind,
    }
    said |= {
        "optimizer_state": "anew: the trunk's is of AdamW",
        "schedule": "wsd continues",
        "digest": "d",
    }
    write_run(
        path,
        optimizer=optimizer,
        seed=seed,
        config={"branch_from": f"{folder}@{seed:016x}", "branch_schedule": "continue"},
        summary={"branch": said},
    )
    lines = [
        line
        for line in (path / "metrics.jsonl").read_text().splitlines()
        if json.loads(line)["step"] > step
    ]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def grove(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trunks of three seeds, and from each a branch of two optimizers."""
    folder = tmp_path_factory.mktemp("grove")
    for seed in range(3):
        trunk = write_run(
            folder / "trunks" / f"oak{seed}", seed=seed, summary={"run_id": f"oak{seed}"}
        )
        for optimizer in ("adamw", "lamb"):
            branch(folder / "branches" / f"{optimizer}{seed}", trunk, optimizer, seed=seed)
    return folder


def of(run: Path) -> Run:
    return load_run(run)


def test_branches_of_several_trunks_are_tested_over_their_seeds(grove: Path) -> None:
    findings = analyse_runs(load_runs([grove / "branches"]))
    assert findings.keys == ["optimizer.name"], "which of the seeds' trunks it was is no setting"
    assert [sorted(row.configuration.scores) for row in findings.contenders] == [[0, 1, 2]] * 2
    kinds = [warning.kind for warning in find_warnings(findings)]
    assert "trunk" not in kinds
    assert "few-seeds" not in kinds
    assert "metric" in {picture.name for picture in pictures(findings)}


def test_branches_of_one_trunk_share_its_luck(grove: Path) -> None:
    findings = analyse_runs([of(grove / "branches" / name) for name in ("adamw0", "lamb0")])
    assert [len(row.configuration.scores) for row in findings.contenders] == [1, 1]
    found = {warning.kind: warning.text for warning in find_warnings(findings)}
    for fact in ("oak0 step 100", "one seed", "branch_from="):
        assert fact in found["trunk"]
    assert "seed=0,1" not in found["few-seeds"], "a branch has the seed of its trunk"


def test_steps_and_trunks_are_what_is_compared(grove: Path, tmp_path: Path) -> None:
    trunks = [
        grove / "trunks/oak0",
        write_run(tmp_path / "elm", lr=2e-3, summary={"run_id": "elm"}),
    ]
    early = of(branch(tmp_path / "early", trunks[0], "lamb", step=50))
    labels = [row.name for row in analyse_runs([early, of(grove / "branches/lamb0")]).contenders]
    assert sorted(labels) == ["branch_from step 100", "branch_from step 50"]
    elm = of(branch(tmp_path / "elm-lamb", trunks[1], "lamb", kind="other"))
    labels = [row.name for row in analyse_runs([elm, of(grove / "branches/lamb0")]).contenders]
    assert sorted(labels) == ["branch_from elm step 100", "branch_from oak0 step 100"]


def test_the_tables_name_trunk_and_step(grove: Path) -> None:
    run = of(grove / "branches/lamb0")
    assert Fork.of(run.summary) is not None
    table = runs_table([run], [], "eval/loss", "min")
    assert "oak0 step 100" in table.rows[0][-1]


def test_a_confirmation_wants_seeds_that_no_trunk_has(grove: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"adamw0 branched from a trunk.*: train trunks of more seeds"
    ):
        load_or_make_plan(grove / "branches", tmp_path / "confirm")
    assert not list(tmp_path.iterdir())
