"""Small stored sweeps of every kind, and what a report finds in them."""

from __future__ import annotations

import math
import tarfile
from pathlib import Path
from statistics import mean
from typing import Any

from optrun.report.build import Report
from optrun.report.configurations import describe_settings
from optrun.report.findings import Findings

FOLDER = Path(__file__).parent
NAMES = sorted(path.name.removesuffix(".tar.xz") for path in FOLDER.glob("*.tar.xz"))


def archive(name: str) -> Path:
    """Where a sweep is stored."""
    return FOLDER / f"{name}.tar.xz"


def snapshot(name: str) -> Path:
    """Where it is written what a report finds in it."""
    return FOLDER / f"{name}.json"


def stored(name: str, folder: Path) -> Path:
    """Unpack a stored sweep beneath a folder; returns its directory."""
    with tarfile.open(archive(name)) as packed:
        packed.extractall(folder / name, filter="data")
    return folder / name


def found_in(made: Report) -> dict[str, Any]:
    """What a report says, as plain values.

    The one place that knows the shape of `Report` and `Findings`.
    """
    comparison, judged = made.comparison, made.comparison.ttest
    facts: dict[str, Any] = {
        "headline": made.verdict.text,
        "next": made.verdict.next,
        "warnings": [each.kind for each in made.warnings],
        "words": len(
            next(path for path in made.files if path.suffix == ".md")
            .read_text(encoding="utf-8")
            .split()
        ),
    }
    if comparison.several:
        facts["overall"] = [
            {
                "name": name,
                "score": _plain(mean(comparison.scores[name].values())),
                "difference": _plain(each.difference),
                "interval": [_plain(each.low), _plain(each.high)],
                "verdict": each.verdict,
            }
            for name, each in (judged.comparisons.items() if judged is not None else ())
        ]
        facts["left_out"] = {
            each.name: each.left_out for each in comparison.workloads if each.left_out
        }
        facts["workloads"] = {each.name: _contenders(each) for each in comparison.workloads}
    else:
        facts["contenders"] = _contenders(made.comparison.findings)
    if made.confirmed is not None and made.confirmed.comparison is not comparison:
        facts["confirmed"] = _contenders(made.confirmed.comparison.findings)
    return facts


def _contenders(findings: Findings) -> list[dict[str, Any]]:
    """Each contender at its best, in the order of the table."""
    return [
        {
            "name": row.name,
            "chosen": describe_settings(row.configuration.settings),
            "seeds": sorted(row.configuration.scores),
            "mean": _plain(row.configuration.mean),
            "sd": _plain(row.configuration.sd),
            "difference": _plain(row.comparison.difference if row.comparison else math.nan),
            "interval": [_plain(row.comparison.low), _plain(row.comparison.high)]
            if row.comparison
            else [None, None],
            "verdict": row.comparison.verdict if row.comparison else None,
            "diverged": len(row.configuration.diverged),
        }
        for row in findings.contenders
    ]


def _plain(number: float) -> float | None:
    """Six significant digits; None for what is no number."""
    return float(f"{number:.6g}") if math.isfinite(number) else None
