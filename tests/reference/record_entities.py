"""Record what seqeval counts: PYTHONPATH=SEQEVAL python -m tests.reference.record_entities FILE

Sentences of each scheme, as their entities say, and labels drawn without any rule, which no scheme
allows.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "entities" / "recorded.json"
PREFIXES = {
    "IOB1": "BI",
    "IOB2": "BI",
    "IOE1": "IE",
    "IOE2": "IE",
    "IOBES": "BIES",
    "BILOU": "BILU",
}
TYPES = ("PER", "LOC")


def drawn_entities(draw: random.Random) -> list[tuple[str | None, int]]:
    """Type and length of each stretch of a sentence; None: no entity."""
    return [
        (draw.choice([None, *TYPES]), draw.choice([1, 1, 2, 3])) for _ in range(draw.randint(0, 5))
    ]


def written(stretches: Sequence[tuple[str | None, int]], scheme: str) -> list[str]:
    """The labels of a sentence in a scheme.

    Example:
        >>> written([("PER", 2), ("PER", 1), (None, 1)], "IOB1")
        ['I-PER', 'I-PER', 'B-PER', 'O']
        >>> written([("PER", 2), ("LOC", 1)], "BILOU")
        ['B-PER', 'L-PER', 'U-LOC']
    """
    labels: list[str] = []
    for place, (kind, length) in enumerate(stretches):
        if kind is None:
            labels += ["O"] * length
            continue
        prefixes = ["I"] * length
        if scheme == "IOB2" or (scheme == "IOB1" and place and stretches[place - 1][0] == kind):
            prefixes[0] = "B"
        elif scheme == "IOE2" or (
            scheme == "IOE1" and [then for then, _ in stretches[place + 1 : place + 2]] == [kind]
        ):
            prefixes[-1] = "E"
        elif scheme in ("IOBES", "BILOU"):
            last, single = ("E", "S") if scheme == "IOBES" else ("L", "U")
            prefixes = [single] if length == 1 else ["B", *prefixes[2:], last]
        labels += [f"{prefix}-{kind}" for prefix in prefixes]
    return labels


def main(path: Path) -> None:
    labeling: Any = importlib.import_module("seqeval.metrics.sequence_labeling")
    strict: Any = importlib.import_module("seqeval.metrics.v1")
    schemes: Any = importlib.import_module("seqeval.scheme")
    draw = random.Random(0)
    cases: list[dict[str, Any]] = []
    for scheme, prefixes in PREFIXES.items():
        every = ["O", *(f"{prefix}-{kind}" for prefix in prefixes for kind in TYPES)]
        for form in ("of the scheme", "of no scheme"):
            actual, predicted = [], []
            for _ in range(30):
                stretches = drawn_entities(draw)
                labels = written(stretches, scheme)
                if form == "of no scheme":
                    labels = [draw.choice(every) for _ in labels]
                    other = [draw.choice([label, *every]) for label in labels]
                else:
                    moved = [
                        (draw.choice([kind, kind, kind, *TYPES]), length)
                        for kind, length in stretches
                    ]
                    other = written(moved, scheme)
                actual.append(labels)
                predicted.append(other)
            case = {"scheme": scheme, "form": form, "actual": actual, "predicted": predicted}
            options = {"average": "micro", "zero_division": 0}
            if scheme != "BILOU":  # its default mode does not know L and U
                case["default"] = labeling.precision_recall_fscore_support(
                    actual, predicted, **options
                )[:3]
            if (
                form == "of the scheme" and scheme != "IOE1"
            ):  # seqeval says that it does not read all of IOE1
                reader = getattr(schemes, scheme)
                case["strict"] = strict.precision_recall_fscore_support(
                    actual, predicted, scheme=reader, **options
                )[:3]
            cases.append(case)
    document = {
        "source": "seqeval 1.2.2, python -m tests.reference.record_entities",
        "cases": cases,
    }
    path.write_text(
        json.dumps(document, separators=(",", ":"), default=float).replace(
            '{"scheme"', '\n{"scheme"'
        )
        + "\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
