"""`optrun certify transfer`: does a learning rate stay right as the model grows?"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from optrun.base.errors import EXIT_DONE, EXIT_FAILED, ConfigError, printable
from optrun.cli.certificate import ProofConsole, with_forced
from optrun.cli.parser import VerbArguments

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from optrun.optimizer.coordinates import CoordinateCheck, SlopeLine

FORCED = {
    "scheduler": "constant",
    "scheduler.num_warmup_steps": "0",
    "training.per_device_train_batch_size": "2",
    "training.gradient_accumulation_steps": "1",
    "training.global_batch_size": "null",
    "training.precision": "fp32",
    "training.compile": "false",
    "training.device": "cpu",
    "distributed": "none",
    "tracking": "none",
}
"""What the check takes in place of the run's own: a constant lr, few tokens, float64 on this
machine."""


def run(arguments: VerbArguments, output: ProofConsole) -> int:
    """Check how updates scale with the width, and print the table.

    Returns:
        0 if every slope is within its limits, else 1.
    """
    from optrun.cli.values import read_seeds
    from optrun.config.compose import compose_changed

    key_values = arguments.key_values
    command_line = arguments.command_line()
    steps = output.read_whole_number("steps", 4, 1)
    widths = _sizes("widths", key_values.get("widths", "1,2,4,8"))
    depths = _sizes("depths", key_values["depths"]) if "depths" in key_values else None
    seeds = read_seeds(key_values.get("seeds", "0-1"))
    overrides, replaced = with_forced(
        command_line.overrides, {**FORCED, "training.max_steps": str(steps)}
    )
    request = compose_changed(command_line, overrides)

    from optrun.certify.transfer import certify
    from optrun.optimizer.coordinates import WRONG_FACTOR

    for note in replaced:
        output.say(note)
    began = time.monotonic()
    with output.watched() as watch:
        checks = certify(
            request, widths=widths, depths=depths, seeds=seeds, steps=steps, watch=watch
        )
    for check in checks:
        _show(output.console, check)
    lines = [line for check in checks for line in check.failures]
    failures = [line.describe_failure() for line in lines]
    facts = {
        "argv": list(command_line.argv),
        "steps": steps,
        "seeds": seeds,
        "holds": not failures,
        "failures": failures,
        "checks": [check.to_dict() for check in checks],
    }
    path = output.publish(facts, always=True)
    assert path is not None
    config = request.config
    models = sum(len(check.sizes) for check in checks) * len(seeds)
    output.say(
        f"parametrization={config.parametrization.name} optimizer={config.optimizer.name}"
        f" lr={config.lr:g}: {models} models of {steps} steps, {time.monotonic() - began:.0f} s"
    )
    output.say(f"written to {path}")
    if not failures:
        output.say("certified: nothing grows or dies with the size", "bold green")
        return EXIT_DONE
    output.say(f"not certified: {failures[0]}", "bold red")
    if len(failures) > 1:
        output.say(f"and {len(failures) - 1} more, in red above")
    if all(line.deviation < WRONG_FACTOR for line in lines):
        output.say(
            "A wrong factor moves a power by a half or more, noise of narrow models by less. Check"
            " a base four times as wide, with seeds=0-3: noise shrinks there, a wrong factor stays."
        )
    return EXIT_FAILED


def _sizes(key: str, text: str) -> list[int]:
    """Read three or more rising whole numbers, such as 1,2,4,8.

    Raises:
        ConfigError: The text is anything else.
    """
    pieces = [piece.strip() for piece in text.split(",")]
    are_numbers = all(re.fullmatch(r"[1-9]\d{0,5}", piece, re.ASCII) for piece in pieces)
    sizes = [int(piece) for piece in pieces] if are_numbers else []
    if len(sizes) < 3 or sizes != sorted(set(sizes)):
        raise ConfigError(
            f"{key}={text}: expected three or more rising whole numbers, as in {key}=1,2,4,8."
        )
    return sizes


def _show(console: Console, check: CoordinateCheck) -> None:
    """Print a table of powers: a row for each parameter, a column for each measure.

    Args:
        console: Where it is printed.
        check: The coordinate check along width or depth.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from optrun.optimizer.coordinates import MEASURES

    title = (
        f"power of the {check.along} (x{', x'.join(f'{size:g}' for size in check.sizes)}) in mean"
        " absolute sizes"
    )
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for name in ("parameter", "initial output", "its change", "by own update"):
        table.add_column(name, justify="left" if name == "parameter" else "right", overflow="fold")
    rows: dict[str, dict[str, SlopeLine]] = {}
    for line in check.lines:
        rows.setdefault(line.parameter, {})[line.measure] = line
    for name, lines in rows.items():
        table.add_row(printable(name), *(_cell(lines.get(measure)) for measure in MEASURES))
    console.print(table)
    console.print(
        Text(
            "The right value is 0, or the one in parentheses; dim: not tested; red: wrong.",
            style="dim",
        )
    )


def _cell(line: SlopeLine | None) -> Text:
    """Write a slope with its spread, and the right value in parentheses unless it is 0.

    Such as `+0.02 ±0.01` or `-0.48 (-0.5)`. Red if it fails, dim if it is not tested; a dash for
    None.
    """
    from rich.text import Text

    if line is None:
        return Text("–", style="dim")
    text = f"{line.slope:+.2f}{line.spread}"
    if line.expected or line.below:
        text += f" ({line.right})"
    if line.fails:
        return Text(text, "bold red")
    if line.expected is None:
        return Text(text, "dim")
    return Text(text)
