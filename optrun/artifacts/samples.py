"""`samples.jsonl`: what a model answered at each evaluation, written and read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from optrun.artifacts.atomic import replace_text
from optrun.base.errors import UnreadableFileError
from optrun.base.reading import parse_json, read_lines


@dataclass(frozen=True)
class SampleLine:
    """One answer."""

    step: int
    """Optimizer steps before it."""
    prompt: str
    reference: str | None
    """What the row says; None: nothing."""
    generated: str


def write_samples(path: Path, lines: Sequence[SampleLine]) -> None:
    """Replace the file by one rename.

    Raises:
        OSError: The disk refused; the file is the old one.
    """
    replace_text(
        path, "".join(json.dumps(asdict(line), ensure_ascii=False) + "\n" for line in lines)
    )


def read_samples(path: Path) -> list[SampleLine]:
    """Read every complete line; nothing if there is no such file."""
    samples = []
    try:
        lines = list(read_lines(path))
    except (OSError, UnreadableFileError):
        return []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            values = parse_json(line, path)
            reference = None if values["reference"] is None else str(values["reference"])
            samples.append(
                SampleLine(
                    int(values["step"]), str(values["prompt"]), reference, str(values["generated"])
                )
            )
    return samples
