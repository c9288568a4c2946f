"""The paragraph for a paper says what was done, and its commands do it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from optrun.report.collect import load_runs
from optrun.report.confirmation import Confirmation
from optrun.report.confirmed import Confirmed
from optrun.report.findings import find
from optrun.report.methods import methods
from optrun.report.reproduce import sweep_lines

MakeRun = Callable[..., Path]


def _grid(folder: Path, make_run: MakeRun, optimizers: tuple[str, ...] = ("adamw", "lamb"), seeds: int = 3) -> None:
    for optimizer in optimizers:
        for lr in (1e-3, 2e-3):
            for seed in range(seeds):
                path = folder / f"{optimizer}-{lr}-{seed}"
                make_run(path, optimizer=optimizer, lr=lr, seed=seed, max_steps=20, log_every=20, eval_every=20)


def test_it_says_what_was_done(tmp_path: Path, make_run: MakeRun) -> None:
    _grid(tmp_path, make_run)
    make_run(tmp_path / "lost", optimizer="lamb", lr=1.0, max_steps=20, diverge_at=10)
    make_run(tmp_path / "cut", optimizer="lamb", lr=0.5, max_steps=20, global_step=5, status="interrupted")
    told = methods(find(load_runs([tmp_path])), [], "optrun report here")
    for fact in ("2 contenders (", "causal lm", "gpt_tiny", "stdlib", "14 training runs of 20 optimizer steps each",
                 "adamw 2", "lamb 4", "2 to 4 configurations", "learning rates from 1e-3 to 1", "lowest mean eval/loss",
                 "200 evaluation examples", "seeds 0, 1, 2", "1 diverged", "1 did not finish", "paired t tests",
                 "Holm", "all pairs", "at 5 %; as these seeds chose the configurations, too,",
                 "265 optimizer steps", "torch 2.13.0", "commit abc123"):  # fmt: skip
        assert fact in told.text, fact
    assert "Smyth" not in told.text, "the variance is moderated from four contenders on"
    assert "\n" not in told.text
    assert told.commands == ["optrun report here"], "the runs are no product of values"


def test_it_says_which_test_was_made(tmp_path: Path, make_run: MakeRun) -> None:
    _grid(tmp_path, make_run, ("adamw", "lamb", "sgd", "adamax"))
    told = methods(find(load_runs([tmp_path]), baseline="adamw"), [], "").text
    assert "Smyth 2004" in told
    assert "3 comparisons with adamw, which was named as the baseline" in told


def test_what_was_not_done_is_not_said(tmp_path: Path, make_run: MakeRun) -> None:
    for optimizer in ("adamw", "lamb"):
        summary = {"versions": {"optrun": optimizer}, "hardware": None, "git": None, "data": None, "perf": None}
        make_run(tmp_path / optimizer, optimizer=optimizer, max_steps=20, summary=summary)
    told = methods(find(load_runs([tmp_path])), [], "").text
    assert "No test was made." in told
    assert "nothing was tuned" in told
    assert "several versions" in told
    assert "examples" not in told
    unfinished = tmp_path / "u"
    make_run(unfinished, max_steps=20, global_step=5, status="running")
    assert "1 did not finish" not in methods(find(load_runs([unfinished])), [], "").text, "nothing has a score"


def test_of_summaries_that_are_torn_the_rest_is_told(tmp_path: Path, make_run: MakeRun) -> None:
    for section in ("versions", "hardware", "git", "data", "perf"):
        make_run(tmp_path / section, max_steps=20, log_every=20, summary={section: "torn", "wall_seconds": "long"})
    told = methods(find(load_runs([tmp_path])), [], "").text
    assert "torch 2.13.0" in told
    assert "torn" not in told
    assert "code at commit abc123" in told


def test_a_confirmation_is_told_with_its_seeds(tmp_path: Path, make_run: MakeRun) -> None:
    _grid(tmp_path, make_run)
    findings, alone = find(load_runs([tmp_path])), find(load_runs([tmp_path]), baseline="adamw", by=["optimizer.name"])
    plan = Confirmation({"adamw": [], "lamb": []}, "adamw", ["optimizer.name"], "eval/loss", [5, 6, 7, 8], power=0.8)
    told = methods(findings, [Confirmed(tmp_path / "confirm", plan, alone)], "optrun report x")
    assert "fresh seeds 5-8, as many as find the differences seen with a power of 0.8" in told.text
    assert "against adamw, which was named before them" in told.text
    assert "480 optimizer steps" in told.text, "of the choice and of the confirmation"
    assert findings.reference == "lamb"
    assert told.commands[1] == f"optrun confirm {tmp_path} baseline=adamw seeds=5,6,7,8"
    of_lamb = replace(plan, reference="lamb")
    found = find(load_runs([tmp_path]), baseline="lamb", by=["optimizer.name"])
    assert methods(findings, [Confirmed(tmp_path / "confirm", of_lamb, found)], "").commands[1] == (
        f"optrun confirm {tmp_path} seeds=5,6,7,8"
    )
    elsewhere = methods(findings, [Confirmed(tmp_path / "other", plan, alone)], "")
    assert elsewhere.commands[1].endswith(f"out={tmp_path / 'other'}")
    by_itself = methods(alone, [Confirmed(tmp_path / "confirm", plan, alone)], "optrun report x")
    assert "5-8 are fresh, as many" in by_itself.text
    assert "240 optimizer steps" in by_itself.text
    assert by_itself.commands == [told.commands[1], "optrun report x"]
    otherwise = methods(alone, [Confirmed(tmp_path / "confirm", of_lamb, alone)], "").text
    assert "is not what was planned before these runs, on the fresh seeds 5-8: eval/loss against lamb" in otherwise


def test_a_grid_is_one_line(tmp_path: Path, make_run: MakeRun) -> None:
    _grid(tmp_path, make_run)
    (line,) = sweep_lines(find(load_runs([tmp_path])))
    assert line == "optrun -m lr=0.001,0.002 optimizer=adamw,lamb seed=0,1,2 training.max_steps=20"


def test_a_grid_for_each_contender_is_a_line_for_each(tmp_path: Path, make_run: MakeRun) -> None:
    for optimizer, lr in (("adamw", 1e-3), ("adamw", 2e-3), ("lamb", 1e-2), ("lamb", 2e-2)):
        summary = {"config_name": "mine", "command": "optrun -cn mine --config-dir conf x=1",
                   "overrides": [f"optimizer={optimizer}", f"lr={lr}", "seed=0"]}  # fmt: skip
        make_run(tmp_path / f"{optimizer}{lr}", optimizer=optimizer, lr=lr, max_steps=20, summary=summary)
    lines = sweep_lines(find(load_runs([tmp_path])))
    assert len(lines) == 2
    assert all(line.startswith("optrun -m -cn mine hydra/sweeper=grid") for line in lines)
    assert {line.partition("--config-dir conf ")[2] for line in lines} == {
        "lr=0.001,0.002 optimizer=adamw seed=0", "lr=0.01,0.02 optimizer=lamb seed=0"
    }  # fmt: skip


@pytest.mark.parametrize("resumed", [[], [{"changes": {"training.max_steps": [20, 30]}}]])
def test_what_no_line_makes_again_has_none(resumed: list[object], tmp_path: Path, make_run: MakeRun) -> None:
    """A list among several values is more values on a command line; what was changed in between is in none."""
    for seed in range(2):
        overrides = ["optimizer.betas=[0.9,0.99]" if seed else "optimizer.betas=[0.9,0.95]", f"seed={seed}"]
        summary = {"resumes": resumed, "overrides": ["lr=1e-3", f"seed={seed}"] if resumed else overrides}
        make_run(tmp_path / str(seed), seed=seed, max_steps=20, summary=summary)
    assert sweep_lines(find(load_runs([tmp_path]))) == []
