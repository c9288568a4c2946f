"""`optrun -m`: one run per combination, then the comparison."""

from __future__ import annotations

import functools
from pathlib import Path

from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from optrun.artifacts.run_dir import RunDir
from optrun.commands.train import execute, quoted, refuse_stored_trust
from optrun.config import saved, store
from optrun.errors import EXIT_DONE, EXIT_FAILED, ConfigError, OptrunError, StoppedEarly


def sweep(hydra: Hydra, config_name: str, words: list[str], cfg: DictConfig, argv: list[str]) -> int:
    """Run every combination, then compare.

    Args:
        hydra: Composes and launches.
        config_name: The primary configuration.
        words: Checked `key=value` words.
        cfg: Composed for the sweep, Hydra's node in it.
        argv: Words after `optrun`.

    Returns:
        0 where every run finished, else 1.
    """
    folder = Path(str(cfg.hydra.sweep.dir))
    task = functools.partial(sweep_job, argv=argv, config_name=config_name)
    try:
        hydra.multirun(
            config_name=config_name,
            task_function=task,
            overrides=[*words, "hydra.mode=MULTIRUN", f"hydra.sweep.dir={quoted(folder)}"],
        )
    except HydraException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    return _compare(folder)


def _compare(folder: Path) -> int:
    from rich.console import Console

    from optrun.report.build import report

    report([folder], console=Console())
    from optrun.artifacts.metrics import read_summary
    from optrun.artifacts.run_dir import find_runs

    states = [
        read_summary(RunDir(run).summary).get("status") for run in find_runs(folder) if RunDir(run).summary.exists()
    ]
    return EXIT_DONE if states and all(state == "finished" for state in states) else EXIT_FAILED


def sweep_job(cfg: DictConfig, *, argv: list[str], config_name: str) -> None:
    """One job: what goes wrong in it is told there and in its summary, and the others go on."""
    from optrun.cli import _say

    own = store.without_hydra(cfg)
    hydra_node = HydraConfig.get()
    run = RunDir(Path(hydra_node.runtime.output_dir))
    words = list(OmegaConf.to_container(hydra_node.overrides.task))  # type: ignore[arg-type]
    try:
        refuse_stored_trust(own, argv)
        execute(store.typed(own), saved.plain(own), run, argv, config_name, words)
    except StoppedEarly as error:
        raise SystemExit(_say(error)) from error  # a signal is meant for the whole sweep
    except OptrunError as error:
        _say(error)
