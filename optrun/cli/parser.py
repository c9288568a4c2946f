"""The command line of a verb: an argparse parser whose refusals name what was meant."""

from __future__ import annotations

import argparse
import math
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from optrun.base import shell
from optrun.base.errors import ConfigError, did_you_mean, refuse_url
from optrun.base.reading import expand_home
from optrun.config.tokens import key_of

if TYPE_CHECKING:
    from optrun.config.request import CommandLine


@dataclass(frozen=True)
class VerbArguments:
    """The parsed arguments of a verb, such as `evaluate`."""

    verb: str
    argv: list[str]
    positional: list[str]
    key_values: dict[str, str]
    """Values of the keys that are the verb's own."""
    overrides: list[str]
    """The other `key=value` arguments."""
    options: argparse.Namespace

    @property
    def out(self) -> Path | None:
        """The value of `out`; None if it is not given."""
        if "out" in self.key_values:
            return expand_home(self.key_values["out"])
        return None

    def flag(self, key: str) -> bool | None:
        """Read true or false; None if the key is not given.

        Raises:
            ConfigError: The value is another word.
        """
        text = self.key_values.get(key)
        if text not in (None, "true", "false"):
            raise ConfigError(f"optrun {self.verb} {key}={text}: expected true or false.")
        if text is None:
            return None
        return text == "true"

    def listed(self, key: str) -> list[str]:
        """Split the value of a key at its commas; empty if the key is not given."""
        return [item for item in self.key_values.get(key, "").split(",") if item]

    def command_line(self) -> CommandLine:
        """Build the command line; only for a verb with the recipe options."""
        from optrun.config.request import CommandLine

        options = self.options
        return CommandLine.of(self.argv, self.overrides, options.config_name, options.config_dir)


class GivenOnce(argparse.Namespace):
    """A namespace that refuses a repeated option, where argparse lets the last one win."""

    def __setattr__(self, name: str, value: object) -> None:
        if not isinstance(value, list) and getattr(self, name, None) not in (None, False):
            raise ConfigError(f"--{name.replace('_', '-')} is given twice; leave one out.")
        super().__setattr__(name, value)


class VerbParser(argparse.ArgumentParser):
    """Parses the arguments of a verb.

    Args:
        verb: Name of the verb.
        places: Positional arguments, such as `RUN_DIR|CHECKPOINT`. A last `...` allows more of the
            one before it.
        description: Text for `--help`.
        keys: The verb's own keys and their kinds of value, such as `{"out": "DIR"}`.
        overrides: Other keys that it takes: `KEY` for all keys of the configuration, `hydra.KEY`
            for Hydra's only, None for none.
        are_paths: Whether positional arguments are paths.
        instead: Option or key that the verb lacks -> a sentence on what to use instead.
    """

    def __init__(
        self,
        verb: str,
        places: Sequence[str],
        description: str,
        *,
        keys: Mapping[str, str] | None = None,
        overrides: Literal["KEY", "hydra.KEY"] | None = None,
        are_paths: bool = True,
        instead: Mapping[str, str] | None = None,
    ) -> None:
        self.verb = verb
        self.places = [name for name in places if name != "..."]
        self.most_places = math.inf if "..." in places else len(self.places)
        self.keys = dict(keys or {})
        self.overrides = overrides
        self.are_paths = are_paths
        self.instead = instead or {}
        usage_words = [*self.places, *("[...]" for name in places if name == "...")]
        usage_words += [f"[{key}={value}]" for key, value in self.keys.items()]
        usage_words += [] if overrides is None else [f"[{overrides}=VALUE ...]"]
        self.arguments = " ".join(usage_words)
        super().__init__(
            prog=f"optrun {verb}",
            usage=textwrap.fill(
                f"optrun {verb} {self.arguments} [options]", 100, subsequent_indent="  "
            ),
            description=description.strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument("words", nargs="*", help=argparse.SUPPRESS)
        # `optrun.config.registry.plugins` takes it out of every command line; it is listed here.
        self.add_argument(
            "--plugin", metavar="FILE", help="a file or module that registers choices of your own"
        )

    def add_recipe_options(self) -> None:
        """Add `-cn` and `--config-dir`, as Hydra has them."""
        self.add_argument(
            "-cn",
            "--config-name",
            metavar="RECIPE",
            help="a recipe, or a configuration of your own",
        )
        self.add_config_dir()

    def add_config_dir(self) -> None:
        """Add `--config-dir`, for a verb with choices but without recipes."""
        self.add_argument(
            "-cd", "--config-dir", metavar="DIR", help="a folder of your own choices and recipes"
        )

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError; argparse would end the process.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{message.removeprefix('argument ')}.")

    def parse(self, argv: list[str]) -> VerbArguments | None:
        """Parse the arguments after the verb.

        Returns:
            The positional arguments, the values of the verb's own keys, the overrides and the
            options. None if help was asked for, and has been printed.

        Raises:
            ConfigError: An option or key is unknown or lacks its value, or the number of positional
                arguments is wrong.
        """
        if {"-h", "--help"} & set(argv):
            sys.stdout.write(self.format_help())
            return None
        if self.are_paths:
            argv = [self._as_path(token) for token in argv]
        try:
            options = self._options(argv)
        except ConfigError as error:
            raise ConfigError(f"optrun {self.verb} {error}") from error
        positional = [token for token in options.words if not is_override(token)]
        self._expect_places(positional)
        key_values: dict[str, str] = {}
        overrides: list[str] = []
        for token in filter(is_override, options.words):
            key, _, value = token.partition("=")
            if key in key_values:
                raise ConfigError(f"optrun {self.verb}: {key} is given twice; leave one out.")
            if key in self.keys:
                key_values[key] = self._value(key, value)
            else:
                self._expect_override(token)
                overrides.append(token)
        return VerbArguments(self.verb, argv, positional, key_values, overrides, options)

    def _options(self, argv: list[str]) -> argparse.Namespace:
        """Parse the options; positional arguments and overrides are in `words` of the result.

        The hint on an unknown option is that of the verb, else how to write it as a key, else the
        nearest option.

        Raises:
            ConfigError: An option is unknown, with a hint, or has an empty value.
        """
        options, unknown = self.parse_known_intermixed_args(argv, namespace=GivenOnce())
        if unknown:
            from optrun.config.keys import translate_option, word_after

            option = unknown[0]
            name = option.partition("=")[0]
            hint = (
                self.instead.get(name.lstrip("-"))
                or translate_option(option, self.keys, value=word_after(option, argv))
                or did_you_mean(name, self._option_string_actions)
            )
            raise ConfigError(f"{name}: no such option. {hint}".rstrip())
        for name, value in vars(options).items():
            if value == "":
                raise ConfigError(f"--{name.replace('_', '-')}: a value is missing.")
        return options

    def _as_path(self, token: str) -> str:
        """Prefix an existing path with `./` if it looks like an option or override."""
        is_foreign_key = is_override(token) and token.partition("=")[0] not in self.keys
        if (token.startswith("-") or is_foreign_key) and os.path.lexists(token):
            return f"./{token}"
        return token

    def _expect_places(self, positional: list[str]) -> None:
        """Refuse a wrong number of positional arguments, and URLs in place of paths.

        Raises:
            ConfigError: If a YAML file or a file of rows is too many, the message names the option
                or key for it.
        """
        if not len(self.places) <= len(positional) <= self.most_places:
            line = " ".join(["optrun", self.verb, *positional])
            hint = ""
            if len(positional) > self.most_places:
                last = positional[-1]
                if last.endswith((".yaml", ".yml")):
                    hint = f". Did you mean optrun {self.verb} -cn {shell.quote(last)}?"
                elif Path(last).is_file():
                    key = "data.eval" if self.places else "data.train"
                    hint = f". A file of rows has a key: {key}={shell.quote(last)}"
            raise ConfigError(
                f"{line}: expected optrun {self.verb} {self.arguments}. See optrun"
                f" {self.verb} --help{hint}"
            )
        if self.are_paths:
            for number, path in enumerate(positional):
                # `...` repeats the last place.
                place_name = self.places[min(number, len(self.places) - 1)]
                refuse_url(place_name.partition("|")[0], path)

    def _value(self, key: str, value: str) -> str:
        """Return the value of a key of the verb; refuse an empty one, and a URL for `out`."""
        if key == "out":
            refuse_url("out", value)
        if not value:
            raise ConfigError(f"optrun {self.verb} {key}=: a value is missing: {self.keys[key]}.")
        return value

    def _expect_override(self, token: str) -> None:
        """Refuse a `key=value` unless the verb takes it as an override of the configuration.

        Args:
            token: An override whose key is not one of the verb's own.

        Raises:
            ConfigError: The message says what to use instead, or names the nearest key.
        """
        key = key_of(token)
        is_for_hydra = key.startswith(("hydra.", "hydra/"))
        is_taken = self.overrides == "KEY" or (self.overrides == "hydra.KEY" and is_for_hydra)
        if is_taken and key not in self.instead:
            return
        hint = did_you_mean(key, self.keys) or "It takes no key=value; leave it out."
        hint = self.instead.get(key, hint)
        raise ConfigError(f"optrun {self.verb} {token}: no such key. {hint}")


def is_override(token: str) -> bool:
    """Tell whether an argument is `key=value`, and not a path with `=` in it.

    Example:
        >>> is_override("lr=0.1"), is_override("hydra/launcher=joblib")
        (True, True)
        >>> is_override("outputs/lr=0.1/run")
        False
    """
    key = key_of(token)
    return "=" in token and ("/" not in key or key.startswith("hydra/"))
