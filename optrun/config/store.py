"""Schemas into Hydra, a typed `RunConfig` out."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from optrun.base.errors import ConfigError, refuse_url
from optrun.config import default_warmup, dialects
from optrun.config.compose_errors import composition_error, interpolation_error
from optrun.config.groups import GROUPS as GROUPS
from optrun.config.groups import foreign_choices
from optrun.config.hydra_internals import Hydra, create_config_search_path
from optrun.config.keys import missing_keys
from optrun.config.kind import kind_of
from optrun.config.literal import parse_token
from optrun.config.loader import Loader, assign_values, is_value
from optrun.config.paths import config_dir, recipes_dir
from optrun.config.registered import publish
from optrun.config.safety import refuse_code_and_secrets
from optrun.config.schema import sweeper
from optrun.config.schema.run import RunConfig
from optrun.config.yaml_files import READ, shown

_NEEDED_AT_ONCE = ("resume", "hydra.mode", "hydra.run.dir", "hydra.sweep.dir")
"""Keys that are read as soon as a configuration is composed: interpolations in them must resolve.
"""

_KNOWN_WARNINGS = (
    "Defaults list is missing `_self_`",  # the file's own values come last then, as expected
    "Support for .yml files is deprecated",  # such a file is refused by name
)


def _times(value: float, factor: float | None) -> float:
    """Multiply for `${times:A,B}` in a YAML, rounded to 12 significant digits; A if B is null.

    Example:
        >>> _times(0.1, 3), _times(0.1, None)
        (0.3, 0.1)
    """
    try:
        product = float(value)
        if factor is not None:
            product *= float(factor)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the resolver times takes two numbers, ${{times:A,B}}, and got {value} and {factor}."
        ) from error
    return float(f"{product:.12g}")


def register_schemas() -> None:
    """Put every dataclass into Hydra's store, as `CHOICE_schema` of its group.

    A choice without a YAML, such as a plugin's, is also stored as the choice itself.
    """
    OmegaConf.register_new_resolver("times", _times, replace=True)
    OmegaConf.register_new_resolver("dialect", dialects.resolve, replace=True)
    OmegaConf.register_new_resolver("default_warmup", default_warmup.resolve, replace=True)
    store = ConfigStore.instance()
    store.store(name="run_schema", node=RunConfig, provider="optrun")
    for group, choices in GROUPS.items():
        for choice, schema in choices.items():
            if choice not in foreign_choices(group):
                store.store(group=group, name=f"{choice}_schema", node=schema, provider="optrun")
        publish(group)
    for choice, schema in sweeper.SCHEMAS.items():
        store.store(group="hydra/sweeper", name=f"{choice}_schema", node=schema, provider="optrun")


def _remove_hydra_sweepers() -> None:
    """Remove Hydra's own `hydra/sweeper=optuna` from the store, if its plugin is installed.

    Hydra would merge it with ours: a configuration file is checked against an entry of the store
    with the same name.
    """
    Plugins.instance()  # plugins register their choices as they are found
    entries = ConfigStore.instance().repo.get("hydra", {}).get("sweeper", {})
    for choice in sweeper.SCHEMAS:
        entries.pop(f"{choice}.yaml", None)


def _search_path(extra_dir: str | None) -> ConfigSearchPath:
    """Build Hydra's search path: `--config-dir`, `conf/`, `recipes/`, and the store of schemas.

    Without `extra_dir` it has no `--config-dir`.

    A configuration in an earlier place hides one of the same name in a later place. Hydra's own
    come before all of these.

    Raises:
        ConfigError: `--config-dir` is a URL or no folder.
    """
    # Hydra's own, `main` (conf/), `schema` (the store). Each `prepend` puts one before its anchor.
    path = create_config_search_path(str(config_dir()))
    path.prepend(
        provider="recipes",
        path=f"file://{recipes_dir()}",
        anchor=SearchPathQuery(provider="schema"),
    )
    if extra_dir is not None:
        refuse_url("--config-dir", extra_dir)
        folder = Path(extra_dir).resolve()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {extra_dir}: no such folder.")
        path.prepend(
            provider="command-line",
            path=f"file://{folder}",
            anchor=SearchPathQuery(provider="main"),
        )
    # Now: Hydra's own, `command-line` if there is one, `main`, `recipes`, `schema`.
    return path


def open_hydra(extra_dir: str | None = None) -> Hydra:
    """Open a Hydra over the shipped folders and one of the user's.

    Replaces the process's global Hydra, registers all schemas, forgets the files of earlier
    compositions, and silences a few warnings of Hydra's in this process.

    Args:
        extra_dir: `--config-dir`, a folder with the user's choices and recipes, searched first.

    Raises:
        ConfigError: The folder does not exist.
    """
    register_schemas()
    _remove_hydra_sweepers()
    READ.clear()
    for pattern in _KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=f"(?s).*{pattern}")
    GlobalHydra.instance().clear()
    hydra = Hydra(
        task_name="optrun", config_loader=Loader(config_search_path=_search_path(extra_dir))
    )
    GlobalHydra.instance().initialize(hydra)
    return hydra


def compose(
    hydra: Hydra, config_name: str, overrides: list[str], run_mode: RunMode = RunMode.RUN
) -> DictConfig:
    """Compose a configuration, with the node `hydra` in it.

    Raises:
        ConfigError: Hydra or OmegaConf refuse it, the recipe is not built on `config`, or a value
            names code or is a secret.
    """
    with _as_config_error(hydra, config_name):
        cfg = hydra.compose_config(
            config_name=config_name,
            overrides=list(overrides),
            run_mode=run_mode,
            from_shell=False,
            with_log_configuration=False,
        )
        for key in _NEEDED_AT_ONCE:
            OmegaConf.select(cfg, key)  # raises if its interpolation has no value
    if OmegaConf.get_type(cfg) is not RunConfig:
        where = shown(READ[config_name]) if config_name in READ else f"-cn {config_name}"
        raise ConfigError(
            f"{where}: not built on `config`: begin with `defaults: [config, _self_]`."
        )
    refuse_code_and_secrets(cfg)
    return cfg


def compose_values(
    hydra: Hydra, config_name: str, choices: DictConfig, overrides: list[str]
) -> DictConfig:
    """Compose overrides on top of composed choices; faster than `compose`.

    The result equals `compose(hydra, config_name, overrides)`, which is called if an override is
    neither a choice nor a value (see `is_value`): it may decide which files are read, or what Hydra
    records.

    Args:
        hydra: Composes configurations.
        config_name: Name of the configuration to compose, as after `-cn`.
        choices: Composed from the choices among the overrides, with the node `hydra`; changed in
            place and returned.
        overrides: All overrides, checked; choices among them.

    Raises:
        ConfigError: As `compose`.
    """
    parsed = [parse_token(token) for token in overrides]
    values = [override for override in parsed if is_value(override)]
    # Choices of groups; those of Hydra have a slash, such as `hydra/launcher`. No override is both.
    chosen = [item for item in parsed if item.key_or_group in GROUPS or "/" in item.key_or_group]
    if len(values) + len(chosen) < len(parsed):  # some are neither
        return compose(hydra, config_name, overrides)
    with _as_config_error(hydra, config_name):
        assign_values(choices, values, parsed)
        for key in _NEEDED_AT_ONCE:
            OmegaConf.select(choices, key)  # raises if its interpolation has no value
    refuse_code_and_secrets(choices)
    return choices


@contextmanager
def _as_config_error(hydra: Hydra, config_name: str) -> Iterator[None]:
    """Turn whatever Hydra, OmegaConf or Python raise in this context into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise composition_error(hydra, config_name, error) from error


def without_hydra(cfg: DictConfig) -> DictConfig:
    """Copy a configuration without the node `hydra`; keys of the copy can be changed and added."""
    run_cfg = cfg.copy()
    OmegaConf.set_struct(run_cfg, False)
    OmegaConf.set_readonly(run_cfg, False)
    run_cfg.pop("hydra", None)
    return run_cfg


def refuse_dangling(cfg: DictConfig) -> None:
    """Refuse interpolations without a value.

    Raises:
        ConfigError: The message names the first key with such an interpolation.
    """
    try:
        OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise interpolation_error(cfg, error) from error


def typed(cfg: DictConfig) -> RunConfig:
    """Convert a composed configuration to checked dataclasses.

    Args:
        cfg: A composed configuration without the node `hydra`.

    Raises:
        ConfigError: A mandatory value is missing or out of range, an interpolation has no value, a
            file is built on no choice of optrun, or a value names code or is a secret.
    """
    refuse_code_and_secrets(cfg)
    missing = missing_keys(cfg)
    if missing:
        key, *others = missing
        rest = f" (also missing: {', '.join(others)})" if others else ""
        raise ConfigError(f"{key} is missing: give {key}=VALUE{rest}.")
    try:
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise interpolation_error(cfg, error) from error
    assert isinstance(config, RunConfig)
    for group, schemas in GROUPS.items():
        kind_of(group, schemas, getattr(config, group))
    return config
