"""Schedules over a resume.

Plateau remembers the evaluations it saw, polynomial keeps an older run's power.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.resume.test_exact import causal_lm
from tests.running import optrun, records


def test_plateau(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        *causal_lm(tmp_path),
        "scheduler=plateau",
        "scheduler.patience=0",
        "scheduler.threshold=10",
    ]
    words += ["training.eval_steps=1", "training.logging_steps=1", "training.max_steps=4"]
    assert optrun(*words, "hydra.run.dir=straight") == 0
    rates = [record["train/lr"] for record in records(Path("straight"))]
    assert rates == [2e-3] * 2 + [1e-3, 5e-4], (
        "the first evaluation is the best, the others no improvement"
    )
    codes = [
        optrun(*words, "training.max_seconds=1e-9", "hydra.run.dir=stopped", "resume=auto")
        for _ in range(4)
    ]
    assert codes == [75] * 3 + [0]
    assert records(Path("stopped")) == records(Path("straight"))
    capsys.readouterr()
    assert optrun(*words, "scheduler.metric=eval/acuracy", "hydra.run.dir=wrong") == 2
    assert "eval/accuracy" in capsys.readouterr().err


def test_a_run_of_the_older_power_keeps_it_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rules = "param_groups.rules=[{pattern: bias, schedule: polynomial}]"
    words = [*causal_lm(tmp_path), "scheduler=polynomial", "scheduler.power=2.0", rules, "lr=1.0"]
    words += ["training.logging_steps=1", "training.max_steps=4", "hydra.run.dir=older"]
    assert optrun(*words, "training.max_seconds=1e-9") == 75
    assert "scheduler.power" not in "".join(capsys.readouterr())
    assert optrun("resume=older") == 75
    said = "".join(capsys.readouterr())
    advice = "{name: polynomial, power: 2.0}"
    for fact in ("scheduler.power=2 stays", "rules[0].schedule=polynomial has power 1", advice):
        assert fact in " ".join(said.split())
    rules = f"param_groups.rules=[{{pattern: bias, schedule: {advice}}}]"
    assert optrun("resume=older", rules, "training.max_seconds=null") == 0
    assert "has power 1" not in "".join(capsys.readouterr())
    rates = [record["train/lr"] for record in records(Path("older"))]
    assert rates == [1.0, 0.75, 0.25, 0.0625], (
        "the largest of any group: step 1 was made with the rule's new power"
    )
