"""Find the position in the data at which a run continues, also if the plan of the data changed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from optrun.artifacts.metadata import CheckpointMetadata
from optrun.base.errors import ConfigError
from optrun.base.formatting import list_names
from optrun.base.plain import PlainDict, PlainMapping
from optrun.config.schema.data import HubConfig
from optrun.config.schema.run import RunConfig
from optrun.data.hub import commit_of
from optrun.data.loader import EpochPlan, ExampleSource
from optrun.runner.resume.config_diff import Changes, may_change_data
from optrun.training.state import TrainState

Plan = Mapping[str, Any]
"""The plan of the data in a checkpoint: which examples each step sees, from `plan_values`."""
_OF_HUB = re.compile(r"hf://datasets/[^@]+@([0-9a-f]{40})/")
"""Matches a file of a hub stream; the group is the commit."""


def plan_values(plan: EpochPlan, fingerprint: str, examples: object = None) -> PlainDict:
    """Describe a plan as plain values for checkpoints.

    Args:
        plan: Which examples each step sees.
        fingerprint: Digests of training and evaluation examples, joined by a dash.
        examples: The training examples; None: not known, so without `parts`.

    Returns:
        Number and order of the examples, and the division into steps: `batch_size` is a
        micro-batch, `accumulation` the micro-batches of a step over all ranks. `grouped` says
        whether examples of like length share a step. `parts` maps each file of a stream, or each
        source of a mixture, to its digest; other examples have none.
    """
    values: PlainDict = {}
    if hasattr(examples, "source_digests"):
        values["parts"] = examples.source_digests()
    return {
        **values,
        "examples": plan.examples,
        "batch_size": plan.batch_size,
        "accumulation": plan.accumulation,
        "seed": plan.seed,
        "grouped": plan.lengths is not None,
        "ordering": plan.ordering,
        "fingerprint": fingerprint,
    }


def pinned_revision(config: RunConfig, saved: CheckpointMetadata | None) -> str | None:
    """Return the commit of a hub stream; None if the data is no hub stream.

    It is the checkpoint's commit if the configuration still names the same data, else the newest
    one, for which the hub is asked.

    Args:
        config: The configuration now.
        saved: Metadata of the checkpoint; None: a new run.

    Raises:
        ConfigError: The hub does not name the commit.
    """
    data = config.data
    if not (isinstance(data, HubConfig) and data.streaming):
        return None
    if saved is not None:
        before = saved.config.get("data", {})
        is_same = before.get("path") == data.path and before.get("revision") == data.revision
        # The commit stands in the path of each file of the stream.
        matches = [_OF_HUB.match(part) for part in saved.plan.get("parts") or {}]
        commits = {match[1] for match in matches if match is not None}
        if is_same and len(commits) == 1:
            return str(commits.pop())
    return commit_of(data)


def with_revision(config: RunConfig, revision: str | None) -> RunConfig:
    """Return the configuration with a commit as `data.revision`; unchanged for None."""
    if revision is None:
        return config
    assert isinstance(config.data, HubConfig)
    return replace(config, data=replace(config.data, revision=revision))


def vocabulary_digest(tokenizer: object) -> str:
    """Digest the tokens of a tokenizer with their ids; 16 hexadecimal digits.

    Empty for an object without a vocabulary, such as an image processor.
    """
    if not hasattr(tokenizer, "get_vocab"):
        return ""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]


def class_names(model_config: PlainMapping) -> list[str]:
    """List the class names in a model configuration read from JSON, by class id."""
    labels = model_config.get("id2label") or {}
    return [str(labels[number]) for number in sorted(labels, key=int)]


def refuse_other_data(saved: CheckpointMetadata, now: CheckpointMetadata, changes: Changes) -> None:
    """Refuse other examples without a changed key, and other token ids or classes in any case.

    A user who changes `data` or `task` asks for other examples. If they differ without that, a file
    was edited, and the run would go on with what nobody chose.

    Args:
        saved: Metadata of the checkpoint.
        now: Metadata for the next checkpoint; `plan`, `tokenizer` and `model_config` are compared.
        changes: Configuration keys that changed since the checkpoint.

    Raises:
        ConfigError: The message names the changed keys, or says that files changed.
    """
    causes = ", ".join(
        key for key in changes if key.startswith(("data.", "task.", "model.")) or key == "seed"
    )
    # 1. Files of a stream, or sources of a mixture.
    parts = _name_changed_parts(saved.plan, now.plan)
    if parts and "seed" not in changes and not may_change_data(changes):
        raise ConfigError(
            f"the data is not what the run was started with: {parts} changed. Restore it, start a"
            " new run, or name other rows with another data.train."
        )
    # 2. Token ids.
    if saved.tokenizer not in (None, now.tokenizer):
        if causes:
            why = f"{causes}: with this change"
            remedy = "Start a new run."
        else:
            why = "RUN_DIR/tokenizer is missing or damaged, and from this data"
            remedy = "Restore it, or start a new run."
        raise ConfigError(
            f"{why} the tokenizer is another one: the trained weights would read other words."
            f" {remedy}"
        )
    # 3. Classes.
    classes_before = class_names(saved.model_config)
    classes_now = class_names(now.model_config)
    if classes_before and classes_before != classes_now:
        raise ConfigError(
            f"{causes or 'the data'}: with this change the classes are"
            f" {list_names(classes_now, 12)}, but the trained weights predict"
            f" {list_names(classes_before, 12)}, in this order: they would mean other labels. Start"
            " a new run."
        )
    # 4. Rows.
    before = saved.plan["fingerprint"]
    fingerprint = now.plan["fingerprint"]
    if before != fingerprint and not may_change_data(changes):
        why = ""
        if "seed" in changes:
            why = " (seed decides here which examples are kept for evaluation)"
        raise ConfigError(
            f"the data is not what the run was started with (fingerprint {before} then,"
            f" {fingerprint} now): rows, their order or their content changed{why}. Restore it, or"
            " start a new run."
        )


def _name_changed_parts(before: Plan, now: Plan) -> str:
    """Name the changed, new and missing files of a stream, or sources of a mixture.

    Empty if there are none, or if a plan has no parts. If no path is the same, all files moved to
    another folder, and are compared by their names.

    Example:
        >>> before = {"parts": {"a.txt": "01", "b.txt": "02"}}
        >>> _name_changed_parts(before, {"parts": {"a.txt": "01", "b.txt": "03"}})
        'b.txt'
    """
    parts_before = before.get("parts")
    parts_now = now.get("parts")
    if parts_before is None or parts_now is None:
        return ""
    if not set(parts_before) & set(parts_now):
        parts_before = _by_file_name(parts_before)
        parts_now = _by_file_name(parts_now)
    names = {**parts_before, **parts_now}
    changed = [name for name in names if parts_before.get(name) != parts_now.get(name)]
    return list_names(changed, 12)


def _by_file_name(parts: PlainMapping) -> PlainDict:
    """Replace the path of each file by its last part."""
    return {path.rsplit("/", 1)[-1]: content for path, content in parts.items()}


def refuse_other_tokenizer(saved: CheckpointMetadata, tokenizer: object) -> None:
    """Refuse a tokenizer with other token ids than in training, if training recorded one.

    Args:
        saved: Metadata of the checkpoint.
        tokenizer: The tokenizer now in use.

    Raises:
        ConfigError: The checkpoint was trained with another tokenizer.
    """
    if saved.tokenizer not in (None, vocabulary_digest(tokenizer)):
        raise ConfigError(
            "with this data and model the tokenizer is another one than the checkpoint was trained"
            " with, so its weights would read other words. Leave data.train, model.path and"
            " model.tokenizer as they were, or name the tokenizer of the run:"
            " model.tokenizer=RUN_DIR/tokenizer."
        )


def warn_of_other_eval_rows(saved: CheckpointMetadata, evaluation: ExampleSource) -> str | None:
    """Return a warning if the evaluation rows changed; else None.

    Args:
        saved: Metadata of the checkpoint.
        evaluation: The evaluation examples held out from the training rows now.
    """
    # The recorded fingerprint is TRAINING-EVALUATION.
    if saved.plan["fingerprint"].split("-")[1] == evaluation.fingerprint()[:16]:
        return None
    return (
        "warning: the evaluation examples are not those that were held out in training, since the"
        " data, its preparation or the seed changed: the checkpoint may have been trained on some"
        " of them. Name rows it has not seen with data.eval."
    )


def plan_of_steps(plan: Plan) -> PlainDict:
    """Return the values of a plan for comparing the examples of each step.

    Two plans are equal then if only the division of a step into micro-batches differs.

    Args:
        plan: From `plan_values`; not changed.

    Example:
        >>> plan_of_steps({"seed": 0, "batch_size": 8, "accumulation": 2})
        {'seed': 0, 'examples a step': 16}
    """
    values = dict(plan)
    values["examples a step"] = values.pop("batch_size") * values.pop("accumulation")
    return values


def describe_other_evaluation(before: str, now: str) -> str | None:
    """Return a warning if the evaluation rows changed at a resume; else None.

    Args:
        before: The digests in the checkpoint: those of training and evaluation examples, joined by
            a dash.
        now: The digests in force.
    """
    if before.split("-")[1] == now.split("-")[1]:
        return None
    return (
        "warning: the evaluation examples are not those before this resume: metrics from now on"
        " cannot be compared with earlier ones, and an earlier best checkpoint was chosen by those."
    )


def shift_data_position(
    before: Plan, state: TrainState, plan: EpochPlan, fingerprint: str
) -> str | None:
    """Set `state.data_shift` for a changed plan to continue at the old position.

    If only the batch size changed, training continues in the same order after the last seen
    example. Steps have the new size, so up to one step of examples is left out of this epoch; none
    comes twice. With other examples, another order, or examples grouped by length, the rest of the
    epoch is skipped.

    For example, 3 steps of 8 examples saw 24 of an epoch's 100. With 16 a step, training goes on at
    step 2 of the epoch, which begins with example 32: the 8 before it are left out.

    Args:
        before: `plan_values` of the checkpoint.
        state: Counters of the checkpoint; `data_shift` is changed in place.
        plan: The plan now.
        fingerprint: Digest of the examples now.

    Returns:
        A note about the position; None if each step has the same examples as before, and
        `state` is then not changed.
    """
    # The parts of a stream are in the fingerprint.
    before = {key: value for key, value in before.items() if key != "parts"}
    # Plans are equal, too, if only the division of a step into micro-batches differs.
    if plan_of_steps(before) == plan_of_steps(plan_values(plan, fingerprint)):
        return None

    # 1. Where the run was: the epoch (from 0), and how many of its examples it has seen. The last
    # step of an epoch may be smaller than the others.
    old = EpochPlan(
        before["examples"], before["batch_size"], before["accumulation"], before["seed"]
    )
    epoch, step_in_epoch = old.locate(state.position)  # both from 0
    seen = min(step_in_epoch * old.accumulation * old.batch_size, old.examples)

    # 2. Where it goes on: `position` counts steps of the new size since the start of training. In
    # the example 24 examples were seen; step 2 begins with example 32, so 8 are left out.
    if _has_same_order(before, plan, fingerprint):
        size = plan.accumulation * plan.batch_size
        new_step = min(-(-seen // size), plan.steps_per_epoch)  # seen / size, rounded up
        left_out = min(new_step * size, plan.examples) - seen
        position = epoch * plan.steps_per_epoch + new_step
        note = (
            f"the plan of the data changed: {seen:,} of {plan.examples:,} examples of epoch"
            f" {epoch + 1} were seen; training continues after them in the same order, {left_out:,}"
            " are left out of this epoch, none comes twice."
        )
    else:
        # At the start of an epoch nothing is left out; else this one ends here.
        left_out = 0
        next_epoch = epoch
        if step_in_epoch:
            left_out = old.examples - seen
            next_epoch = epoch + 1
        position = next_epoch * plan.steps_per_epoch
        orders = ""
        if before["ordering"] != plan.ordering:
            orders = f" ({before['ordering']} then, {plan.ordering} now)"
        note = (
            f"the examples or their order changed{orders}: training continues at the start of a new"
            f" epoch; {left_out:,} examples of epoch {epoch + 1} are left out."
        )
    # 3. `TrainState.position` is the sum of these three.
    state.data_shift = position - state.global_step - state.passed_steps
    return note


def _has_same_order(before: Plan, plan: EpochPlan, fingerprint: str) -> bool:
    """Tell whether an epoch has the same examples in the same order, whatever the batch size.

    Args:
        before: `plan_values` of the checkpoint; their fingerprint is TRAINING-EVALUATION.
        plan: The plan now.
        fingerprint: The same digests of the examples now. Only TRAINING counts here.
    """
    if before["grouped"] or plan.lengths is not None:
        return False  # grouped by length, the order depends on the size of a step
    if before["fingerprint"].split("-")[0] != fingerprint.split("-")[0]:
        return False
    order_before = (before["ordering"], before["seed"], before["examples"])
    return order_before == (plan.ordering, plan.seed, plan.examples)
