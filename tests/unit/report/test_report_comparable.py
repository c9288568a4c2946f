"""Numbers of other tasks or of other evaluation rows are shown, and not ranked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optrun.report.findings import analyse_runs
from optrun.report.runs import load_runs
from optrun.report.tables import configurations_table, ranking_table
from optrun.report.verdict import write_verdict
from optrun.report.workloads import Comparison

LM, MLM = {"task": {"name": "causal_lm"}}, {"task": {"name": "masked_lm"}}


def data(digest: str, **values: Any) -> dict[str, Any]:
    return {"config": {"data": values}, "summary": {"data": {"fingerprint": f"same-{digest}"}}}


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"config": LM}, {"config": MLM}, "different tasks (causal_lm, masked_lm)"),
        (
            data("a", name="files", eval="a.csv"),
            data("b", name="files", eval="b.csv"),
            "different rows (a.csv, b.csv)",
        ),
        (
            data("a", name="files", eval="a.csv"),
            data("b", name="files", eval="a.csv"),
            "content of the evaluation data",
        ),
        (data("a", name="files", eval="a.csv"), data("a", name="files", eval="copy.csv"), ""),
        (
            data("a", name="files", eval="a.csv", train="x"),
            data("a", name="files", eval="a.csv", train="y"),
            "",
        ),
        (
            data("a", name="files", eval="a.csv", max_length=8),
            data("b", name="files", eval="a.csv", max_length=9),
            "",
        ),
    ],
    ids=["tasks", "rows", "content", "a copy", "more to train on", "longer texts"],
)
def test_what_is_compared(
    first: dict[str, Any],
    second: dict[str, Any],
    said: str,
    tmp_path: Path,
    make_run: Callable[..., Path],
) -> None:
    for number, kind in enumerate((first, second)):
        for seed in range(3):
            make_run(
                tmp_path / f"{number}-{seed}",
                optimizer=("adamw", "lamb")[number],
                lr=1e-3,
                seed=seed,
                **kind,
            )
    findings = analyse_runs(load_runs([tmp_path]))
    assert [row.rank for row in findings.contenders] == ([None, None] if said else [1, 2])
    assert said in findings.incomparable
    assert ("best" in ranking_table(findings).styles) is (said == "")
    assert ("best" in configurations_table(findings).styles) is (said == "")
    text = write_verdict(Comparison.of(findings)).text
    assert text.startswith("Nothing is ranked: ") is bool(said)
    assert all(row.configuration.scores for row in findings.contenders), "shown all the same"
