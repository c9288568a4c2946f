"""The options of `optrun` without a verb: those of Hydra, each accepted once and none ignored."""

import argparse
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from optrun.artifacts.run_dir import RunDir
from optrun.base import shell
from optrun.base.errors import ConfigError, did_you_mean, nearest
from optrun.cli.parser import GivenOnce
from optrun.cli.verbs import VERBS
from optrun.config import foreign_names, keys
from optrun.config.groups import GROUPS
from optrun.config.hydra_internals import get_args_parser


def parser() -> argparse.ArgumentParser:
    """Build Hydra's parser; it raises ConfigError instead of leaving the process."""
    hydra_parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        if re.match(r"ambiguous option: --config(=| )|argument --cfg/-c.*\.ya?ml'", message):
            raise ConfigError("To run a YAML file of your own, write optrun -cn FILE.yaml")
        raise ConfigError(f"{message}. `optrun --hydra-help` lists the options.")

    hydra_parser.error = refuse  # type: ignore[method-assign]
    return hydra_parser


def _no_such_option(parser: argparse.ArgumentParser, argv: list[str], option: str) -> ConfigError:
    """Build the error for an unknown option: how to write it as a key, or the nearest option."""
    hint = keys.translate_option(option, value=keys.word_after(option, argv))
    if not hint:
        names = [name for action in parser._actions for name in action.option_strings]
        hint = did_you_mean(option, names, "`optrun --hydra-help` lists the options.")
    return ConfigError(f"{option}: no such option. {hint}")


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Parse the command line of `optrun` without a verb.

    Args:
        parser: The parser of `parser()`.
        argv: Arguments after `optrun`.

    Raises:
        ConfigError: An option is unknown, repeated or does not go with the others, or a word is
            neither an option nor `key=value`.
    """
    args, unknown = parser.parse_known_intermixed_args(argv, namespace=GivenOnce())
    if unknown:
        raise _no_such_option(parser, argv, unknown[0])
    if "" in (args.config_name, args.config_dir):
        raise ConfigError("-cn and --config-dir take a name: -cn stdlib_gpt, --config-dir DIR")
    answers = {
        "--help": args.help,
        "--hydra-help": args.hydra_help,
        "--cfg": args.cfg,
        "--info": args.info,
        "-sc": args.shell_completion,
    }
    several = [option for option, value in answers.items() if value]
    if len(several) > 1:
        raise ConfigError(f"{' and '.join(several)} are given together. Ask for them one by one.")
    if args.resolve and not (args.cfg or args.help):
        raise ConfigError("--resolve belongs to --cfg: optrun --cfg job --resolve")
    if args.package is not None and not args.cfg:
        raise ConfigError("--package belongs to --cfg: optrun --cfg job --package optimizer")
    if args.run and args.multirun:
        raise ConfigError("--run and --multirun are both given; leave one out.")
    if args.config_path is not None:
        raise ConfigError(
            "--config-path: not offered. --config-dir DIR adds choices and recipes of your own."
        )
    if args.experimental_rerun is not None:
        raise ConfigError("--experimental-rerun: not offered. resume=RUN_DIR continues a run.")
    words = [] if args.help else args.overrides  # `--help lr` takes bare words
    for at, (word, next_word) in enumerate(pairwise([*words, ""])):
        _refuse_blanks(words, at)
        _refuse_bare(word, next_word)
    return args


def _refuse_blanks(tokens: list[str], at: int) -> None:
    """Refuse blanks around `=` in two or three tokens from index `at` on.

    They are `lr = 1e-3`, `lr =1e-3` and `lr= 1e-3`. An empty value before another override, as in
    `run_name= lr=1e-3`, is correct, and so is a single token with blanks inside.

    Raises:
        ConfigError: With the override without blanks.

    Example:
        >>> _refuse_blanks(["lr", "=", "1e-3"], 0)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        optrun.base.errors.ConfigError: 'lr = 1e-3': remove the blanks around '='. Did you mean ...
    """
    for count in (3, 2):
        typed = " ".join(tokens[at : at + count])
        match = re.match(r"([\w./+~@]+)( = | =|= )([^\s=]+)$", typed)
        if match is not None and typed != tokens[at]:
            raise ConfigError(
                f"{typed!r}: remove the blanks around '='. Did you mean {match[1]}={match[3]}?"
            )


def _refuse_bare(word: str, next_word: str) -> None:
    """Refuse a word without `=` or `~`, such as a misspelt verb.

    Args:
        word: A word of the command line; an override passes.
        next_word: The word after it; empty at the end.

    Raises:
        ConfigError: The message suggests what to type: the first guess that fits, of a verb in the
            wrong place, a YAML file, another dash, `KEY VALUE`, a word of another program, and
            what `_suggest_command` finds.
    """
    if "=" in word or word.startswith("~"):
        return
    if word in VERBS:
        raise ConfigError(f"{word!r}: a command comes first: optrun {word} ...")
    for file in (word, next_word):
        if "=" not in file and file.endswith((".yaml", ".yml")):
            raise ConfigError(
                f"{word!r}: expected key=value. Did you mean optrun -cn {shell.quote(file)}?"
            )
    if word[0] in "\u2012\u2013\u2014\u2212":
        raise ConfigError(
            f"{word!r}: it begins with {word[0]!r}, which is no dash of the keyboard. Type - or --."
        )
    is_key = word in GROUPS or word in ("lr", "seed", "resume", "run_name", "branch_from")
    if is_key and next_word and "=" not in next_word:
        raise ConfigError(f"{word!r}: expected key=value. Did you mean {word}={next_word}?")
    advice = foreign_names.table()["first_words"]
    if word in advice:
        raise ConfigError(f"{word!r}: {advice[word]}")
    raise ConfigError(f"{word!r}: expected key=value. {_suggest_command(word)}")


def _suggest_command(word: str) -> str:
    """Suggest the command for a file, a folder or a run, else the nearest verb or all verbs.

    Example:
        >>> _suggest_command("evalute")
        'Did you mean the command evaluate?'
    """
    if os.path.exists(word):  # noqa: PTH110 - Path raises where a word is too long for a name
        command = "resume=" if RunDir(Path(word)).is_run() else "start "
        return f"Did you mean optrun {command}{shell.quote(word)}?"
    close = nearest(word, VERBS)
    if close:
        return f"Did you mean the command {close[0]}?"
    return f"Commands: {', '.join(VERBS)}; without one, optrun trains."
