"""Does it generalise: the verdict, and the sentence with its numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from optrun.artifacts.generalisation import Verdict, generalisation_of, sentence_of


def run(
    before: float | None,
    after: float,
    train: float | None,
    classes: list[tuple[str, int, int]] | None = None,
) -> dict[str, Any]:
    """A summary; of each class its name, how many there are, and how many of these were found."""
    last = {"eval/loss": after} | ({} if train is None else {"train/loss": train})
    rows = [
        {"class": name, "support": there, "recall": right / there}
        for name, there, right in classes or ()
    ]
    return {
        "global_step": 80,
        "main_metric": {"name": "eval/accuracy" if classes else "eval/loss", "mode": "max"},
        "metrics": {
            "last": last,
            "before_training": {} if before is None else {"eval/loss": before},
        },
        "classes": {"step": 80, "sets": {"": {"classes": rows}}} if classes else None,
    }


GENERALISES, PARTLY, MEMORISED, NO_BETTER, BETTER, SEEN = Verdict
HALVES = [("neg", 51, 48), ("pos", 49, 45)]
ALWAYS = [("neg", 51, 51), ("pos", 49, 0)]
GUESSED = [("neg", 51, 27), ("pos", 49, 25)]


@pytest.mark.parametrize(
    ("summary", "verdict", "facts"),
    [
        (run(0.69, 0.41, 0.38), GENERALISES, ["generalises", "0.41", "0.38", "0.69"]),
        (run(5.8, 3.9, 0.5), PARTLY, ["in part", "3.9", "0.5", "5.8"]),
        (run(0.69, 1.68, 0.007), MEMORISED, ["memorised", "1.68", "0.007", "0.69"]),
        (
            run(0.69, 0.7, 0.66),
            NO_BETTER,
            ["no better than before training", "0.7", "0.66", "0.69"],
        ),
        (
            run(6.91, 6.9, 6.9),
            NO_BETTER,
            ["not clearly better than before training", "6.9", "6.91"],
        ),  # a hundredth at most
        (run(6.91, 6.8, 6.8), BETTER, ["better than before training"]),
        (run(0.69, math.nan, 0.2), MEMORISED, []),
        (run(0.69, 0.41, None), GENERALISES, ["0.41"]),
        (run(0.69, 0.2, 0.25, HALVES), GENERALISES, ["0.93", "'neg'", "0.51", "100"]),
        (
            run(0.69, 1.9, 0.01, HALVES),
            PARTLY,
            ["0.93", "1.9"],
        ),  # right, and too sure of what is wrong
        (
            run(0.69, 0.69, 0.69, ALWAYS),
            NO_BETTER,
            ["no better than always answering 'neg'", "0.51"],
        ),
        (
            run(0.69, 0.69, 0.69, GUESSED),
            NO_BETTER,
            ["not clearly better than always answering 'neg'", "0.52"],
        ),
        (run(0.69, 1.68, 0.007, GUESSED), MEMORISED, ["memorised", "0.52", "'neg'"]),
        (
            run(None, 1.9, 0.01, HALVES),
            BETTER,
            ["better than always answering 'neg'", "0.93", "1.9"],
        ),
        (run(None, 0.7, 0.7, ALWAYS), NO_BETTER, ["'neg'"]),
    ],
)
def test_verdicts(summary: dict[str, Any], verdict: Verdict, facts: list[str]) -> None:
    found = generalisation_of(summary)
    assert found is not None
    assert found.verdict is verdict
    for fact in facts:
        assert fact in str(found), str(found)


@pytest.mark.parametrize(
    "summary",
    [
        run(None, 0.4, 0.3),  # resumed from a checkpoint of before: no floor
        run(math.nan, 0.4, 0.3),
        {**run(0.69, 0.4, 0.3), "main_metric": None},
        {},
    ],
)
def test_nothing_is_said_without_a_floor(summary: dict[str, Any]) -> None:
    assert generalisation_of(summary) is None
    assert sentence_of({**summary, "generalisation": None}) == ""


def test_a_sentence_is_of_the_weights_that_are_told_of() -> None:
    summary = run(0.69, 0.41, 0.38)
    assert sentence_of({**summary, "generalisation": {"step": 80}}).startswith("generalises")
    assert sentence_of({**summary, "generalisation": {"step": 70}}) == ""


def test_of_several_sets_that_of_the_main_metric_counts() -> None:
    summary = run(0.69, 0.41, 0.38)
    summary["main_metric"]["name"] = "eval/dev/f1"
    summary["metrics"]["last"]["eval/dev/loss"] = 0.9
    summary["metrics"]["before_training"]["eval/dev/loss"] = 0.7
    found = generalisation_of(summary)
    assert found is not None
    assert (found.loss, found.eval_loss, found.verdict) == ("eval/dev/loss", 0.9, NO_BETTER)


@pytest.mark.parametrize(("seen", "verdict"), [(100, SEEN), (30, GENERALISES)])
def test_what_was_trained_on_shows_no_generalisation(seen: int, verdict: Verdict) -> None:
    summary = {**run(0.69, 0.2, 0.2), "data": {"eval_seen": {"": [seen, 100]}}}
    found = generalisation_of(summary)
    assert found is not None
    assert found.verdict is verdict
    assert f"{seen} of 100 evaluation texts" in str(found)
    assert generalisation_of({**run(0.69, 0.7, 0.66), "data": summary["data"]}).verdict is NO_BETTER  # type: ignore[union-attr]


def test_two_steps_that_move_the_loss_by_three_percent_do_not_generalise() -> None:
    summary = {
        "global_step": 2,
        "main_metric": {"name": "eval/loss", "mode": "min"},
        "metrics": {
            "before_training": {"eval/loss": 6.0},
            "last": {"eval/loss": 5.82, "train/loss": 5.9},
        },
    }
    assert str(generalisation_of(summary)).startswith("better than before training: eval/loss 5.82")
