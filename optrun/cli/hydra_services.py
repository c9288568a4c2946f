"""What Hydra answers without training.

Help, configuration, information, the installation of completion.
"""

import argparse
import os
import sys

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from optrun.base.errors import ConfigError, did_you_mean
from optrun.cli import help
from optrun.cli.completion import candidates
from optrun.cli.overview import overview
from optrun.config import keys, store
from optrun.config.compose_errors import composition_error
from optrun.config.hydra_internals import Hydra
from optrun.config.request import CommandLine


def answer(
    hydra: Hydra,
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    command_line: CommandLine,
) -> bool:
    """Answer `--help`, `--hydra-help` or `-sc`, if given.

    Args:
        hydra: Composes configurations, also from the user's folders.
        parser: Parser of the options, for the help.
        args: The parsed options.
        command_line: The same command line, with its recipe.

    Returns:
        Whether one of them was given, so that nothing is left to do.

    Raises:
        ConfigError: The choice or key is unknown, or `-sc` does not take the argument.
    """
    config_name = command_line.config_name
    if args.help and args.overrides:
        sys.stdout.write("\n\n".join(help.explain(hydra, token) for token in args.overrides) + "\n")
    elif args.help:
        if command_line.config_dir is not None or command_line.names_config:
            store.compose(hydra, config_name, [])  # refuses an unknown recipe
        sys.stdout.write(overview(command_line.config_dir))
    elif args.hydra_help:
        hydra.hydra_help(config_name=config_name, args_parser=parser, args=args)
    elif args.shell_completion:
        _complete(hydra, config_name, args.overrides)
    else:
        return False
    return True


def _complete(hydra: Hydra, config_name: str, tokens: list[str]) -> None:
    """Install or remove shell completion, or print the candidates for a TAB.

    Args:
        hydra: Composes configurations.
        config_name: Name of the configuration to compose, as after `-cn`.
        tokens: `install=SHELL`, `uninstall=SHELL` or `query=SHELL`; a query reads COMP_LINE and
            COMP_POINT of the environment.

    Raises:
        ConfigError: It is none of these, or COMP_LINE is not set.
    """
    task, _, shell = " ".join(tokens).partition("=")
    if shell not in ("bash", "fish", "zsh") or task not in ("install", "uninstall", "query"):
        raise ConfigError(
            f"-sc {' '.join(tokens)}: expected install=SHELL or uninstall=SHELL, one of bash, fish,"
            " zsh."
        )
    if task != "query":
        hydra.shell_completion(config_name=config_name, overrides=tokens)
        return
    line = os.environ.get("COMP_LINE")
    if line is None:
        raise ConfigError(
            f"-sc query={shell}: the shell calls this, with the typed line in COMP_LINE."
        )
    point = os.environ.get("COMP_POINT", "")
    line = line[: int(point)] if point.isdecimal() else line
    separator = "\n" if shell == "fish" else " "
    sys.stdout.write(separator.join(candidates(hydra, config_name, line)) + "\n")


def show(hydra: Hydra, config_name: str, overrides: list[str], args: argparse.Namespace) -> None:
    """Print the answer to `--cfg` or `--info`, as Hydra does; optrun only words the errors.

    Args:
        hydra: Composes configurations.
        config_name: Name of the configuration to compose, as after `-cn`.
        overrides: Checked.
        args: The parsed options: `cfg`, `info`, `package`, `resolve`.

    Raises:
        ConfigError: The configuration does not compose, has no such package, or holds an
            interpolation without a value and `--resolve` is given.
    """
    try:
        if args.cfg:
            if args.resolve and args.cfg == "job":
                store.refuse_dangling(
                    store.without_hydra(store.compose(hydra, config_name, overrides))
                )
            if args.package is not None:
                packages = keys.all_keys(store.compose(hydra, config_name, overrides))
                if args.package not in ("_global_", *packages):
                    run_keys = [key for key in packages if not key.startswith("hydra")]
                    raise ConfigError(
                        f"--package {args.package}: no such part of the configuration. "
                        f"{did_you_mean(args.package, run_keys)}"
                    )
            hydra.show_cfg(
                config_name=config_name,
                overrides=overrides,
                cfg_type=args.cfg,
                package=args.package,
                resolve=args.resolve,
            )
        else:
            hydra.show_info(args.info, config_name=config_name, overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise composition_error(hydra, config_name, error) from error
