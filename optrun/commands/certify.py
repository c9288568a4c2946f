"""`optrun certify resume`: proof, on the user's own configuration."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.commands import train
from optrun.commands.arguments import Words, parse_arguments
from optrun.commands.messages import guarded
from optrun.errors import EXIT_DONE, EXIT_FAILED, ConfigError, printable, refuse_url

if TYPE_CHECKING:
    from optrun.certify.resume import Certificate

USAGE = """
optrun certify resume [-cn RECIPE] [KEY=VALUE ...] [--steps N] [--kills N] [--seed N] [--out FILE] [--json]

Trains this configuration for a few steps (12) in a temporary folder, once undisturbed, then killed (8 times, SIGKILL)
at random moments, most of them inside a save, and resumed. Weights, optimizer state, schedule, loss scale, random
states, sample order, counters and metrics lines must be equal to the last bit. Prints the certificate and writes it as
JSON, or names the first tensor that differs. Exit code 0: it holds; 1: it does not.

  --out FILE  where the certificate goes (default: outputs/certificates/)
  --json      print it as JSON instead of tables
"""
OPTIONS = {
    "--steps": True, "--kills": True, "--seed": True, "--out": True, "--json": False,
    "--config-name": True, "--config-dir": True,
}  # fmt: skip
_FORCED = {
    "training.logging_steps": "1",
    "training.max_seconds": "null",
    "checkpoint.save_steps": "1",
    "tracking": "none",
}


def run(argv: list[str]) -> int:
    """Prove and tell.

    Returns:
        0 where the claim holds, else 1.
    """
    words = parse_arguments("certify", argv, USAGE, OPTIONS)
    if words is None:
        return EXIT_DONE
    if words.positional != ["resume"]:
        raise ConfigError("optrun certify takes the claim to prove: optrun certify resume [KEY=VALUE ...]")
    steps, kills, seed = (_whole(words, name, least) for name, least in (("steps", 2), ("kills", 1), ("seed", 0)))
    refuse_url("--out", words.flags.get("--out"))
    command, replaced = command_line(words, steps)

    from rich.console import Console

    from optrun.certify.resume import certify

    console = Console(stderr="--json" in words.flags)
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
    text = json.dumps(paper.to_dict(), indent=2)
    if "--json" in words.flags:
        sys.stdout.write(text + "\n")
    else:
        show(console, paper)
    place = words.flags.get("--out")
    if place is not None or "--json" not in words.flags:
        out = Path(place) if place else Path("outputs", "certificates", time.strftime("resume-%Y-%m-%d-%H-%M-%S.json"))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8")
        console.print(f"written to {out}", markup=False, highlight=False, soft_wrap=True)
    if paper.difference is not None:
        console.print(f"the runs are kept in {folder}", markup=False, highlight=False, soft_wrap=True)
        return EXIT_FAILED
    import shutil

    shutil.rmtree(folder)
    return EXIT_DONE


def _whole(words: Words, name: str, least: int) -> int:
    given = words.flags.get(f"--{name}") or {"steps": "12", "kills": "8", "seed": "0"}[name]
    if not given.isdecimal() or int(given) < least:
        raise ConfigError(f"optrun certify --{name} {given}: expected a whole number, {least} or more.")
    return int(given)


def command_line(words: Words, steps: int) -> tuple[list[str], list[str]]:
    """What is run: the user's words, with what a proof needs in their place.

    Args:
        words: Of the verb.
        steps: Of each run.

    Returns:
        The words, and a sentence for each of the user's that another one took the place of.

    Raises:
        ConfigError: A word that has no meaning here, or a configuration that does not compose.
    """
    from optrun.config import overrides as words_of
    from optrun.config import store
    from optrun.config.safety import refuse_stored_trust

    forced = {**_FORCED, "training.max_steps": str(steps)}
    kept, replaced = [], []
    for word in words.overrides:
        key = word.split("=", 1)[0].lstrip("+")
        if key == "resume" or key.startswith("hydra."):
            raise ConfigError(f"{word}: certify chooses where it runs and resumes by itself; leave it out.")
        if key == "checkpoint":
            if word == "checkpoint=none":
                raise ConfigError(f"{word}: nothing is saved, so there is nothing to resume from.")
        elif key.startswith("tracking."):
            replaced.append(f"{word}: nothing is tracked here")
            continue
        elif key == "training.num_train_epochs":
            replaced.append(f"{word}: certify takes training.max_steps={steps} (--steps)")
            continue
        elif key in forced:
            if word.partition("=")[2] != forced[key]:
                way = " (--steps)" if key == "training.max_steps" else ""
                replaced.append(f"{word}: certify takes {key}={forced[key]}{way}")
            continue
        kept.append(word)
    own = [*kept, *(f"{key}={value}" for key, value in forced.items())]
    name = words.flags.get("--config-name") or store.DEFAULT_CONFIG
    directory = words.flags.get("--config-dir")
    hydra = store.open_hydra(directory)
    checked = words_of.checked(hydra, name, own, sweep=False)
    cfg = store.without_hydra(store.compose(hydra, name, checked))
    refuse_stored_trust(cfg, checked)
    config = store.typed(cfg)
    if not config.checkpoint.enabled:
        raise ConfigError("checkpoint=none: nothing is saved, so there is nothing to resume from.")
    options = ["-cn", name]
    if directory is not None:
        options += ["--config-dir", str(Path(directory).resolve())]
    return [*options, *own], replaced


def show(console: object, paper: Certificate) -> None:
    """The certificate as tables.

    Args:
        console: A rich console.
        paper: What came out.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    assert isinstance(console, Console)
    table = Table(
        title=Text(printable(" ".join(paper.words)), style="dim"), title_justify="left", caption_justify="left"
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
