"""What a search with several objectives goes for.

Numbers of a run, each with its better direction.
"""

from __future__ import annotations

from collections.abc import Sequence

from optrun.base.errors import ConfigError, did_you_mean
from optrun.config.schema.metric import metric_mode

OF_SUMMARY = {"wall_seconds": "min", "model.parameters": "min", "model.trainable_parameters": "min"}
"""Numbers of `summary.json` that may be objectives, by dotted name, and which direction is better.
"""
_BY_ENDING = {"_per_second": "max", "seconds": "min", "_bytes": "min", "parameters": "min"}
_MODES = ("min", "max")


def read_objective(text: str, where: str) -> tuple[str, str]:
    """Read `NAME` or `NAME:min` or `NAME:max`.

    Args:
        text: The name is one of metrics.jsonl, with `eval/` before it where it has no slash, or one
            of `OF_SUMMARY`.
        where: The key that it is a value of.

    Returns:
        The whole name, and `min` or `max`.

    Raises:
        ConfigError: Another word for the direction, or a number of which no direction is known.

    Example:
        >>> read_objective("loss", "objectives"), read_objective("perf/tokens_per_second", "objectives")
        (('eval/loss', 'min'), ('perf/tokens_per_second', 'max'))
    """
    name, colon, mode = text.partition(":")
    if not name or (colon and mode not in _MODES):
        hint = f" {did_you_mean(mode, _MODES)}" if name and mode else ""
        raise ConfigError(
            f"{where}: {text!r}: expected NAME, NAME:min or NAME:max, such as eval/loss:min.{hint}"
        )
    if "/" not in name and name not in OF_SUMMARY:
        if "." in name:
            raise ConfigError(
                f"{where}: {name}: no such number of summary.json. {did_you_mean(name, OF_SUMMARY)}"
            )
        name = f"eval/{name}"
    return name, mode or _direction(name, where)


def read_objectives(texts: Sequence[str], where: str) -> list[tuple[str, str]]:
    """Read all of them; there are two or more, or none.

    Raises:
        ConfigError: As `read_objective`, one alone, or one that stands there twice.
    """
    found = [read_objective(text, where) for text in texts]
    if len(found) == 1:
        raise ConfigError(
            f"{where}={texts[0]}: one objective is checkpoint.metric, which decides on the best"
            " checkpoint, too. Give two or more here."
        )
    for name, _ in found:
        if [other for other, _ in found].count(name) > 1:
            raise ConfigError(f"{where}: {name} stands there twice.")
    return found


def _direction(name: str, where: str) -> str:
    if name in OF_SUMMARY:
        return OF_SUMMARY[name]
    ending = next((mode for ending, mode in _BY_ENDING.items() if name.endswith(ending)), None)
    if ending is not None:
        return ending
    if name.startswith(("eval/", "train/loss")):
        return metric_mode(name)
    raise ConfigError(
        f"{where}: {name}: is less of it better, or more? Say {name}:min or {name}:max."
    )
