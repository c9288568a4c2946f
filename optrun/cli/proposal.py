"""What `optrun start` finds out of data, and what it proposes to do with them."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optrun.base.errors import ConfigError
from optrun.base.formatting import count, duration, size
from optrun.base.plain import PlainDict
from optrun.config import registry, store
from optrun.config.compose import compose_request
from optrun.config.hydra_internals import Hydra
from optrun.config.literal import quote_path
from optrun.config.request import CommandLine
from optrun.config.schema.data import ColumnsConfig, DataConfig, PathsConfig

if TYPE_CHECKING:
    from optrun.config.schema.run import RunConfig
    from optrun.data.roles import Roles
    from optrun.data.source import Source
    from optrun.explain.facts import Facts
    from optrun.runner.trial_steps import Trial

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
_OF_ONE_RUN = ("optimizer", "lr", "seed", "run_name", "hydra")
"""What a comparison decides by itself."""
_FACTORS = (0.3, 1.0, 3.0)
"""Learning rates that each is tried with, over its own default."""
_SEEDS = "0,1,2"
_STEPS = 300
"""That a small run should have, at least."""
_MOST_EPOCHS, _LONGEST = 20, 512
_TRIED = 200_000_000
"""Parameters up to which two trial steps are cheap."""
_NO_TEXTS = ("true", "false", "null", "nan", "inf")
_SMALL = 16 << 20
"""Bytes of data up to which they are prepared."""
_SHOWN = 60
"""Characters of a cell."""


@dataclass(frozen=True)
class Proposal:
    """A run that fits the data.

    Attributes:
        overrides: Of the run.
        grids: Optimizer to learning rates.
        steps: Of the run.
        seconds: Of a step; None: not measured.
    """

    overrides: list[str]
    grids: Mapping[str, str]
    steps: int
    seconds: float | None

    def commands(self) -> list[tuple[str, list[str]]]:
        """List what can be done, each with its words after `optrun`."""
        grids = [f"search.{name}.lr={rates}" for name, rates in self.grids.items()]
        jobs = sum(rates.count(",") + 1 for rates in self.grids.values()) * (_SEEDS.count(",") + 1)
        common = without(self.overrides, *_OF_ONE_RUN)
        steps = min(self.steps, _STEPS)
        if steps < self.steps:
            common = [
                *without(common, "training.num_train_epochs", "training.max_steps"),
                f"training.max_steps={steps}",
            ]
        return [
            (f"train: {self.steps:,} steps{self._time(self.steps)}", self.overrides),
            (
                (
                    f"compare {' and '.join(self.grids)}, each with learning rates of its own:"
                    f" {jobs} runs of {steps:,} steps{self._time(jobs * steps)}"
                ),
                ["-m", *grids, f"seed={_SEEDS}", *common],
            ),
            (
                "see every parameter group, the schedule and the memory",
                ["explain", *without(self.overrides, "hydra")],
            ),
        ]

    def _time(self, steps: int) -> str:
        return "" if self.seconds is None else f", about {duration(self.seconds * steps)} here"


def without(overrides: Sequence[str], *keys: str) -> list[str]:
    """Leave out the overrides of keys, and of the keys below them."""
    return [
        token
        for token in overrides
        if not re.match(rf"\+*({'|'.join(map(re.escape, keys))})[.=]", token)
    ]


def propose(name: str, own: Sequence[str], config_dir: str | None, say: Say) -> Proposal:
    """Read data, say what they hold, and propose what to do with them.

    Args:
        name: A file, a folder, or a name.
        own: Overrides that decide what they name.
        config_dir: A folder of choices of the user's own.
        say: Takes a heading and its lines, as soon as they are known.

    Raises:
        ConfigError: The data cannot be read, or make no task.
    """
    say("data in", name)  # at once: what follows imports for seconds
    from optrun.data.place import keys_of_place

    hydra = store.open_hydra(config_dir)
    keys = keys_of_place(name)
    formats = _formats(keys)
    say("", *(f"format {kind}" for kind in formats))
    if "data.eval" in keys and not _is_said(own, "data.eval"):
        say("", f"{keys['data.eval']} lies beside it: these rows are to evaluate on")
    place = [f"{key}={_value(value)}" for key, value in keys.items() if not _is_said(own, key)]
    task, found = "causal_lm", list[str]()
    if keys["data"] != "tokens":
        source, place = _read(hydra, place, own, say, tables=formats <= {"csv", "tsv", "xlsx"})
        task, found = _task(
            _understood(source, own, say), own, named=isinstance(source.columns, ColumnsConfig)
        )
    run = _Run(hydra, [*place, *found], [f"task={task}"], list(own))
    run.pick_model(say)
    return run.fit(say)


def _value(text: str) -> str:
    """Write a text as Hydra reads it.

    One that it would take for a number or for nothing is quoted.
    """
    plain = re.fullmatch(r"[A-Za-z_./][\w./-]*", text, re.ASCII) and text.lower() not in _NO_TEXTS
    return text if plain else quote_path(text)


def _formats(keys: Mapping[str, str]) -> set[str]:
    """Name the formats of the files by their endings."""
    from optrun.data.files import resolve
    from optrun.data.formats import format_of

    with contextlib.suppress(ConfigError):
        if keys["data"] == "files":
            return {format_of("", path, None).name for path in resolve("", keys["data.train"])}
    return set()


def _is_said(own: Sequence[str], key: str) -> bool:
    return any(token.lstrip("+").partition("=")[0] == key for token in own)


# What is there
# ----------------------------------------------------------------------------------------------------


def _read(
    hydra: Hydra, place: list[str], own: Sequence[str], say: Say, *, tables: bool
) -> tuple[Source, list[str]]:
    """Read the rows, as CoNLL if that is what the lines of a text are, with names if a table has none.

    Returns:
        The rows, and the overrides that read them.
    """
    from optrun.data.build import load_source
    from optrun.data.columns import is_headless
    from optrun.data.shapes import looks_like, looks_tagged

    data = [token for token in own if token.lstrip("+").startswith("data.")]

    def load(more: list[str]) -> Source:
        config = compose_request(hydra, CommandLine(overrides=[*place, *more, *data])).config
        return load_source(config.data, seed=config.seed, documents=False)

    source, more = load([]), list[str]()
    kind = "conll" if looks_tagged(source.train.rows) else looks_like(source.train.rows)
    if kind is not None and not _is_said(own, "data.format"):
        say("lines", _LINES[kind])
        more = [f"data.format={kind}"]
        source, tables = load(more), kind == "csv"
    if tables and is_headless(source.train) and not _is_said(own, "data.column_names"):
        more.append(f"data.column_names=[{','.join(_names(source.train.rows))}]")
        say("names", "there is no line of names: the first line is a row as the others are")
        source = load(more)
    held = next((token for token in place if token.startswith("data.eval=")), None)
    if held is not None and (missing := _missing(source)):
        there = ", ".join(next(iter(source.eval_sets.values())).rows.column_names)
        lacks = f"{held} calls its columns {there}, and has no {' and '.join(missing)}"
        say("held", f"{lacks}: it is left out, and a part of data.train is held back instead")
        place = [token for token in place if token != held]
        source = load(more)
    return source, [*place, *more]


_LINES = {
    "conll": "a word and its tag on each (CoNLL)",
    "json": "an object on each (JSON)",
    "csv": "as many columns on each (a table)",
}


def _missing(source: Source) -> list[str]:
    """List the columns of the training rows that the rows to evaluate on would need, and lack."""
    from optrun.data.columns import same_column
    from optrun.data.roles import roles_of

    with contextlib.suppress(ConfigError):
        needed = [
            name
            for key, name in roles_of(source.train.rows).columns.items()
            if key != "text_column"
        ]
        there = [split.rows.column_names for split in source.eval_sets.values()]
        return [name for name in needed if any(same_column(name, names) is None for names in there)]
    return []


def _names(rows: Any) -> list[str]:
    """Name the columns of a table without names by what they hold."""
    from optrun.data.roles import roles_of

    names = {column: f"column{at}" for at, column in enumerate(rows.column_names, 1)}
    with contextlib.suppress(ConfigError):
        names.update(
            {column: key.removesuffix("_column") for key, column in roles_of(rows).columns.items()}
        )
    return list(names.values())


def _understood(source: Source, own: Sequence[str], say: Say) -> Roles | None:
    """Say what the rows are, and find the roles of their columns."""
    from optrun.data.roles import LOOKED_AT, roles_of, undecoded
    from optrun.data.shapes import labelled_lines

    rows = undecoded(source.train.rows)
    held = sum(len(split.rows) for split in source.eval_sets.values())
    lines = rows.column_names == ["text"]
    say(
        "lines" if lines else "rows",
        *(
            [f"{len(rows) + held:,}"]
            if lines
            else [f"{len(rows):,} to train on, {held:,} to evaluate on"]
        ),
        *(note for note in source.notes if not (lines and "held back" in note)),
    )
    head = rows.select(range(min(LOOKED_AT, len(rows))))
    roles = None
    try:
        roles = roles_of(rows)
        say("columns", *_columns(roles))
    except ConfigError as error:
        if not _is_said(own, "task"):
            raise ConfigError(
                f"{source.train.key}: {error} task=NAME and data.text_column=NAME say it."
            ) from error
    say(
        "examples", *(" | ".join(map(_short, head[at].values())) for at in range(min(3, len(head))))
    )
    advice = labelled_lines(head)
    if "look like" in advice:
        say("doubt", advice)
    if not lines:
        repeated, empty = _repeated(rows, roles)
        say(
            "repeated", f"{repeated:,} row{'s repeat' if repeated != 1 else ' repeats'} another one"
        )
        if empty:
            say(
                "empty",
                f"{empty:,} row{'s have' if empty != 1 else ' has'} nothing in one of these"
                " columns",
            )
    return roles


def _repeated(rows: Any, roles: Roles | None) -> tuple[int, int]:
    """Count the rows that are equal to one before them in the columns that are read, and those with a gap there."""
    names = list(roles.columns.values()) if roles is not None else rows.column_names
    keys, empty = list[int](), 0
    for batch in rows.select_columns(names).iter(batch_size=1000):
        for row in zip(*batch.values(), strict=True):
            keys.append(hash(repr(row)))
            empty += any(
                cell is None or (isinstance(cell, str) and not cell.strip()) for cell in row
            )
    return len(keys) - len(set(keys)), empty


def _columns(roles: Roles) -> list[str]:
    shown = [
        (
            f"{column} is the {key.removesuffix('_column').replace('_', ' ')}"
            if key != column
            else column
        )
        for key, column in roles.columns.items()
    ]
    unread = [f"not read: {', '.join(roles.unread)}"] if roles.unread else []
    return [" · ".join(shown), *unread, *roles.doubts]


def _short(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):  # turns of a chat
        value = " / ".join(
            ": ".join(str(each) for each in list(turn.values())[:2]) for turn in value
        )
    elif isinstance(value, list):
        value = " ".join(map(str, value))
    elif isinstance(value, dict) and value.keys() == {"bytes", "path"}:
        value = "/".join(Path(value["path"] or "an image").parts[-2:])
    text = " ".join(str(value).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN].rsplit(' ', 1)[0]} ..."


def _task(roles: Roles | None, own: Sequence[str], *, named: bool) -> tuple[str, list[str]]:
    """Pick the task, as it is said or by the roles, and the keys that name its columns.

    Raises:
        ConfigError: There is no such task here.
    """
    said = next((token.partition("=")[2] for token in own if token.startswith("task=")), None)
    if roles is None:
        return said or "causal_lm", []
    if said is None and roles.task not in registry.choices("task"):
        raise ConfigError(
            f"{' and '.join(roles.columns)} are columns of a task called {roles.task}, which this"
            " optrun does not have."
        )
    columns = [
        f"data.{key}={_value(column)}"
        for key, column in roles.columns.items()
        if named
        and key.endswith("_column")
        and not _is_said(own, f"data.{key}")
        and column != "text"
    ]
    if said not in (None, roles.task):
        return str(said), []
    return roles.task, [*columns, *roles.overrides]


# What to do
# -------------------------------------------------------------------------------------------------------


class _Run:
    """A run that is made to fit, step by step."""

    def __init__(self, hydra: Hydra, data: list[str], task: list[str], own: list[str]) -> None:
        self.hydra = hydra
        self.data = data
        self.task = [token for token in task if not _is_said(own, "task")]
        self.own = own
        self.model: list[str] = []
        self.more: PlainDict = {}
        self.facts: Facts | None = None
        self._line = list[str]()

    @property
    def overrides(self) -> list[str]:
        more = [f"{key}={value}" for key, value in self.more.items() if not _is_said(self.own, key)]
        return [*self.task, *self.data, *self.model, *more, *self.own]

    def config(self) -> RunConfig:
        """Compose it; what was asked for last is kept."""
        if self._line != self.overrides:
            self._line = self.overrides
            self._config = compose_request(self.hydra, CommandLine(overrides=self._line)).config
        return self._config

    def explain(self) -> Facts:
        from optrun.explain.build import explain

        self.facts = explain(self.config())
        return self.facts

    def pick_model(self, say: Say) -> None:
        """Take a pretrained model that is at hand and fits the task, else a small one from scratch."""
        from optrun.model.at_hand import models_at_hand

        config = self.config()
        why = "as it was said"
        if not any(token.startswith(("model=", "model.")) for token in self.own):
            for path in [] if config.task.PROCESSOR != "AutoTokenizer" else models_at_hand():
                self.model = ["model=pretrained", f"model.path={_value(path)}"]
                with contextlib.suppress(ConfigError):
                    self.explain()
                    say("model", f"{path}, pretrained, which lies in the cache")
                    return
            self.model = _SCRATCH.get(config.task.AUTO_CLASS, ["model=bert_tiny"])
            why = (
                "from scratch: no pretrained one is at hand (model=pretrained model.path=NAME takes"
                " one)"
            )
        try:
            facts = self.explain()
        except ConfigError as error:
            if "task.chat_template" not in str(error):
                raise
            self.task.append("task.chat_template=chatml")
            facts = self.explain()
        say(
            "model",
            f"{facts.model} for {facts.task}, {count(facts.parameters)} parameters train, {why}",
        )

    def fit(self, say: Say) -> Proposal:
        """Choose length, batch and epochs; measure two steps where that is cheap."""
        from optrun.explain.fit import USUAL_BATCH, bytes_of_batch, fitting_batch, memory_there
        from optrun.explain.tables import data_lines
        from optrun.runner.trial_steps import try_steps

        facts = self._with_length()
        seen = facts.data
        told = ""
        if seen is not None and seen.looked_at != (seen.train_rows, seen.eval_rows):
            told = f"of a sample of {seen.looked_at[0]:,} and {seen.looked_at[1]:,} rows:"
        say("data", *filter(None, [told]), *data_lines(facts)[2:])
        length, there = self.config().data.max_length, memory_there()
        batch = fitting_batch(facts, length, there) or 1
        if batch < USUAL_BATCH:
            self.more |= {
                "training.per_device_train_batch_size": batch,
                "training.global_batch_size": USUAL_BATCH,
            }
        need = size(bytes_of_batch(facts, batch, length))
        say("memory", f"some {need} of {size(there)} for a step of {batch} examples at a time")
        trial: Trial | None = None
        if facts.parameters + facts.frozen_parameters <= _TRIED and _is_small(self.config().data):
            trial = try_steps(self.config())
            say("", *(note for note in trial.notes if note.startswith("data.eval has no column")))
            say("lengths", *_lengths(trial))
        steps = self._epochs(facts)
        seconds = (
            None
            if trial is None or trial.seconds is None
            else trial.seconds * (USUAL_BATCH / batch)
        )
        if trial is not None and seconds is not None:
            say(
                "time",
                f"{seconds:.2g} s a step on {trial.device}, measured in two trial steps without"
                " evaluation",
            )
        elif trial is not None:
            say(
                "time",
                "not measured: the start model is first run over all rows, as the reference of the"
                " loss",
            )
        common, grids = without(self.overrides, *_OF_ONE_RUN), {}
        for name in _CONTENDERS:
            lr = compose_request(
                self.hydra, CommandLine(overrides=[*common, f"optimizer={name}"])
            ).config.lr
            grids[name] = ",".join(f"{lr * factor:.0e}".replace("e-0", "e-") for factor in _FACTORS)
        return Proposal(self.overrides, grids, steps, seconds)

    def _with_length(self) -> Facts:
        """Raise `data.max_length` where examples would be cut, as far as the model takes it."""
        facts = self.facts or self.explain()
        cuts = (
            facts.data.facts.train.cuts
            if facts.data is not None and facts.data.facts is not None
            else []
        )
        if cuts and not _is_said(self.own, "data.max_length"):
            before = dict(self.more)
            self.more["data.max_length"] = min(
                _LONGEST, math.ceil(max(cut.longest for cut in cuts) / 64) * 64
            )
            with contextlib.suppress(ConfigError):
                return self.explain()
            self.more = before
        return facts

    def _epochs(self, facts: Facts) -> int:
        """Choose how often the rows are seen; return the optimizer steps that makes."""
        config = self.config()
        if config.training.max_steps is not None:
            return config.training.max_steps
        each = max(1, round(facts.steps / config.training.num_train_epochs))
        epochs = (
            3
            if "model=pretrained" in self.overrides
            else min(_MOST_EPOCHS, math.ceil(_STEPS / each))
        )
        if epochs > 1 and not _is_said(self.own, "training.num_train_epochs"):
            self.more["training.num_train_epochs"] = epochs
        if each < _STEPS:
            self.more["training.eval_steps"] = "null"
        return max(1, math.ceil(self.config().training.num_train_epochs * each))


def _is_small(data: DataConfig) -> bool:
    """Tell whether data are read and tokenised within seconds.

    Those of the hub were fetched before.
    """
    from optrun.data.files import every_file, resolve

    files = every_file(resolve("data.train", data.train)) if isinstance(data, PathsConfig) else []
    return sum(file.stat().st_size for file in files) <= _SMALL


def _lengths(trial: Trial) -> list[str]:
    import numpy as np

    if trial.lengths is None or not len(trial.lengths):
        return []
    half, most, longest = (int(np.quantile(trial.lengths, at)) for at in (0.5, 0.95, 1.0))
    return [
        f"tokens of an example: half have up to {half:,}, 95 % up to {most:,}, the longest"
        f" {longest:,}"
    ]
