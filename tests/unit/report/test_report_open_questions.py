"""What a report leaves open names a command that is not refused, and a confirmation keeps its plan wherever it lies."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from optrun.report import build
from optrun.report.build import Report, report
from optrun.report.confirmation import Confirmation, parse_seeds, prepare
from optrun.report.narrative import notes
from optrun.report.open_questions import Asked, open_questions

MakeRun = Callable[..., Path]
NOISE = (0.0, 0.03, 0.01, 0.04, 0.02, 0.0, 0.05, 0.01)
"""By seed, what lamb gains: too uneven for a verdict on few seeds."""


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "pictures", lambda findings: [])


def _runs(folder: Path, make_run: MakeRun, seeds: range, gain: float = 0.0, noise: float = 1.0) -> None:
    for seed in seeds:
        lamb = 2.6 - gain - noise * NOISE[seed]
        make_run(folder / f"adamw{seed}", optimizer="adamw", lr=1e-3, seed=seed, max_steps=25, final=2.6)
        make_run(folder / f"lamb{seed}", optimizer="lamb", lr=4e-3, seed=seed, max_steps=25, final=lamb)


@pytest.fixture
def sweep(tmp_path: Path, make_run: MakeRun) -> Path:
    """Two contenders on the seeds 0 to 2; the difference is not told."""
    _runs(tmp_path / "a sweep", make_run, range(3))
    return tmp_path / "a sweep"


def _planned(sweep: Path, folder: Path, given: dict[str, str]) -> Confirmation:
    """What the verb makes of a line."""
    made, _ = prepare(
        sweep,
        folder,
        seeds=parse_seeds(given["seeds"]) if "seeds" in given else None,
        baseline=given.get("baseline"),
        metric=given.get("metric"),
        by=given.get("by", "").split(",") if "by" in given else (),
    )
    return made


def _confirm(sweep: Path, folder: Path, make_run: MakeRun, *, gain: float = 0.0, last: int = 7) -> None:
    """Confirm on the seeds 3 to 7, with results up to the last."""
    prepare(sweep, folder, seeds=[3, 4, 5, 6, 7], baseline="adamw")[0].write(folder)
    _runs(folder, make_run, range(3, last + 1), gain)


def _open(made: Report, directory: Path, *options: str) -> str:
    (told,) = open_questions(made.findings, made.confirmed, Asked([directory], options))
    return told


def _line(told: str) -> tuple[Path, dict[str, str]]:
    """The command that a sentence names: its directory, and what it is given."""
    (found,) = re.findall(r"`optrun confirm ([^`]+)`", told)
    directory, *words = shlex.split(found)
    return Path(directory), dict(word.split("=", 1) for word in words)


@pytest.mark.parametrize("options", [{}, {"baseline": "adamw"}])
def test_the_line_of_a_choice_plans_what_it_says(sweep: Path, options: dict[str, str]) -> None:
    made = report([sweep], **options)
    told = _open(made, sweep, *(f"{key}={given}" for key, given in options.items()))
    (needed,) = (row.versus.needed for row in made.findings.rows if row.versus and row.versus.needed)
    directory, given = _line(told)
    assert (directory, given) == (sweep, {**options, "seeds": f"3-{2 + needed}"})
    assert _planned(directory, directory / "confirm", given).reference == made.findings.reference
    assert "mislead" not in told, "there is one confirmation"
    assert f"optrun confirm '{sweep}' {'baseline=adamw ' if options else ''}seeds=3-" in " ".join(
        (sweep / "report.html").read_text().replace("&#39;", "'").split()
    )


def test_a_confirmation_that_finds_nothing_says_how_many_seeds_would(sweep: Path, make_run: MakeRun) -> None:
    _confirm(sweep, sweep / "confirm", make_run)
    made = report([sweep])
    told = _open(made, sweep)
    (versus,) = (row.versus for row in made.confirmed[0].findings.rows if row.versus and row.versus.needed)
    assert f": {versus.needed}. " in told, "counted from the spread of the confirmation"
    directory, given = _line(told)
    assert given == {
        "baseline": "adamw", "by": "optimizer.name", "seeds": f"8-{7 + (versus.needed or 0)}",
        "out": str(sweep / "confirm-2"),
    }  # fmt: skip
    again = _planned(directory, Path(given["out"]), given)
    assert (again.reference, min(again.seeds)) == ("adamw", 8)
    assert "one of 2 does in up to 10%" in told
    for one in (report([sweep / "confirm"]), report([sweep], baseline="lamb")):
        assert _line(_open(one, one.files[0].parent)) == (directory, given), "asked of either, however it is shown"


def test_no_seed_is_run_twice_unasked(sweep: Path, make_run: MakeRun) -> None:
    _confirm(sweep, sweep / "confirm", make_run)
    assert min(prepare(sweep, sweep / "next")[0].seeds) == 8
    _, said = prepare(sweep, sweep / "next", seeds=[6, 7, 8])
    assert said == [f"seeds 6-7 ran in {sweep / 'confirm'}, too, and what they found is known; unused: from 8 on"]


def test_a_confirmation_that_is_not_done_is_gone_on_with(sweep: Path, make_run: MakeRun) -> None:
    folder = sweep / "confirm"
    _confirm(sweep, folder, make_run, last=2)
    told = _open(report([sweep]), sweep)
    assert "goes on with the confirmation that was planned, on seeds 3-7" in told
    assert _planned(sweep, folder, _line(told)[1]).seeds == [3, 4, 5, 6, 7]
    _runs(folder, make_run, range(3, 7))
    told = _open(report([sweep]), sweep)
    assert told.startswith("Open: 2 of the runs that were planned have not come to their end.")
    assert _planned(sweep, folder, _line(told)[1]).seeds == [3, 4, 5, 6, 7]


def test_what_no_line_confirms_has_none(sweep: Path, tmp_path: Path, make_run: MakeRun) -> None:
    made = report([sweep])
    several = open_questions(made.findings, [], Asked([sweep, tmp_path], []))[0]
    assert "Run as many fresh ones" in several
    for path in sweep.glob("*/summary.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "overrides": ["model.trust_remote_code=true"]}))
    assert "Run as many fresh ones" in _open(report([sweep]), sweep), "the verb would refuse"
    branched = {"branch": {"folder": "trunk/checkpoints/step-00000010", "step": 10, "run_id": "t"}}
    for path in sweep.glob("*/summary.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), **branched}))
    found = report([sweep])
    assert "For as many train trunks of more seeds" in _open(found, sweep)
    assert not any("optrun confirm" in note for note in notes(found.findings, [], Asked([sweep], [])))
    _runs(tmp_path / "same", make_run, range(3), gain=1e-5 - sum(NOISE[:3]) / 3)
    assert "more than 100" in _open(report([tmp_path / "same"]), tmp_path / "same")
    assert "optrun confirm" not in _open(report([tmp_path / "same"]), tmp_path / "same")


@pytest.mark.parametrize("place", ["elsewhere", "a sweep/confirm"])
def test_a_confirmation_by_itself_is_judged_by_its_plan(
    sweep: Path, tmp_path: Path, make_run: MakeRun, place: str
) -> None:
    """The best of its runs is lamb; its plan is adamw."""
    folder = tmp_path / place
    _confirm(sweep, folder, make_run, gain=0.2)
    stream = io.StringIO()
    made = report([folder], console=Console(file=stream, width=140))
    assert made.findings.chosen_baseline
    said = " ".join(stream.getvalue().split())
    assert said.startswith("Confirmed on fresh seeds 3-7: lamb has the best mean")
    assert "Against adamw: lamb is better." in said
    assert "single-lr" not in said, "a plan has one"
    text = (folder / "report.md").read_text()
    assert "## Result" in text
    assert "The choice" not in text
    assert "reference were written down before any of these runs (eval/loss against adamw)" in text
    assert "Selection:" not in text, "nothing was chosen of these runs"
    assert f"optrun confirm {shlex.quote(str(sweep))} baseline=adamw seeds=3,4,5,6,7" in text
    assert not open_questions(made.findings, made.confirmed, Asked([folder], []))


def test_another_question_is_not_called_confirmed(sweep: Path, tmp_path: Path, make_run: MakeRun) -> None:
    folder = tmp_path / "elsewhere"
    _confirm(sweep, folder, make_run, gain=0.2)
    for options in ({"baseline": "lamb"}, {"metric": "eval/perplexity"}, {"by": ["lr"]}):
        report([folder], **options)
        text = " ".join((folder / "report.md").read_text().split())
        assert "**Not as planned, which was eval/loss against adamw on fresh seeds 3-7: " in text, options
        assert "Confirmed" not in text, options
    report([folder], baseline="adamw", metric="eval/loss", by=["optimizer.name"])
    assert "**Confirmed on fresh seeds 3-7: " in (folder / "report.md").read_text()


def test_a_record_from_before_the_sweep_was_noted(sweep: Path, tmp_path: Path, make_run: MakeRun) -> None:
    for folder in (sweep / "confirm", tmp_path / "elsewhere"):
        _confirm(sweep, folder, make_run)
        record = json.loads((folder / "confirmation.json").read_text())
        assert (folder / record.pop("sweep")).resolve() == sweep
        (folder / "confirmation.json").write_text(json.dumps(record))
    told = _open(report([sweep / "confirm"]), sweep / "confirm")
    assert _line(told)[0] == sweep
    elsewhere = report([tmp_path / "elsewhere"])
    assert elsewhere.confirmed[0].title == "Confirmed on fresh seeds 3-7"
    assert "Run as many fresh ones" in _open(elsewhere, tmp_path / "elsewhere")
    assert any(note.startswith("Open: ") for note in notes(elsewhere.findings, elsewhere.confirmed))
