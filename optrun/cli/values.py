"""Read numbers, seeds and the request of a confirmation from the command line."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from optrun.base.errors import ConfigError
from optrun.config.tokens import key_of

if TYPE_CHECKING:
    from optrun.report.confirmation_plan import ConfirmationRequest

PLACES = (
    "hydra/launcher",
    "hydra.sweeper.devices",
    "hydra.sweeper.max_batch_size",
    "hydra.sweeper.retry_failed",
    "hydra.sweeper.timeout",
)
"""Keys, beside those of a launcher."""


def is_place(token: str) -> bool:
    """Tell whether an override chooses the machines or processes of runs.

    Example:
        >>> is_place("hydra.launcher.n_jobs=2"), is_place("hydra.sweeper.n_trials=8")
        (True, False)
    """
    key = key_of(token)
    return key in PLACES or key.startswith("hydra.launcher.")


def read_request(
    *, seeds: Any = None, power: Any = None, difference: Any = None, **options: Any
) -> ConfirmationRequest:
    """Check typed values, and build the request of a confirmation from them.

    Args:
        seeds: As `read_seeds`; None: planned from power and difference.
        power: A number between 0 and 1, or None.
        difference: A number above 0, or None.
        **options: Other fields of the request, taken as they are.

    Raises:
        ConfigError: A value is invalid, or seeds are given together with power or difference.
    """
    from optrun.report.confirmation_plan import ConfirmationRequest

    for key, value in (("power", power), ("difference", difference)):
        if seeds is not None and value is not None:
            raise ConfigError(
                f"{key}={value}: plans how many seeds are run, and seeds= names them. Leave one"
                " out."
            )
    return ConfirmationRequest(
        seeds=None if seeds is None else read_seeds(seeds),
        power=read_number("power", power, "a chance between 0 and 1, such as 0.8", below=1),
        difference=read_number(
            "difference", difference, "a number above 0, in units of the metric"
        ),
        **options,
    )


def read_number(key: str, value: object, expected: str, *, below: float = math.inf) -> float | None:
    """Read a number between 0 and a limit, both excluded; None if it is not given.

    Raises:
        ConfigError: The value is no such number.
    """
    if value is None:
        return None
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not 0 < number < below:
        raise ConfigError(f"{key}={value}: expected {expected}.")
    return number


def read_seeds(value: object) -> list[int]:
    """Read `5-9`, `5,6,7` or a mixture; in YAML also 5 or [5, 6, 7].

    Raises:
        ConfigError: The value is anything else, repeats a seed, or has a range of more than 10,000.

    Example:
        >>> read_seeds("5-7,11"), read_seeds([5, 6])
        ([5, 6, 7, 11], [5, 6])
    """
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    seeds: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", piece.strip(), re.ASCII)
        numbers = range(0)  # empty: refused below
        if match is not None:
            first = int(match[1])
            last = int(match[2] or first)
            numbers = range(first, last + 1)
        if not 0 < len(numbers) <= 10_000 or set(numbers) & set(seeds):
            raise ConfigError(
                f"seeds={text}: expected numbers and ranges, each seed once, as in seeds=5-9 or"
                " 5,6,7."
            )
        seeds += numbers
    return seeds
