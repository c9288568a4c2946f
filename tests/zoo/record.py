"""Write down what grouping says of every architecture.

Python -m tests.zoo.record docs/reference/zoo.md.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

from optrun.base.formatting import size
from tests.zoo.zoo import DECAY_RATE, Row, build, examine, model_types


def main(path: Path) -> None:
    rows = []
    for model_type in model_types():
        model = build(model_type)
        rows.append(
            Row(model_type, why_not=model) if isinstance(model, str) else examine(model_type, model)
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_page(rows), encoding="utf-8")
    sys.stdout.write(f"{len(rows)} types -> {path}\n")


def _page(rows: list[Row]) -> str:
    built = [row for row in rows if row.kind]
    layered = [row for row in built if row.towers]
    refused = [row for row in built if not row.towers]
    absent = [row for row in rows if not row.kind]
    lines = [
        "# Parameter groups, architecture by architecture",
        "",
        (
            "What `param_groups=standard` and `param_groups=layerwise` say of every architecture"
            f" that transformers {version('transformers')} builds from a default configuration, on"
            " the meta device. Written by"
        ),
        "",
        "    python -m tests.zoo.record docs/reference/zoo.md",
        "",
        (
            f"Of {len(rows)} model types {len(built)} build. In all of them every trainable"
            " parameter is claimed exactly once. Every linear, convolution and embedding weight"
            " decays, and no norm weight, bias or other one-dimensional tensor does"
            f" ({sum(row.norms for row in built):,} tensors in normalisation layers). In"
            f" {len(layered)} the layers are told from the module tree. The scales fall"
            f" monotonically from the head (1) to the embeddings (here by {DECAY_RATE} a layer)."
        ),
        "",
        (
            "`optrun explain` was asked about each with `param_groups=layerwise optimizer=lamb`:"
            " what it shows is what the groups hold. LAMB's state is what it says of the memory."
        ),
        "",
        *_order_of_use(layered),
        "",
        (
            "| type | class | parameters | norm tensors | groups (standard, layerwise) | LAMB state"
            " | depth | used |"
        ),
        "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    for row in layered:
        depth = ", ".join(
            f"{tower} {depth}" if tower else str(depth) for tower, depth in row.towers.items()
        )
        numbers = (
            f"{row.parameters:,} | {row.norms} | {row.groups[0]}, {row.groups[1]} |"
            f" {size(row.state)}"
        )
        used = f"{row.used} of {row.tensors}" if row.used else "not run"
        lines.append(f"| {row.model_type} | {row.kind} | {numbers} | {depth} | {used} |")
    moved = [row for row in layered if row.moved]
    lines += ["", f"## Where names alone would be wrong ({len(moved)})", ""]
    lines += [
        "| type | tensors that the forward pass puts on the other side of the blocks |",
        "| --- | --- |",
    ]
    lines += [f"| {row.model_type} | {_listed(row.moved)} |" for row in moved]
    unseen = [row for row in layered if not row.used]
    lines += [
        "",
        f"## Not run over shapes ({len(unseen)})",
        "",
        "Names and registration place what lies beside the blocks.",
    ]
    lines += ["", "| type | why |", "| --- | --- |"]
    lines += [f"| {row.model_type} | {_cell(row.not_run)} |" for row in unseen]
    lines += [
        "",
        f"## Without a stack of blocks ({len(refused)})",
        "",
        "`layerwise` refuses these, in words:",
        "",
    ]
    lines += [f"- {row.model_type}: {row.message}" for row in refused]
    lines += ["", f"## Not buildable from a default configuration here ({len(absent)})", ""]
    lines += ["| type | what transformers says |", "| --- | --- |"]
    lines += [f"| {row.model_type} | {_cell(row.why_not)} |" for row in absent]
    return "\n".join(lines) + "\n"


def _order_of_use(layered: list[Row]) -> list[str]:
    ran = [row for row in layered if row.used]
    return [
        (
            f"**Beside the blocks.** {len(ran)} of these {len(layered)} run one forward pass over"
            " shapes. The example is tokens, images or sound (tokens alone if a model takes its"
            " images in another form). A tensor outside the blocks belongs to the embeddings if it"
            " is used before the first block, and to the head after the last. What is used between"
            " blocks, on both sides, or not at all keeps the side that its name and registration"
            " say. Independent forward hooks noted each call of a module. None that is called"
            " before the blocks is in the head, and none that is called after them in the"
            " embeddings."
        ),
    ]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(f"`{name}`" for name in names[:4]) + more


def _cell(text: str) -> str:
    return text.replace("|", chr(92) + "|")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/reference/zoo.md"))
