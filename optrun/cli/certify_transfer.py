"""`optrun certify transfer`: does a learning rate stay right as the model grows?"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base.errors import EXIT_DONE, EXIT_FAILED, ConfigError, printable
from optrun.cli.forced import with_forced

if TYPE_CHECKING:
    from rich.text import Text

    from optrun.config.request import CommandLine
    from optrun.optimizer.coordinates import CoordinateCheck, Line

KEYS = ("widths", "depths", "seeds")
DEFAULT_STEPS = 4
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
"""What the check takes in place of the run's own: a constant lr, few tokens, float64 on this machine."""


def run(asked: CommandLine, own: Mapping[str, str], *, steps: int, out: str | None, as_json: bool) -> int:
    """Check, and print the table.

    Args:
        asked: Of the verb, without its own keys.
        own: `widths`, `depths` and `seeds` as they were typed.
        steps: Of each model.
        out: Where the numbers go as JSON, and the picture beside them; None: outputs/certificates/.
        as_json: Print it as JSON, too.

    Returns:
        0 if every slope is right, else 1.
    """
    from optrun.cli.confirm_request import read_seeds
    from optrun.config import store
    from optrun.config.compose import compose_request

    widths = _sizes("widths", own.get("widths", "1,2,4,8"))
    depths = _sizes("depths", own["depths"]) if "depths" in own else None
    seeds = read_seeds(own.get("seeds", "0-1"))
    overrides, replaced = with_forced(asked.overrides, {**FORCED, "training.max_steps": str(steps)})
    request = compose_request(store.open_hydra(asked.config_dir), replace(asked, overrides=overrides))

    from rich.console import Console

    from optrun.certify.transfer import certify
    from optrun.report.coordinates_figure import draw_coordinates

    console = Console(stderr=as_json, highlight=False)
    for note in replaced:
        console.print(printable(note), markup=False, soft_wrap=True)
    began = time.monotonic()
    with console.status("certify transfer") as status:
        checks = certify(
            request,
            widths=widths,
            depths=depths,
            seeds=seeds,
            steps=steps,
            watch=lambda text: status.update(f"certify transfer · {text}"),
        )
    for check in checks:
        _show(console, check)
    failures = [line.in_words() for check in checks for line in check.failures]
    facts = {
        "argv": list(asked.argv),
        "steps": steps,
        "seeds": seeds,
        "holds": not failures,
        "failures": failures,
        "checks": [check.to_dict() for check in checks],
    }
    text = json.dumps(facts, indent=2)
    if as_json:
        sys.stdout.write(text + "\n")
    path = Path(out) if out else Path("outputs", "certificates", time.strftime("transfer-%Y-%m-%d-%H-%M-%S.json"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
    picture = draw_coordinates([check.to_dict() for check in checks], path.with_suffix(".png"))
    config = request.config
    models = sum(len(check.sizes) for check in checks) * len(seeds)
    console.print(
        f"parametrization={config.parametrization.name} optimizer={config.optimizer.name} lr={config.lr:g}: "
        f"{models} models of {steps} steps, {time.monotonic() - began:.0f} s",
        soft_wrap=True,
    )
    console.print(printable(f"written to {path} and {picture}"), markup=False, soft_wrap=True)
    if not failures:
        console.print("certified: nothing grows or dies with the size", style="bold green")
        return EXIT_DONE
    console.print(printable(f"not certified: {failures[0]}"), style="bold red", markup=False, soft_wrap=True)
    if len(failures) > 1:
        console.print(f"and {len(failures) - 1} more, in red above")
    return EXIT_FAILED


def _sizes(key: str, given: str) -> list[int]:
    numbers = [int(piece) for piece in given.split(",") if re.fullmatch(r"[1-9]\d{0,5}", piece.strip(), re.ASCII)]
    if len(numbers) < 3 or len(numbers) != given.count(",") + 1 or numbers != sorted(set(numbers)):
        raise ConfigError(f"{key}={given}: expected three or more rising whole numbers, as in {key}=1,2,4,8.")
    return numbers


def _show(console: object, check: CoordinateCheck) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from optrun.optimizer.coordinates import MEASURES

    assert isinstance(console, Console)
    title = f"power of the {check.along} (x{', x'.join(f'{size:g}' for size in check.sizes)}) in mean absolute sizes"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("parameter", "initial output", "its change", "by own update"):
        table.add_column(name, justify="left" if name == "parameter" else "right", overflow="fold")
    rows: dict[str, dict[str, Line]] = {}
    for line in check.lines:
        rows.setdefault(line.parameter, {})[line.measure] = line
    for name, lines in rows.items():
        table.add_row(printable(name), *(_cell(lines.get(measure)) for measure in MEASURES))
    console.print(table)
    console.print(Text("right: 0, and where another is right it stands behind; dim: not judged; red: off", style="dim"))


def _cell(line: Line | None) -> Text:
    from rich.text import Text

    if line is None:
        return Text("–", style="dim")
    right = f" ({line.expected:+g})" if line.expected else ""
    style = "bold red" if line.fails else "dim" if line.expected is None else ""
    return Text(f"{line.slope:+.2f} ±{2 * line.noise:.2f}{right}", style=style)
