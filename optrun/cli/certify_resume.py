"""`optrun certify resume`: a run that is killed and resumed equals the undisturbed one."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base.errors import EXIT_DONE, EXIT_FAILED, ConfigError, printable
from optrun.base.formatting import plural
from optrun.cli.certificate import ProofConsole, with_forced
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


def run(arguments: VerbArguments, output: ProofConsole) -> int:
    """Train, kill and resume a configuration in a temporary folder, and print the certificate.

    The folder is deleted if all runs are equal, and kept otherwise.

    Returns:
        0 if every resumed run equals the uninterrupted one, else 1.
    """
    steps = output.read_whole_number("steps", 12, 2)
    kills = output.read_whole_number("kills", 8, 1)
    seed = output.read_whole_number("seed", 0, 0)
    command, replaced, config = command_line(arguments.command_line(), steps)

    from optrun.certify.resume import certify
    from optrun.cli import train

    for note in replaced:
        output.say(note)
    hidden = _hidden_attributes(config)
    for name in hidden:
        output.say(
            f"warning: {name} changes in step() and is in no state dict: a resume begins it anew",
            "yellow",
        )
    folder = Path(tempfile.mkdtemp(prefix="optrun-certify-"))
    with output.watched() as watch:
        certificate = certify(
            functools.partial(guarded, train.run),
            command,
            steps=steps,
            kills=kills,
            seed=seed,
            folder=folder,
            watch=watch,
        )
    # The recorded command line loads the plugins again.
    certificate.argv[:0] = plugins.options(plugins.LOADED.values())
    out = output.publish(certificate.to_dict(), always=not output.options.json)
    if not output.options.json:
        _show(output, certificate, hidden)
    if out is not None:
        output.say(f"written to {out}")
    if certificate.difference is not None:
        output.say(f"the runs are kept in {folder}")
        return EXIT_FAILED
    shutil.rmtree(folder)
    return EXIT_DONE


def _hidden_attributes(config: RunConfig) -> list[str]:
    """List attributes that the optimizer changes in `step()` and leaves out of its state dict.

    A resume would begin them anew. Names such as `BeliefSign.t`; empty if there are none, or if the
    optimizer fails on a small layer.
    """
    from optrun.certify.hidden_state import hidden_attributes
    from optrun.optimizer.build import build_optimizer

    def build(params: list[tuple[str, Parameter]]) -> Optimizer:
        return build_optimizer(config.optimizer, [{"params": params}], lr=config.lr)

    try:
        # Takes a few steps on a small layer, loads the state dict into a second optimizer, and
        # returns the names of changed attributes that the second one then has other values of.
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


def _show(output: ProofConsole, certificate: Certificate, hidden: list[str]) -> None:
    """Print the certificate: a table of the compared values, the kills, and the verdict.

    Args:
        output: Where it is printed.
        certificate: The certificate.
        hidden: Attributes of the optimizer that no state dict holds. If there are any, a
            certificate says that it does not cover what they do after the last step.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(printable(" ".join(certificate.argv)), style="dim"),
        title_justify="left",
        caption_justify="left",
    )
    for name in ("compared", "values", "digest of the undisturbed run", "after kill and resume"):
        table.add_column(name, justify="right" if name == "values" else "left")
    for section in certificate.sections:
        if section.difference is None:
            verdict = Text("equal", style="green")
        else:
            verdict = Text("differs", style="red")
        table.add_row(section.name, f"{section.count:,}", section.digest, verdict)
    output.console.print(table)
    # Such as `5 inside a save (the process)`; the victim is what was killed.
    kills = [
        f"{count} {where} ({victim})"
        for (victim, where), count in certificate.victims.most_common()
    ]
    output.say(
        f"{plural(len(certificate.kills), 'kill')} in {plural(certificate.runs, 'run')} of"
        f" {certificate.steps} steps, {plural(certificate.starts, 'start')},"
        f" {certificate.seconds:.0f} s: {', '.join(kills) or 'none'}"
    )
    if certificate.difference is None:
        output.say(
            f"certified over {certificate.steps} steps: resumed runs equal the undisturbed run to"
            " the last bit",
            "bold green",
        )
        if hidden:
            output.say(
                f"What {', '.join(hidden)} does after step {certificate.steps} was not shown;"
                " give --steps N",
                "yellow",
            )
    else:
        output.say(f"not certified: {certificate.difference}", "bold red")
