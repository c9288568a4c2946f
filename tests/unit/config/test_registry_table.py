"""Rows that others add: the decorators, what a schema has to be, and what is refused."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import optrun
from optrun import plugin
from optrun.base.errors import ConfigError
from optrun.config import reference, registry
from optrun.config.choice import choice
from optrun.config.groups import GROUPS, default_values
from optrun.config.schema.metric import MetricConfig
from optrun.config.schema.optimizer_base import OptimizerConfig
from optrun.config.schema.scheduler import SchedulerConfig


@dataclass(kw_only=True)
class FirstConfig(OptimizerConfig):
    default_lr: float = 1e-3
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    names: list[str] = field(default_factory=list)
    needed: int


@dataclass(kw_only=True)
class CurveConfig(SchedulerConfig):
    power: float = 2.0


def made() -> None:
    """Stands for a class."""


@pytest.fixture(autouse=True)
def _no_row_stays() -> Iterator[None]:
    yield
    registry.remove(__name__)


def test_a_registered_choice_is_one_of_its_group() -> None:
    @optrun.register_optimizer("first", schema=FirstConfig)
    def first() -> None:
        """Stands for a class."""

    assert GROUPS["optimizer"]["first"] is FirstConfig
    row = registry.choices("optimizer")["first"]
    assert row.load() is first
    assert row.origin == __name__
    assert default_values("optimizer", "first") == {
        "name": "first",
        "default_lr": 1e-3,
        "weight_decay": 0.0,
        "betas": (0.9, 0.99),
        "names": [],
        "needed": "???",
    }


def test_help_shows_a_class_by_its_own_docstring() -> None:
    class Base:
        """Says what the base does."""

    optrun.register_optimizer("first", schema=FirstConfig)(type("First", (Base,), {}))
    assert reference.head("optimizer", "first") == ""
    optrun.register_optimizer("second", schema=FirstConfig)(Base)
    assert reference.head("optimizer", "second") == "Says what the base does."


def test_what_may_be_null_needs_no_default() -> None:
    optrun.register_scheduler("curve", schema=CurveConfig)(lambda step, *, config, decay_steps: 1.0)
    config = choice("scheduler", registry.schemas("scheduler"), "curve", {"power": 3.0})
    assert (config.name, config.power, config.num_warmup_steps) == ("curve", 3.0, None)


class NoDataclass(OptimizerConfig):
    """Its decorator was forgotten."""


@dataclass
class Another:
    weight_decay: float = 0.0


@pytest.mark.parametrize(
    ("name", "schema", "facts"),
    [
        ("mine", dict, ["schema=dict", "dataclass", "OptimizerConfig"]),
        ("mine", FirstConfig(default_lr=1, needed=2, name="x"), ["expected a dataclass"]),
        ("mine", Another, ["schema=Another", "OptimizerConfig"]),
        ("mine", NoDataclass, ["schema=NoDataclass", "@dataclass"]),
        ("my-lion", FirstConfig, ["'my-lion'", "letters"]),
        ("mine_schema", FirstConfig, ["'mine_schema'"]),
        ("", FirstConfig, ["''"]),
        (3, FirstConfig, ["(3, "]),
        ("lamb", FirstConfig, ["optimizer=lamb", "taken", "optrun itself"]),
    ],
)
def test_what_cannot_be_registered(name: str, schema: type, facts: list[str]) -> None:
    before = dict(registry.schemas("optimizer"))
    with pytest.raises(ConfigError) as caught:
        optrun.register_optimizer(name, schema=schema)(made)
    assert [fact for fact in [*facts, __name__] if fact not in str(caught.value)] == []
    assert registry.schemas("optimizer") == before


def test_a_context_that_fails_leaves_no_row() -> None:
    def load() -> None:
        with registry.origin("somewhere"):
            optrun.register_optimizer("first", schema=FirstConfig)(made)
            assert registry.choices("optimizer")["first"].origin == "somewhere"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        load()
    assert "first" not in registry.choices("optimizer")


def test_a_cell_of_a_notebook_may_run_again() -> None:
    for _ in range(2):
        with registry.origin("__main__"):
            optrun.register_optimizer("first", schema=FirstConfig)(made)
    registry.remove("__main__")
    assert "first" not in registry.choices("optimizer")


def test_the_names_of_plugin_are_those_of_its_types() -> None:
    stub = Path(plugin.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    typed = {alias.asname for node in ast.parse(stub).body for alias in node.names}  # type: ignore[attr-defined]
    assert typed == set(plugin.__all__)
    assert all(getattr(plugin, name) is not None for name in plugin.__all__)


def test_a_metric_says_which_direction_is_better() -> None:
    @dataclass(kw_only=True)
    class Undirected(MetricConfig):
        pass

    with pytest.raises(ConfigError, match="MODE=None: expected MODE = 'max' or MODE = 'min'"):
        optrun.register_metric("undirected", schema=Undirected)(made)


def test_a_schedule_is_called_with_a_step_its_keys_and_the_length() -> None:
    def of_two(step: int, total: int) -> float:
        return 1.0

    with pytest.raises(ConfigError, match=r"\(step, \*, config, decay_steps\)") as refused:
        optrun.register_scheduler("of_two", schema=CurveConfig)(of_two)
    assert "total" in str(refused.value)
