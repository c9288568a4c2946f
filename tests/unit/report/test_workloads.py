"""Several workloads: scores between a measured floor and the best mean.

What teaches nothing is left out.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from optrun.base.errors import ConfigError
from optrun.report.build import report
from optrun.report.runs import load_runs
from optrun.report.statistics import TtestResult
from optrun.report.tables import ranking_table, scores_table
from optrun.report.verdict import write_verdict
from optrun.report.workloads import compare_runs, split_workloads

MakeRun = Callable[..., Path]


def workload(
    folder: Path,
    make_run: MakeRun,
    means: Mapping[str, float],
    *,
    task: str,
    before: float | None = 10.0,
    spread: float = 0.01,
    seeds: int = 3,
    matters: float | None = None,
    **options: Any,
) -> None:
    config = {"task.name": task, "data.train": f"{task}.txt", "matters": matters}
    for place, (name, mean) in enumerate(means.items()):
        for seed in range(seeds):
            noise = spread * math.sin(1 + 5 * seed) + 0.2 * spread * math.sin(
                2 + 7 * seed + 3 * place
            )
            make_run(
                folder / f"{task}-{name}-{seed}",
                optimizer=name,
                seed=seed,
                max_steps=options.pop("max_steps", 40),
                final=mean + noise,
                before=before,
                config=config,
                summary={"data": {"fingerprint": f"t-{task}"}},
                **options,
            )


def test_a_score_lies_between_what_was_measured_and_the_best(
    tmp_path: Path, make_run: MakeRun
) -> None:
    workload(tmp_path, make_run, {"adamw": 2.0, "lamb": 4.0}, task="one", spread=0.0)
    workload(tmp_path, make_run, {"adamw": 6.0, "lamb": 5.0}, task="two", spread=0.0)
    found = compare_runs(load_runs([tmp_path]))
    assert found.several
    assert [each.untrained_metric for each in found.workloads] == [10.0, 10.0]
    for seed in range(3):
        assert found.scores["adamw"][seed] == pytest.approx((1.0 + 0.8) / 2)
        assert found.scores["lamb"][seed] == pytest.approx((0.75 + 1.0) / 2)


def test_how_often_is_evaluated_changes_no_score(tmp_path: Path, make_run: MakeRun) -> None:
    scores = []
    for often in (5, 40):
        folder = tmp_path / str(often)
        workload(folder, make_run, {"adamw": 2.0, "lamb": 2.2}, task="one", eval_every=often)
        workload(folder, make_run, {"adamw": 2.3, "lamb": 2.0}, task="two", eval_every=45 - often)
        found = compare_runs(load_runs([folder]))
        scores.append(found.scores)
        assert write_verdict(found).possible == ("lamb",)
    assert scores[0] == scores[1]


def test_a_workload_at_chance_is_named_and_left_out(tmp_path: Path, make_run: MakeRun) -> None:
    workload(tmp_path, make_run, {"adamw": 2.0, "lamb": 2.1, "sgd": 2.6}, task="one")
    workload(
        tmp_path,
        make_run,
        {"adamw": 9.99, "lamb": 9.985, "sgd": 9.98},
        task="chance",
        before=10.0,
        spread=0.02,
    )
    found = compare_runs(load_runs([tmp_path]))
    reasons = {each.name: each.left_out for each in found.workloads}
    (chance,) = [name for name in reasons if "chance" in name]
    assert "teaches nothing" in reasons[chance]
    assert [name for name, why in reasons.items() if not why] == [
        name for name in reasons if name != chance
    ]
    verdict = write_verdict(found)
    assert verdict.possible == ("adamw",)
    assert "is the best of 3 over 1 workload " in verdict.text


def test_what_matters_in_units_of_a_metric_is_no_limit_of_scores(
    tmp_path: Path, make_run: MakeRun
) -> None:
    for task in ("one", "two"):
        workload(tmp_path, make_run, {"adamw": 2.0, "lamb": 2.3}, task=task, matters=5.0)
    found = compare_runs(load_runs([tmp_path]))
    assert found.ttest is not None
    assert found.ttest.matters < 0.1
    assert found.ttest.comparisons["lamb"].verdict == "ruled out"
    assert all(each.ttest.matters == 5.0 for each in found.workloads if each.ttest is not None)


def test_without_an_evaluation_before_the_first_step_there_is_no_score(
    tmp_path: Path, make_run: MakeRun
) -> None:
    workload(tmp_path, make_run, {"adamw": 2.0, "lamb": 2.1}, task="one")
    workload(tmp_path, make_run, {"adamw": 2.0, "lamb": 2.1}, task="old", before=None)
    (old,) = [each for each in compare_runs(load_runs([tmp_path])).workloads if "old" in each.name]
    assert "not" in old.left_out
    assert "evaluated before its first step" in old.left_out


def test_a_contender_that_is_missing_somewhere_has_no_score(
    tmp_path: Path, make_run: MakeRun
) -> None:
    workload(tmp_path, make_run, {"adamw": 2.0, "lamb": 2.1, "sgd": 1.0}, task="one")
    workload(tmp_path, make_run, {"adamw": 2.0, "lamb": 2.1}, task="two")
    found = compare_runs(load_runs([tmp_path]))
    assert found.scores["sgd"] == {}
    assert write_verdict(found).possible == ("adamw",)


def test_a_baseline_of_several_workloads(tmp_path: Path, make_run: MakeRun) -> None:
    workload(tmp_path, make_run, {"adamw": 2.0, "lamb": 2.3}, task="one")
    workload(tmp_path, make_run, {"adamw": 2.0, "lamb": 2.3}, task="two")
    runs = load_runs([tmp_path])
    found = compare_runs(runs, baseline="adamw").ttest
    assert found is not None
    assert found.has_baseline
    assert found.comparisons["lamb"].verdict == "worse"
    with pytest.raises(ConfigError, match=r"baseline=adam: .*adamw"):
        compare_runs(runs, baseline="adam")


def test_runs_that_share_no_two_contenders_are_not_compared(
    tmp_path: Path, make_run: MakeRun
) -> None:
    workload(tmp_path, make_run, {"adamw": 2.0}, task="one")
    workload(tmp_path, make_run, {"lamb": 2.0}, task="two")
    found = compare_runs(load_runs([tmp_path]))
    assert not found.several
    assert "different tasks" in write_verdict(found).text


def test_what_a_workload_is(tmp_path: Path, make_run: MakeRun) -> None:
    make_run(tmp_path / "a", max_steps=20)
    make_run(tmp_path / "b", max_steps=40, optimizer="lamb")
    assert len(split_workloads(load_runs([tmp_path]))) == 1
    make_run(tmp_path / "c", max_steps=20, config={"task.name": "masked_lm"})
    assert list(split_workloads(load_runs([tmp_path]))) == ["causal_lm", "masked_lm"]


def test_runs_that_diverged_do_not_widen_what_another_seed_changes(
    tmp_path: Path, make_run: MakeRun
) -> None:
    workload(tmp_path, make_run, {"adamw": 2.0, "lamb": 2.1, "sgd": 2.2}, task="one", seeds=5)
    workload(tmp_path, make_run, {"adamw": 3.0, "lamb": 3.1, "sgd": 3.2}, task="two", seeds=5)
    before = judgement_of(tmp_path)
    for seed in (0, 1):
        path = tmp_path / f"two-sgd-{seed}" / "summary.json"
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"status": "failed", "exit_code": 3})
        )
    found = judgement_of(tmp_path)
    assert found.matters == pytest.approx(before.matters, rel=0.2)
    assert found.comparisons["lamb"].verdict == before.comparisons["lamb"].verdict == "ruled out"


def judgement_of(folder: Path) -> TtestResult:
    found = compare_runs(load_runs([folder])).ttest
    assert found is not None
    return found


def test_a_baseline_without_a_score_on_every_workload_is_not_forgotten(
    tmp_path: Path, make_run: MakeRun
) -> None:
    workload(tmp_path, make_run, {"adamw": 2.0, "lamb": 2.1, "sgd": 2.2}, task="one")
    workload(tmp_path, make_run, {"adamw": 3.0, "lamb": 3.1}, task="two")
    found = write_verdict(compare_runs(load_runs([tmp_path]), baseline="sgd"))
    assert "sgd, the baseline" in found.text
    assert not found.ruled_out


def test_each_workload_has_its_own_choice(tmp_path: Path, make_run: MakeRun) -> None:
    for task, best in (("one", 1e-3), ("two", 4e-3)):
        for lr in (1e-3, 4e-3):
            part = tmp_path / f"{lr}"
            workload(part, make_run, {"adamw": 2.0 + (lr != best), "lamb": 2.5}, task=task, lr=lr)
    chosen = write_verdict(compare_runs(load_runs([tmp_path]))).chosen["adamw"]
    assert "adamw at lr 1e-3 on one" in chosen
    assert "adamw at lr 4e-3 on two" in chosen


def test_what_is_said_of_every_workload_is_said_once(tmp_path: Path, make_run: MakeRun) -> None:
    for task in ("causal_lm", "masked_lm"):
        for optimizer in ("adamw", "lamb"):
            config = {"task": {"name": task}}
            make_run(
                tmp_path / f"{task}-{optimizer}",
                optimizer=optimizer,
                max_steps=20,
                before=9.0,
                config=config,
            )
    (few,) = [each.text for each in report([tmp_path]).warnings if each.kind == "few-seeds"]
    assert few.startswith("Fewer than 3 seeds")


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"metric": "eval/acuracy"}, "metric=eval/acuracy: no run has logged it"),
        ({"metric": "train/loss"}, "a training metric cannot rank runs"),
        ({"by": ["optimiser.name"]}, "by=optimiser.name: no run has this configuration key"),
    ],
)
def test_unknown_names_are_refused_over_several_workloads(
    question: dict[str, Any], message: str, tmp_path: Path, make_run: MakeRun
) -> None:
    for task in ("one", "two"):
        workload(tmp_path, make_run, {"adamw": 2.0, "lamb": 4.0}, task=task)
    with pytest.raises(ConfigError, match=message):
        compare_runs(load_runs([tmp_path]), **question)


def test_without_a_test_the_scores_have_no_verdict(tmp_path: Path, make_run: MakeRun) -> None:
    """The only contender with a score on both was said to have none."""
    workload(tmp_path, make_run, {"adamw": 2.0, "lamb": 2.1, "sgd": 4.0}, task="one")
    workload(tmp_path, make_run, {"adamw": 2.0, "lamb": 2.1, "sgd": 4.0}, task="two")
    for seed, task in enumerate(("one", "two", "one")):
        shutil.rmtree(tmp_path / f"{task}-lamb-{seed}")
    for seed, task in enumerate(("two", "one", "two")):
        shutil.rmtree(tmp_path / f"{task}-sgd-{seed}")
    found = compare_runs(load_runs([tmp_path]))
    assert found.ttest is None
    table = scores_table(found)
    assert {"verdict", "difference"}.isdisjoint(table.columns)
    assert [row[:2] for row in table.rows] == [["adamw", "1.000"], ["lamb", "–"], ["sgd", "–"]]
    assert table.styles == ["", "muted", "muted"]


def test_while_runs_are_left_several_workloads_are_not_judged(
    tmp_path: Path, make_run: MakeRun
) -> None:
    for task in ("one", "two"):
        workload(tmp_path, make_run, {"adamw": 2.0, "lamb": 2.3}, task=task)
    rows = [{"name": "new", "status": "new", "overrides": ["optimizer=lamb", "seed=9"]}]
    (tmp_path / "sweep.json").write_text(json.dumps({"format": 1, "tuned": [], "jobs": rows}))
    made = report([tmp_path])
    assert made.verdict.text.startswith("12 of 13 runs have ended.")
    assert not (tmp_path / "report-looks.json").exists()
    tables = [scores_table(made.comparison), *map(ranking_table, made.comparison.workloads)]
    for table in tables:
        assert {"verdict", "difference"}.isdisjoint(table.columns)
