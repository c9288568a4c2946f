"""A plateau schedule remembers over a resume which evaluations it saw."""

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
