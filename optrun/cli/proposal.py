"""Describe data and propose two commands, for `optrun start`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import TYPE_CHECKING

from optrun.base.errors import ConfigError
from optrun.base.formatting import count, rate
from optrun.config import store
from optrun.config.compose import compose_request
from optrun.config.literal import quoted
from optrun.config.request import CommandLine
from optrun.config.tokens import is_typed

if TYPE_CHECKING:
    from datasets import Dataset

    from optrun.config.hydra_internals import Hydra
    from optrun.config.schema.run import RunConfig
    from optrun.data.source import Source
    from optrun.explain.facts import Facts

Say = Callable[..., None]
"""Takes a heading and its lines."""
_SCRATCH = {
    "AutoModelForImageClassification": ["model=vit_tiny"],
    "AutoModelForCausalLM": [],
    "AutoModelForSeq2SeqLM": [
        "model=from_config",
        "model.model_type=t5",
        "model.config={d_model:128,d_kv:32,d_ff:256,num_layers:2,num_heads:4}",
    ],
}
"""A small model from scratch for each kind of task; bert_tiny for any other."""
_CONTENDERS = ("adamw", "lamb")
_DECIDED_BY_COMPARISON = ("optimizer", "lr", "seed", "run_name", "hydra")
_LR_FACTORS = (0.3, 1.0, 3.0)
"""Learning rates of the comparison, over each optimizer's own default."""
_SEEDS = "0,1,2"
_FEWEST_STEPS = 300
"""Steps that a small run should have, and the steps of each run of the comparison."""
_MOST_EPOCHS = 20
_EPOCHS_OF_PRETRAINED = 3
_LONGEST_EXAMPLE = 512
_CELL_WIDTH = 60
"""Characters of a cell that are shown."""


@dataclass(frozen=True)
class Proposal:
    """A run and a comparison for the data.

    Attributes:
        overrides: Overrides of the run.
        grids: Optimizer -> its learning rates, as typed on the command line.
        steps: Optimizer steps of the run.
    """

    overrides: list[str]
    grids: Mapping[str, str]
    steps: int

    def commands(self) -> list[tuple[str, list[str]]]:
        """List the commands of a run and of a comparison: a title, and arguments after `optrun`.

        A run of the comparison has at most 300 steps; the title says how long all of them take, in
        multiples of the first command. The comparison runs, for example, `-m
        search.adamw.lr=3e-4,1e-3,3e-3 search.lamb.lr=... seed=0,1,2` and the overrides of the run
        but those that it varies.
        """
        steps = min(self.steps, _FEWEST_STEPS)
        common = without(self.overrides, *_DECIDED_BY_COMPARISON)
        if steps < self.steps:
            common = without(common, "training.num_train_epochs", "training.max_steps")
            common.append(f"training.max_steps={steps}")
        runs = len(self.grids) * len(_LR_FACTORS) * len(_SEEDS.split(","))
        grids = [f"search.{name}.lr={grid}" for name, grid in self.grids.items()]
        comparison = (
            f"compare {' and '.join(self.grids)}, each with learning rates of its own:"
            f" {runs} runs of {steps:,} steps, {runs * steps / self.steps:.0f} times as long"
        )
        return [
            (f"train: {self.steps:,} steps", self.overrides),
            (comparison, ["-m", *grids, f"seed={_SEEDS}", *common]),
        ]


def without(overrides: Sequence[str], *keys: str) -> list[str]:
    """Leave out the overrides of keys, and of the keys below them."""
    pattern = re.compile(rf"\+*({'|'.join(map(re.escape, keys))})[.=]")
    return [token for token in overrides if not pattern.match(token)]


def propose(name: str, typed: Sequence[str], config_dir: str | None, say: Say) -> Proposal:
    """Read and describe data, and propose a run and a comparison.

    Args:
        name: A file, a folder, a data choice, or a data set on the hub.
        typed: Overrides that the user typed; they win over proposed ones.
        config_dir: A folder with the user's own choices.
        say: Prints a heading and lines; called as soon as they are known.

    Raises:
        ConfigError: The data cannot be read, or the task is not clear from them.
    """
    say("data in", name)  # at once, since the imports take seconds
    from optrun.data.data_keys import data_keys, unused_splits

    draft = _Draft(store.open_hydra(config_dir), list(typed))
    keys = data_keys(name)
    draft.add(*(f"{key}={quoted(value)}" for key, value in keys.items()))
    if "data.eval" in draft.proposed:
        say(
            "", f"evaluates on {keys['data.eval']}, found beside it (data.eval=null: hold out rows)"
        )
    for split in unused_splits(name, keys):
        say("", f"{split} is left alone")
    if keys["data"] == "tokens":
        draft.add("task=causal_lm")
    else:
        _describe_rows(draft, _read_rows(draft, say), say)
    # In this order: the length is known with the tokenizer of the model, the facts with both.
    _add_model(draft, say)
    _add_length(draft)
    _say_facts(draft.explain(), say)
    steps = _add_epochs(draft)
    return Proposal(draft.overrides, _grids(draft), steps)


@dataclass
class _Draft:
    """The command line of a run under construction; typed keys win."""

    hydra: Hydra
    typed: list[str]
    proposed: dict[str, str] = field(default_factory=dict)
    explained: dict[tuple[str, ...], Facts] = field(default_factory=dict)

    @property
    def overrides(self) -> list[str]:
        """List the proposed overrides, then the typed ones."""
        return [*(f"{key}={value}" for key, value in self.proposed.items()), *self.typed]

    def add(self, *tokens: str) -> None:
        """Add values of keys, unless the user typed the key."""
        for token in tokens:
            key, _, value = token.partition("=")
            if not is_typed(key, self.typed):
                self.proposed[key] = value

    def compose(self, overrides: Sequence[str]) -> RunConfig:
        """Compose and check the configuration of these overrides, typed ones not added."""
        return compose_request(self.hydra, CommandLine(overrides=list(overrides))).config

    def explain(self) -> Facts:
        """Explain the present command line, as `optrun explain`; each line is explained once."""
        from optrun.explain.build import explain

        overrides = tuple(self.overrides)
        if overrides not in self.explained:  # seconds each
            self.explained[overrides] = explain(self.compose(overrides))
        return self.explained[overrides]

    def load(self) -> Source:
        """Load the rows by the data keys of the present command line."""
        from optrun.data.build import load_source

        data = [token for token in self.overrides if token.lstrip("+").startswith("data")]
        config = self.compose(data)
        return load_source(config.data, seed=config.seed, documents=False)


# The rows
# --------------------------------------------------------------------------------------------------


def _read_rows(draft: _Draft, say: Say) -> Source:
    """Read the rows; add `data.format` to the draft if texts look like lines of a table or JSON.

    Raises:
        ConfigError: The file is a table whose first line seems to be a row, not column names.
    """
    from optrun.data.columns import advise_on_header
    from optrun.data.row_advice import looks_like, looks_tagged

    source = draft.load()
    # The format that lines look like: conll (a word and its tag), json, csv or tsv; None: texts.
    likely = "conll" if looks_tagged(source.train.rows) else looks_like(source.train.rows)
    if likely is not None and not is_typed("data.format", draft.typed):
        say("lines", f"they look like {likely}, so they are read as {likely}")
        draft.add(f"data.format={likely}")
        source = draft.load()
    hint = advise_on_header(source.train)
    train = draft.proposed.get("data.train", "").strip("'").lower()
    is_table = likely in ("csv", "tsv") or train.endswith((".csv", ".tsv", ".tab"))
    if hint and is_table:
        raise ConfigError(f"{source.train.key}: not sure what its columns are.{hint}")
    return source


def _describe_rows(draft: _Draft, source: Source, say: Say) -> None:
    """Describe the rows with three examples, and add the task and its columns to the draft.

    Raises:
        ConfigError: The task is not clear from the rows, and none was typed.
    """
    from optrun.data.first_values import without_image_decoding
    from optrun.data.source import NO_SPLIT

    rows = without_image_decoding(source.train.rows)
    # `_say_facts` says how evaluation rows are held out, since that depends on the task.
    say("rows", *(note for note in source.notes if not note.startswith(NO_SPLIT)))
    _add_task(draft, source.train.key, rows, say)
    for row in rows.select(range(min(3, len(rows)))):
        cells = [shorten(str(value), _CELL_WIDTH, placeholder=" ...") for value in row.values()]
        if any(cells):
            say("example", " | ".join(cells))


def _add_task(draft: _Draft, data_key: str, rows: Dataset, say: Say) -> None:
    """Add the task that the columns of the rows suggest, and the names of these columns.

    Columns `text` and `verdict` with two values give `task=sequence_classification` and
    `data.label_column=verdict`. Nothing is added if another task was typed, or if a task was typed
    and the rows suggest none.

    Args:
        draft: Added to.
        data_key: Where the rows come from, for messages.
        rows: The training rows.
        say: Prints the columns.

    Raises:
        ConfigError: The rows suggest no task, and none was typed.
    """
    from optrun.data.column_roles import roles_of

    try:
        roles = roles_of(rows)  # the task, and its columns such as `label_column` -> "verdict"
    except ConfigError as error:
        if is_typed("task", draft.typed):
            return
        raise ConfigError(
            f"{data_key}: {error} Give task=NAME and data.text_column=NAME."
        ) from error
    columns = roles.columns.items()
    described = [f"{name} ({key.removesuffix('_column')})" for key, name in columns]
    say("columns", ", ".join(described))  # such as: text (text), verdict (label)
    task = f"task={roles.task}"
    draft.add(task)  # unless a task was typed
    if task not in draft.overrides:
        return
    # Only these read named columns; `text` is the column that they read by default.
    if draft.proposed["data"] in ("files", "hub"):
        for key, name in columns:
            if key.endswith("_column") and name != "text":
                draft.add(f"data.{key}={quoted(name)}")
    draft.add(*roles.overrides)


# The run
# --------------------------------------------------------------------------------------------------


def _add_model(draft: _Draft, say: Say) -> None:
    """Add a small model from scratch for the task, unless the user typed one.

    Adds `task.chat_template=chatml` if the model has no chat template and the task needs one.
    """
    origin = "as you typed it"
    if not any(token.startswith(("model=", "model.")) for token in draft.typed):
        task = draft.compose(draft.overrides).task
        draft.add(*_SCRATCH.get(task.AUTO_CLASS, ["model=bert_tiny"]))
        origin = "from scratch (for a pretrained one add model=pretrained model.path=NAME)"
    try:
        facts = draft.explain()
    except ConfigError as error:
        if "task.chat_template" not in str(error):
            raise
        draft.add("task.chat_template=chatml")
        facts = draft.explain()
    parameters = count(facts.parameters)
    say("model", f"{facts.model} for {facts.task}, {parameters} trainable parameters, {origin}")


def _add_length(draft: _Draft) -> None:
    """Raise `data.max_length` to the longest example if examples would be cut.

    Rounded up to a multiple of 64 tokens, 512 at most. Does nothing if no example would be cut.
    """
    data = draft.explain().data
    if data is None or data.facts is None or not data.facts.train.cuts:
        return
    longest = max(cut.longest for cut in data.facts.train.cuts)
    draft.add(f"data.max_length={min(_LONGEST_EXAMPLE, math.ceil(longest / 64) * 64)}")


def _say_facts(facts: Facts, say: Say) -> None:
    """Say the lines of `optrun explain` about the data."""
    from optrun.data.source import NO_SPLIT
    from optrun.explain.tables import data_lines

    lines = [line.removeprefix("data   ") for line in data_lines(facts) if line]
    data_phrases = ("has no column", "not read by", "does not read", NO_SPLIT)
    lines += [note for note in facts.notes if any(phrase in note for phrase in data_phrases)]
    say("data", *lines)


def _add_epochs(draft: _Draft) -> int:
    """Add the number of epochs, and return the optimizer steps of the run.

    Training from scratch gets enough epochs for 300 steps, 20 at most; pretrained models get 3. An
    epoch of fewer than 300 steps is evaluated at its end only. A typed `training.max_steps` stays.
    """
    config = draft.compose(draft.overrides)
    if config.training.max_steps is not None:
        return config.training.max_steps
    steps_of_epoch = max(1, round(draft.explain().steps / config.training.num_train_epochs))
    epochs = min(_MOST_EPOCHS, math.ceil(_FEWEST_STEPS / steps_of_epoch))
    if "model=pretrained" in draft.overrides:
        epochs = _EPOCHS_OF_PRETRAINED
    if epochs > 1:
        draft.add(f"training.num_train_epochs={epochs}")
    if steps_of_epoch < _FEWEST_STEPS:
        draft.add("training.eval_steps=null")
    return draft.explain().steps


def _grids(draft: _Draft) -> dict[str, str]:
    """Map adamw and lamb to learning rates: 0.3, 1 and 3 times the default of each.

    A default of 1e-3 gives "3e-4,1e-3,3e-3".
    """
    common = without(draft.overrides, *_DECIDED_BY_COMPARISON)
    grids = {}
    for name in _CONTENDERS:
        lr = draft.compose([*common, f"optimizer={name}"]).lr
        grids[name] = ",".join(rate(lr * factor) for factor in _LR_FACTORS)
    return grids
