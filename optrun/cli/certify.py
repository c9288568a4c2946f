"""`optrun certify resume`, `optimizer` and `transfer`: proof, on the user's own configuration."""

from __future__ import annotations

import functools
import json
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base.errors import EXIT_DONE, EXIT_FAILED, ConfigError, printable, refuse_url
from optrun.cli import certify_transfer
from optrun.cli.forced import with_forced
from optrun.cli.messages import guarded
from optrun.cli.parser import VerbArguments, VerbParser
from optrun.config.registry import plugins

if TYPE_CHECKING:
    from optrun.certify.resume import Certificate
    from optrun.config.request import CommandLine

_FORCED = {
    "training.logging_steps": "1",
    "training.max_seconds": "null",
    "checkpoint.save_steps": "1",
    "tracking": "none",
}


def parser() -> VerbParser:
    """Build the parser of the verb."""
    made = VerbParser(
        "certify",
        "resume | optimizer [dialect=NAME] | transfer [widths=1,2,4,8] [depths=1,2,4] [seeds=0-1] [KEY=VALUE ...]",
        """
resume: trains this configuration for a few steps in a temporary folder, once undisturbed, then killed (SIGKILL) at
random moments, most of them inside a save, and resumed. Weights, optimizer state, schedule, loss scale, random states,
sample order, counters and metrics lines must be equal to the last bit. Prints the certificate and writes it as JSON, or
names the first tensor that differs.

optimizer: takes the configured optimizer and that of a package (dialect=timm, apex, deepspeed, optax, ...), or one that
--plugin registers (dialect=ITS_NAME), over the same weights, gradients and groups. Says that they are equal, or at
which step, in which tensor and by which term they part, with the options that would make them equal.

transfer: trains models of several widths (times the base of parametrization.base, or the model itself) and depths for a
few steps. What a layer puts out, what the steps change of it, and what each parameter's update adds to that must not
grow or die with the size. Prints the powers, draws them, or names the parameter that is off.

Exit code 0: it holds; 1: it does not.
""",
        overrides=True,
        keys=("dialect", *certify_transfer.KEYS),
    )
    made.add_recipe_options()
    made.add_argument(
        "--steps", metavar="N", help="optimizer steps (default: 12 of each run; optimizer: 20, transfer: 4)"
    )
    made.add_argument("--kills", metavar="N", help="resume: kills in all (default: 8)")
    made.add_argument("--seed", metavar="N", help="chooses the moments, or the gradients (default: 0)")
    made.add_argument("--out", metavar="FILE", help="where the certificate goes (default: outputs/certificates/)")
    made.add_argument("--json", action="store_true", help="print it as JSON instead of tables")
    return made


def run(argv: list[str]) -> int:
    """Prove, and print the certificate.

    Returns:
        0 where the claim holds, else 1.
    """
    arguments = parser().parse(argv)
    if arguments is None:
        return EXIT_DONE
    options = arguments.options
    if arguments.positional not in (["resume"], ["optimizer"], ["transfer"]):
        raise ConfigError(
            "optrun certify takes the claim to prove: optrun certify resume [KEY=VALUE ...], "
            "optrun certify optimizer dialect=NAME [KEY=VALUE ...], or optrun certify transfer [KEY=VALUE ...]"
        )
    claim = arguments.positional[0]
    for token in arguments.overrides:
        key = token.partition("=")[0]
        owner = "optimizer" if key == "dialect" else "transfer" if key in certify_transfer.KEYS else claim
        if owner != claim:
            raise ConfigError(f"{token}: goes with optrun certify {owner}, not with {claim}.")
    if claim == "optimizer":
        return _optimizer(arguments, argv)
    if claim == "transfer":
        return _transfer(arguments, argv)
    steps = _whole("steps", options.steps or "12", 2)
    kills = _whole("kills", options.kills or "8", 1)
    seed = _whole("seed", options.seed or "0", 0)
    refuse_url("--out", options.out)
    command, replaced = command_line(arguments.command_line(argv), steps)

    from rich.console import Console

    from optrun.certify.resume import certify
    from optrun.cli import train

    console = Console(stderr=options.json)
    for note in replaced:
        console.print(printable(note), markup=False, highlight=False, soft_wrap=True)
    folder = Path(tempfile.mkdtemp(prefix="optrun-certify-"))
    with console.status("certify resume") as status:
        paper = certify(
            functools.partial(guarded, train.run),
            command,
            steps=steps,
            kills=kills,
            seed=seed,
            folder=folder,
            watch=lambda text: status.update(f"certify resume · {text}"),
        )
    paper.argv[:0] = plugins.options(plugins.LOADED.values())
    text = json.dumps(paper.to_dict(), indent=2)
    if options.json:
        sys.stdout.write(text + "\n")
    else:
        show(console, paper)
    if options.out is not None or not options.json:
        stamped = time.strftime("resume-%Y-%m-%d-%H-%M-%S.json")
        out = Path(options.out) if options.out else Path("outputs", "certificates", stamped)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8")
        console.print(f"written to {out}", markup=False, highlight=False, soft_wrap=True)
    if paper.difference is not None:
        console.print(f"the runs are kept in {folder}", markup=False, highlight=False, soft_wrap=True)
        return EXIT_FAILED
    shutil.rmtree(folder)
    return EXIT_DONE


def _optimizer(arguments: VerbArguments, argv: list[str]) -> int:
    from optrun.cli import certify_optimizer

    options = arguments.options
    if options.kills is not None:
        raise ConfigError("--kills: goes with optrun certify resume; nothing is killed here.")
    refuse_url("--out", options.out)
    return certify_optimizer.run(
        arguments.command_line(argv),
        steps=_whole("steps", options.steps or str(certify_optimizer.DEFAULT_STEPS), 1),
        seed=_whole("seed", options.seed or "0", 0),
        out=options.out,
        as_json=options.json,
    )


def _transfer(arguments: VerbArguments, argv: list[str]) -> int:
    options = arguments.options
    for name, instead in (("kills", "nothing is killed here"), ("seed", "give seeds=0-2")):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name}: does not go with optrun certify transfer; {instead}.")
    refuse_url("--out", options.out)
    is_own = {token: token.partition("=")[0] in certify_transfer.KEYS for token in arguments.overrides}
    own = replace(arguments, overrides=[token for token in is_own if is_own[token]]).values("certify transfer")
    asked = replace(arguments.command_line(argv), overrides=[token for token in is_own if not is_own[token]])
    steps = _whole("steps", options.steps or str(certify_transfer.DEFAULT_STEPS), 1)
    return certify_transfer.run(asked, own, steps=steps, out=options.out, as_json=options.json)


def _whole(name: str, given: str, least: int) -> int:
    if not given.isdecimal() or int(given) < least:
        raise ConfigError(f"optrun certify --{name} {given}: expected a whole number, {least} or more.")
    return int(given)


def command_line(asked: CommandLine, steps: int) -> tuple[list[str], list[str]]:
    """Build the command line of the trials: what was asked for, with what a proof needs.

    Args:
        asked: Of the verb.
        steps: Of each run.

    Returns:
        Arguments after `optrun`, and a note for each override of the user's that another one replaces.

    Raises:
        ConfigError: An override that has no meaning here, or a configuration that does not compose.
    """
    from optrun.config import store
    from optrun.config.branch import is_branch
    from optrun.config.compose import compose_request

    for token in filter(is_branch, asked.overrides):
        raise ConfigError(f"{token}: the runs of a certificate begin at step 0; leave it out.")
    own, replaced = with_forced(asked.overrides, {**_FORCED, "training.max_steps": str(steps)})
    request = compose_request(store.open_hydra(asked.config_dir), replace(asked, overrides=own))
    if not request.config.checkpoint.enabled:
        raise ConfigError("checkpoint=none: nothing is saved, so there is nothing to resume from.")
    options = ["-cn", asked.config_name]
    if asked.config_dir is not None:
        options += ["--config-dir", str(Path(asked.config_dir).resolve())]
    return [*options, *own], replaced


def show(console: object, paper: Certificate) -> None:
    """Show the certificate as tables.

    Args:
        console: A rich console.
        paper: What came out.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    assert isinstance(console, Console)
    table = Table(
        title=Text(printable(" ".join(paper.argv)), style="dim"), title_justify="left", caption_justify="left"
    )
    for name in ("compared", "values", "digest of the undisturbed run", "after kill and resume"):
        table.add_column(name, justify="right" if name == "values" else "left")
    for section in paper.sections:
        verdict = Text("equal", style="green") if section.difference is None else Text("differs", style="red")
        table.add_row(section.name, f"{section.count:,}", section.digest, verdict)
    console.print(table)
    fell = ", ".join(f"{count} {where}" for where, count in paper.fell.most_common())
    console.print(
        f"{len(paper.kills)} kills in {paper.runs} runs of {paper.steps} steps, {paper.starts} starts, "
        f"{paper.seconds:.0f} s: {fell or 'none'}",
        highlight=False,
    )
    if paper.difference is None:
        console.print(Text("certified: resumed runs equal the undisturbed run to the last bit", style="bold green"))
    else:
        console.print(Text(printable(f"not certified: {paper.difference}"), style="bold red"))
