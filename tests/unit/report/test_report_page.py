"""The page: what it loads, tells, switches, prints; what strangers' names do to it; the numbers beside its pictures."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from optrun.report.build import Report, report
from optrun.report.collect import load_runs
from optrun.report.figures import pictures
from optrun.report.findings import find
from optrun.report.searched import importance
from optrun.report.svg import to_svg
from optrun.report.theme import PAGE
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
            assert value.startswith("#"), f"the page would load {item}"
    assert "url(http" not in content
    assert "@import" not in content
    assert "default-src 'none'" in content
    assert {"iframe", "object", "embed", "link", "img"}.isdisjoint(page.tags)
    assert page.tags.count("svg") == 6
    addresses = [word for word in content.split('"') if word.startswith(("http:", "https:"))]
    assert set(addresses) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_the_page_has_the_parts_promised(made: tuple[Report, str]) -> None:
    words = " ".join(Page(made[0].files[0].read_text()).text)
    for part in ("verdict", "steps to target", "time to target", "lr basin", "wall time", "tokens/s", "optimizer state",
                 "optrun -m optimizer=lamb lr=0.004 training.max_steps=60 seed=0,1,2", "Selection:", "95 % interval",
                 "p (Holm)", "effect g"):  # fmt: skip
        assert part in words, part


def test_the_page_is_legible_on_a_phone(made: tuple[Report, str]) -> None:
    """Pictures as wide as one, in points, and the rows of the ranking as cards: no verdict is off the screen."""
    page = made[0].files[0].read_text()
    widths = [float(box.split()[2]) for box in re.findall(r'viewBox="([^"]+)"', page)]
    assert len(widths) == 6
    assert max(widths) <= 320
    assert page.count('class="worse" data-label="verdict"') == 1
    assert "table.cards td::before { content: attr(data-label)" in page


def test_what_a_picture_leaves_out_is_said(made: tuple[Report, str]) -> None:
    """The steep begin of training is above the frame of three pictures; that of the learning rates shows all."""
    page = made[0].files[0].read_text()
    assert page.count("cut off: values above") == 3


def test_hostile_names_stay_text(tmp_path: Path, make_run: MakeRun) -> None:
    for number in range(4):
        make_run(
            tmp_path / "s" / f"{number}<b>|", seed=number % 2, max_steps=20,
            config={"optimizer.name": HOSTILE if number < 2 else "adamw", "model.name": HOSTILE},
            summary={"message": HOSTILE, "overrides": [f"optimizer={HOSTILE}"]},
            status="failed" if number == 3 else "finished",
        )  # fmt: skip
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


def test_every_point_tells_its_value_without_a_script(made: tuple[Report, str]) -> None:
    """A browser shows the `<title>` of what it points at; a script only makes more of it."""
    page = made[0].files[0].read_text()
    told = re.findall(r'<circle class="m s(\d)" cx="([\d.]+)" cy="([\d.]+)" r="6"><title>([^<]+)</title>', page)
    lamb = made[0].findings.rows[0]
    assert (lamb.name, round(lamb.arm.mean, 4)) == ("lamb", 2.5111)
    words = {text: series for series, _, _, text in told}
    assert words["lamb, lr 4e-3: 2.5111 (2.4977 to 2.5241, 3 seeds)"] == "0"
    assert words["adamw, best of 3: 2.6126"] == "1"
    assert words["lamb, seed 0: 2.4977"] == "0"
    assert any(text.startswith("lamb, step 60: 2.5111 (") for text in words)
    assert len(told) >= 50
    assert all(0 <= float(x) <= 320 for _, x, _, _ in told)


def test_a_point_lies_where_its_axis_says(tmp_path: Path, make_run: MakeRun) -> None:
    for seed, final in enumerate((2.0, 2.1, 2.4, 3.0)):
        make_run(tmp_path / str(seed), seed=seed, max_steps=20, final=final)
    results = pictures(find(load_runs([tmp_path])))[0]
    svg = to_svg(results.draw(PAGE), name="results", label='"<results>')
    assert 'aria-label="&quot;&lt;results&gt;"' in svg
    ticks = re.findall(r'<use xlink:href="#\w+" x="([\d.]+)" y="[\d.]+" style="fill[^>]*/>\s*</g>\s*</g>\s*'
                       r"<g>\s*<text[^>]*>([\d.]+)</text>", svg)  # fmt: skip
    (x0, v0), *_, (x1, v1) = [(float(x), float(value)) for x, value in ticks]
    told = re.findall(r'cx="([\d.]+)" cy="[\d.]+" r="6"><title>adamw, seed \d: ([\d.]+)<', svg)
    assert len(told) == 4
    for x, value in told:
        assert float(x) == pytest.approx(x0 + (float(value) - v0) * (x1 - x0) / (v1 - v0), abs=0.1)


def test_contenders_are_switched_by_the_style_alone(made: tuple[Report, str]) -> None:
    page = made[0].files[0].read_text()
    for series, name in enumerate(("lamb", "adamw")):
        assert re.search(rf'id="show-{series}" checked>{name}</label>', page)
        assert f"body:has(#show-{series}:not(:checked)) .s{series} {{ display: none; }}" in page
        assert page.count(f'<g class="s{series}"') > 10, "lines, bands and dots of all pictures"
        assert page.count(f'<g class="k{series}"') >= 2 * 5, "line and name in each legend"
    assert "show-2" not in page


def test_a_reader_of_paper_gets_black_on_white_and_whole_tables(made: tuple[Report, str]) -> None:
    page = made[0].files[0].read_text()
    paper = page[page.index("@media print") :]
    for rule in ("--paper: #ffffff", "--ink: #000", ".scroll { overflow: visible", "break-inside: avoid",
                 "button, .switches, .tip { display: none; }", "thead { display: table-header-group; }"):  # fmt: skip
        assert rule in paper, rule


def test_each_picture_has_its_numbers_beside_it(made: tuple[Report, str]) -> None:
    result = made[0]
    folder, findings = result.files[0].parent, result.findings
    texts = {path.stem: path.read_text() for path in result.files if path.suffix == ".csv" and path.stem != "report"}
    assert texts.keys() == {path.stem for path in result.files if path.suffix == ".png"}
    tables = {stem: list(csv.DictReader(io.StringIO(text))) for stem, text in texts.items()}
    lamb = findings.rows[0]
    scores = {row["seed"]: float(row["eval/loss"]) for row in tables["report-results"] if row["contender"] == "lamb"}
    assert scores == {str(seed): pytest.approx(score) for seed, score in lamb.arm.scores.items()}
    last = [row for row in tables["report-metric"] if row["contender"] == "lamb"][-1]
    assert (last["step"], last["seeds"], float(last["mean eval/loss"])) == ("60", "3", pytest.approx(lamb.arm.mean))
    assert [row["lr"] for row in tables["report-basin"] if row["best"] == "True"] == ["0.004", "0.001"]
    assert float(tables["report-budget"][2]["expected best eval/loss"]) == pytest.approx(lamb.arm.mean)
    for name in ("report.html", "report.md"):
        assert "report-basin.csv" in (folder / name).read_text()


def test_a_search_over_several_settings_is_shown_in_slices(tmp_path: Path, make_run: MakeRun) -> None:
    """lr decides, dropout does nothing: one explains the ranks, the other does not."""
    for number, factor in enumerate([0.2, 0.3, 0.5, 0.8, 1, 2, 3, 5, 8, 20] * 2):
        flavour = ("plain", "b<c>$", "a name of many words")[number % 3]
        config = {"optimizer.dropout": 0.1 * (number > 9), "optimizer.flavour": flavour}
        lost = {"diverge_at": 10} if factor == 20 else {}
        make_run(tmp_path / str(number), lr=1e-3 * factor, max_steps=20, config=config, log_every=10, **lost)
    findings = find(load_runs([tmp_path]), by=["optimizer.name"])
    drawn = {one.name: one for one in pictures(findings) if one.name.startswith("slice-")}
    assert drawn.keys() == {"slice-lr", "slice-optimizer-dropout", "slice-optimizer-flavour"}
    assert next(iter(drawn)) == "slice-lr", "what matters most comes first"
    share = {name: int(re.sub(r"\D", "", one.title)) for name, one in drawn.items()}
    assert share["slice-lr"] > 50
    assert share["slice-optimizer-dropout"] == 0
    data = drawn["slice-optimizer-flavour"].data
    assert data is not None
    assert (len(data().rows), data().columns[:2]) == (20, ["contender", "optimizer.flavour"])
    svg = to_svg(drawn["slice-optimizer-flavour"].draw(PAGE), name="x", label="x")
    assert "flavour b&lt;c&gt;$" in svg
    assert svg.count(": diverged</title>") == 2


def test_too_few_configurations_weigh_nothing(tmp_path: Path, make_run: MakeRun) -> None:
    for number in range(4):
        config = {"optimizer.dropout": 0.1 * (number % 2)}
        make_run(tmp_path / str(number), lr=1e-3 * (1 + number // 2), max_steps=20, config=config, log_every=20)
    findings = find(load_runs([tmp_path]), by=["optimizer.name"])
    assert [importance(findings.rows, key, "min") for key in ("lr", "optimizer.dropout")] == [None, None]


def test_equal_scores_at_the_target_are_drawn(tmp_path: Path, make_run: MakeRun) -> None:
    """No axis is without extent; warnings are errors."""
    for number in range(4):
        optimizer, lr = ("adamw", "lamb")[number % 2], 1e-3 * (1 + number // 2)
        make_run(tmp_path / str(number), optimizer=optimizer, lr=lr, max_steps=20, final=2.0, log_every=20)
    drawn = {one.name: one for one in pictures(find(load_runs([tmp_path]), target=2.0))}
    for name in ("results", "basin", "budget"):
        assert "<circle" in to_svg(drawn[name].draw(PAGE), name=name, label=name)
