"""A loader for Hydra that composes choices once and puts values into copies of the composition."""

import copy
from dataclasses import fields

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from optrun.config import registry
from optrun.config.groups import GROUPS
from optrun.config.hydra_internals import ConfigLoaderImpl, get_overrides_dirname
from optrun.config.literal import parse_token
from optrun.config.schema.run import RunConfig
from optrun.config.yaml_files import Repository

_AT_TOP = {field.name for field in fields(RunConfig)} - set(GROUPS)
_VALUES_OF_HYDRA = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.mode")
"""Keys below `hydra.` that are plain values; others may decide which files are read or what is
recorded."""


class Loader(ConfigLoaderImpl):
    """Hydra's loader, with file names in its errors and without schemas among the choices.

    A command line is composed several times: to check its keys, to look at `hydra.run.dir`, and as
    Hydra's job. Only choices of groups decide which files are read, so these are read once.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = Repository(config_search_path)
        self._composed: dict[tuple[str | None, tuple[str, ...]], DictConfig] = {}

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Compose a configuration; see `ConfigLoaderImpl`.

        The choices of groups are composed once and cached; values are put into a copy. Hydra
        composes sweeps, and whatever is not a plain run.
        """
        parsed = [parse_token(token) for token in overrides]
        if run_mode is not RunMode.RUN or any(override.is_sweep_override() for override in parsed):
            return super().load_configuration(
                config_name, overrides, run_mode, from_shell, validate_sweep_overrides
            )
        values = [override for override in parsed if is_value(override)]
        choices = [str(override.input_line) for override in parsed if not is_value(override)]
        cache_key = (config_name, tuple(choices))
        if cache_key not in self._composed:
            self._composed[cache_key] = super().load_configuration(
                config_name, choices, run_mode, from_shell
            )
        cfg = copy.deepcopy(self._composed[cache_key])
        if values:
            assign_values(cfg, values, parsed)
        return cfg

    def get_group_options(
        self,
        group_name: str,
        results_filter: ObjectType | None = ObjectType.CONFIG,
        config_name: str | None = None,
        overrides: list[str] | None = None,
    ) -> list[str]:
        """List the choices of a group with registered ones, without schemas and Hydra's dummy."""
        options = super().get_group_options(group_name, results_filter, config_name, overrides)
        if group_name in registry.GROUPS and results_filter in (None, ObjectType.CONFIG):
            options = sorted({*options, *registry.names(registry.GROUPS[group_name])})
        return [option for option in options if not option.endswith(("_schema", "_config_"))]


def is_value(override: Override) -> bool:
    """Tell whether an override only sets a value of the composed configuration.

    True for `lr=0.1`, `model.config.n_layer=2` and `hydra.run.dir=DIR`. False for overrides that
    decide which files are read, or what Hydra records: `optimizer=lamb`, `hydra/launcher=joblib`,
    a key with a package (`@`), and most keys below `hydra.`.
    """
    key = override.key_or_group
    if override.package is not None or "/" in key:
        return False
    if key.startswith("hydra."):
        return key in _VALUES_OF_HYDRA
    return "." in key or key in _AT_TOP


def assign_values(cfg: DictConfig, values: list[Override], parsed: list[Override]) -> None:
    """Put values into a composition of the choices, and record all overrides below `hydra`.

    Does what the end of `ConfigLoaderImpl._load_configuration_impl` does: `hydra.overrides.task`
    and `.hydra` list the overrides of the run and of Hydra, `hydra.job.override_dirname` joins
    those of the run.

    Args:
        cfg: Composed from the choices; changed in place.
        values: The overrides that set values.
        parsed: All overrides, in their order, for the record.

    Raises:
        ConfigCompositionException: Hydra's, for a value that does not fit.
    """
    try:
        ConfigLoaderImpl._apply_overrides_to_config(values, cfg)
        job = cfg.hydra.job.config.override_dirname
        run_overrides = [override for override in parsed if not override.is_hydra_override()]
        cfg.hydra.overrides.task = [override.input_line for override in run_overrides]
        cfg.hydra.overrides.hydra = [
            override.input_line for override in parsed if override.is_hydra_override()
        ]
        cfg.hydra.job.override_dirname = get_overrides_dirname(
            overrides=run_overrides,
            kv_sep=job.kv_sep,
            item_sep=job.item_sep,
            exclude_keys=job.exclude_keys,
        )
    except OmegaConfBaseException as error:
        raise ConfigCompositionException() from error
