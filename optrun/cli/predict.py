"""`optrun predict`: labels, entities, texts for the rows of a file."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optrun.base.errors import EXIT_DONE, ConfigError, nearest, refuse_url
from optrun.base.plain import PlainDict
from optrun.cli.evaluate import open_saved
from optrun.cli.parser import VerbArguments, VerbParser

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

    from optrun.runner.predict import Predicted, PredictionRequest

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
_GONE = {
    "keep": "Every column of the file stands beside the predictions; leave it out.",
    "top_k": "Five tokens are written for each mask; leave it out.",
}
"""Keys that are no more, and what to do instead."""
_GENERATION = "generation."
_FIRST = "optrun predict RUN_DIR data.eval=FILE out=FILE"


def parser() -> VerbParser:
    """Build the parser of the verb."""
    made = VerbParser(
        "predict",
        ["RUN_DIR|CHECKPOINT"],
        """
Predictions of a checkpoint (of a run: its newest) for each row of a file, in its order:
labels with probabilities, entities, masked tokens, numbers, vectors, or generated texts.
FILE of out ends with .jsonl, .csv or .parquet. Labels are not needed.

Keys: data.text_column=NAME and its kin, data.delimiter, data.encoding, data.format and
data.column_names (how the file is read), generation.max_new_tokens=N and every other name of
transformers' generation, data.max_length, seed, training.device,
training.per_device_eval_batch_size, training.precision.
""",
        keys={"out": "FILE"},
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

        from optrun.runner.predict import predict_file

        request = _request(values)
        request.max_length = any(one.key_or_group == "data.max_length" for one in parsed)
        return checkpoint, predict_file(config, run_dir, checkpoint, request)


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


def _request(values: PlainDict) -> PredictionRequest:
    """Read what the keys of the command line ask for.

    Args:
        values: Key to value, without keys of the run.

    Raises:
        ConfigError: A key that does not exist, a value of another type, or one that is missing.
    """
    from optrun.config.schema.checks import build
    from optrun.config.schema.data import FilesConfig
    from optrun.runner.predict import PredictionRequest

    columns = _column_keys()
    names: PlainDict = {}
    generation: PlainDict = {}
    read: PlainDict = {}
    for key, value in values.items():
        if key in columns:
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{key}={value}: expected the name of a column.")
            names[key.removeprefix("data.")] = value
        elif key.startswith(_GENERATION):
            generation[key.removeprefix(_GENERATION)] = value
        elif key in _READ:
            read[key.removeprefix("data.")] = value
        elif key not in ("data.eval", "out"):
            raise _no_such_key(key, value)
    data, out = _paths(values)
    # refuses what is no encoding
    build(FilesConfig, {"name": "files", "train": data, "eval": None, **read}, "data")
    return PredictionRequest(data, out, names, generation, read=read)


def _paths(values: PlainDict) -> tuple[str | list[str], Path]:
    """Return the file with the rows, and the file to be written.

    Raises:
        ConfigError: One is missing, or no path.
    """
    data, out = values.get("data.eval"), values.get("out")
    if data is None:
        raise ConfigError(f"optrun predict needs data.eval, the file with the rows: {_FIRST}")
    if out is None:
        raise ConfigError(f"optrun predict needs out, the file to be written: {_FIRST}")
    refuse_url("data.eval", data)
    refuse_url("out", out)
    if not _is_path(data) and not _are_texts(data):
        raise ConfigError(f"data.eval={data}: expected a path, a list of paths, or a glob.")
    if not _is_path(out):
        raise ConfigError(f"out={out}: expected a path.")
    return data, Path(out).expanduser()


def _column_keys() -> list[str]:
    """List the keys that name a column."""
    from optrun.config.schema.data import ColumnsConfig

    names = [column.name for column in fields(ColumnsConfig)]
    return [f"data.{name}" for name in names if name.endswith("_column")]


def _is_path(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _no_such_key(key: str, value: object) -> ConfigError:
    """Make the refusal of a key that a prediction does not go by."""
    from transformers import GenerationConfig

    from optrun.config.schema.run import RunConfig

    if key in _GONE:
        return ConfigError(f"{key}={value}: no such key any more. {_GONE[key]}")
    keys = [*_RUN_KEYS, "data.eval", "out", *_column_keys(), *_READ, f"{_GENERATION}KEY"]
    names = {name: f"{_GENERATION}{name}" for name in vars(GenerationConfig())}
    names |= {name: name for name in keys}
    close = [names[name] for name in nearest(key, names)]
    hint = f"Did you mean {' or '.join(close)}? " if close else ""
    exists = key.split(".")[0] in RunConfig.__dataclass_fields__
    why = "no key that a prediction goes by" if exists else "no such key"
    return ConfigError(f"{key}={value}: {why}. {hint}optrun predict takes {', '.join(keys)}.")


def _show(checkpoint: Path, found: Predicted) -> None:
    from rich.console import Console

    from optrun.base.formatting import duration

    Console().print(
        f"{checkpoint} -> {found.out}: {found.rows:,} rows, {duration(found.seconds)}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
