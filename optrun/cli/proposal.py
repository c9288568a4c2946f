"""What `optrun start` understands of data, and the two commands that it proposes."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optrun.base.errors import ConfigError
from optrun.base.formatting import count
from optrun.config import registry, store
from optrun.config.compose import compose_request
from optrun.config.literal import quote_path
from optrun.config.request import CommandLine
from optrun.config.schema.data import ColumnsConfig

if TYPE_CHECKING:
    from optrun.config.hydra_internals import Hydra
    from optrun.config.schema.run import RunConfig
    from optrun.data.roles import Roles
    from optrun.data.source import Source
    from optrun.explain.facts import Facts

Say = Callable[..., None]
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
_NOT_TEXT_FOR_HYDRA = ("true", "false", "null", "nan", "inf")
_CELL_WIDTH = 60
"""Characters of a cell that are shown."""


@dataclass(frozen=True)
class Proposal:
    """A run that fits the data.

    Attributes:
        overrides: Of the run.
        grids: Optimizer to its learning rates, as the command line takes them.
        steps: Optimizer steps of the run.
    """

    overrides: list[str]
    grids: Mapping[str, str]
    steps: int

    def commands(self) -> list[tuple[str, list[str]]]:
        """List the two commands: what each does, and its words after `optrun`."""
        steps = min(self.steps, _FEWEST_STEPS)
        common = without(self.overrides, *_DECIDED_BY_COMPARISON)
        if steps < self.steps:
            common = without(common, "training.num_train_epochs", "training.max_steps")
            common.append(f"training.max_steps={steps}")
        rates = sum(len(grid.split(",")) for grid in self.grids.values())
        runs = rates * len(_SEEDS.split(","))
        grids = [f"search.{name}.lr={grid}" for name, grid in self.grids.items()]
        comparison = (
            f"compare {' and '.join(self.grids)}, each with learning rates of its own:"
            f" {runs} runs of {steps:,} steps"
        )
        return [
            (f"train: {self.steps:,} steps", self.overrides),
            (comparison, ["-m", *grids, f"seed={_SEEDS}", *common]),
        ]


def without(overrides: Sequence[str], *keys: str) -> list[str]:
    """Leave out the overrides of keys, and of the keys below them."""
    pattern = re.compile(rf"\+*({'|'.join(map(re.escape, keys))})[.=]")
    return [token for token in overrides if not pattern.match(token)]


def propose(place: str, own: Sequence[str], config_dir: str | None, say: Say) -> Proposal:
    """Read data, say what they hold, and propose a run and a comparison.

    Args:
        place: A file, a folder, or a name.
        own: Overrides that the user typed; they win over what is found.
        config_dir: A folder of choices of the user's own.
        say: Takes a heading and its lines, as soon as they are known.

    Raises:
        ConfigError: The data cannot be read, or it is not sure which task they are for.
    """
    say("data in", place)  # at once: what follows imports for seconds
    from optrun.data.place import keys_of_place

    draft = _Draft(store.open_hydra(config_dir), list(own))
    keys = keys_of_place(place)
    draft.data = [
        f"{key}={_quote(value)}" for key, value in keys.items() if not draft.is_typed(key)
    ]
    if "data.eval" in keys and not draft.is_typed("data.eval"):
        say("", f"{keys['data.eval']} lies beside it: these rows are to evaluate on")
    if keys["data"] == "tokens":
        draft.set_task("causal_lm")
    else:
        source = _read_rows(draft, say)
        roles = _say_rows(source, draft, say)
        _take_roles(draft, roles, columns_are_named=isinstance(source.columns, ColumnsConfig))
    _take_model(draft, say)
    _take_length(draft)
    _say_facts(draft.explain(), say)
    steps = _take_epochs(draft)
    return Proposal(draft.overrides, _grids(draft), steps)


class _Draft:
    """The command line of a run while it is put together."""

    def __init__(self, hydra: Hydra, own: list[str]) -> None:
        self.hydra = hydra
        self.own = own
        self.task: list[str] = []
        self.data: list[str] = []
        self.model: list[str] = []
        self.training: list[str] = []

    @property
    def overrides(self) -> list[str]:
        return [*self.task, *self.data, *self.model, *self.training, *self.own]

    def is_typed(self, key: str) -> bool:
        """Tell whether the user gave this key."""
        return any(token.lstrip("+").partition("=")[0] == key for token in self.own)

    def set_task(self, name: str) -> None:
        if not self.is_typed("task"):
            self.task = [f"task={name}"]

    def set_training(self, key: str, value: object) -> None:
        if not self.is_typed(key):
            self.training = [*without(self.training, key), f"{key}={value}"]

    def compose(self, overrides: Sequence[str] | None = None) -> RunConfig:
        words = self.overrides if overrides is None else list(overrides)
        return compose_request(self.hydra, CommandLine(overrides=words)).config

    def explain(self) -> Facts:
        from optrun.explain.build import explain

        return explain(self.compose())


def _quote(text: str) -> str:
    """Write a text so that Hydra reads it as one; what it takes for a number is quoted."""
    is_plain = re.fullmatch(r"[A-Za-z_./][\w./-]*", text, re.ASCII)
    return text if is_plain and text.lower() not in _NOT_TEXT_FOR_HYDRA else quote_path(text)


# The rows
# --------------------------------------------------------------------------------------------------


def _read_rows(draft: _Draft, say: Say) -> Source:
    """Read the rows, and add to the draft what it takes to read them."""
    from optrun.data.columns import is_headless
    from optrun.data.shapes import looks_like, looks_tagged

    source = _load(draft)
    kind = "conll" if looks_tagged(source.train.rows) else looks_like(source.train.rows)
    if kind is not None and not draft.is_typed("data.format"):
        say("lines", _LINES[kind])
        draft.data.append(f"data.format={kind}")
        source = _load(draft)
    is_table = kind == "csv" or _file_format(draft) in ("csv", "tsv", "xlsx")
    if is_table and not draft.is_typed("data.column_names") and is_headless(source.train):
        say("names", "there is no line of names: the first line is a row as the others are")
        draft.data.append(f"data.column_names=[{','.join(_column_names(source.train.rows))}]")
        source = _load(draft)
    held_out = next((token for token in draft.data if token.startswith("data.eval=")), None)
    missing = _missing_columns(source) if held_out is not None else []
    if held_out is None or not missing:
        return source
    columns = ", ".join(next(iter(source.eval_sets.values())).rows.column_names)
    say(
        "held",
        f"{held_out} calls its columns {columns}, and has no {' and '.join(missing)}: it is left"
        " out, and a part of data.train is held back instead",
    )
    draft.data.remove(held_out)
    return _load(draft)


_LINES = {
    "conll": "a word and its tag on each (CoNLL)",
    "json": "an object on each (JSON)",
    "csv": "as many columns on each (a table)",
}


def _load(draft: _Draft) -> Source:
    from optrun.data.build import load_source

    data = [token for token in draft.own if token.lstrip("+").startswith("data.")]
    config = draft.compose([*draft.data, *data])
    return load_source(config.data, seed=config.seed, documents=False)


def _file_format(draft: _Draft) -> str | None:
    """Name the format of the training files by their endings; None: they have several or none."""
    from optrun.data.files import resolve
    from optrun.data.formats import format_of

    train = next((token for token in draft.data if token.startswith("data.train=")), "")
    with contextlib.suppress(ConfigError):
        files = resolve("", train.partition("=")[2].strip("'\""))
        names = {format_of("", path, None).name for path in files}
        return names.pop() if len(names) == 1 else None
    return None


def _column_names(rows: Any) -> list[str]:
    """Name the columns of a table without names by what they hold."""
    from optrun.data.roles import roles_of

    names = {column: f"column{number}" for number, column in enumerate(rows.column_names, 1)}
    with contextlib.suppress(ConfigError):
        for key, column in roles_of(rows).columns.items():
            names[column] = key.removesuffix("_column")
    return list(names.values())


def _missing_columns(source: Source) -> list[str]:
    """List the columns that the task reads and the rows to evaluate on lack."""
    from optrun.data.columns import same_column
    from optrun.data.roles import roles_of

    try:
        columns = roles_of(source.train.rows).columns
    except ConfigError:
        return []
    missing = []
    for key, name in columns.items():
        eval_columns = [split.rows.column_names for split in source.eval_sets.values()]
        is_missing = any(same_column(name, names) is None for names in eval_columns)
        if key != "text_column" and is_missing:
            missing.append(name)
    return missing


def _say_rows(source: Source, draft: _Draft, say: Say) -> Roles | None:
    """Say how many rows there are and what their columns are for.

    Returns:
        The roles of the columns; None: the user named a task, and they are not known.

    Raises:
        ConfigError: It is not sure what the rows are for, and no task was named.
    """
    from optrun.data.roles import roles_of, undecoded
    from optrun.data.shapes import labelled_lines

    rows = undecoded(source.train.rows)
    if rows.column_names == ["text"]:
        notes = [note for note in source.notes if "held back" not in note]
        say("lines", f"{len(rows):,} to train on", *notes)
    else:
        evaluated = sum(len(split.rows) for split in source.eval_sets.values())
        sizes = f"{len(rows):,} to train on, {evaluated:,} to evaluate on"
        say("rows", sizes, *source.notes)
    roles = None
    try:
        roles = roles_of(rows)
        say("columns", *_columns_in_words(roles))
    except ConfigError as error:
        if not draft.is_typed("task"):
            raise ConfigError(
                f"{source.train.key}: {error} task=NAME and data.text_column=NAME say it."
            ) from error
    head = rows.select(range(min(3, len(rows))))
    say("examples", *(" | ".join(map(_cell_in_words, row.values())) for row in head))
    advice = labelled_lines(rows.select(range(min(1000, len(rows)))))
    if "look like" in advice:
        say("doubt", advice)
    return roles


def _columns_in_words(roles: Roles) -> list[str]:
    parts = []
    for key, column in roles.columns.items():
        role = key.removesuffix("_column").replace("_", " ")
        parts.append(column if key == column else f"{column} is the {role}")
    unread = [f"not read: {', '.join(roles.unread)}"] if roles.unread else []
    return [" · ".join(parts), *unread, *roles.doubts]


def _cell_in_words(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):  # turns of a chat
        turns = [": ".join(str(part) for part in list(turn.values())[:2]) for turn in value]
        value = " / ".join(turns)
    elif isinstance(value, list):
        value = " ".join(map(str, value))
    elif isinstance(value, dict) and value.keys() == {"bytes", "path"}:
        value = "/".join(Path(value["path"] or "an image").parts[-2:])
    text = " ".join(str(value).split())
    return text if len(text) <= _CELL_WIDTH else f"{text[:_CELL_WIDTH].rsplit(' ', 1)[0]} ..."


# The run
# --------------------------------------------------------------------------------------------------


def _take_roles(draft: _Draft, roles: Roles | None, *, columns_are_named: bool) -> None:
    """Add the task and the names of its columns to the draft.

    Raises:
        ConfigError: The task is not one of this optrun.
    """
    if roles is None:
        return
    if not draft.is_typed("task") and roles.task not in registry.choices("task"):
        raise ConfigError(
            f"{' and '.join(roles.columns)} are columns of a task called {roles.task}, which this"
            " optrun does not have."
        )
    typed = next((token for token in draft.own if token.startswith("task=")), None)
    if typed not in (None, f"task={roles.task}"):
        return
    draft.set_task(roles.task)
    for key, column in roles.columns.items():
        is_key = columns_are_named and key.endswith("_column") and column != "text"
        if is_key and not draft.is_typed(f"data.{key}"):
            draft.data.append(f"data.{key}={_quote(column)}")
    draft.data += roles.overrides


def _take_model(draft: _Draft, say: Say) -> None:
    """Take a pretrained model that lies in the cache and fits, else a small one from scratch."""
    from optrun.model.at_hand import models_at_hand

    config = draft.compose()
    why = "as it was said"
    if not any(token.startswith(("model=", "model.")) for token in draft.own):
        cached = models_at_hand() if config.task.PROCESSOR == "AutoTokenizer" else []
        for path in cached:
            draft.model = ["model=pretrained", f"model.path={_quote(path)}"]
            with contextlib.suppress(ConfigError):
                draft.explain()
                say("model", f"{path}, pretrained, which lies in the cache")
                return
        draft.model = _SCRATCH.get(config.task.AUTO_CLASS, ["model=bert_tiny"])
        why = (
            "from scratch: no pretrained one is at hand (model=pretrained model.path=NAME takes"
            " one)"
        )
    try:
        facts = draft.explain()
    except ConfigError as error:
        if "task.chat_template" not in str(error):
            raise
        draft.task.append("task.chat_template=chatml")
        facts = draft.explain()
    parameters = count(facts.parameters)
    say("model", f"{facts.model} for {facts.task}, {parameters} parameters train, {why}")


def _take_length(draft: _Draft) -> None:
    """Raise `data.max_length` where examples would be cut, as far as the model takes it."""
    data = draft.explain().data
    cuts = data.facts.train.cuts if data is not None and data.facts is not None else []
    if not cuts:
        return
    longest = max(cut.longest for cut in cuts)
    before = list(draft.training)
    draft.set_training("data.max_length", min(_LONGEST_EXAMPLE, math.ceil(longest / 64) * 64))
    try:
        draft.explain()
    except ConfigError:
        draft.training = before


def _say_facts(facts: Facts, say: Say) -> None:
    """Say what `optrun explain` says of the data."""
    from optrun.explain.tables import data_lines

    lines = data_lines(facts)[2:]
    seen = facts.data
    if seen is not None and seen.looked_at != (seen.train_rows, seen.eval_rows):
        lines = ["of a sample of {:,} and {:,} rows:".format(*seen.looked_at), *lines]
    lines += [note for note in facts.notes if "has no column" in note]
    if lines:
        say("data", *lines)


def _take_epochs(draft: _Draft) -> int:
    """Choose how often the rows are seen, and return the optimizer steps that this makes."""
    config = draft.compose()
    if config.training.max_steps is not None:
        return config.training.max_steps
    steps_of_epoch = max(1, round(draft.explain().steps / config.training.num_train_epochs))
    epochs = min(_MOST_EPOCHS, math.ceil(_FEWEST_STEPS / steps_of_epoch))
    if "model=pretrained" in draft.overrides:
        epochs = _EPOCHS_OF_PRETRAINED
    if epochs > 1:
        draft.set_training("training.num_train_epochs", epochs)
    if steps_of_epoch < _FEWEST_STEPS:
        draft.set_training("training.eval_steps", "null")
    epochs_chosen = draft.compose().training.num_train_epochs
    return max(1, math.ceil(epochs_chosen * steps_of_epoch))


def _grids(draft: _Draft) -> dict[str, str]:
    """Map each contender to learning rates around its default."""
    common = without(draft.overrides, *_DECIDED_BY_COMPARISON)
    grids = {}
    for name in _CONTENDERS:
        lr = draft.compose([*common, f"optimizer={name}"]).lr
        rates = [f"{lr * factor:.0e}".replace("e-0", "e-") for factor in _LR_FACTORS]
        grids[name] = ",".join(rates)
    return grids
