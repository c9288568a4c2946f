"""Build the jobs of a sweep from its command line: one for each combination of values."""

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
    """Name of its folder, which depends only on the resolved configuration."""
    digest: str
    """See `config_digest`."""
    overrides: tuple[str, ...]
    values: PlainMapping
    """The resolved configuration, as plain values."""
    label: str
    """The overrides in which it differs from the other jobs, for people."""
    left_out: tuple[str, ...] = ()
    """Labels of other points of the sweep with the same result, which are not run."""


def param_overrides(
    params: Mapping[str, object], key: str = "hydra.sweeper.params", prefix: str = ""
) -> list[str]:
    """Write a mapping of values as overrides; keys may be nested or dotted, None becomes `null`.

    Args:
        params: Keys and values.
        key: Configuration key of the mapping, for messages.
        prefix: Added to the front of each override.

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
                f"{key}.{name}={value}: expected a text as on the command line: '1e-3,2e-3' for"
                " several values, '[0.9,0.99]' for one value that is a list."
            )
        if isinstance(value, Mapping) and value:
            overrides += param_overrides(value, f"{key}.{name}", f"{prefix}{name}.")
        else:
            overrides.append(f"{prefix}{name}={'null' if value is None else value}")
    return overrides


def merged(lower: Iterable[str], upper: Iterable[str]) -> list[str]:
    """Return lower overrides without the keys of upper ones, then the upper overrides.

    Example:
        >>> merged(["lr=1,2", "seed=0,1"], ["lr=3"])
        ['seed=0,1', 'lr=3']
    """
    upper = list(upper)
    upper_keys = {key_of(token) for token in upper}
    return [token for token in lower if key_of(token) not in upper_keys] + upper


def parse(hydra: Hydra, tokens: Sequence[str]) -> list[Override]:
    """Parse overrides of a sweep, `glob()` among them."""
    return list(
        OverridesParser.create(config_loader=hydra.config_loader).parse_overrides(list(tokens))
    )


def combinations(hydra: Hydra, tokens: Sequence[str]) -> list[list[str]]:
    """Expand one grid into the overrides of each job, the last key varying fastest.

    Such as `["lr=1,2", "seed=0,1"]` into `[["lr=1", "seed=0"], ["lr=1", "seed=1"], ...]`. An
    override with one value is in every job.

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
                f"{token}: a grid needs single values, and an interval has none. List values, or"
                " add hydra/sweeper=optuna to search the interval."
            )
    return [list(point) for point in itertools.product(*axes)]


@dataclass(eq=False)
class Composer:
    """Resolves overrides to configurations; composes what many jobs share only once."""

    hydra: Hydra
    config_name: str
    """The primary configuration."""
    complete: Callable[[Sequence[str]], Sequence[str]] = tuple
    """Adds the overrides that follow from those of a job, such as the configuration of a trunk."""
    require: Callable[[PlainMapping], object] = bool
    """Refuses the values of a job if they do not fit to the trunk."""
    _bases: dict[tuple[str, ...], tuple[DictConfig, list[str]]] = field(
        default_factory=dict, init=False
    )
    """Composed overrides -> the configuration, and all of its keys."""

    def __call__(self, tokens: Sequence[str]) -> dict[str, object]:
        """Compose and resolve the values of one job.

        Hydra composes choices of groups, mappings, additions and deletions, once for all jobs that
        share them. Other values are assigned to a copy, which is faster.

        Raises:
            ConfigError: This combination lacks a key or choice, or a value has another type.
        """
        composed = []
        assigned = []
        all_tokens = self.complete(tokens)
        for token, override in zip(all_tokens, parse(self.hydra, all_tokens), strict=True):
            is_choice = override.key_or_group in store.GROUPS
            is_mapping = isinstance(override.value(), dict)
            if override.type == OverrideType.CHANGE and not is_choice and not is_mapping:
                assigned.append(override)
            else:
                composed.append(token)
        try:
            cfg = self._compose(tuple(composed), assigned)
            store.refuse_dangling(cfg)
            unset_derived_size(cfg, all_tokens)
            values = saved.plain(cfg)
            self.require(values)
            return values
        except ConfigError as error:
            raise ConfigError(f"{error} In the job {' '.join(tokens)}.") from error

    def _compose(self, composed: tuple[str, ...], assigned: list[Override]) -> DictConfig:
        """Compose overrides, or take the result from an earlier call; assign others to a copy.

        Raises:
            ConfigError: A key or choice is unknown, or a value has another type.
        """
        if composed not in self._bases:
            base = store.without_hydra(store.compose(self.hydra, self.config_name, list(composed)))
            self._bases[composed] = base, keys.all_keys(base)
        base, known_keys = self._bases[composed]
        cfg = copy.deepcopy(base)
        for override in assigned:
            if override.key_or_group not in known_keys:
                raise keys.unknown_key(cfg, override.key_or_group)
            assign(cfg, override.key_or_group, override.value())
        return cfg


def build_jobs(compose: Composer, points: Iterable[Sequence[str]]) -> list[Job]:
    """Build the jobs of points: one for each different result-deciding configuration.

    Points with the same digest (see `config_digest`) become one job, with the overrides of the
    first of them. The overrides in which another one differs from it are its `left_out`, unless the
    two configurations are equal. The label of a job leaves out overrides that all jobs share.

    Args:
        compose: Resolves overrides to a configuration.
        points: The overrides of each point.

    Raises:
        ConfigError: As `Composer`.
    """
    # 1. Compose each point; keep overrides and values of the first of each digest.
    first_points: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {}
    left_out: dict[str, dict[str, None]] = {}  # digest -> an ordered set of labels
    for point in points:
        values = compose(point)
        overrides = tuple(compose.complete(point))
        digest = config_digest(values)
        if digest not in first_points:
            first_points[digest] = overrides, values
            continue
        # Another point of the same digest is left out. It is named if its values differ from those
        # of the first, in something that decides no result.
        first_overrides, first_values = first_points[digest]
        difference = label_of([token for token in overrides if token not in first_overrides])
        if difference and values != first_values:
            left_out.setdefault(digest, {})[difference] = None
    if not first_points:
        return []
    # 2. Make a job of each of them; its label has what not all jobs share.
    common = set.intersection(*(set(overrides) for overrides, _ in first_points.values()))
    jobs = []
    for digest, (overrides, values) in first_points.items():
        name = job_name(values, digest)
        label = label_of([token for token in overrides if token not in common])
        jobs.append(
            Job(name, digest, overrides, values, label or name, tuple(left_out.get(digest, ())))
        )
    return jobs


def label_of(overrides: Sequence[str]) -> str:
    """Join overrides to the label of a job in lists, without leading `+`."""
    return " ".join(token.lstrip("+") for token in overrides)


def job_name(values: Mapping[str, object], digest: str) -> str:
    """Name the folder of a job by optimizer, lr, seed and digest of its configuration.

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
