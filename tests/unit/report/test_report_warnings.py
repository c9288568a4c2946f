"""Each warning fires when its cause is there, and in a clean comparison none does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optrun.report.findings import analyse_runs
from optrun.report.runs import load_runs
from optrun.report.warnings import find_warnings

Change = dict[str, Any]

CLEAN = [
    (optimizer, lr, seed)
    for optimizer in ("adamw", "lamb")
    for lr in (1, 2, 4)
    for seed in (0, 1, 2, 3)
]
BEST = {"adamw": 1e-3, "lamb": 4e-3}


def _sweep(
    folder: Path, make_run: Callable[..., Path], change: Callable[[str, float, int], Change | None]
) -> list[str]:
    """The clean sweep with changes; the kinds of warnings it gives."""
    for number, (optimizer, step, seed) in enumerate(CLEAN):
        options = change(optimizer, step, seed)
        if options is None:
            continue
        options = {"lr": BEST[optimizer] * step / 2, "seed": seed, **options}
        make_run(folder / str(number), optimizer=optimizer, max_steps=40, eval_every=10, **options)
    return [warning.kind for warning in find_warnings(analyse_runs(load_runs([folder])))]


def test_a_clean_comparison_has_no_warning(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    assert _sweep(tmp_path, make_run, lambda *_: {}) == []


CASES: list[tuple[str, list[str], Callable[[str, float, int], Change | None]]] = [
    ("edge", ["edge"], lambda o, lr, s: {"lr": BEST[o] * lr} if o == "lamb" else {}),
    ("edge-low", ["edge"], lambda o, lr, s: {"lr": BEST[o] * lr / 4} if o == "adamw" else {}),
    (
        "budget-steps",
        ["budget"],
        lambda o, lr, s: {"summary": {"max_steps": 80, "global_step": 80}} if o == "lamb" else {},
    ),
    (
        "budget-batch",
        ["budget"],
        lambda o, lr, s: {
            "config": {"training.per_device_train_batch_size": 32 if o == "lamb" else 16}
        },
    ),
    ("seeds", ["seeds"], lambda o, lr, s: None if (o, s) == ("lamb", 2) else {}),
    (
        "other-seeds",
        ["seeds", "few-seeds"],
        lambda o, lr, s: {"seed": s + 2} if o == "lamb" else {},
    ),
    ("few-seeds", ["few-seeds"], lambda o, lr, s: None if s >= 2 else {}),
    (
        "schedule",
        ["schedule"],
        lambda o, lr, s: {"summary": {"global_step": 30}} if (o, lr, s) == ("lamb", 2, 0) else {},
    ),
    (
        "unfinished-best",
        ["schedule", "seeds", "unfinished"],
        lambda o, lr, s: {"global_step": 20, "status": "running"} if o == "lamb" and s == 1 else {},
    ),
    (
        "unfinished-elsewhere",
        ["unfinished"],
        lambda o, lr, s: (
            {"global_step": 20, "status": "interrupted"} if (o, lr, s) == ("lamb", 4, 0) else {}
        ),
    ),
    (
        "diverged",
        ["diverged"],
        lambda o, lr, s: {"diverge_at": 30} if (o, lr) == ("lamb", 4) else {},
    ),
    (
        "failed",
        ["failed"],
        lambda o, lr, s: (
            {"status": "failed", "message": "out of memory"} if (o, lr, s) == ("lamb", 4, 0) else {}
        ),
    ),
    ("data", ["data"], lambda o, lr, s: {"summary": {"data": {"fingerprint": o}}}),
    ("data-cut-by-seed", [], lambda o, lr, s: {"summary": {"data": {"fingerprint": f"cut {s}"}}}),
    (
        "code",
        ["code"],
        lambda o, lr, s: {"summary": {"versions": {"torch": "2.12" if o == "lamb" else "2.13"}}},
    ),
    ("code of optrun", ["code"], lambda o, lr, s: {"summary": {"code": {"optrun": o}}}),
    ("code of a plugin", ["code"], lambda o, lr, s: {"summary": {"code": {"mine.py": o}}}),
    (
        "a plugin of one contender",
        [],
        lambda o, lr, s: {"summary": {"code": {"mine.py": "a"} if o == "lamb" else {}}},
    ),
    (
        "task",
        ["task"],
        lambda o, lr, s: {
            "config": {"task": {"name": "masked_lm" if o == "lamb" else "causal_lm"}}
        },
    ),
]


@pytest.mark.parametrize(
    ("expected", "change"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_a_warning_fires_for_its_cause_and_no_other(
    tmp_path: Path,
    make_run: Callable[..., Path],
    expected: list[str],
    change: Callable[[str, float, int], Change | None],
) -> None:
    assert sorted(_sweep(tmp_path, make_run, change)) == sorted(expected)


def test_unequal_tuning(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    _sweep(tmp_path, make_run, lambda *_: {})
    for seed in range(4):
        make_run(
            tmp_path / f"more-{seed}",
            optimizer="lamb",
            lr=3e-3,
            seed=seed,
            max_steps=40,
            eval_every=10,
        )
    assert [warning.kind for warning in find_warnings(analyse_runs(load_runs([tmp_path])))] == [
        "tuning"
    ]


def test_one_lr_each_is_no_comparison_of_optimizers(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    kinds = _sweep(tmp_path, make_run, lambda o, lr, s: {} if lr == 2 else None)
    assert kinds == ["single-lr"]


def test_the_best_lr_beside_one_that_diverged_is_not_on_the_edge(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    """The grid did go further: what lies there diverges."""
    kinds = _sweep(
        tmp_path,
        make_run,
        lambda o, lr, s: {
            "lr": BEST[o] * lr / 2,
            "diverge_at": 10 if lr == 4 else None,
            "final": 3 - lr / 10,
        },
    )
    assert kinds == ["diverged"]


@pytest.mark.parametrize(
    ("grid", "expected"),
    [
        (
            {1e-4: {}, 1e-3: {"final": 2.0}, 1e-1: {"diverge_at": 10}},
            [("coarse", "1e-4"), ("coarse", "lr=1e-2")],
        ),
        ({5e-4: {}, 1e-3: {"final": 2.0}, 1e-2: {"diverge_at": 10}}, [("coarse", "diverged")]),
        ({5e-4: {}, 1e-3: {"final": 2.0}, 1e-2: {}}, [("coarse", "×10")]),
        ({5e-4: {}, 1e-3: {"final": 2.0}, 5e-3: {}}, []),
        ({1e-3: {"final": 2.0}, 2e-3: {"status": "running"}}, [("edge", "lowest")]),
        ({5e-4: {"status": "failed"}, 1e-3: {"final": 2.0}, 2e-3: {}}, []),
    ],
    ids=["far-both", "far-diverged", "far", "near", "low-end", "low-unfinished"],
)
def test_the_best_lr_wants_results_close_by(
    tmp_path: Path,
    make_run: Callable[..., Path],
    grid: dict[float, Change],
    expected: list[tuple[str, str]],
) -> None:
    """A neighbour that diverged bounds the search only where it is near.

    One that has not ended is named by itself.
    """
    for number, (lr, options) in enumerate(grid.items()):
        make_run(tmp_path / f"a{number}", lr=lr, max_steps=20, **options)
        make_run(tmp_path / f"b{number}", lr=2e-3, optimizer="lamb", max_steps=20, seed=number)
    told = [
        each
        for each in find_warnings(analyse_runs(load_runs([tmp_path])))
        if each.kind in ("edge", "coarse")
    ]
    assert [each.kind for each in told] == [kind for kind, _ in expected]
    for warning, (_, fact) in zip(told, expected, strict=True):
        assert fact in warning.text
        assert warning.text.startswith("adamw")


def test_a_run_stopped_by_numbers_that_are_not_finite_was_tried(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    """It ends before a line that holds such a number is written."""
    stopped: Change = {"global_step": 12, "status": "failed", "summary": {"exit_code": 3}}
    kinds = _sweep(
        tmp_path,
        make_run,
        lambda o, lr, s: {
            "lr": BEST[o] * lr / 2,
            "final": 3 - lr / 10,
            **(stopped if lr == 4 else {}),
        },
    )
    assert kinds == ["diverged"]


def test_repeats_files_and_missing_metric(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    _sweep(tmp_path, make_run, lambda *_: {})
    late = {"updated_at": "2027-01-01T00:00:00+00:00"}
    make_run(
        tmp_path / "again",
        optimizer="lamb",
        lr=4e-3,
        seed=0,
        max_steps=40,
        eval_every=10,
        summary=late,
    )
    findings = analyse_runs(load_runs([tmp_path]))
    (warning,) = find_warnings(findings)
    assert warning.kind == "repeated"
    assert ": again." not in warning.text
    (tmp_path / "again" / "metrics.jsonl").write_text('{"step": 1, "tra')
    (tmp_path / "again" / "config.yaml").unlink()
    summary = json.loads((tmp_path / "again" / "summary.json").read_text())
    summary["metrics"] = {}
    (tmp_path / "again" / "summary.json").write_text(json.dumps(summary))
    found = {
        warning.kind: warning for warning in find_warnings(analyse_runs(load_runs([tmp_path])))
    }
    assert "line 1 is torn" in found["files"].text
    assert "config.yaml is missing" in found["files"].text
    assert "again" in found["metric"].text


def test_a_run_without_a_finite_metric_is_named(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    """A score that is not a number ranks nothing, and the run is not lost without a word."""
    main = {"main_metric": {"name": "eval/accuracy", "mode": "max"}}
    for seed in range(3):
        for optimizer in ("adamw", "lamb"):
            make_run(
                tmp_path / f"{optimizer}-{seed}",
                optimizer=optimizer,
                seed=seed,
                accuracy=True,
                summary=main,
            )
    file = tmp_path / "adamw-1" / "summary.json"
    held = json.loads(file.read_text())
    held["metrics"]["last"]["eval/accuracy"] = "NaN"
    file.write_text(json.dumps(held))
    log = tmp_path / "adamw-1" / "metrics.jsonl"
    *first, last = log.read_text().splitlines()
    log.write_text(
        "\n".join([*first, json.dumps(json.loads(last) | {"eval/accuracy": "NaN"})]) + "\n"
    )
    (found,) = [
        each for each in find_warnings(analyse_runs(load_runs([tmp_path]))) if each.kind == "metric"
    ]
    assert "adamw-1" in found.text
    assert "eval/accuracy" in found.text


def test_learning_rates_that_are_compared_were_swept(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    for number, (optimizer, lr, seed) in enumerate(CLEAN):
        make_run(
            tmp_path / str(number),
            optimizer=optimizer,
            lr=lr * 1e-3,
            seed=seed,
            max_steps=40,
            eval_every=10,
        )
    found = analyse_runs(load_runs([tmp_path]), by=["optimizer.name", "lr"])
    assert "single-lr" not in {each.kind for each in find_warnings(found)}
