"""Schemas into Hydra, a typed `RunConfig` out."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from optrun.bounded_yaml import UnboundedYamlError, read_text
from optrun.config import (
    checkpoint,
    clip,
    data,
    model,
    optimizer,
    param_groups,
    scheduler,
    sweeper,
    task,
    tracking,
    training,
)
from optrun.config.folders import config_dir, recipes_dir
from optrun.config.kind import kind_of
from optrun.config.refused import refuse_code, refuse_secrets
from optrun.config.run import RunConfig
from optrun.errors import ConfigError, did_you_mean, refuse_url

GROUPS: dict[str, dict[str, type[Any]]] = {
    "task": dict(task.SCHEMAS),
    "data": dict(data.SCHEMAS),
    "model": dict(model.SCHEMAS),
    "param_groups": dict(param_groups.SCHEMAS),
    "optimizer": dict(optimizer.SCHEMAS),
    "scheduler": dict(scheduler.SCHEMAS),
    "clip": dict(clip.SCHEMAS),
    "training": dict(training.SCHEMAS),
    "checkpoint": dict(checkpoint.SCHEMAS),
    "tracking": dict(tracking.SCHEMAS),
}
DEFAULT_CONFIG = "config"


def recipe_names() -> list[str]:
    """Names that `-cn` takes, besides `config`."""
    return sorted(path.stem for path in recipes_dir().glob("*.yaml"))


def choices_with(group: str, key: str) -> list[str]:
    """The choices of a group that have a key."""
    return sorted(
        choice
        for choice, schema in GROUPS[group].items()
        if any(field.name == key for field in dataclasses.fields(schema))
    )


def register_schemas() -> None:
    """Put every dataclass into Hydra's store, as `<choice>_schema` of its group."""
    store = ConfigStore.instance()
    store.store(name="run_schema", node=RunConfig, provider="optrun")
    for group, choices in GROUPS.items():
        for choice, schema in choices.items():
            store.store(group=group, name=f"{choice}_schema", node=schema, provider="optrun")
    for choice, kind in sweeper.SCHEMAS.items():
        store.store(group="hydra/sweeper", name=f"{choice}_schema", node=kind, provider="optrun")


def _own_sweepers() -> None:
    """`hydra/sweeper=optuna` means ours, whether or not Hydra's plugin of that name is installed.

    Hydra would merge the two: a configuration file is checked against an entry of its store with the same name.
    """
    Plugins.instance()  # plugins register their choices as they are found
    entries = ConfigStore.instance().repo.get("hydra", {}).get("sweeper", {})
    for choice in sweeper.SCHEMAS:
        entries.pop(f"{choice}.yaml", None)


class _Loader(ConfigLoaderImpl):
    """Hydra's loader, that does not show schemas among the choices."""

    def get_group_options(
        self,
        group_name: str,
        results_filter: ObjectType | None = ObjectType.CONFIG,
        config_name: str | None = None,
        overrides: list[str] | None = None,
    ) -> list[str]:
        """Choices of a group, without the schemas."""
        options = super().get_group_options(group_name, results_filter, config_name, overrides)
        return [option for option in options if not option.endswith("_schema")]


def _search_path(extra_dir: str | None) -> ConfigSearchPath:
    path = create_config_search_path(str(config_dir()))
    path.prepend(provider="recipes", path=f"file://{recipes_dir()}", anchor=SearchPathQuery(provider="schema"))
    if extra_dir is not None:
        refuse_url("--config-dir", extra_dir)
        folder = Path(extra_dir).resolve()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {extra_dir}: no such folder.")
        _refuse_unbounded_files(folder)
        path.prepend(provider="command-line", path=f"file://{folder}", anchor=SearchPathQuery(provider="main"))
    return path


def _refuse_unbounded_files(folder: Path) -> None:
    """Hydra reads a file to its end, however long its aliases make it."""
    groups = [*GROUPS, "hydra", "hydra/*", "."]
    for path in sorted({path for group in groups for path in folder.glob(f"{group}/*.yaml") if path.is_file()}):
        try:
            read_text(path)
        except UnboundedYamlError as error:
            raise ConfigError(f"{path}: {error}: not read.") from error
        except (OSError, ValueError):
            continue  # Hydra says so, should it be asked for


def open_hydra(extra_dir: str | None = None) -> Hydra:
    """A Hydra over the shipped folders and one of the user's.

    Args:
        extra_dir: `--config-dir`: choices and configurations of the user's own, found first.

    Raises:
        ConfigError: Where that folder does not exist.
    """
    register_schemas()
    _own_sweepers()
    GlobalHydra.instance().clear()
    hydra = Hydra(task_name="optrun", config_loader=_Loader(config_search_path=_search_path(extra_dir)))
    GlobalHydra.instance().initialize(hydra)
    return hydra


def compose(hydra: Hydra, config_name: str, overrides: list[str], run_mode: RunMode = RunMode.RUN) -> DictConfig:
    """Compose, with Hydra's own node in it.

    Raises:
        ConfigError: In one readable message, for whatever Hydra or OmegaConf refuse; for the name of code to run, and
            for a secret.
    """
    try:
        cfg = hydra.compose_config(
            config_name=config_name,
            overrides=list(overrides),
            run_mode=run_mode,
            from_shell=False,
            with_log_configuration=False,
        )
    except MissingConfigException as error:
        if error.missing_cfg_file == config_name:
            names = [DEFAULT_CONFIG, *recipe_names()]
            raise ConfigError(
                f"-cn {config_name}: no such recipe. {did_you_mean(config_name, names)} "
                f"Recipes: {', '.join(recipe_names())}; your own are found with --config-dir DIR."
            ) from error
        raise ConfigError(_first_line(error)) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_first_line(error)) from error
    refuse_code(cfg)
    refuse_secrets(cfg)
    return cfg


def _first_line(error: BaseException) -> str:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, ConfigError):
        return str(cause)
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def without_hydra(cfg: DictConfig) -> DictConfig:
    """A copy that holds the run's own keys alone."""
    own = copy.deepcopy(cfg)
    OmegaConf.set_struct(own, False)
    OmegaConf.set_readonly(own, False)
    own.pop("hydra", None)
    return own


def typed(cfg: DictConfig) -> RunConfig:
    """The dataclasses, checked.

    Args:
        cfg: A composed configuration without Hydra's node.

    Raises:
        ConfigError: For a mandatory value that is missing, an interpolation that leads nowhere, a value out of range, a
            choice that is built on none of ours; for the name of code to run, and for a secret.
    """
    refuse_code(cfg)
    refuse_secrets(cfg)
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        key = missing[0]
        others = f" (also missing: {', '.join(missing[1:])})" if missing[1:] else ""
        raise ConfigError(f"{key} is missing: give {key}=VALUE{others}.")
    try:
        config = OmegaConf.to_object(cfg)
    except ConfigError:
        raise
    except OmegaConfBaseException as error:
        raise ConfigError(_first_line(error)) from error
    if not isinstance(config, RunConfig):
        raise ConfigError("this configuration is not built on `config`: begin its defaults list with `- config`.")
    for group, schemas in GROUPS.items():
        kind_of(group, schemas, getattr(config, group))
    return config
