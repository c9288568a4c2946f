"""The space of a search: sweeps in Hydra's grammar as distributions of Optuna's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from optrun.base.errors import ConfigError
from optrun.base.plain import PlainDict

_WHOLE_ENDS = re.compile(
    r"interval\(\s*(?:\w+\s*=\s*)?[+-]?[\d_]+\s*,\s*(?:\w+\s*=\s*)?[+-]?[\d_]+\s*\)"
)

Resolve = Callable[[Mapping[str, object]], Mapping[str, Any]]
"""Values of some searched keys to every value of the configuration, by dotted name."""


def space_of(swept: Sequence[Override], resolve: Resolve) -> dict[str, BaseDistribution]:
    """Read the search space: override key -> Optuna distribution.

    A key whose value is a whole number gets an integer distribution, even if its range was typed
    with decimals, as `data.max_length=interval(32.0,64.0)`, see `_takes_integers`.

    Args:
        swept: Overrides with several values.
        resolve: Composes a configuration.

    Raises:
        ConfigError: A range is invalid.
    """
    space = {str(override.get_key_element()): distribution(override) for override in swept}
    # 1. Resolve the configuration with all low ends (`after`), and without those of ranges of
    # floats (`before`): the types of its values show what a key takes.
    lowest = {key: low_or_first(domain) for key, domain in space.items()}
    float_keys = [key for key, domain in space.items() if isinstance(domain, FloatDistribution)]
    after = resolve(lowest)
    before = resolve({key: value for key, value in lowest.items() if key not in float_keys})
    # 2. Turn those that the configuration takes as integers into integer distributions. The keys of
    # a space may begin with +, those of a configuration do not.
    for override in swept:
        key = str(override.get_key_element())
        name = override.key_or_group
        if key in float_keys and _takes_integers(
            override, space[key], before.get(name), after.get(name)
        ):
            domain = space[key]
            space[key] = IntDistribution(
                int(domain.low), int(domain.high), log=domain.log, step=int(domain.step or 1)
            )
    return space


def _takes_integers(
    override: Override, interval: FloatDistribution, before: object, after: object
) -> bool:
    """Tell whether a swept key takes integers, although Hydra reads the ends as floats.

    To find out, the low end is assigned without a decimal point. The first rule that applies:

    1. If the configuration makes it a float, or the step of the range is no integer: no.
       `lr=interval(1,2)`.
    2. The type of the key's value without the override decides, if that is a number.
       `seed=interval(1.0,8.0)`: yes.
    3. A key that the override adds has no such type: yes if both ends are written as integers.
       `+model.config.n_inner=interval(8,32)`: yes. A key of an open mapping without a number is
       added, too: its override was changed to `++key` before.
    4. Else yes: a schema has kept it an integer, and its value was null.
       `training.eval_steps=interval(2.0,8.0)`.

    Args:
        override: The sweep.
        interval: Distribution of the key over floats.
        before: Value of the key without the override; None if there is none.
        after: Value of the key with the low end assigned.
    """
    # Rule 1.
    has_fractional_step = interval.step is not None and interval.step != int(interval.step)
    if type(after) is not int or has_fractional_step:
        return False
    # Rule 2.
    if type(before) in (int, float):
        return type(before) is int
    # Rule 3.
    if override.is_add() or override.is_force_add():
        line = str(override.input_line)
        return "float(" not in line and _WHOLE_ENDS.search(line) is not None
    # Rule 4.
    return True


def distribution(override: Override) -> BaseDistribution:
    """Translate a sweep of Hydra's grammar to a distribution of Optuna's.

    | override | distribution |
    | --- | --- |
    | `lr=interval(1e-4, 1e-2)` | float |
    | `lr=tag(log, interval(1e-4, 1e-2))` | float, logarithmic |
    | `model.config.n_layer=int(interval(2, 8))` | integer |
    | `training.max_steps=range(100, 500, 100)` | integer or float with steps, see `_grid` |
    | `lr=1e-3,2e-3`, a shuffled or logarithmic range | categorical, of texts |

    Raises:
        ConfigError: An interval is empty, or logarithmic and reaches 0; or a value stands twice.
    """
    value = override.value()
    key = override.key_or_group
    log = "log" in getattr(value, "tags", ())
    try:
        if isinstance(value, IntervalSweep):
            low: Any = value.start  # Hydra annotates both as float, but they may be int
            high: Any = value.end
            if isinstance(low, int) and isinstance(high, int):
                return IntDistribution(low, high, log=log)
            return FloatDistribution(float(low), float(high), log=log)
        if isinstance(value, RangeSweep) and not log and not value.shuffle:
            return _grid(value)
    except ValueError as error:
        raise ConfigError(f"{override.input_line}: {error}") from error
    choices = [str(choice) for choice in override.sweep_string_iterator()]
    if len(set(choices)) != len(choices):
        raise ConfigError(f"{key}: list each value once; got {override.input_line}.")
    return CategoricalDistribution(choices)


def _grid(value: RangeSweep) -> BaseDistribution:
    """Convert `range(a, b, step)` to a distribution with steps.

    As in Hydra b itself is left out: `range(0, 10, 4)` has the values 0, 4 and 8.

    Raises:
        ValueError: The range falls.
    """
    if value.step < 0:
        raise ValueError(
            "a range of a search rises. Write its lower end first, with a step above 0."
        )
    values = value.range()
    steps = len(list(values)) - 1
    if isinstance(values, range):  # all numbers are integers
        return IntDistribution(values.start, values.start + steps * values.step, step=values.step)
    # In decimal, as Optuna compares: 3 * 0.3 in binary is less than 0.9, and Optuna would take that
    # for a range that ends at 0.6.
    start = Decimal(str(value.start))
    step = Decimal(str(value.step))
    return FloatDistribution(float(start), float(start + steps * step), step=float(step))


def low_or_first(distribution: BaseDistribution) -> object:
    """Return the first choice of a distribution, or its low end: as an integer if it is whole."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[0]
    if distribution.low == int(distribution.low):
        return int(distribution.low)
    return distribution.low


def corner_points(space: Mapping[str, BaseDistribution]) -> list[PlainDict]:
    """List the fewest points to cover both ends of each range and each choice.

    Example:
        >>> choices = CategoricalDistribution(["a", "b", "c"])
        >>> corner_points({"lr": FloatDistribution(0.5, 2.0), "x": choices})
        [{'lr': 0.5, 'x': 'a'}, {'lr': 2.0, 'x': 'b'}, {'lr': 2.0, 'x': 'c'}]
    """
    values_by_key = {
        key: getattr(kind, "choices", None) or (low_or_first(kind), kind.high)
        for key, kind in space.items()
    }
    points = []
    for index in range(max(map(len, values_by_key.values()))):
        # A key with fewer values repeats its last one.
        points.append(
            {key: values[min(index, len(values) - 1)] for key, values in values_by_key.items()}
        )
    return points
