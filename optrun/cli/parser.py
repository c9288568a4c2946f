"""The command line of a verb.

An argparse parser with a help of its own, whose refusals name what was meant.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from optrun.base.errors import ConfigError, did_you_mean, refuse_url

if TYPE_CHECKING:
    from optrun.config.request import CommandLine


@dataclass(frozen=True)
class VerbArguments:
    """What was typed after a verb."""

    verb: str
    argv: list[str]
    positional: list[str]
    own: dict[str, str]
    """Values of the keys that are the verb's own."""
    overrides: list[str]
    """The other `key=value` arguments."""
    options: argparse.Namespace

    @property
    def out(self) -> Path | None:
        """The value of `out`; None if it is not given."""
        return Path(self.own["out"]).expanduser() if "out" in self.own else None

    def folders(self) -> list[Path]:
        """Return the positional arguments, each an existing directory.

        Raises:
            ConfigError: One does not exist.
        """
        found = [Path(path).expanduser() for path in self.positional]
        for folder in found:
            if not folder.is_dir():
                raise ConfigError(f"{folder}: no such directory.")
        return found

    def flag(self, key: str) -> bool | None:
        """Read true or false; None if the key is not given.

        Raises:
            ConfigError: Another word.
        """
        text = self.own.get(key)
        if text not in (None, "true", "false"):
            near = did_you_mean(text, ("true", "false"))
            raise ConfigError(f"optrun {self.verb} {key}={text}: expected true or false. {near}")
        return None if text is None else text == "true"

    def listed(self, key: str) -> list[str]:
        """Split a value at its commas."""
        return [part for part in self.own.get(key, "").split(",") if part]

    def command_line(self) -> CommandLine:
        """Build the command line of a verb that composes a configuration."""
        from optrun.config.request import DEFAULT_CONFIG, CommandLine

        return CommandLine(
            argv=self.argv,
            config_name=self.options.config_name or DEFAULT_CONFIG,
            names_config=self.options.config_name is not None,
            config_dir=self.options.config_dir,
            overrides=self.overrides,
        )


class GivenOnce(argparse.Namespace):
    """Takes each option once: argparse would let the last one win."""

    def __setattr__(self, name: str, value: object) -> None:
        if not isinstance(value, list) and getattr(self, name, None) not in (None, False):
            raise ConfigError(f"--{name.replace('_', '-')} is given twice: which one is meant?")
        super().__setattr__(name, value)


class VerbParser(argparse.ArgumentParser):
    """Parses what stands behind a verb.

    Args:
        verb: Its name.
        arguments: What it takes besides options, as the usage shows it: places first, then
            `key=value`. `[KEY=VALUE` stands for keys of the configuration, `[hydra.KEY=VALUE` for
            Hydra's.
        description: What it does, for `--help`.
    """

    def __init__(self, verb: str, arguments: str, description: str) -> None:
        super().__init__(
            prog=f"optrun {verb}",
            description=description.strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
            allow_abbrev=False,
        )
        self.verb = verb
        self.takes_overrides = "[KEY=VALUE" in arguments
        self.keys = re.findall(r"(?<![\w.])([a-z_]+)=", arguments)
        self.claims = [
            piece
            for piece in re.findall(r"[^\s\[\]]+", arguments)
            if piece.isalpha() and piece.islower()
        ]
        places = re.split(r"\[?[\w.]+=", arguments)[0]
        self._places = [place.split("|")[0] for place in re.sub(r"\[.*?\]", "", places).split()]
        self.takes_paths = re.search(r"(RUN_DIR|CHECKPOINT|DIR|FILE)\b", places) is not None
        self._least = 0 if self.claims else len(self._places)
        self._most = math.inf if "...]" in places else len(self.claims[:1] or self._places)
        self._arguments = arguments
        self.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
        # `optrun.config.registry.plugins` takes it out of every command line; it stands here to be
        # shown and completed.
        self.add_argument(
            "--plugin", metavar="FILE", help="a file or module that registers choices of your own"
        )
        self.add_argument("-h", "--help", action="store_true", help="show this help")

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
        """Add `--config-dir`, for a verb that takes choices and no recipe."""
        self.add_argument(
            "-cd", "--config-dir", metavar="DIR", help="a folder of your own choices and recipes"
        )

    def option_values(self) -> dict[str, str | None]:
        """Map options to what they take, as the help shows it; None: nothing."""
        return {
            name: None if action.nargs == 0 else str(action.metavar)
            for action in self._actions
            for name in action.option_strings
        }

    def format_usage(self) -> str:
        """Write the first line of the help: arguments stand before options."""
        pieces = [f"usage: {self.prog} {self._arguments}"]
        for action in self._actions:
            if action.option_strings and action.dest not in ("help", "plugin"):
                value = "" if action.nargs == 0 else f" {action.metavar}"
                pieces.append(f"[{action.option_strings[0]}{value}]")
        return (
            textwrap.fill(" ".join(pieces), 118, subsequent_indent="  ", break_on_hyphens=False)
            + "\n"
        )

    def format_help(self) -> str:
        """Write usage, description, options."""
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        formatter.start_section("options")
        options = [action for action in self._actions if action.option_strings]
        formatter.add_arguments(
            sorted(options, key=lambda action: action.dest in ("help", "plugin"))
        )
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
        problem = (
            "a value is missing"
            if missing
            else "takes no value"
            if "ignored explicit" in found[2]
            else found[2]
        )
        raise ConfigError(f"{found[1].rpartition('/')[2]}: {problem}.")

    def parse(self, argv: list[str]) -> VerbArguments | None:
        """Parse the arguments after the verb.

        Returns:
            None where help was asked for, and has been printed.

        Raises:
            ConfigError: An option, a key or a number of places that the verb does not have, or one
                without its value.
        """
        if {"-h", "--help"} & set(argv):
            sys.stdout.write(self.format_help())
            return None
        if (
            self.takes_paths
        ):  # a path that begins with a dash, or has `=` in it, is no option and no override
            argv = [f"./{token}" if self._is_path(token) else token for token in argv]
        try:
            options, unknown = self.parse_known_intermixed_args(argv, namespace=GivenOnce())
            if unknown:
                from optrun.config.keys import as_key

                name = unknown[0].partition("=")[0]
                hint = as_key(name, self.keys) or f" {did_you_mean(name, self.option_values())}"
                raise ConfigError(f"{name}: no such option.{hint}")
            for name, value in vars(options).items():
                if value == "":
                    raise ConfigError(f"--{name.replace('_', '-')}: a value is missing.")
        except ConfigError as error:
            raise ConfigError(f"optrun {self.verb} {error}") from error
        own, overrides = self._keys(token for token in options.arguments if is_override(token))
        positional = [token for token in options.arguments if not is_override(token)]
        if not self._least <= len(positional) <= self._most:
            given = " ".join(["optrun", self.verb, *positional])
            file = (
                positional[-1]
                if len(positional) > self._most and Path(positional[-1]).is_file()
                else ""
            )
            hint = (
                f". A file of rows has a key, such as data.eval={file} or data.train={file}."
                if file
                else ""
            )
            usage = f"expected optrun {self.verb} {self._arguments}. See optrun {self.verb} --help"
            raise ConfigError(f"{given}: {usage}{hint}")
        if self.takes_paths:
            for name, path in zip_longest(self._places, positional, fillvalue=self._places[-1]):
                refuse_url(name, path)
        return VerbArguments(self.verb, argv, positional, own, overrides, options)

    def _is_path(self, token: str) -> bool:
        other = token.startswith("-") or (
            is_override(token) and token.partition("=")[0] not in self.keys
        )
        return other and os.path.lexists(token)

    def _keys(self, tokens: Iterable[str]) -> tuple[dict[str, str], list[str]]:
        """Tell the verb's own keys from overrides."""
        own: dict[str, str] = {}
        overrides = []
        for token in tokens:
            key, _, value = token.partition("=")
            if key in own:
                raise ConfigError(f"optrun {self.verb}: {key} is given twice: which one is meant?")
            if key in self.keys:
                own[key] = value
            elif self.takes_overrides or (
                "[hydra.KEY" in self._arguments and re.match(r"[+~]*hydra[./]", key)
            ):
                overrides.append(token)
            else:
                hint = did_you_mean(key, self.keys) or "It takes no key=value; leave it out."
                raise ConfigError(f"optrun {self.verb} {token}: no such key. {hint}")
        refuse_url("out", own.get("out"))
        if (empty := next((key for key, value in own.items() if not value), None)) is not None:
            told = ": expected a folder or file to write to" if empty == "out" else ""
            raise ConfigError(f"optrun {self.verb} {empty}=: a value is missing{told}.")
        return own, overrides


def is_override(token: str) -> bool:
    """Tell whether an argument is `key=value`, and not a path with `=` in it.

    Example:
        >>> is_override("lr=0.1"), is_override("hydra/launcher=joblib"), is_override("outputs/lr=0.1/run")
        (True, True, False)
    """
    key = token.partition("=")[0].lstrip("+~")
    return "=" in token and ("/" not in key or key.startswith("hydra/"))
