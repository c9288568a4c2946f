"""From a command line to jobs: every combination, each with an identity of its own."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig

from optrun.artifacts.provenance import config_digest
from optrun.base.errors import ConfigError
from optrun.base.plain import PlainMapping, lookup
from optrun.config import keys, saved, store
from optrun.config.batch import unset_derived_size
from optrun.config.hydra_internals import Hydra
from optrun.config.overrides import assign
from optrun.config.tokens import key_of


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    name: str
    """Its folder, a pure function of the resolved configuration."""
    digest: str
    overrides: tuple[str, ...]
    """What makes it, as `key=value`."""
    values: PlainMapping
    """Resolved and plain."""
    label: str
    """What tells it from the others, for people."""
    left_out: tuple[str, ...] = ()
    """Labels of points that are this run, too, although they say something else."""


def param_overrides(
    params: Mapping[str, object], key: str = "hydra.sweeper.params", prefix: str = ""
) -> list[str]:
    """Write a mapping of the sweeper's options as overrides; keys may be nested or dotted.

    Args:
        params: Keys and values.
        key: Configuration key of the mapping, for messages.
        prefix: What each override begins with.

    Raises:
        ConfigError: A value is a list.

    Example:
        >>> param_overrides({"lr": "1e-3,2e-3", "optimizer": {"eps": 1e-6}, "seed": None})
        ['lr=1e-3,2e-3', 'optimizer.eps=1e-06', 'seed=null']
    """
    overrides = []
    for name, value in params.items():
        if isinstance(value, list | tuple):
            raise ConfigError(
                f"{key}.{name}={value}: expected a text as on the command line, such as"
                " '1e-3,2e-3', or '[0.9,0.99]' for a value that is a list."
            )
        if isinstance(value, Mapping) and value:
            overrides += param_overrides(value, f"{key}.{name}", f"{prefix}{name}.")
        else:
            overrides.append(f"{prefix}{name}={'null' if value is None else value}")
    return overrides


def merged(lower: Iterable[str], upper: Iterable[str]) -> list[str]:
    """Merge overrides of a file and of the command line.

    The command line wins by key.

    Example:
        >>> merged(["lr=1,2", "seed=0,1"], ["lr=3"])
        ['seed=0,1', 'lr=3']
    """
    above = list(upper)
    keys_above = {key_of(token) for token in above}
    return [token for token in lower if key_of(token) not in keys_above] + above


def parse(hydra: Hydra, tokens: Sequence[str]) -> list[Override]:
    """Parse overrides of a sweep, `glob()` among them."""
    return list(
        OverridesParser.create(config_loader=hydra.config_loader).parse_overrides(list(tokens))
    )


def combinations(hydra: Hydra, tokens: Sequence[str]) -> list[list[str]]:
    """Expand one grid into the overrides of each job, the last key varying fastest.

    Raises:
        ConfigError: A continuous range, which only a search can use.
    """
    axes = []
    for token, override in zip(tokens, parse(hydra, tokens), strict=True):
        if not override.is_sweep_override():
            axes.append([token])
        elif override.is_discrete_sweep():
            key = override.get_key_element()
            axes.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            raise ConfigError(
                f"{token}: an interval has no single values to combine. Add hydra/sweeper=optuna to"
                " search."
            )
    return [list(point) for point in itertools.product(*axes)]


@dataclass(eq=False)
class Composer:
    """Resolves configurations of many jobs; composes the shared part only once."""

    hydra: Hydra
    config_name: str
    """The primary configuration."""
    complete: Callable[[Sequence[str]], Sequence[str]] = tuple
    """Adds to the overrides of a job those that follow from them: the configuration of its trunk.
    """
    require: Callable[[PlainMapping], object] = bool
    """Refuses values of a job that do not fit that."""
    _bases: dict[tuple[str, ...], tuple[DictConfig, list[str]]] = field(
        default_factory=dict, init=False
    )
    """What overrides compose to, and all its keys."""

    def __call__(self, tokens: Sequence[str]) -> dict[str, object]:
        """Compose and resolve the values of one job.

        Raises:
            ConfigError: This combination lacks a key or choice, or a value has another type.
        """
        changes = []
        settled = []
        every = self.complete(tokens)
        for token, override in zip(every, parse(self.hydra, every), strict=True):
            # A mapping is left to Hydra, which merges it into what is there.
            replaces_group = override.key_or_group in store.GROUPS or isinstance(
                override.value(), dict
            )
            simple = override.type == OverrideType.CHANGE and not replaces_group
            if simple:
                changes.append(override)
            else:
                settled.append(token)
        try:
            cfg = self._with(tuple(settled), changes)
            store.refuse_dangling(cfg)
            unset_derived_size(cfg, every)
            values = saved.plain(cfg)
            self.require(values)
            return values
        except ConfigError as error:
            raise ConfigError(f"{error} In the job {' '.join(tokens)}.") from error

    def _with(self, settled: tuple[str, ...], changes: list[Override]) -> DictConfig:
        """Compose `settled` overrides once, and assign `changes` to a copy."""
        if settled not in self._bases:
            base = store.without_hydra(store.compose(self.hydra, self.config_name, list(settled)))
            self._bases[settled] = base, keys.all_keys(base)
        base, known_keys = self._bases[settled]
        cfg = copy.deepcopy(base)
        for override in changes:
            if override.key_or_group not in known_keys:
                raise keys.unknown_key(cfg, override.key_or_group)
            assign(cfg, override.key_or_group, override.value())
        return cfg


def build_jobs(compose: Composer, points: Iterable[Sequence[str]]) -> list[Job]:
    """Build the jobs of many points.

    Points with the same resolved configuration become one job, with the first one's overrides.

    Args:
        compose: Resolves overrides to a configuration.
        points: The overrides of each point.

    Raises:
        ConfigError: As `Composer`.
    """
    points_by_digest: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {}
    left_out: dict[str, dict[str, None]] = {}
    for point in points:
        values = compose(point)
        overrides_of_point = tuple(compose.complete(point))
        digest = config_digest(values)
        first, first_values = points_by_digest.setdefault(digest, (overrides_of_point, values))
        difference = label_of([token for token in overrides_of_point if token not in first])
        if difference and values != first_values:
            left_out.setdefault(digest, {})[difference] = None
    if points_by_digest:
        common = set.intersection(*(set(overrides) for overrides, _ in points_by_digest.values()))
    else:
        common = set()
    jobs = []
    for digest, (overrides, values) in points_by_digest.items():
        name = job_name(values, digest)
        label = label_of([token for token in overrides if token not in common])
        jobs.append(
            Job(name, digest, overrides, values, label or name, tuple(left_out.get(digest, ())))
        )
    return jobs


def label_of(overrides: Sequence[str]) -> str:
    """Write overrides as a short label for lists."""
    return " ".join(token.lstrip("+") for token in overrides)


def job_name(values: Mapping[str, object], digest: str) -> str:
    """Name the folder of a job: readable, and independent of order and size of the sweep.

    Example:
        >>> job_name({"optimizer": {"name": "lamb"}, "lr": 0.002, "seed": 1}, "0123456789abcdef")
        'lamb-lr0.002-seed1-0123456789ab'
    """
    lr = values.get("lr")
    lr_text = f"{lr:g}" if isinstance(lr, int | float) else str(lr)
    text = (
        f"{lookup(values, 'optimizer', 'name')}-lr{lr_text}-seed{values.get('seed')}-{digest[:12]}"
    )
    return re.sub(r"[^\w.+-]", "_", text)
