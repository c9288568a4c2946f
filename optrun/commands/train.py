"""`optrun` without a verb: Hydra's own services, a run, a resumed run, a sweep."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from optrun.artifacts.lock import refuse_held
from optrun.artifacts.metrics import read_summary
from optrun.artifacts.run_dir import RunDir
from optrun.config import keys, saved, store
from optrun.config import overrides as words_of
from optrun.config.compose_errors import refusal
from optrun.config.original_cwd import original_cwd, rebase_paths
from optrun.config.request import Request
from optrun.config.safety import refuse_stored_trust
from optrun.errors import EXIT_DONE, ConfigError, OptrunError, StorageError, did_you_mean, nearest, refuse_url

if TYPE_CHECKING:
    from optrun.run.resume.checkpoint import ResumePoint


def run(argv: list[str]) -> int:
    """Train, or show what would be trained.

    Args:
        argv: Words after `optrun`.

    Returns:
        The exit code.
    """
    parser = get_args_parser()
    args = _parse(parser, argv)
    hydra = store.open_hydra(args.config_dir)
    config_name = args.config_name or store.DEFAULT_CONFIG
    if args.help:
        if args.config_dir is not None or args.config_name is not None:
            store.compose(hydra, config_name, [])  # Hydra sets up logging as the files say, also to show help
        hydra.app_help(config_name=config_name, args_parser=parser, args=args)
        return EXIT_DONE
    if args.hydra_help:
        hydra.hydra_help(config_name=config_name, args_parser=parser, args=args)
        return EXIT_DONE
    if args.shell_completion:
        _check_completion(args.overrides)
        hydra.shell_completion(config_name=config_name, overrides=args.overrides)
        return EXIT_DONE
    if not (args.cfg or args.info):
        refuse_ranks()
    words_of.refuse_twice(words_of.parse(args.overrides))
    resume = _resume_value(args.overrides)
    if resume is not None and not (args.cfg or args.info):
        if args.multirun:
            raise _not_a_sweep()
        return _resume(hydra, config_name, args, argv, resume)
    sweeping = args.multirun or _is_sweep(hydra, config_name, args.overrides)
    words = words_of.checked(hydra, config_name, args.overrides, sweep=sweeping)
    if args.cfg or args.info:
        return _show(hydra, config_name, words, args)
    cfg = store.compose(hydra, config_name, words, RunMode.MULTIRUN if sweeping else RunMode.RUN)
    if cfg.resume is not None:  # a recipe of the user's says so
        if sweeping:
            raise _not_a_sweep()
        return _resume(hydra, config_name, args, argv, str(cfg.resume))
    if sweeping:
        from optrun.commands.sweep import sweep
        from optrun.sweep.driver import SweepCommand

        own = [word for word in args.overrides if words_of.is_hydra(word)]
        by_itself = _is_sweep(hydra, config_name, [])
        return sweep(hydra, SweepCommand(config_name, args.config_dir, own, words, by_itself), cfg)
    return _single(hydra, config_name, words, cfg, argv)


def refuse_ranks() -> None:
    """One process trains; several that were started together would each train alone, in the same directory.

    Raises:
        ConfigError: `WORLD_SIZE` says that there are more, as under torchrun.
    """
    ranks = os.environ.get("WORLD_SIZE", "1").strip()
    if ranks not in ("", "1"):
        raise ConfigError(
            f"WORLD_SIZE={ranks}: optrun trains in one process; expected WORLD_SIZE=1. Start it once, without "
            "torchrun; a sweep (-m) uses several devices side by side."
        )


def _is_sweep(hydra: Hydra, config_name: str, overrides: list[str]) -> bool:
    """Whether a recipe, or a word, says that this is a sweep without `-m`."""
    asked = [word for word in overrides if word.startswith("hydra.mode=")]
    if config_name == store.DEFAULT_CONFIG and not asked:
        return False
    return bool(store.compose(hydra, config_name, asked).hydra.mode == RunMode.MULTIRUN)


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}. `optrun --hydra-help` lists the options.")

    parser.error = refuse  # type: ignore[method-assign]
    args, unknown = parser.parse_known_intermixed_args(argv, namespace=_Once())
    if unknown:
        options = [option for action in parser._actions for option in action.option_strings]
        close = nearest(unknown[0], options)
        hint = keys.as_key(unknown[0]) or (f" Did you mean {' or '.join(close)}?" if close else "")
        raise ConfigError(f"{unknown[0]}: no such option.{hint} `optrun --hydra-help` lists them.")
    if "" in (args.config_name, args.config_dir):
        raise ConfigError("-cn and --config-dir take a name: -cn stdlib_gpt, --config-dir DIR")
    if args.resolve and not (args.cfg or args.help):
        raise ConfigError("--resolve belongs to --cfg: optrun --cfg job --resolve")
    if args.package is not None and not args.cfg:
        raise ConfigError("--package belongs to --cfg: optrun --cfg job --package optimizer")
    if args.run and args.multirun:
        raise ConfigError("--run and --multirun are both given: which is meant?")
    if args.config_path is not None:
        raise ConfigError("--config-path: not offered. --config-dir DIR adds choices and recipes of your own.")
    if args.experimental_rerun is not None:
        raise ConfigError("--experimental-rerun: not offered. resume=RUN_DIR goes on with a run.")
    return args


class _Once(argparse.Namespace):
    """Takes each option once: argparse would let the last one win."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "overrides" and getattr(self, name, None) not in (None, False):
            raise ConfigError(f"--{name.replace('_', '-')} is given twice: which one is meant?")
        super().__setattr__(name, value)


def _check_completion(words: list[str]) -> None:
    """Hydra ends with a traceback where the words are not these.

    Raises:
        ConfigError: With the words it takes.
    """
    asked, _, shell = words[0].partition("=") if len(words) == 1 else ("", "", "")
    if asked == "query":
        raise ConfigError(f"-sc {words[0]}: this is what the shell asks, with the line so far in COMP_LINE.")
    if asked not in ("install", "uninstall") or shell not in ("bash", "fish", "zsh"):
        raise ConfigError(f"-sc {' '.join(words)}: expected install=SHELL or uninstall=SHELL, one of bash, fish, zsh.")


def _is_resume(word: str) -> bool:
    return word.split("=", 1)[0].lstrip("+") == "resume"


def _not_a_sweep() -> ConfigError:
    return ConfigError("resume goes on with one run; a sweep is taken up by repeating its own command.")


def _resume_value(words: list[str]) -> str | None:
    """The value of `resume=`; None where it is absent or null."""
    for override in words_of.parse([word for word in words if _is_resume(word)]):
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line}: one run at a time can be resumed.")
        return None if override.value() is None else str(override.value())
    return None


def _show(hydra: Hydra, config_name: str, words: list[str], args: argparse.Namespace) -> int:
    try:
        if args.cfg:
            if args.resolve and args.cfg == "job":
                store.refuse_dangling(store.without_hydra(store.compose(hydra, config_name, words)))
            if args.package is not None:
                parts = keys.all_keys(store.compose(hydra, config_name, words))
                if args.package not in ("_global_", *parts):
                    raise ConfigError(
                        f"--package {args.package}: no such part of the configuration. "
                        f"{did_you_mean(args.package, [part for part in parts if not part.startswith('hydra')])}"
                    )
            hydra.show_cfg(
                config_name=config_name, overrides=words, cfg_type=args.cfg, package=args.package, resolve=args.resolve
            )
        else:
            hydra.show_info(args.info, config_name=config_name, overrides=words)
    except (HydraException, OmegaConfBaseException) as error:
        raise refusal(hydra, config_name, error) from error
    return EXIT_DONE


# A single run ---------------------------------------------------------------------------------------------------------


def _single(hydra: Hydra, config_name: str, words: list[str], cfg: DictConfig, argv: list[str]) -> int:
    own = store.without_hydra(cfg)
    store.typed(own)
    refuse_stored_trust(own, words)
    refuse_url("hydra.run.dir", str(cfg.hydra.run.dir))
    folder = Path(str(cfg.hydra.run.dir))
    if not any(word.startswith("hydra.run.dir=") for word in words):
        folder = _unused(folder)
    refuse_used(folder)
    task = functools.partial(_train_job, argv=argv, config_name=config_name, words=words)
    hydra.run(
        config_name=config_name, task_function=task, overrides=[*words, f"hydra.run.dir={words_of.quote_path(folder)}"]
    )
    return EXIT_DONE


def _unused(folder: Path) -> Path:
    """The folder, or one beside it where two runs began in the same second."""
    number, place = 2, folder
    while place.exists():
        place, number = folder.with_name(f"{folder.name}-{number}"), number + 1
    return place


def refuse_used(folder: Path) -> None:
    """A fresh run goes into an empty place.

    Raises:
        ConfigError: Something is there already.
        LockedError: Another process is at work there, perhaps since a moment ago.
        StorageError: It could not be written.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"hydra.run.dir={folder}: this is a file.")
    if folder.is_dir() and not RunDir(folder).is_unbegun():
        refuse_held(RunDir(folder).lock)
        if RunDir(folder).is_run():
            raise ConfigError(
                f"hydra.run.dir={folder}: there is a run in it already, and nothing is overwritten. Go on with it: "
                f"resume={folder}. Or choose another directory."
            )
        raise ConfigError(f"hydra.run.dir={folder}: this directory is not empty. Choose another one.")
    parent = next(place for place in (folder, *folder.resolve().parents) if place.exists())
    if not os.access(parent, os.W_OK):
        raise StorageError(f"hydra.run.dir={folder}: no permission to write in {parent}. Choose another directory.")


def _train_job(cfg: DictConfig, *, argv: list[str], config_name: str, words: list[str]) -> None:
    """What Hydra runs in the directory it made."""
    own = store.without_hydra(cfg)
    run = RunDir(Path(HydraConfig.get().runtime.output_dir))
    try:
        execute(_request(own, argv, config_name, words), run)
    except OptrunError as error:
        if isinstance(error, ConfigError):  # any other may be about a run of another process
            forget_unbegun(run)
        from optrun.commands.messages import say

        raise SystemExit(say(error, argv)) from error


def forget_unbegun(run: RunDir) -> None:
    """Remove the directory of a run that was refused before it began, so that the mended command can have it."""
    if run.summary.exists() or run.metrics.exists():
        return
    shutil.rmtree(run.hydra, ignore_errors=True)
    for leftover in (run.config, run.log, run.lock, run.manifest):
        leftover.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something of the user's is in it
        run.path.rmdir()


def _request(own: DictConfig, argv: list[str], config_name: str, overrides: list[str]) -> Request:
    """A composed configuration without Hydra's node, typed and checked."""
    return Request(
        config=store.typed(own),
        values=saved.plain(own),
        argv=argv,
        config_name=config_name,
        overrides=overrides,
    )


def execute(request: Request, run: RunDir, resume: ResumePoint | None = None) -> None:
    """Train in a run directory and show the result.

    Raises:
        OptrunError: As `optrun.run.train.train`.
    """
    from rich.console import Console

    from optrun.run import console as outcome
    from optrun.run.resume.checkpoint import refuse_links
    from optrun.run.train import train
    from optrun.training.display import make_display

    console, config = Console(), request.config
    refuse_links(run)  # the log is the first that would be written through one
    with outcome.run_log(run):
        display = make_display(
            console, f"optrun · {config.task.name} · {config.model.name} · {config.optimizer.name} · lr {config.lr:g}"
        )
        outcome.introduce(display, config, run)
        done = train(request, run, display, resume)
        outcome.show(console, done, config.data)


# Going on -------------------------------------------------------------------------------------------------------------


def _refuse_other_recipe(run: RunDir, config_name: str | None) -> None:
    """A run goes on with its own configuration: a recipe that it was not started from would be left unread.

    Raises:
        ConfigError: `-cn` names another one than the run began with.
    """
    if config_name is None:
        return
    try:
        began = read_summary(run.summary).get("config_name", config_name)
    except (OSError, ValueError):
        return  # it did not get as far as its first step
    if began != config_name:
        raise ConfigError(
            f"-cn {config_name}: the run in {run.path} began with {began} and goes on with the configuration it has. "
            "Leave -cn out, and give what should change as key=value."
        )


def _resume(hydra: Hydra, config_name: str, args: argparse.Namespace, argv: list[str], value: str) -> int:
    from optrun.run.resume.target import find_target

    words = [word for word in args.overrides if not _is_resume(word)]
    place = [word for word in words if word.startswith("hydra.run.dir=")]
    given_dir = str(words_of.parse(place)[-1].value()) if place else None
    refuse_url("hydra.run.dir", given_dir)
    run_dir = None if given_dir is None else Path(given_dir)
    outputs = Path("outputs")
    target = find_target(value, run_dir=run_dir, outputs=outputs)
    if target is None:  # resume=auto, and nothing to resume
        checked = words_of.checked(hydra, config_name, args.overrides, sweep=False)
        cfg = store.compose(hydra, config_name, checked)
        # That took a moment, in which another process may have begun there, and ended.
        target = find_target(value, run_dir=run_dir, outputs=outputs)
        if target is None:
            return _single(hydra, config_name, checked, cfg, argv)
    own = [word for word in words if not word.startswith("hydra.")]
    other = [word for word in words if word.startswith("hydra.") and word not in place]
    if other:
        raise ConfigError(f"{other[0]}: has no effect on a run that goes on; leave it out.")
    _refuse_other_recipe(target.run, args.config_name)
    from optrun.run.resume.saved_config import configuration_of

    given = [override.key_or_group for override in words_of.parse(own)]
    kept, mended = configuration_of(target.run, given)
    before = saved.with_schemas(kept, str(target.run.config))
    began = original_cwd(target.run.hydra)
    rebase_paths(before, began)
    after = saved.changed(hydra, before, own)
    refuse_stored_trust(after, own)
    request = _request(after, argv, config_name, own)
    from optrun.run.resume.checkpoint import ResumePoint

    over = value in ("latest", "auto")
    said = [] if mended is None else [mended]
    point = ResumePoint(target.checkpoint, began, saved=bool(before.checkpoint.enabled), start_over=over, said=said)
    execute(request, target.run, point)
    return EXIT_DONE
