"""Judge in one sentence whether a run generalises to examples it was not trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from optrun.artifacts.objective import loss_beside
from optrun.base.formatting import number
from optrun.base.plain import lookup

LEAST = 0.01
"""The share of its value before training that eval/loss has to fall by: less than that is nothing
learnt."""
ENOUGH = 0.1
"""The share that eval/loss has to fall by before more is said than that it fell.

Two steps move a loss by some percent, and say nothing of what would hold.
"""
HALF = 0.5
"""The share of what training gained that has to hold on evaluation; also how far train/loss falls
by heart."""
STANDARD_ERRORS = 2.0
"""By how many of them the right answers have to outnumber those of the majority class."""


class Verdict(StrEnum):
    """The verdict on the generalisation of a run."""

    generalises = "generalises"
    partly = "generalises in part"
    memorised = "memorised"
    no_better = "no better"
    better = "better"
    """Than always answering a class or than before training; how much of it holds is not known."""
    seen = "evaluated on what it was trained on"


NOTHING_LEARNT = (Verdict.memorised, Verdict.no_better, Verdict.seen)
"""Verdicts after which the winner of a comparison has won nothing."""


@dataclass(frozen=True)
class Majority:
    """The accuracy of always answering the most frequent evaluation label, as a floor.

    The model should do better than that.
    """

    label: str
    accuracy: float
    """Of always answering it."""
    model_accuracy: float
    examples: int
    beaten: bool
    """Whether the model has more right answers, by `STANDARD_ERRORS` of their difference."""


@dataclass(frozen=True)
class Generalisation:
    """Training against evaluation loss after the last step, and a verdict on the gap."""

    verdict: Verdict
    step: int
    loss: str
    """Name of the evaluation loss."""
    eval_loss: float
    """After the last step."""
    before_training: float | None
    """The same loss before the first step; None: it was not evaluated then."""
    train_loss: float | None
    """Mean over the last logged steps, while they trained: with dropout, and with weights that
    still moved."""
    majority: Majority | None
    """None: the examples have no classes, or several each."""
    seen: int = 0
    """How many texts of the evaluation set are also in the training data."""
    texts: int = 0
    """Of how many."""

    def __str__(self) -> str:
        floor = self.majority
        judgement = str(self.verdict)
        baseline = "before training" if floor is None else f"always answering {floor.label!r}"
        if self.verdict is Verdict.better:
            judgement = f"better than {baseline}"
        elif self.verdict is Verdict.no_better:
            ahead = self.before_training is not None and self.eval_loss < self.before_training
            ahead = ahead if floor is None else floor.model_accuracy > floor.accuracy
            judgement = f"{'not clearly' if ahead else 'no'} better than {baseline}"
        figures = f"{self.loss} {number(self.eval_loss)}"
        if self.before_training is not None:
            figures += f" (before training {number(self.before_training)})"
        if self.train_loss is not None:
            figures += f", train/loss {number(self.train_loss)} over the last logged steps"
        if floor is not None:
            figures = (
                f"accuracy {number(floor.model_accuracy)} on {floor.examples:,} evaluation labels"
                f" (always answering {floor.label!r} gives {number(floor.accuracy)}); {figures}"
            )
        if self.seen:
            figures += (
                f"; {self.seen:,} of {self.texts:,} evaluation texts are also in the training data"
            )
        return f"{judgement}: {figures}"


def generalisation_of(summary: Mapping[str, object]) -> Generalisation | None:
    """Judge how a run generalises, by the values of its summary.

    Args:
        summary: Values of `summary.json`; a missing one is not used.

    Returns:
        None without an evaluation, an evaluation loss, or a floor to compare it with.
    """
    metric = lookup(summary, "main_metric", "name")
    step = summary.get("global_step")
    if not isinstance(metric, str):
        return None
    name = loss_beside(metric)
    after = _value(summary, "last", name)
    train = _value(summary, "last", "train/loss")
    before = _value(summary, "before_training", name)
    majority = _majority(summary, name)
    if after is None or not isinstance(step, int) or (majority is None and before is None):
        return None
    seen, texts = _seen(summary, name)
    verdict = _verdict(after, before, train, majority)
    if verdict is not Verdict.no_better and seen > HALF * texts:
        verdict = Verdict.seen
    return Generalisation(verdict, step, name, after, before, train, majority, seen, texts)


def sentence_of(summary: Mapping[str, object]) -> str:
    """Write the verdict on an ended run; empty if it is about other weights."""
    fits = lookup(summary, "generalisation", "step") == summary.get("global_step")
    generalisation = generalisation_of(summary) if fits else None
    if generalisation is None:
        return ""
    return str(generalisation)


def _verdict(
    after: float, before: float | None, train: float | None, majority: Majority | None
) -> Verdict:
    """Choose the verdict from losses before and after training, and the majority class.

    Args:
        after: eval/loss at the end.
        before: The same before training; None: it was not evaluated.
        train: train/loss at the end; None: not logged.
        majority: The most frequent class; None: the task has none.

    Returns:
        `memorised` or `no better` if neither the majority class nor the loss before training is
            beaten; `better` if how much of the gain holds cannot be told; else `generalises`,
            or `partly` if less than `HALF` of what training gained holds on evaluation.
    """
    learnt = math.nan if before is None else before - after
    fitted = math.nan if before is None or train is None else before - train
    better = before is not None and learnt > LEAST * abs(before)
    beats_floor = better if majority is None else majority.beaten
    if not beats_floor:
        by_heart = before is not None and fitted > HALF * abs(before) and not better
        if by_heart:
            return Verdict.memorised
        return Verdict.no_better
    if before is None or (majority is None and learnt < ENOUGH * abs(before)):
        return Verdict.better
    if fitted > 0 and learnt < HALF * fitted:
        return Verdict.partly
    return Verdict.generalises


def _seen(summary: Mapping[str, object], loss: str) -> tuple[int, int]:
    """Count evaluation texts that are in the training data, too, and all evaluation texts.

    Both are 0 if unknown.
    """
    counts = lookup(summary, "data", "eval_seen", _set_of(loss))
    if not (
        isinstance(counts, list)
        and len(counts) == 2
        and all(isinstance(number, int) for number in counts)
    ):
        return 0, 0
    return counts[0], counts[1]


def _set_of(loss: str) -> str:
    return loss.removeprefix("eval").removesuffix("loss").strip("/")


def _majority(summary: Mapping[str, object], loss: str) -> Majority | None:
    """Count the correct answers of always choosing the most frequent class.

    None unless each example has exactly one class.

    The model beats that answer on the n1 examples of other classes that it gets right, and loses on
    the n2 examples of the majority that it gets wrong. n1 - n2 has the standard error sqrt(n1 +
    n2).

    Source: McNemar 1947, Note on the sampling error of the difference between correlated
        proportions.
    """
    if lookup(summary, "classes", "step") != summary.get("global_step"):
        return None
    rows = lookup(summary, "classes", "sets", _set_of(loss), "classes")
    if (
        not isinstance(rows, list)
        or not rows
        or not all(isinstance(row, Mapping) and "class" in row for row in rows)
    ):
        return None
    supports = [int(row.get("support") or 0) for row in rows]
    right = [
        round(float(row.get("recall") or 0.0) * count)
        for row, count in zip(rows, supports, strict=True)
    ]
    most = supports.index(max(supports))
    examples = sum(supports)
    if not examples:
        return None
    gained = sum(right) - right[most]
    lost = supports[most] - right[most]
    beaten = gained - lost > STANDARD_ERRORS * math.sqrt(gained + lost)
    return Majority(
        str(rows[most]["class"]), supports[most] / examples, sum(right) / examples, examples, beaten
    )


def _value(summary: Mapping[str, object], section: str, name: str) -> float | None:
    """Look up the value of a metric in a section of the summary.

    None if it is missing, or if the section is that before training and it is not finite.
    """
    value = lookup(summary, "metrics", section, name)
    if not isinstance(value, int | float) or (
        section == "before_training" and not math.isfinite(value)
    ):
        return None
    return float(value)
