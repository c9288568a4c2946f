"""`optrun certify resume`: a run that is killed and resumed equals the undisturbed one."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base.errors import EXIT_DONE, EXIT_FAILED, ConfigError, printable
from optrun.base.formatting import plural
from optrun.cli.certificate import Desk, with_forced
from optrun.cli.messages import guarded
from optrun.cli.parser import VerbArguments
from optrun.config.registry import plugins

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from optrun.certify.resume import Certificate
    from optrun.config.request import CommandLine
    from optrun.config.schema.run import RunConfig

_FORCED = {
    "training.logging_steps": "1",
    "training.max_seconds": "null",
    "checkpoint.save_steps": "1",
    "tracking": "none",
}


def run(arguments: VerbArguments, desk: Desk) -> int:
    """Prove the named claim, and print the certificate.

    Returns:
        0 if every resumed run equals the uninterrupted one, else 1.
    """
    steps = desk.read_whole_number("steps", 12, 2)
    kills = desk.read_whole_number("kills", 8, 1)
    seed = desk.read_whole_number("seed", 0, 0)
    command, replaced, config = command_line(arguments.command_line(), steps)

    from optrun.certify.resume import certify
    from optrun.cli import train

    for note in replaced:
        desk.say(note)
    hidden = _hidden_attributes(config)
    for name in hidden:
        desk.say(
            f"warning: {name} changes in step() and is in no state dict: a resume begins it anew",
            "yellow",
        )
    folder = Path(tempfile.mkdtemp(prefix="optrun-certify-"))
    with desk.watched() as watch:
        paper = certify(
            functools.partial(guarded, train.run),
            command,
            steps=steps,
            kills=kills,
            seed=seed,
            folder=folder,
            watch=watch,
        )
    paper.argv[:0] = plugins.options(plugins.LOADED.values())
    out = desk.publish(paper.to_dict(), always=not desk.options.json)
    if not desk.options.json:
        _show(desk, paper, hidden)
    if out is not None:
        desk.say(f"written to {out}")
    if paper.difference is not None:
        desk.say(f"the runs are kept in {folder}")
        return EXIT_FAILED
    shutil.rmtree(folder)
    return EXIT_DONE


def _hidden_attributes(config: RunConfig) -> list[str]:
    """List attributes of the optimizer missing from its state.

    Empty if the optimizer fails on a small layer.
    """
    from optrun.certify.hidden_state import hidden_attributes
    from optrun.optimizer.build import build_optimizer

    def build(params: list[tuple[str, Parameter]]) -> Optimizer:
        return build_optimizer(config.optimizer, [{"params": params}], lr=config.lr)

    try:
        return hidden_attributes(build)
    except Exception:  # of a stranger's optimizer: the trials say what is wrong with it
        return []


def command_line(line: CommandLine, steps: int) -> tuple[list[str], list[str], RunConfig]:
    """Build the command line of the trials.

    Args:
        line: Command line of the verb.
        steps: Optimizer steps of each run.

    Returns:
        Arguments after `optrun`, a note for each typed override that was replaced, and the
        configuration.

    Raises:
        ConfigError: An override has no effect here, or the configuration does not compose.
    """
    from optrun.config.compose import compose_changed

    forced = {**_FORCED, "training.max_steps": str(steps)}
    tokens, replaced = with_forced(line.overrides, forced)
    request = compose_changed(line, tokens)
    if not request.config.checkpoint.enabled:
        raise ConfigError("checkpoint=none: nothing is saved, so there is nothing to resume from.")
    options = ["-cn", line.config_name]
    if line.config_dir is not None:
        options += ["--config-dir", str(Path(line.config_dir).resolve())]
    return [*options, *tokens], replaced, request.config


def _show(desk: Desk, paper: Certificate, hidden: list[str]) -> None:
    """Print the certificate: a table of what was compared, the kills, and the verdict.

    Args:
        desk: Where it is printed.
        paper: The certificate.
        hidden: Attributes of the optimizer that no state dict holds; a yellow line names them.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(printable(" ".join(paper.argv)), style="dim"),
        title_justify="left",
        caption_justify="left",
    )
    for name in ("compared", "values", "digest of the undisturbed run", "after kill and resume"):
        table.add_column(name, justify="right" if name == "values" else "left")
    for section in paper.sections:
        if section.difference is None:
            verdict = Text("equal", style="green")
        else:
            verdict = Text("differs", style="red")
        table.add_row(section.name, f"{section.count:,}", section.digest, verdict)
    desk.console.print(table)
    fell = ", ".join(
        f"{count} {where} ({victim})" for (victim, where), count in paper.victims.most_common()
    )
    desk.say(
        f"{plural(len(paper.kills), 'kill')} in {plural(paper.runs, 'run')} of {paper.steps} steps,"
        f" {plural(paper.starts, 'start')}, {paper.seconds:.0f} s: {fell or 'none'}"
    )
    if paper.difference is None:
        desk.say(
            f"certified over {paper.steps} steps: resumed runs equal the undisturbed run to the"
            " last bit",
            "bold green",
        )
        if hidden:
            desk.say(
                f"What {', '.join(hidden)} does after step {paper.steps} was not shown;"
                " give --steps N",
                "yellow",
            )
    else:
        desk.say(f"not certified: {paper.difference}", "bold red")
