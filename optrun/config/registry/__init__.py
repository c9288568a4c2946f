"""The registry: one row for each named choice, from optrun or others.

A row has the name, the schema (a dataclass: keys, types, ranges, and facts that are known without
torch) and the target (a class or function). optrun's own rows name their target as text, so that a
configuration composes without torch; rows of others come by the decorators here, from a plugin
file, an installed package or a program that imports optrun.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from optrun.base.errors import ConfigError, did_you_mean, first_line
from optrun.base.plain import PlainDict

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from _typeshed import DataclassInstance

    Schema = type[DataclassInstance]

Target = TypeVar("Target", bound=Callable[..., Any])

NO_TEXTS = ("null", "true", "false", "inf", "nan")
"""What Hydra's grammar reads as another value than a text, whatever the case."""

KINDS = ("optimizer", "scheduler", "task", "metric", "data", "tracker", "callback")
"""What can be registered. The decorator of each is `register_<kind>`."""

ENTRY_POINTS = {kind: "optrun.data" if kind == "data" else f"optrun.{kind}s" for kind in KINDS}
"""The entry-point group of each kind, by which installed packages bring rows."""

GROUPS = {
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "task": "task",
    "data": "data",
    "tracking": "tracker",
}
"""Configuration groups whose choices are rows, and the kind of these."""

BASES = {
    "optimizer": "optrun.config.schema.optimizer:OptimizerConfig",
    "scheduler": "optrun.config.schema.scheduler:SchedulerConfig",
    "task": "optrun.config.schema.task:TaskConfig",
    "metric": "optrun.config.schema.metric:MetricConfig",
    "data": "optrun.config.schema.data:DataConfig",
    "tracker": "optrun.config.schema.tracking:TrackingConfig",
}
"""Kind -> base class of its schemas; importing the module adds optrun's own rows of the kind."""


@dataclass(frozen=True)
class Choice:
    """A registered choice: a row of the registry."""

    kind: str
    name: str
    schema: type[Any]
    """A dataclass; `optimizer=NAME` has its fields as keys, and facts of its kind stand in class
    variables."""
    target: Any
    """A class or function, or `module:attribute` of one."""
    origin: str | None = None
    """Who registered it: the path of a plugin, a module or a distribution; None: optrun itself."""

    def load(self) -> Any:
        """Import the target."""
        if isinstance(self.target, str):
            return _imported(self.target)
        return self.target

    def values(self) -> PlainDict:
        """Return the values of a choice without a YAML."""
        return {**schema_defaults(self.schema), "name": self.name}


def schema_defaults(schema: type[Any]) -> PlainDict:
    """Map the fields of a schema to their defaults.

    A field without one has None if its type allows None, else `???`, OmegaConf's mark for a value
    that must be given.
    """
    hints = get_type_hints(schema)
    return {field.name: _default(field, hints[field.name]) for field in fields(schema)}


def _default(field: Any, hint: Any) -> Any:
    """Return the default of one field, see `schema_defaults`."""
    if field.default is not MISSING:
        return field.default
    if field.default_factory is not MISSING:
        return field.default_factory()
    if NoneType in get_args(hint):
        return None
    return "???"


def _imported(target: str) -> Any:
    """Import `module:attribute`."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


_ROWS: dict[str, dict[str, Choice]] = {kind: {} for kind in KINDS}


@dataclass(frozen=True, eq=False)
class _Schemas(Mapping[str, type[Any]]):
    """Schemas by name.

    Looking a name up imports the entry point that brings it; iterating shows what is loaded.
    """

    kind: str

    def __getitem__(self, name: str) -> type[Any]:
        row = find(self.kind, name)
        if row is None:
            raise KeyError(name)
        return row.schema

    def __iter__(self) -> Iterator[str]:
        return iter(_ROWS[self.kind])

    def __len__(self) -> int:
        return len(_ROWS[self.kind])


_origin: list[str] = []
"""The origins that are being loaded, one inside the other; the last one counts."""


def add(choice: Choice) -> None:
    """Add a row to the registry.

    Raises:
        ConfigError: The kind is unknown, or the name is taken.
    """
    if choice.kind not in KINDS:
        raise ConfigError(
            f"{choice.kind}: nothing of this kind can be registered."
            f" {did_you_mean(choice.kind, KINDS)}"
        )
    existing = _ROWS[choice.kind].get(choice.name)
    if existing is not None:
        raise ConfigError(
            f"{_origin_prefix(choice.origin)}{choice.kind}={choice.name}: the name is taken by"
            f" {existing.origin or 'optrun itself'}. Choose another name."
        )
    _ROWS[choice.kind][choice.name] = choice


def _origin_prefix(origin: str | None) -> str:
    """Begin a message with an origin; empty inside the context `origin`, whose caller names it."""
    if _origin:
        return ""
    return f"{origin or 'optrun'}: "


def add_builtin(kind: str, rows: Mapping[str, tuple[type[Any], str]]) -> Mapping[str, type[Any]]:
    """Register optrun's own choices of a kind.

    Args:
        kind: One of `KINDS`.
        rows: Name -> schema and `module:attribute` of the target.

    Returns:
        Name -> schema of every choice of this kind, also of later ones and of installed packages.
    """
    for name, (schema, target) in rows.items():
        add(Choice(kind, name, schema, target))
    return schemas(kind)


def schemas(kind: str) -> Mapping[str, type[Any]]:
    """Return a live mapping from names to schemas of a kind."""
    return _Schemas(kind)


def names(kind: str) -> list[str]:
    """List every name of a kind, including entry points not imported yet."""
    return [*_ROWS[kind], *(name for name in _entry_points()[kind] if name not in _ROWS[kind])]


def names_of(origin: str) -> list[str]:
    """List the registered names of an origin, such as `optimizer=my_lion`."""
    rows = [row for kind in KINDS for row in _ROWS[kind].values()]
    return [f"{row.kind}={row.name}" for row in rows if row.origin == origin]


def find(kind: str, name: str) -> Choice | None:
    """Find the row of a name; None if nobody has it.

    If an installed package has an entry point of this name, it is imported first.

    Raises:
        ConfigError: The entry point fails, registers nothing of this name, or two packages have
            one.
    """
    row = _ROWS[kind].get(name)
    if row is None and name in _entry_points()[kind]:
        _import_entry_point(kind, name)
        row = _ROWS[kind][name]
    return row


def _import_entry_point(kind: str, name: str) -> None:
    """Import the entry point of an installed package; it must register the name.

    Raises:
        ConfigError: See `find`.
    """
    points = _entry_points()[kind][name]
    packages = [
        f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"
        for point in points
    ]
    if len(points) > 1:
        raise ConfigError(
            f"{kind}={name}: {' and '.join(packages)} both have one. Keep one of them installed."
        )
    point = points[0]
    prefix = (
        f"{kind}={name}: the entry point {ENTRY_POINTS[kind]}: {name} = {point.value} of"
        f" {packages[0]}"
    )
    try:
        with origin(packages[0]):
            point.load()
    except ConfigError as error:
        raise ConfigError(f"{prefix}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{prefix} fails at import: {type(error).__name__}: {error}".rstrip(": .") + "."
        ) from error
    if name not in _ROWS[kind]:
        raise ConfigError(
            f"{prefix} registers no such name: expected @optrun.register_{kind}({name!r}, ...)"
            " in it."
        )


@cache
def _entry_points() -> dict[str, dict[str, list[EntryPoint]]]:
    """Collect the entry points of installed packages by kind and name, without importing them."""
    from importlib.metadata import entry_points

    points_by_kind: dict[str, dict[str, list[EntryPoint]]] = {kind: {} for kind in KINDS}
    for kind, group in ENTRY_POINTS.items():
        for point in entry_points(group=group):
            points_by_kind[kind].setdefault(point.name, []).append(point)
    return points_by_kind


def of_others() -> list[Choice]:
    """List the rows registered by others than optrun."""
    return [row for rows in _ROWS.values() for row in rows.values() if row.origin is not None]


def choices(kind: str) -> Mapping[str, Choice]:
    """Return a live mapping from names to rows of a kind."""
    return MappingProxyType(_ROWS[kind])


def adopt(module: str, origin: str) -> None:
    """Give the rows registered by a module another origin.

    A plugin may have been imported before it is loaded, by unpickling; its origin is then the
    module, and not yet the path of the plugin.
    """
    for rows in _ROWS.values():
        for name, row in rows.items():
            if row.origin == module:
                rows[name] = replace(row, origin=origin)


def remove(origin: str) -> None:
    """Remove all rows of an origin."""
    for rows in _ROWS.values():
        for name, row in list(rows.items()):
            if row.origin == origin:
                del rows[name]


@contextmanager
def origin(name: str) -> Iterator[None]:
    """Give all rows added inside this context an origin; remove these rows on failure.

    Args:
        name: The origin: the path of a plugin, or an installed package and its version.
    """
    rows_before = {kind: dict(rows) for kind, rows in _ROWS.items()}
    _origin.append(name)
    try:
        yield
    except BaseException:
        for kind, rows in rows_before.items():
            _ROWS[kind].clear()
            _ROWS[kind].update(rows)
        raise
    finally:
        _origin.pop()


def register(kind: str, name: str, schema: Schema) -> Callable[[Target], Target]:
    """Return a decorator; it registers a class or function and leaves it unchanged.

    In a notebook (module `__main__`) a second registration of a name replaces the first.

    Raises:
        ConfigError: The schema is no dataclass, builds on another base than the kind's, or has a
            type that OmegaConf does not know; the name is taken or invalid.
    """

    def decorate(target: Target) -> Target:
        where = _origin[-1] if _origin else target.__module__  # a plugin, a package or a module
        _check(kind, name, schema, where)
        _check_meaning(kind, name, schema, target, where)
        existing = _ROWS[kind].get(name)
        is_notebook_cell_run_again = existing is not None and existing.origin == where == "__main__"
        if is_notebook_cell_run_again:
            del _ROWS[kind][name]
        add(Choice(kind, name, schema, target, where))
        return target

    return decorate


def _check(kind: str, name: str, schema: object, where: str) -> None:
    """Refuse an invalid name or schema of a registration.

    Args:
        kind: One of `KINDS`.
        name: The name to register.
        schema: What was given as its schema.
        where: Who registers it, for messages.

    Raises:
        ConfigError: The name is no plain identifier, or the schema is no dataclass, does not build
            on the base of its kind, or has a type that OmegaConf does not know.
    """
    prefix = f"{_origin_prefix(where)}register_{kind}({name!r}, ...)"
    if not _is_plain_name(name):
        raise ConfigError(f"{prefix}: expected a name of letters, digits and _, such as my_{kind}.")
    base: type = _imported(BASES[kind]) if kind in BASES else object
    if not (isinstance(schema, type) and is_dataclass(schema) and issubclass(schema, base)):
        expected = "a dataclass"
        if kind in BASES:
            expected += (
                f" that builds on {base.__name__} from {base.__module__}, decorated with"
                " @dataclass(kw_only=True)"
            )
        schema_name = schema.__name__ if isinstance(schema, type) else repr(schema)
        raise ConfigError(f"{prefix}: schema={schema_name}: expected {expected}.")
    if "__dataclass_fields__" not in vars(schema):  # those of the base do not count
        raise ConfigError(
            f"{prefix}: schema={schema.__name__} lacks @dataclass(kw_only=True): its fields would"
            " not count."
        )
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        OmegaConf.structured(schema)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{prefix}: schema={schema.__name__}: {error.full_key or 'a field'}:"
            f" {first_line(error)}. Expected types that OmegaConf knows, such as float, str | None,"
            " list[int], and a default of the type."
        ) from error


def _is_plain_name(name: object) -> bool:
    """Tell whether a value is an ASCII identifier and a text for Hydra.

    Names that end with `_schema` are taken: so optrun names the schemas in Hydra's store.

    Example:
        >>> [_is_plain_name(name) for name in ("my_lion", "my-lion", "true", "my_schema")]
        [True, False, False, False]
    """
    if not isinstance(name, str) or not name.isascii() or not name.isidentifier():
        return False
    return not name.endswith("_schema") and name.lower() not in NO_TEXTS


def _check_meaning(kind: str, name: str, schema: Schema, target: object, where: str) -> None:
    """Refuse a metric without a direction, and a schedule with another signature.

    Raises:
        ConfigError: The message says what is expected.
    """
    prefix = f"{_origin_prefix(where)}register_{kind}({name!r}, ...)"
    mode = getattr(schema, "MODE", None)
    if kind == "metric" and mode not in ("min", "max"):
        raise ConfigError(
            f"{prefix}: schema={schema.__name__}: MODE={mode}: expected MODE = 'max' or MODE ="
            " 'min', the direction in which the metric is better."
        )
    if kind == "scheduler" and callable(target):
        signature = inspect.signature(target)
        try:
            signature.bind(0, config=None, decay_steps=1)
        except TypeError as error:
            raise ConfigError(
                f"{prefix}: {error}. Expected a function (step, *, config, decay_steps), and this"
                f" one is {signature}."
            ) from error


def register_optimizer(name: str, *, schema: Schema) -> Callable[[Target], Target]:
    """Make a class known as `optimizer=NAME`.

    Args:
        name: What users type.
        schema: A dataclass on `optrun.config.schema.optimizer_base.OptimizerConfig`; its defaults
            are the values.

    Returns:
        The decorator of a `torch.optim.Optimizer` that takes parameters, `lr` and the fields of the
        schema.
    """
    return register("optimizer", name, schema)


def register_scheduler(name: str, *, schema: Schema) -> Callable[[Target], Target]:
    """Make a schedule known as `scheduler=NAME`.

    Args:
        name: What users type.
        schema: A dataclass on `optrun.config.schema.scheduler.SchedulerConfig`; its defaults are
            the values.

    Returns:
        The decorator of a function (step, config=..., decay_steps=...) -> multiplier of the peak
        lr. Steps count from the end of the warm-up, `decay_steps` is the rest of the run; warm-up
        and `min_lr` come by themselves.
    """
    return register("scheduler", name, schema)


def register_task(name: str, *, schema: Schema) -> Callable[[Target], Target]:
    """Make a class known as `task=NAME`.

    Its schema is a dataclass on `optrun.config.schema.task_base.TaskConfig`.
    """
    return register("task", name, schema)


def register_metric(name: str, *, schema: Schema) -> Callable[[Target], Target]:
    """Make a metric known by its name."""
    return register("metric", name, schema)


def register_data(name: str, *, schema: Schema) -> Callable[[Target], Target]:
    """Make a data source known as `data=NAME`.

    Its schema is a dataclass on `optrun.config.schema.data.DataConfig`.
    """
    return register("data", name, schema)


def register_tracker(name: str, *, schema: Schema) -> Callable[[Target], Target]:
    """Make a tracker known as `tracking=NAME`.

    Its schema is on `optrun.config.schema.tracking.TrackingConfig`.
    """
    return register("tracker", name, schema)


def register_callback(name: str, *, schema: Schema) -> Callable[[Target], Target]:
    """Make a callback known by its name."""
    return register("callback", name, schema)
