"""Write docs/reference/foreign.md: what comes of each optimizer of pytorch-optimizer."""

from __future__ import annotations

import inspect
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path

from tests.foreign.foreign import HALF, REFUSED, WHOLE, WORKS, Row, walk


def main(path: Path) -> None:
    rows = walk()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(rows), encoding="utf-8")
    sys.stdout.write(f"{len(rows)} optimizers -> {path}\n")


def page(rows: list[Row]) -> str:
    works, refused = (
        [row for row in rows if row.verdict == verdict] for verdict in (WORKS, REFUSED)
    )
    intro = [
        (
            "What comes of `optimizer=pytorch_optimizer optimizer.class_name=NAME` for every"
            f" optimizer class of pytorch_optimizer {version('pytorch_optimizer')}. Written by"
        ),
        "    python -m tests.foreign.record docs/reference/foreign.md",
        (
            f"Of {len(rows)} classes {len(works)} work."
            f" The other {len(refused)} are refused before the model is trained, by name and with"
            f" the reason. Each that is offered was trained for {WHOLE} steps on a small model. A"
            f" checkpoint was saved after {HALF}, and read into a freshly built one that went on."
            " Weights, state and counters are those of a run that was never saved and never"
            " evaluated, to the last bit."
        ),
        (
            "At the start of every run the state of the optimizer makes one round trip, with the"
            " options of that run. Small copies of its parameters are stepped, saved, loaded and"
            " stepped again. If a bit differs, the run ends there with the reason."
        ),
        (
            "`lr there` is the default of the library; optrun takes `optimizer.default_lr=1e-3` for"
            " all of them unless `lr` is given. `state` is the size of what a checkpoint keeps of"
            " it over that of the model."
        ),
    ]
    lines = ["# The optimizers of pytorch-optimizer, one by one"]
    for text in intro:
        lines += [
            "",
            text if text.startswith(" ") else textwrap.fill(text, 120, break_on_hyphens=False),
        ]
    lines += [
        "",
        f"## Works ({len(works)})",
        "",
        "| name | lr there | state |",
        "| --- | ---: | ---: |",
    ]
    lines += [f"| {row.name.lower()} | {_lr(row)} | {row.state:.1f} |" for row in works]
    lines += [
        "",
        f"## Refused ({len(refused)})",
        "",
        "| name | what optrun says |",
        "| --- | --- |",
    ]
    lines += [f"| {row.name.lower()} | {_reason(row)} |" for row in refused]
    return "\n".join(lines) + "\n"


def _lr(row: Row) -> str:
    import pytorch_optimizer

    return f"{inspect.signature(getattr(pytorch_optimizer, row.name)).parameters['lr'].default}"


def _reason(row: Row) -> str:
    said = row.what.split(": ", 1)[1]
    return said.replace("|", r"\|")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/reference/foreign.md"))
