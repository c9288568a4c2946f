"""Small stored sweeps of every kind, and what a report finds in them."""

from __future__ import annotations

import math
import tarfile
from pathlib import Path
from typing import Any

from optrun.report import workloads_page
from optrun.report.build import Report
from optrun.report.findings import Findings
from optrun.report.narrative import verdict_line

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
    """What a report says, as plain values: the one place that knows the shape of `Report` and `Findings`."""
    overview = made.overview
    facts: dict[str, Any] = {
        "headline": verdict_line(made.findings, made.confirmed) if overview is None else workloads_page.lead(overview),
        "warnings": [each.kind for each in made.warnings],
        "words": len(next(path for path in made.files if path.suffix == ".md").read_text(encoding="utf-8").split()),
    }
    if overview is None:
        facts["contenders"] = _contenders(made.findings)
    else:
        facts["overall"] = [
            {
                "name": each.name,
                "score": _plain(each.mean),
                "interval": [_plain(end) for end in each.interval],
                "difference": _plain(each.test.difference if each.test else math.nan),
                "difference_interval": [_plain(each.test.low), _plain(each.test.high)] if each.test else [None, None],
                "verdict": each.verdict,
            }
            for each in overview.standings
        ]
        facts["left_out"] = dict(overview.left_out)
        facts["workloads"] = {each.name: _contenders(each.findings) for each in overview.workloads}
    confirmed = {one.folder.name: _contenders(one.findings) for one in made.confirmed if one.findings != made.findings}
    return facts | ({"confirmed": confirmed} if confirmed else {})


def _contenders(findings: Findings) -> list[dict[str, Any]]:
    """Each contender at its best, in the order of the table."""
    return [
        {
            "name": row.name,
            "chosen": row.arm.label,
            "seeds": sorted(row.arm.scores),
            "mean": _plain(row.arm.mean),
            "sd": _plain(row.arm.sd),
            "difference": _plain(row.versus.difference if row.versus else math.nan),
            "interval": [_plain(row.versus.low), _plain(row.versus.high)] if row.versus else [None, None],
            "verdict": row.versus.verdict if row.versus else None,
            "diverged": len(row.arm.diverged),
        }
        for row in findings.rows
    ]


def _plain(number: float) -> float | None:
    """Six significant digits; None for what is no number."""
    return float(f"{number:.6g}") if math.isfinite(number) else None
