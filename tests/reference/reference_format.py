"""The files.

Which keys they may hold, what is left out stands for, and how close a number must come.

What is not known here is an error. The format is described in the README beside this file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "float64": torch.float64}

TORCH = (
    "lion_pytorch",
    "schedulefree_adamw",
    "pytorch_optimizer_ademamix",
    "timm_mars",
    "pytorch_optimizer_soap",
)
"""Systems that are written for torch.

The same arithmetic, so that only the order of operations differs.
"""

ATOL = {
    ("paddle_lamb", "float32"): 3e-6,
    ("paddle_lamb", "float64"): 1e-6,
    ("paddle_adamax", "float32"): 2e-6,
    ("paddle_adamax", "float64"): 2e-7,
    ("paddlenlp_adamwdl", "float32"): 7e-6,
    ("paddlenlp_adamwdl", "float64"): 1e-8,
    ("tfm_lamb", "float32"): 2e-6,
    ("tfm_lamb", "float64"): 1e-7,
    ("mindspore_lazyadam", "float32"): 4e-6,
    **{(system, "float64"): 1e-13 for system in TORCH},
    ("pytorch_optimizer_soap", "float64"): 1e-6,
}
"""Absolute tolerance of a parameter by file and by the dtype a case was recorded in."""

RTOL = dict.fromkeys(TORCH, 1e-13) | {"pytorch_optimizer_soap": 1e-6}
"""Relative tolerance of a parameter; 1e-6 where a system is not listed."""

RTOL_SCHEDULE = {"paddle": 1e-12, "float32": 3e-6}
"""Relative tolerance of a rate.

Paddle computes it as a Python float, Keras and MindSpore as a float32.
"""

TABLES = {
    "paddle_lamb": {"clip_values"},
    "paddle_adamax": set(),
    "paddlenlp_adamwdl": {
        "layerwise_ratios",
        "inverse_square_root",
        "inverse_square_root_warmup_0_raises",
        "paddle_schedules",
    },
    "tfm_lamb": {"get_config", "keras_schedules", "normalised_names"},
    "mindspore_lazyadam": {"mindspore_schedules"},
    **{system: set() for system in TORCH},
}
"""Systems, and the value tables that may stand in any file."""


class FormatError(ValueError):
    """A file says something that is not in the format, so that its meaning is not known."""


def fields(where: str, source: Any, /, *needed: str, **defaults: Any) -> SimpleNamespace:
    """Every value of an object, the documented default where it is left out.

    Raises:
        FormatError: An unknown key, or one of `needed` that is not there.
    """
    if not isinstance(source, dict):
        raise FormatError(f"{where}: expected an object, got {source!r}.")
    known = {*needed, *defaults}
    for key in source:
        if key not in known:
            raise FormatError(
                f"{where}: unknown key {key!r}; known are {', '.join(sorted(known))}."
            )
    for key in needed:
        if key not in source:
            raise FormatError(f"{where}: has no {key!r}.")
    return SimpleNamespace(**{**defaults, **source})


def reference_dir() -> Path:
    """Where the recorded cases lie."""
    return Path(os.environ.get("OPTRUN_REFERENCE_DIR") or Path(__file__).parent)


@cache
def documents() -> list[tuple[str, dict[str, Any]]]:
    """Every file of the folder, with its name.

    Raises:
        FormatError: There is none.
    """
    found = [
        (path.name, json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(reference_dir().glob("*.json"))
    ]
    if not found:
        raise FormatError(f"{reference_dir()} holds no reference file (*.json).")
    return found


def check_document(where: str, document: dict[str, Any]) -> None:
    """Refuse a file of another format, of an unknown system, or with an unknown table."""
    tables: set[str] = set().union(*TABLES.values())
    file = fields(where, document, "schema", "system", source="", cases=[], **dict.fromkeys(tables))
    if file.schema != "golden-1":
        raise FormatError(f"{where}: schema {file.schema!r}, this reader knows golden-1.")
    if file.system not in TABLES:
        raise FormatError(
            f"{where}: unknown system {file.system!r}; known are {', '.join(TABLES)}."
        )
    ids = [case.get("id") for case in file.cases]
    if len(set(ids)) < len(ids):
        raise FormatError(f"{where}: two cases have one id.")


def entries(key: str) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Every entry of a table (or `cases`) of every file.

    The entry's name, its file and the entry.
    """
    for name, document in documents():
        table = document.get(key, [])
        for index, entry in enumerate(table if isinstance(table, list) else [table]):
            title = entry.get("id", entry.get("kind", index)) if isinstance(entry, dict) else index
            yield f"{name.removesuffix('.json')}-{title}-{index}", document, entry


def outside(got: Tensor, want: Tensor, *, atol: float, rtol: float) -> Tensor:
    """Where two tensors differ by more than the tolerance; NaN and infinities must be the same."""
    got = got.double()
    near = (got - want).abs() <= atol + rtol * want.abs()
    return ~(near | (got == want) | (got.isnan() & want.isnan()))


def check_number(what: str, got: float, want: Any, *, rtol: float, atol: float = 0.0) -> None:
    """Assert that a number agrees with the recorded one."""
    if isinstance(want, bool) or not isinstance(want, int | float):
        raise FormatError(f"{what}: expected a number, got {want!r}.")
    pair = torch.tensor([got, want], dtype=torch.float64)
    assert not outside(pair[0], pair[1], atol=atol, rtol=rtol), (
        f"{what}: {got!r}, recorded {want!r}"
    )


def check_same(what: str, got: Any, want: Any) -> None:
    """Assert that two things which are no measured numbers are equal."""
    assert got == want, f"{what}: {got!r}, recorded {want!r}"
