"""The callback of docs/performance.md that profiles some steps."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from optrun.artifacts.metrics import read_metrics
from optrun.config.registry import plugins
from tests.running import TINY_GPT, optrun, write_text


@pytest.fixture(autouse=True)
def _plugins() -> Iterator[None]:
    """A plugin that stays loaded goes along with the sweeps of later tests in this process."""
    yield
    for name in list(plugins.LOADED):
        plugins.forget(name)


def words(folder: Path, steps: int = 6) -> list[str]:
    """Of a run."""
    run = [
        "training.logging_steps=1",
        f"training.max_steps={steps}",
        "checkpoint=none",
        "training.eval_steps=100",
    ]
    return [*TINY_GPT, "data=files", f"data.train={write_text(folder)}", *run]


def losses(run: Path) -> list[float]:
    """Of training."""
    return read_metrics(run / "metrics.jsonl").series("train/loss")[1]


def test_a_trace_of_three_steps_and_the_same_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    assert optrun(*words(tmp_path), f"hydra.run.dir={plain}") == 0
    page = Path(__file__).parents[2] / "docs" / "performance.md"
    (code,) = re.findall(r"```python\n(# profile_steps.py\n.*?)```", page.read_text(), re.DOTALL)
    plugin = tmp_path / "profile_steps.py"
    plugin.write_text(code)
    more = ["callbacks.profile_steps.steps=3", f"hydra.run.dir={watched}"]
    assert optrun("--plugin", str(plugin), *words(tmp_path), *more) == 0
    assert losses(plain) == losses(watched)
    trace = json.loads((watched / "extra" / "trace.json").read_text())
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert {f"ProfilerStep#{number}" for number in (2, 3, 4)} <= names
    assert any("addmm" in name for name in names)
    assert "Self CPU" in capsys.readouterr().out
    assert optrun("verify", str(watched)) == 0


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        (["training.profile=5"], ("training.profile", "torch.profiler")),
        (["training.peak_flops=1e12"], ("training.peak_flops", "Not offered")),
        (["training.noise_scale=true"], ("training.noise_scale", "Not offered")),
    ],
)
def test_what_is_not_measured_is_refused(
    more: list[str], facts: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert optrun(*words(tmp_path), *more, f"hydra.run.dir={tmp_path / 'run'}") == 2
    told = capsys.readouterr().err
    for fact in facts:
        assert fact in told
