"""The page: what it loads, tells, prints; what strangers' names do to it."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from optrun.report.build import Report, Section, render, report
from optrun.report.table import Table
from optrun.report.warnings import RunWarning
from tests.unit.report.page_reader import Page

MakeRun = Callable[..., Path]
HOSTILE = '<script>alert("x")</script>|[red]$\\frac`\x1b[2J\n-->{{ 7 * 7 }}{count}'


def test_the_page_loads_nothing_and_says_so(made: tuple[Report, str]) -> None:
    content = made[0].files[0].read_text()
    page = Page(content)
    assert page.open == []
    for item in page.loads:
        name, _, value = item.partition("=")
        if name == "style":
            assert "url(" not in value or "url(#" in value
        else:
            assert value.startswith(("#", "data:image/png")), f"the page would load {item}"
    assert "url(http" not in content
    assert "@import" not in content
    assert "default-src 'none'" in content
    assert {"iframe", "object", "embed", "link"}.isdisjoint(page.tags)
    assert page.tags.count("img") == 3
    addresses = [word for word in content.split('"') if word.startswith(("http:", "https:"))]
    assert addresses == []


def test_the_page_is_legible_on_a_phone(made: tuple[Report, str]) -> None:
    """Pictures as wide as one, the rows of the ranking as cards, no verdict off the screen."""
    page = made[0].files[0].read_text()
    assert "figure img { display: block; width: 100%" in page
    assert page.count('class="worse" data-label="verdict"') == 1
    assert "table.cards td::before { content: attr(data-label)" in page


def test_hostile_names_stay_text(tmp_path: Path, make_run: MakeRun) -> None:
    for number in range(4):
        make_run(
            tmp_path / "s" / f"{number}<b>|",
            seed=number % 2,
            max_steps=20,
            config={"optimizer.name": HOSTILE if number < 2 else "adamw", "model.name": HOSTILE},
            summary={"message": HOSTILE, "overrides": [f"optimizer={HOSTILE}"]},
            status="failed" if number == 3 else "finished",
        )
    stream = io.StringIO()
    made = report([tmp_path / "s"], console=Console(file=stream, width=200, force_terminal=False))
    html = made.files[0].read_text()
    assert "<script>alert" not in html
    assert "\x1b" not in html
    assert "{{ 7 * 7 }}{count}" in html
    assert Page(html).tags.count("script") == 1
    assert "<script>" not in made.files[1].read_text().replace("```sh", "```").split("```")[0]
    assert "\x1b" not in stream.getvalue()
    table = [line for line in made.files[1].read_text().splitlines() if line.startswith("| 1 |")]
    assert len(table) == 1
    rows = list(csv.DictReader(io.StringIO(made.files[2].read_text())))
    assert len(rows) == 4
    assert {row["optrun_report"] for row in rows} == {"1"}


def test_a_reader_of_paper_gets_black_on_white_and_whole_tables(made: tuple[Report, str]) -> None:
    page = made[0].files[0].read_text()
    paper = page[page.index("@media print") :]
    for rule in (
        "--paper: #ffffff",
        "--ink: #000",
        ".scroll { overflow: visible",
        "break-inside: avoid",
        "button { display: none; }",
        "thead { display: table-header-group; }",
    ):
        assert rule in paper, rule


CONTENT = {
    "title": "3 contenders",
    "subtitle": "15 runs",
    "directories": "0123456789abcdef",
    "line": "lamb at lr 4e-3 could be the best.",
    "next": "optrun confirm outputs/sweeps/<b>",
    "cost": "10 runs, about 8 min 00 s of training",
    "table": Table(
        ["contender", "verdict"], [False, False], [["lamb", "could be the best"]], ["best"]
    ),
    "table_note": "Intervals are at 90 %.",
    "warnings": [RunWarning("edge", f"reason {number}") for number in range(5)],
    "sections": [Section("Metrics", Table(["metric"], [False], [["eval/loss"]], [""]))],
    "folds": [
        Section("Every run", Table(["run", "lr"], [False, True], [["0", "1e-3"]] * 2, ["", ""]))
    ],
    "commands": [],
    "tested": "Paired t tests.",
    "footer": "Made by optrun.",
}


def test_the_answer_stands_first_and_the_rest_is_folded() -> None:
    html, markdown = render(CONTENT, {})
    page = Page(html)
    assert page.open == []
    parts = [
        "lamb at lr 4e-3",
        "optrun confirm",
        ">contender<",
        "reason 0",
        "reason 3",
        ">Metrics<",
        "Every run",
    ]
    places = [html.index(part) for part in [*parts, "Paired t"]]
    assert places == sorted(places)
    assert html.index("reason 2") < html.index("<details>") < html.index("reason 3"), (
        "three reasons for care are open"
    )
    assert "outputs/sweeps/&lt;b&gt;</code><button" in html, (
        "the next command is copied by a button"
    )
    assert 'class="better" data-label="verdict">could be the best' in html
    for part in (
        "**lamb at lr 4e-3 could be the best.**",
        "optrun confirm outputs/sweeps/<b>",
        "reason 4",
        "Paired t",
    ):
        assert part in markdown
    assert "Every run" not in markdown, "rows of runs stand in report.csv"
