"""The command line of a verb: an argparse parser with a help of its own, whose refusals name what was meant."""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from optrun.base.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from optrun.config.request import CommandLine


@dataclass(frozen=True)
class VerbArguments:
    """What was typed after a verb."""

    positional: list[str]
    overrides: list[str]
    """The `key=value` arguments."""
    options: argparse.Namespace

    def values(self, verb: str) -> dict[str, str]:
        """Return the values of a verb's own keys.

        Raises:
            ConfigError: A key is given twice.
        """
        given: dict[str, str] = {}
        for token in self.overrides:
            key, _, value = token.partition("=")
            if key in given:
                raise ConfigError(f"optrun {verb}: {key} is given twice: which one is meant?")
            given[key] = value
        return given

    def command_line(self, argv: list[str]) -> CommandLine:
        """Parse the command line of a verb that composes a configuration.

        Args:
            argv: As it was parsed.
        """
        from optrun.config.request import DEFAULT_CONFIG, CommandLine

        return CommandLine(
            argv=argv,
            config_name=self.options.config_name or DEFAULT_CONFIG,
            names_config=self.options.config_name is not None,
            config_dir=self.options.config_dir,
            overrides=self.overrides,
        )


class GivenOnce(argparse.Namespace):
    """Takes each option once: argparse would let the last one win."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(value, list) and getattr(self, name, None) not in (None, False):
            raise ConfigError(f"--{name.replace('_', '-')} is given twice: which one is meant?")
        super().__setattr__(name, value)


class VerbParser(argparse.ArgumentParser):
    """Parses what stands behind a verb.

    Args:
        verb: Its name.
        arguments: What it takes besides options, as the usage shows it.
        description: What it does, for `--help`.
        overrides: Whether it takes keys of the configuration.
        keys: What else it takes as `key=value`.
    """

    def __init__(
        self, verb: str, arguments: str, description: str, *, overrides: bool = False, keys: Collection[str] = ()
    ) -> None:
        super().__init__(
            prog=f"optrun {verb}",
            description=description.strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
            allow_abbrev=False,
        )
        self.verb = verb
        self.takes_overrides = overrides
        self.keys = keys
        self.takes_paths = re.search(r"(RUN_DIR|CHECKPOINT|DEST|DIR)\b", re.sub(r"\w+=\S+", "", arguments)) is not None
        self.claims = [piece for piece in re.findall(r"[^\s\[\]]+", arguments) if piece.isalpha() and piece.islower()]
        self._arguments = arguments
        self.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
        # `optrun.config.registry.plugins` takes it out of every command line; it stands here to be shown and completed.
        self.add_argument("--plugin", metavar="FILE", help="a file or module that registers choices of your own")
        self.add_argument("-h", "--help", action="store_true", help="show this help")

    def add_recipe_options(self) -> None:
        """Add `-cn` and `--config-dir`, as Hydra has them."""
        self.add_argument("-cn", "--config-name", metavar="RECIPE", help="a recipe, or a configuration of your own")
        self.add_config_dir()

    def add_config_dir(self) -> None:
        """Add `--config-dir`, for a verb that takes choices and no recipe."""
        self.add_argument("-cd", "--config-dir", metavar="DIR", help="a folder of your own choices and recipes")

    def option_values(self) -> dict[str, str | None]:
        """Map options to what they take, as the help shows it; None: nothing."""
        return {
            name: None if action.nargs == 0 else str(action.metavar)
            for action in self._actions
            for name in action.option_strings
        }

    def format_usage(self) -> str:
        """Write the first line of the help: arguments stand before options."""
        pieces = [f"usage: {self.prog}", *([self._arguments] if self._arguments else [])]
        for action in self._actions:
            if action.option_strings and action.dest not in ("help", "plugin"):
                value = "" if action.nargs == 0 else f" {action.metavar}"
                pieces.append(f"[{action.option_strings[0]}{value}]")
        return textwrap.fill(" ".join(pieces), 118, subsequent_indent="  ", break_on_hyphens=False) + "\n"

    def format_help(self) -> str:
        """Write usage, description, options."""
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        formatter.start_section("options")
        options = [action for action in self._actions if action.option_strings]
        formatter.add_arguments(sorted(options, key=lambda action: action.dest in ("help", "plugin")))
        formatter.end_section()
        return f"{self.format_usage()}\n{formatter.format_help()}"

    def error(self, message: str) -> NoReturn:
        """Refuse as everywhere else, instead of leaving the process.

        Raises:
            ConfigError: Always.
        """
        found = re.match(r"argument (\S+): (.*)", message)
        if found is None:
            raise ConfigError(f"{message}.")
        missing = "expected one argument" in found[2]
        problem = "a value is missing" if missing else "takes no value" if "ignored explicit" in found[2] else found[2]
        raise ConfigError(f"{found[1].rpartition('/')[2]}: {problem}.")

    def parse(self, argv: list[str]) -> VerbArguments | None:
        """Parse the arguments after the verb.

        Returns:
            None where help was asked for, and has been printed.

        Raises:
            ConfigError: An option or a kind of argument that the verb does not have, or an option without its value.
        """
        if {"-h", "--help"} & set(argv):
            sys.stdout.write(self.format_help())
            return None
        if self.takes_paths:  # a path that begins with a dash, or has `=` in it, is no option and no override
            argv = [f"./{token}" if self._is_path(token) else token for token in argv]
        try:
            options, unknown = self.parse_known_intermixed_args(argv, namespace=GivenOnce())
            if unknown:
                self._refuse_option(unknown[0].partition("=")[0])
            for name, value in vars(options).items():
                if value == "":
                    raise ConfigError(f"--{name.replace('_', '-')}: a value is missing.")
        except ConfigError as error:
            raise ConfigError(f"optrun {self.verb} {error}") from error
        overrides = [token for token in options.arguments if is_override(token)]
        self._refuse_overrides(overrides)
        return VerbArguments([token for token in options.arguments if not is_override(token)], overrides, options)

    def _is_path(self, token: str) -> bool:
        other = token.startswith("-") or (is_override(token) and token.partition("=")[0] not in self.keys)
        return other and os.path.lexists(token)

    def _refuse_option(self, name: str) -> NoReturn:
        from optrun.config.keys import as_key

        hint = as_key(name, self.keys) or f" {did_you_mean(name, self.option_values())}"
        raise ConfigError(f"{name}: no such option.{hint}")

    def _refuse_overrides(self, overrides: list[str]) -> None:
        if self.takes_overrides:
            return
        for token in overrides:
            if token.partition("=")[0] not in self.keys:
                hint = did_you_mean(token.partition("=")[0], self.keys) or "It takes no key=value; leave it out."
                raise ConfigError(f"optrun {self.verb} {token}: no such key. {hint}")


def is_override(token: str) -> bool:
    """Tell whether an argument is `key=value`, and not a path with `=` in it.

    Example:
        >>> is_override("lr=0.1"), is_override("hydra/launcher=joblib"), is_override("outputs/lr=0.1/run")
        (True, True, False)
    """
    key = token.partition("=")[0].lstrip("+~")
    return "=" in token and ("/" not in key or key.startswith("hydra/"))
