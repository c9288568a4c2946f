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
"""Smallest relative fall of eval/loss that counts as learning."""
ENOUGH = 0.1
"""Smallest relative fall of eval/loss for a verdict other than `better`: a loss that fell by some
percent, after a few steps, says nothing about generalisation."""
HALF = 0.5
"""Share of the fall of train/loss that eval/loss has to reach; also the relative fall of train/loss
from which training data count as memorised if eval/loss does not fall."""
STANDARD_ERRORS = 2.0
"""Standard errors by which the model's right answers have to exceed those of the majority class."""


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
    seen: int
    """How many texts of the evaluation set are also in the training data."""
    texts: int
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
    """Judge how well a run generalises, from the values of its summary.

    The model has to do better than a floor: always answering the most frequent class, or where
    there are no classes, the loss before training. `_verdict` has the rules. One is added here: if
    more than half of the evaluation texts are training texts, the verdict is `seen`, unless it is
    `no_better`.

    Args:
        summary: Values of `summary.json`.

    Returns:
        The verdict with its figures. None if the summary lacks the main metric, the loss of the
        same evaluation (eval/loss for eval/accuracy), the step, or both floors.
    """
    metric = lookup(summary, "main_metric", "name")
    step = summary.get("global_step")
    if not isinstance(metric, str):
        return None
    loss = loss_beside(metric)
    # Each is None if the summary lacks it.
    after = _value(summary, "last", loss)
    train = _value(summary, "last", "train/loss")
    before = _value(summary, "before_training", loss)
    majority = _compare_with_majority(summary, loss)
    if after is None or not isinstance(step, int) or (majority is None and before is None):
        return None
    seen, texts = _count_seen_texts(summary, loss)  # 0 and 0 if nobody counted
    verdict = _verdict(after, before, train, majority)
    if verdict is not Verdict.no_better and seen > HALF * texts:
        verdict = Verdict.seen
    return Generalisation(verdict, step, loss, after, before, train, majority, seen, texts)


def sentence_of(summary: Mapping[str, object]) -> str:
    """Write the verdict on a run as one line of text.

    Empty if no verdict can be given, or if the recorded verdict is of another step than
    `global_step`: that of the run's end, where the card describes an earlier checkpoint.

    Example: "generalises: eval/loss 1.2 (before training 4.1), train/loss 1.1 over the last logged
    steps".
    """
    if lookup(summary, "generalisation", "step") != summary.get("global_step"):
        return ""
    return str(generalisation_of(summary) or "")


def _verdict(
    after: float, before: float | None, train: float | None, majority: Majority | None
) -> Verdict:
    """Choose the verdict from losses before and after training, and the majority class.

    Args:
        after: eval/loss at the end.
        before: The same before training; None: it was not evaluated.
        train: train/loss at the end; None: not logged.
        majority: The model against always answering one class; None: there are no classes.

    Returns:
        The first of these that holds. The model beats its floor if it has clearly more right
        answers than the majority class (`Majority.beaten`), or without classes if eval/loss fell by
        more than 1 %.

        1. The loss before training is unknown: `better` if the model beats the majority class, else
           `no_better`.
        2. The floor is not beaten: `memorised` if train/loss fell by more than half and eval/loss
           by 1 % at most; else `no_better`.
        3. There are no classes, and eval/loss fell by less than 10 %: `better`.
        4. eval/loss fell by less than half as much as train/loss: `partly`.
        5. Else: `generalises`.
    """
    # 1. How far a loss has fallen is unknown.
    if before is None:
        beats_majority = majority is not None and majority.beaten
        return Verdict.better if beats_majority else Verdict.no_better
    eval_fall = before - after
    train_fall = 0.0 if train is None else before - train
    has_improved = eval_fall > LEAST * abs(before)
    beats_floor = has_improved if majority is None else majority.beaten
    # 2.
    if not beats_floor:
        if train_fall > HALF * abs(before) and not has_improved:
            return Verdict.memorised
        return Verdict.no_better
    # 3. and 4.
    if majority is None and eval_fall < ENOUGH * abs(before):
        return Verdict.better
    if train_fall > 0 and eval_fall < HALF * train_fall:
        return Verdict.partly
    return Verdict.generalises


def _count_seen_texts(summary: Mapping[str, object], loss: str) -> tuple[int, int]:
    """Count the evaluation texts also in the training texts, and all evaluation texts.

    Both are 0 if the summary does not record them, as for a set without such texts.

    Args:
        summary: Values of `summary.json`.
        loss: Names the evaluation set, as in `eval/dev/loss`.
    """
    match lookup(summary, "data", "eval_seen", _set_of(loss)):
        case [int(seen), int(texts)]:
            return seen, texts
    return 0, 0


def _set_of(loss: str) -> str:
    """Name the evaluation set of a loss; empty if the run has only one.

    Example:
        >>> _set_of("eval/loss"), _set_of("eval/dev/loss")
        ('', 'dev')
    """
    return loss.removeprefix("eval").removesuffix("loss").strip("/")


def _compare_with_majority(summary: Mapping[str, object], loss: str) -> Majority | None:
    """Compare the model with always answering the most frequent class, by McNemar's test.

    The model beats that answer if it is right more often by two standard errors.

    Example: of 100 examples, 60 are of class a and 40 of b; the model has 55 of a right and 30 of
    b. So it alone is right on 30, and "always a" alone on 60 - 55 = 5. The difference, 25, is more
    than 2 * sqrt(30 + 5) = 11.8: beaten.

    Args:
        summary: Values of `summary.json`, with the support and recall of each class.
        loss: Names the evaluation set, as in `eval/dev/loss`.

    Returns:
        None if the summary has no classes for the set, or those of another step than its last, or
        if an example may have several labels.

    Source: McNemar 1947, Note on the sampling error of the difference between correlated
        proportions.
    """
    # Read how many examples each class has, and how many of them the model has right.
    if lookup(summary, "classes", "step") != summary.get("global_step"):
        return None
    rows = lookup(summary, "classes", "sets", _set_of(loss), "classes")
    if not isinstance(rows, list):
        return None
    if not all(isinstance(row, Mapping) and "class" in row for row in rows):
        return None  # rows of labels or entities, of which an example may have several
    supports = [int(row.get("support") or 0) for row in rows]
    right = [
        round(float(row.get("recall") or 0.0) * support)
        for row, support in zip(rows, supports, strict=True)
    ]
    examples = sum(supports)
    if not examples:
        return None

    # Count the examples on which only one of the two is right.
    majority = supports.index(max(supports))
    only_model_right = sum(right) - right[majority]
    only_majority_right = supports[majority] - right[majority]
    lead = only_model_right - only_majority_right
    standard_error = math.sqrt(only_model_right + only_majority_right)
    return Majority(
        str(rows[majority]["class"]),
        accuracy=supports[majority] / examples,
        model_accuracy=sum(right) / examples,
        examples=examples,
        beaten=lead > STANDARD_ERRORS * standard_error,
    )


def _value(summary: Mapping[str, object], section: str, name: str) -> float | None:
    """Look up the value of a metric in a section of `metrics` of the summary.

    None if it is missing. A value `before_training` that is not finite counts as missing, because
    no fall can be measured from it; a last one counts: the run diverged.
    """
    value = lookup(summary, "metrics", section, name)
    if not isinstance(value, int | float) or (
        section == "before_training" and not math.isfinite(value)
    ):
        return None
    return float(value)
