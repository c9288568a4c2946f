"""`optrun predict`: labels, entities, texts for the rows of a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optrun.base.errors import EXIT_DONE, ConfigError, nearest, refuse_url
from optrun.base.plain import PlainDict
from optrun.cli.evaluate import open_saved
from optrun.cli.parser import VerbArguments, VerbParser

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

    from optrun.runner.predict import Asked, Predicted

_RUN_KEYS = (
    "data.max_length",
    "seed",
    "training.device",
    "training.per_device_eval_batch_size",
    "training.precision",
)
"""Keys of the run that a prediction goes by."""
_READ = ("data.format", "data.delimiter", "data.encoding", "data.column_names")
"""Keys of `data` that say how the file is read."""
_OPTIONS = ("top_k",)
"""Keys of predictors of optrun's own; a task of one's own may have others."""
_GENERATION = "generation."
_FIRST = "optrun predict RUN_DIR data.eval=FILE out=FILE"


def parser() -> VerbParser:
    """Build the parser of the verb."""
    made = VerbParser(
        "predict",
        ["RUN_DIR|CHECKPOINT"],
        """
Predictions of a checkpoint (of a run: its newest) for each row of a file, in its order: labels with probabilities,
entities, masked tokens, numbers, or generated texts. FILE of out ends with .jsonl, .csv or .parquet. Labels are not
needed. A prediction that was stopped or killed is continued by the same command.

Keys: data.text_column=NAME and its kin, data.delimiter, data.encoding, data.format and data.column_names (how the
file is read), keep=[COLUMN, ...] (what stands beside the predictions; all columns), top_k=N
(masked_lm), generation.max_new_tokens=N and every other name of transformers' generation, data.max_length, seed,
training.device, training.per_device_eval_batch_size, training.precision.
""",
        keys={"out": "FILE", "keep": "[COLUMN,...]", "top_k": "N"},
        overrides="KEY",
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def run(arguments: VerbArguments) -> int:
    """Predict, and say what was written.

    Returns:
        0.
    """
    own = [f"{key}={value}" for key, value in arguments.own.items()]
    checkpoint, found = predict(arguments.positional[0], [*own, *arguments.overrides])
    for note in found.notes:
        sys.stderr.write(f"optrun: {note}\n")
    if arguments.options.json:
        told = {
            "checkpoint": str(checkpoint),
            "step": found.step,
            "out": str(found.out),
            "rows": found.rows,
            "continued": found.continued,
            "seconds": round(found.seconds, 3),
        }
        sys.stdout.write(json.dumps(told) + "\n")
        return EXIT_DONE
    _show(checkpoint, found)
    return EXIT_DONE


def predict(path: str, overrides: list[str]) -> tuple[Path, Predicted]:
    """Predict the rows of a file with the configuration a checkpoint was trained with.

    Args:
        path: A checkpoint, or a run directory: its newest whole one.
        overrides: The keys of the command line.

    Returns:
        The checkpoint, and what was written.

    Raises:
        ConfigError: A key that does not exist, or has no effect on a prediction; rows that do not
            fit.
        CheckpointError: There is no whole checkpoint.
    """
    from optrun.config import saved, store
    from optrun.config.overrides import parse, refuse_twice

    parsed = parse(overrides)
    refuse_twice(parsed)
    with open_saved(path) as (run_dir, checkpoint, before):
        values = {
            one.key_or_group: _value(one) for one in parsed if one.key_or_group not in _RUN_KEYS
        }
        of_run = [str(one.input_line) for one in parsed if one.key_or_group in _RUN_KEYS]
        config = store.typed(saved.changed(store.open_hydra(), before, of_run))

        from optrun.runner.predict import options_of, predict_file

        asked = _asked(values, options_of(config))
        asked.cut = any(one.key_or_group == "data.max_length" for one in parsed)
        return checkpoint, predict_file(config, run_dir, checkpoint, asked)


def _value(override: Override) -> Any:
    """Return the plain value of one key.

    Raises:
        ConfigError: Several values, or one that is taken away.
    """
    from optrun.config.overrides import plain_value

    if override.is_sweep_override():
        raise ConfigError(
            f"{override.input_line}: several values are a sweep; give one, a list is written [a,b]."
        )
    if override.is_delete():
        raise ConfigError(f"{override.input_line}: there is nothing to take away; leave it out.")
    return plain_value(override.value())


def _asked(values: PlainDict, options: Any) -> Asked:
    """Read what the keys of the command line ask for.

    Args:
        values: Key to value, without keys of the run.
        options: Those of the task's predictor.

    Raises:
        ConfigError: A key that does not exist, a value of another type, or one that is missing.
    """
    from optrun.config.schema.checks import build
    from optrun.config.schema.data import ColumnsConfig, FilesConfig
    from optrun.runner.predict import Asked

    columns = [f"data.{one.name}" for one in fields(ColumnsConfig) if one.name.endswith("_column")]

    def take(is_one: Callable[[str], bool], prefix: str = "") -> PlainDict:
        return {key.removeprefix(prefix): values.pop(key) for key in [*values] if is_one(key)}

    named = take(columns.__contains__, "data.")
    for name, value in named.items():
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"data.{name}={value}: expected the name of a column.")
    generation = take(lambda key: key.startswith(_GENERATION), _GENERATION)
    data, out, keep = (values.pop(key, None) for key in ("data.eval", "out", "keep"))
    given = take(lambda key: key in options or key in _OPTIONS)
    read = take(_READ.__contains__, "data.")
    for key, value in values.items():
        raise _no_such_key(key, value, columns, options)
    if data is None or out is None:
        missing = (
            "data.eval, the file with the rows" if data is None else "out, the file to be written"
        )
        raise ConfigError(f"optrun predict needs {missing}: {_FIRST}")
    for key, value, more in (("data.eval", data, ", a list of paths, or a glob"), ("out", out, "")):
        refuse_url(key, value)
        if not (isinstance(value, str) and value.strip()) and not (more and _are_texts(value)):
            raise ConfigError(f"{key}={value}: expected a path{more}.")
    build(
        FilesConfig, {"name": "files", "train": data, "eval": None, **read}, "data"
    )  # refuses what is no encoding
    if keep is not None and not _are_texts(keep):
        raise ConfigError(
            f"keep={keep}: expected a list of columns, such as keep=[id,text]; keep=[] keeps none."
        )
    return Asked(data, Path(out).expanduser(), named, keep, given, generation, read=read)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _no_such_key(key: str, value: Any, columns: list[str], options: Any) -> ConfigError:
    """Make the refusal of a key that a prediction does not go by."""
    from optrun.config.schema.run import RunConfig
    from optrun.runner.predict import GENERATION_OPTIONS

    known = [
        *_RUN_KEYS,
        "data.eval",
        "out",
        "keep",
        *columns,
        *_READ,
        *options,
        f"{_GENERATION}KEY",
    ]
    names = {name: f"{_GENERATION}{name}" for name in GENERATION_OPTIONS} | {
        name: name for name in known
    }
    close = [names[name] for name in nearest(key, names)]
    hint = f"Did you mean {' or '.join(close)}? " if close else ""
    real = key.split(".")[0] in RunConfig.__dataclass_fields__
    why = "no key that a prediction goes by" if real else "no such key"
    return ConfigError(f"{key}={value}: {why}. {hint}optrun predict takes {', '.join(known)}.")


def _show(checkpoint: Path, found: Predicted) -> None:
    from rich.console import Console

    from optrun.base.formatting import duration

    continued = f", {found.continued:,} of them predicted before" if found.continued else ""
    Console().print(
        f"{checkpoint} -> {found.out}: {found.rows:,} rows{continued}, {duration(found.seconds)}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
