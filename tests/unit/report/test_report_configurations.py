"""Joining runs: what differs, what is compared, where the lr curve ends."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from optrun.artifacts.provenance import TRAINING_KEYS_WITHOUT_EFFECT
from optrun.report.configurations import differing_keys, drop_implied_keys
from optrun.report.findings import Findings, analyse_runs
from optrun.report.runs import Run, flatten, load_runs, read_config
from optrun.report.table import to_rich
from optrun.report.tables import ranking_table

MakeRun = Callable[..., Path]


def _find(folder: Path) -> Findings:
    return analyse_runs(load_runs([folder]))


def test_only_what_differs_within_a_choice_is_named(tmp_path: Path, make_run: MakeRun) -> None:
    """That lamb has another default_lr than adamw follows from its name.

    Another eps among lambs does not.
    """
    for number, (optimizer, eps) in enumerate([("adamw", None), ("lamb", 1e-6), ("lamb", 1e-8)]):
        config = {"optimizer.eps": eps} if eps else {}
        make_run(
            tmp_path / str(number), optimizer=optimizer, max_steps=20, config=config, seed=number
        )
    assert differing_keys(load_runs([tmp_path])) == ["optimizer.name", "optimizer.eps"]


def test_seed_paths_and_tracking_never_separate_runs(tmp_path: Path, make_run: MakeRun) -> None:
    for number in range(3):
        config = {
            "tracking.name": f"t{number}",
            "checkpoint.keep_last": number,
            "training.logging_steps": 1 + number,
        }
        config |= {f"training.{key}": number for key in TRAINING_KEYS_WITHOUT_EFFECT}
        make_run(tmp_path / str(number), seed=number, max_steps=20, config=config)
    findings = _find(tmp_path)
    assert findings.keys == []
    assert [sorted(configuration.scores) for configuration in findings.configurations] == [
        [0, 1, 2]
    ]


def test_of_settings_changed_together_the_first_typed_names_the_contender(
    tmp_path: Path, make_run: MakeRun
) -> None:
    """Batch size with its warm-up and evaluation interval.

    One name, and what follows from it was not tuned.
    """
    for number, (batch, warmup, lr) in enumerate(
        [(8, 0.05, 1e-3), (16, 0.1, 2e-3), (32, 0.1, 4e-3)]
    ):
        key = "training.per_device_train_batch_size"
        overrides = ["seed=0", f"{key}={batch}", f"lr={lr}", f"scheduler.warmup_ratio={warmup}"]
        config = {key: batch, "scheduler.warmup_ratio": warmup, "training.eval_steps": 100 // batch}
        make_run(
            tmp_path / str(number),
            lr=lr,
            max_steps=20,
            config=config,
            summary={"overrides": overrides},
        )
    findings = _find(tmp_path)
    assert findings.compared_keys == ["training.per_device_train_batch_size"]
    assert findings.tuned_keys == ["lr"]
    assert {row.name for row in findings.contenders} == {
        f"per_device_train_batch_size {size}" for size in (8, 16, 32)
    }
    # Without a command line, which of the two that follow from each other it is does not matter.
    runs = load_runs([tmp_path])
    assert drop_implied_keys(["scheduler.warmup_ratio", "training.eval_steps"], runs) == [
        "training.eval_steps"
    ]


def test_the_spelling_of_a_path_makes_no_contender(tmp_path: Path, make_run: MakeRun) -> None:
    """The same model and data, seen from two folders, through a link, and on a machine where
    they are gone.
    """
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "train.tsv").touch()
    (tmp_path / "link.tsv").symlink_to("in/train.tsv")
    spelt = [
        ("train.tsv", "in"),
        ("../train.tsv", "in/deep"),
        ("link.tsv", ""),
        (str(tmp_path / "in/train.tsv"), ""),
    ]
    for number, (path, folder) in enumerate([*spelt, ("/gone/x.tsv", "")]):
        config = {
            "data.train": path,
            "model.path": path if number < 4 else "train.tsv",
            "data.eval": ["a", "b"],
        }
        data = {"fingerprint": "d1"} if number in (0, 4) else {}
        run = make_run(
            tmp_path / f"r{number}",
            optimizer=("adamw", "lamb")[number % 2],
            max_steps=20,
            config=config,
            seed=number // 2 if number < 4 else 0,
            summary={"data": data},
        )
        (run / ".hydra").mkdir()
        (run / ".hydra" / "hydra.yaml").write_text(
            f"hydra:\n  runtime:\n    version: 1\n    cwd: {tmp_path / folder}\n"
        )
    runs = load_runs([tmp_path])
    found = analyse_runs(runs[:4])
    assert found.keys == ["optimizer.name"]
    assert sorted(row.name for row in found.contenders) == ["adamw", "lamb"]
    assert runs[1].config["data.train"] == "../train.tsv", "the table of runs says what each has"
    assert "data.train" not in analyse_runs([runs[0], runs[4]]).keys, "the examples are the same"


def test_paths_that_differ_are_told_by_where_they_do(tmp_path: Path, make_run: MakeRun) -> None:
    folders = [f"/a/very/long/way/to/{'x' * 80}/{name}/train.tsv" for name in ("clean", "noisy")]
    for number, path in enumerate(folders):
        summary = {"data": {"fingerprint": str(number)}}
        make_run(tmp_path / str(number), max_steps=20, config={"data.train": path}, summary=summary)
    findings = _find(tmp_path)
    assert sorted(row.name for row in findings.contenders) == ["train clean", "train noisy"]
    assert analyse_runs(load_runs([tmp_path]), baseline=folders[1]).baseline == "train noisy"


def test_a_narrow_terminal_shows_fewer_columns_and_breaks_no_word(
    tmp_path: Path, make_run: MakeRun
) -> None:
    for number, name in enumerate(("adamw", "lazy_adam", "lamb")):
        make_run(tmp_path / str(number), optimizer=name, max_steps=20)
    table = ranking_table(_find(tmp_path))
    for width in (50, 70, 80, 90, 120):
        console = Console(width=width, file=io.StringIO())
        console.print(to_rich(table, width=width))
        said = console.file.getvalue()  # type: ignore[attr-defined]
        assert "lazy_adam" in said
        assert "too few" in said
        assert width not in (50, 120) or ("wall" in said) is (width == 120)
        heads = [len(line.rstrip()) for line in said.splitlines()]
        assert "…" not in said
        assert max(heads) <= width
        assert ("1.2 s" in said) is ("wall" in said), "a column is shown whole or not at all"


def test_an_optimizer_stands_at_its_best_lr_with_most_seeds(
    tmp_path: Path, make_run: MakeRun
) -> None:
    """One lucky run does not displace a configuration that was run again with more seeds."""
    make_run(tmp_path / "lucky", lr=5e-3, seed=0, max_steps=20, final=1.0)
    for seed in range(3):
        make_run(tmp_path / f"s{seed}", lr=1e-3, seed=seed, max_steps=20, final=2.0 + seed / 100)
        make_run(
            tmp_path / f"l{seed}",
            optimizer="lamb",
            lr=1e-3,
            seed=seed,
            max_steps=20,
            final=3.0 + seed / 100,
        )
    findings = _find(tmp_path)
    assert [(row.name, row.configuration.settings["lr"]) for row in findings.contenders] == [
        ("adamw", 1e-3),
        ("lamb", 1e-3),
    ]


def test_other_settings_separate_contenders_and_lr_alone_is_compared_itself(
    tmp_path: Path, make_run: MakeRun
) -> None:
    for number, lr in enumerate((1e-3, 2e-3)):
        make_run(tmp_path / "lr" / str(number), lr=lr, max_steps=20)
        make_run(
            tmp_path / "rate" / str(number),
            max_steps=20,
            config={"param_groups.decay_rate": 0.8 + lr},
            lr=lr,
        )
    assert sorted(row.name for row in _find(tmp_path / "lr").contenders) == ["lr 1e-3", "lr 2e-3"]
    assert _find(tmp_path / "rate").compared_keys == ["param_groups.decay_rate"]
    by_lr = analyse_runs(load_runs([tmp_path / "rate"]), by=["lr"])
    assert sorted(row.name for row in by_lr.contenders) == ["lr 1e-3", "lr 2e-3"]


def test_a_basin_has_its_points_and_what_diverged(tmp_path: Path, make_run: MakeRun) -> None:
    for number, lr in enumerate((1e-3, 2e-3, 4e-3)):
        make_run(
            tmp_path / str(number),
            lr=lr,
            max_steps=40,
            final=2.0 + lr,
            diverge_at=20 if lr == 4e-3 else None,
        )
        make_run(tmp_path / f"x{number}", optimizer="lamb", lr=lr, max_steps=40, final=2.0)
    lr_curve = next(row.lr_curve for row in _find(tmp_path).contenders if row.name == "adamw")
    assert {lr: configuration.mean for lr, configuration in lr_curve.points.items()} == {
        1e-3: 2.001,
        2e-3: 2.002,
    }
    assert (lr_curve.diverged, lr_curve.finished_lrs) == ((4e-3,), (1e-3, 2e-3, 4e-3))
    assert lr_curve.best is lr_curve.points[1e-3]
    assert lr_curve.neighbours_of_best() == (None, 2e-3)


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [
        ([5.0] * 20, ""),
        ([5.0 - i / 10 for i in range(20)], ""),
        ([1.0 + i / 10 for i in range(20)], ""),
        ([5.0, "NaN", 4.0, 4.0], ""),
        ([5.0, 4.0, "NaN", "NaN"], "not finite from step 3"),
        (["Infinity"], "not finite from step 1"),
    ],
    ids=["flat", "learns", "rises", "recovers", "nan", "never"],
)
def test_what_counts_as_diverged(
    tmp_path: Path, make_run: MakeRun, losses: list[object], diverged: str
) -> None:
    path = make_run(tmp_path / "run", summary={"metrics": {}})
    quoted = [f'"{loss}"' if isinstance(loss, str) else loss for loss in losses]
    text = "".join(
        f'{{"step": {step}, "train/loss": {loss}}}\n' for step, loss in enumerate(quoted, start=1)
    )
    (path / "metrics.jsonl").write_text(text)
    (run,) = load_runs([path])
    assert diverged in run.diverged
    assert bool(run.diverged) == bool(diverged)


def _command(
    overrides: list[str], name: str = "config", typed: str = "typed", **summary: Any
) -> Run:
    summary |= {"config_name": name, "command": typed}
    return Run(Path("x"), "x", "finished", "", {}, summary, None, [], overrides)  # type: ignore[arg-type]


def test_commands_are_safe_to_paste_and_leave_out_what_was_only_for_then() -> None:
    run = _command(
        [
            "optimizer=lamb",
            "lr=1e-3",
            "seed=4",
            "resume=auto",
            "data.train=a b;rm",
            "hydra.run.dir=/x",
        ]
    )
    assert run.command() == "optrun optimizer=lamb lr=1e-3 seed=4 'data.train=a b;rm'"
    assert (
        run.command(seeds=[4, 5]) == "optrun -m optimizer=lamb lr=1e-3 'data.train=a b;rm' seed=4,5"
    )
    assert _command([], "sst2_minilm").command() == "optrun -cn sst2_minilm"
    assert _command(["lr=1"], "sst2_minilm").command() == "optrun -cn sst2_minilm lr=1"


@pytest.mark.parametrize(
    "given", ["--config-dir 'my own'", "--config-dir='my own'", "-cd 'my own'"]
)
def test_commands_name_the_folder_of_a_recipe(given: str) -> None:
    run = _command(["lr=1"], "mine", f"optrun -cn mine {given} lr=1")
    assert run.command() == "optrun -cn mine --config-dir 'my own' lr=1"
    assert (
        _command(["lr=1"], "mine", "optrun -cn mine --config-dir").command()
        == "optrun -cn mine lr=1"
    )
    assert _command(["lr=1"], "mine", "optrun 'x").command() == "optrun -cn mine lr=1"


def test_commands_take_one_point_of_a_recipe_that_is_a_sweep() -> None:
    """Without its grids, whose other keys would come along."""
    run = _command(
        ["optimizer=sgd", "seed=1"], "many", "optrun -cn many hydra.mode=RUN optimizer=sgd seed=1"
    )
    assert run.command() == "optrun -cn many hydra.mode=RUN optimizer=sgd seed=1"
    assert (
        run.command(seeds=[0, 1])
        == "optrun -m -cn many hydra/sweeper=grid 'hydra.sweeper.grids=[]' optimizer=sgd seed=0,1"
    )


def test_what_was_changed_when_a_run_was_resumed() -> None:
    resumes = [
        {"changes": {"lr": [1, 2], "training.max_steps": [5, 9]}},
        {"changes": {"lr": [2, 3]}},
        {"changes": 1},
    ]
    assert _command([], resumes=resumes).values_in_records("resumes", "changes", dict) == [
        each["changes"] for each in resumes[:2]
    ]
    assert _command([], resumes="torn").values_in_records("resumes", "changes", dict) == []


def test_configuration_files(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("lr: 1e-3\nbetas: [1e-1, x]\nnone: null\nempty: {}\n")
    assert flatten(read_config(path)) == {
        "lr": 0.001,
        "betas": "[0.1, 'x']",
        "none": None,
        "empty": "{}",
    }
    for content in ("- 1", "a: [", "\x00", "!!python/object/apply:os.system ['true']"):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"config\.yaml"):
            read_config(path)


@pytest.mark.parametrize("patience", [None, 2])
def test_the_metric_of_early_stopping_separates_runs(
    tmp_path: Path, make_run: MakeRun, patience: int | None
) -> None:
    for number, metric in enumerate(("eval/loss", "eval/accuracy")):
        config = {"training.early_stopping_patience": patience, "checkpoint.metric": metric}
        make_run(tmp_path / str(number), seed=number, max_steps=20, config=config)
    expected = [] if patience is None else ["checkpoint.metric"]
    assert differing_keys(load_runs([tmp_path])) == expected
