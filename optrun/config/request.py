"""The command line, and the request for a run composed from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Self

from optrun.base.errors import ConfigError
from optrun.base.plain import PlainMapping
from optrun.base.reading import read_text
from optrun.config.paths import VALUES_FILES
from optrun.config.schema.run import RunConfig
from optrun.config.tokens import key_of

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

DEFAULT_CONFIG = "config"
"""The configuration that is composed if no recipe is named."""


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A command line, split into its parts and not composed yet."""

    argv: Sequence[str] = ()
    """Command-line arguments after `optrun`."""
    config_name: str = DEFAULT_CONFIG
    """The configuration to compose: `config`, or a recipe."""
    names_config: bool = False
    """Whether `-cn` names a recipe. False for `-cn` with a file of values, which are overrides."""
    config_dir: str | None = None
    """`--config-dir`: a folder with the user's choices and recipes."""
    overrides: Sequence[str] = ()
    """The `key=value` arguments among them."""
    config_file: str = ""
    """The text of the user's YAML file that `-cn` names, for the model card; empty: none."""

    @classmethod
    def of(
        cls,
        argv: Sequence[str],
        overrides: Sequence[str],
        config_name: str | None = None,
        config_dir: str | None = None,
    ) -> Self:
        """Build a command line, and read the YAML file after `-cn` if there is one.

        A file without a defaults list becomes overrides before the typed ones: `-cn mine.yaml
        seed=1` with the line `lr: 0.1` in it means `lr=0.1 seed=1`. A file with a defaults list is
        a recipe, found in its own folder unless `--config-dir` is given.

        Args:
            argv: Arguments after `optrun`.
            overrides: The `key=value` arguments among them.
            config_name: The value of `-cn`: a recipe, or a YAML file of the user's own.
            config_dir: The value of `--config-dir`.

        Raises:
            ConfigError: There is no such file, or it cannot be read.
        """
        VALUES_FILES.clear()
        config_file = ""
        if config_name is not None:
            from optrun.config import values_file  # needs Hydra

            path = values_file.find_values_file(config_name)
            if path is not None:
                values = values_file.read_values_file(path)
                config_file = read_text(path, follow=True)
                is_recipe = "defaults" in values
                if not is_recipe:
                    overrides = [*values_file.file_overrides(path, values, overrides), *overrides]
                    config_name = None
                elif config_dir is None:
                    config_name = path.stem
                    config_dir = str(path.parent)
        return cls(
            argv=argv,
            config_name=config_name or DEFAULT_CONFIG,
            names_config=config_name is not None,
            config_dir=config_dir,
            overrides=overrides,
            config_file=config_file,
        )

    @cached_property
    def parsed(self) -> list[Override]:
        """The overrides, parsed once; each key occurs once.

        Raises:
            ConfigError: One cannot be read, or a key is given twice.
        """
        from optrun.config import overrides  # needs Hydra

        parsed = overrides.parse(self.overrides)
        overrides.refuse_twice(parsed)
        return parsed

    def override(self, key: str) -> Override | None:
        """Return the override of a key; None if it is not given."""
        return next((item for item in self.parsed if item.key_or_group == key), None)

    @property
    def resume(self) -> str | None:
        """The value of `resume=`; None if it is absent or null.

        Raises:
            ConfigError: It has several values.
        """
        override = self.override("resume")
        if override is None:
            return None
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line}: one run at a time can be resumed.")
        value = override.value()
        if value is None:
            return None
        return str(value)

    def without(self, *keys: str) -> Self:
        """Return the command line without the overrides of these keys."""
        tokens = [token for token in self.overrides if key_of(token) not in keys]
        return replace(self, overrides=tokens)


@dataclass(frozen=True, kw_only=True)
class Request(CommandLine):
    """A command line that was composed into the configuration of one run."""

    config: RunConfig
    """Typed and checked."""
    values: PlainMapping
    """The same, resolved and plain."""
