"""The report as a whole: what is written, what is said, what it survives."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from optrun.artifacts.lock import RunLock, starting
from optrun.base.errors import ConfigError
from optrun.report import build
from optrun.report.build import Report, report
from optrun.report.runs import load_runs
from optrun.report.statistics import Verdict
from optrun.report.table import to_csv, to_markdown
from optrun.report.tables import configurations_table, ranking_table, runs_table
from tests.unit.report.conftest import write_sweep
from tests.unit.report.page_reader import Page

MakeRun = Callable[..., Path]

OF_OPTRUN = "hydra: {job: {name: optrun}}\n"
"""What Hydra notes of a job of optrun."""


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A sweep that a test may change."""
    return write_sweep(tmp_path / "sweep")


def test_files_findings_and_terminal(made: tuple[Report, str]) -> None:
    result, said = made
    sweep = result.files[0].parent
    assert [path.name for path in result.files] == [
        "report.html",
        "report.md",
        "report.csv",
        "report-differences.png",
        "report-metric.png",
        "report-lr.png",
    ]
    assert all(path.parent == sweep and path.stat().st_size > 500 for path in result.files[:6])
    assert all(path.parent == sweep and path.stat().st_size > 200 for path in result.files[6:])
    assert [row.name for row in result.comparison.findings.contenders] == ["lamb", "adamw"]
    assert result.comparison.findings.contenders[0].configuration.settings["lr"] == 4e-3
    assert result.comparison.findings.contenders[1].comparison is not None
    assert result.comparison.findings.contenders[1].comparison.verdict is Verdict.ruled_out
    assert result.warnings == []
    assert "Selected: lamb at lr 4e-3 is the best of 2 (3 seeds; " in said
    assert "Ruled out: adamw at lr 1e-3." in said
    assert (
        said.index("is the best of 2")
        < said.index("next: optrun confirm ")
        < said.index("contender")
    )
    assert re.search(r"next: optrun confirm \S+  \(\d+ runs, about [\d.]+ s of training\)", said)
    assert f"Next ({result.verdict.cost}):" in result.files[1].read_text()
    assert result.verdict.text in " ".join(result.files[1].read_text().replace("**", "").split())
    assert str(sweep / "report.html") in said
    assert not [entry for entry in sweep.iterdir() if entry.name.startswith(".")]


@pytest.mark.usefixtures("pictures")
def test_a_report_says_the_same_twice_and_replaces_itself(sweep: Path) -> None:
    first = {path.name: path.read_bytes() for path in report([sweep]).files}
    second = {path.name: path.read_bytes() for path in report([sweep]).files}
    assert first.keys() == second.keys()
    differing = [name for name in first if first[name] != second[name]]
    assert set(differing) <= {"report.html", "report.md"}  # the time it was made


@pytest.mark.parametrize("name", ["report.html", "report.md", "report.csv", "report-lr.png"])
def test_a_file_of_a_person_is_never_overwritten(sweep: Path, name: str) -> None:
    (sweep / name).write_text("mine")
    with pytest.raises(ConfigError, match=r"was not written by optrun report.*out="):
        report([sweep])
    assert (sweep / name).read_text() == "mine"


def test_out_is_made_and_used(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "all_pictures", lambda comparison, judged: [])
    result = report([sweep], out=sweep / "elsewhere" / "deep")
    assert result.files[0].parent == sweep / "elsewhere" / "deep"
    assert not (sweep / "report.html").exists()


def test_no_run_holds_a_report_on_others(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(build, "all_pictures", lambda comparison, judged: [])
    runs = [make_run(tmp_path / name, optimizer=name, max_steps=20) for name in ("adamw", "lamb")]
    before = [sorted(path.name for path in run.iterdir()) for run in runs]
    folders = [report(runs).files[0].parent for _ in range(2)]
    assert [folder.parent.parent for folder in folders] == [Path("outputs/reports")] * 2
    assert folders[0] != folders[1], "nor over one that was made before"
    assert [sorted(path.name for path in run.iterdir()) for run in runs] == before
    assert report(runs[:1]).files[0].parent == runs[0], "a report on one run lies in it"


def test_unfinished_failed_and_broken_runs_are_rows(sweep: Path, make_run: MakeRun) -> None:
    make_run(
        sweep / "100",
        optimizer="lamb",
        lr=4e-3,
        seed=7,
        max_steps=60,
        global_step=20,
        status="running",
    )
    make_run(
        sweep / "101",
        optimizer="lamb",
        lr=1.0,
        seed=0,
        max_steps=60,
        diverge_at=30,
        status="failed",
    )
    (sweep / "102" / ".hydra").mkdir(parents=True)
    (sweep / "102" / ".hydra" / "overrides.yaml").write_text("- optimizer=lamb\n- lr=-1\n")
    (sweep / "103").mkdir()
    (sweep / "103" / "summary.json").write_text("{")
    (sweep / "104").mkdir()
    (sweep / "104" / "metrics.jsonl").write_text('{"step": 1, "train/loss": 3.0}\n{"st')
    stream = io.StringIO()
    made = report([sweep], console=Console(file=stream, width=160))
    by_label = {run.label: run for run in made.comparison.findings.runs}
    assert by_label["100"].status == "running"
    assert by_label["101"].diverged
    assert by_label["102"].status == "failed"
    assert by_label["103"].status == "failed"
    assert by_label["104"].status == "unknown"
    assert [row.name for row in made.comparison.findings.contenders][:2] == ["lamb", "adamw"]
    assert made.comparison.findings.contenders[0].configuration.mean == pytest.approx(2.5, abs=0.1)
    for label in ("100", "101", "102", "103", "104"):
        assert f"  {label}: " in stream.getvalue()
    kinds = {warning.kind for warning in made.warnings}
    assert {"unfinished", "diverged", "failed", "files"} <= kinds


def test_a_run_that_has_just_begun_runs(tmp_path: Path) -> None:
    """Its process holds the lock, or starts ranks that will; nothing was logged yet.

    A job that failed would say so.
    """
    for name, files in {"alone": (), "loads": ("config.yaml",), "ranks": ()}.items():
        (tmp_path / name / ".hydra").mkdir(parents=True)
        (tmp_path / name / ".hydra" / "overrides.yaml").write_text("- lr=1e-3\n")
        (tmp_path / name / ".hydra" / "hydra.yaml").write_text(OF_OPTRUN)
        for file in files:
            (tmp_path / name / file).write_text("lr: 1.0e-3\n")
    assert {run.status for run in load_runs([tmp_path])} == {"failed"}
    alone, loads, ranks = (tmp_path / name / ".lock" for name in ("alone", "loads", "ranks"))
    with RunLock(alone), RunLock(loads), starting(ranks):
        for _ in ("a folder of runs", "a sweep"):
            assert [(run.status, run.message, run.problems) for run in load_runs([tmp_path])] == [
                ("running", "", [])
            ] * 3
            (tmp_path / "sweep.json").write_text('{"jobs": []}')
    dead = {run.label: run.status for run in load_runs([tmp_path])}
    assert dead == {"alone": "not started", "loads": "interrupted", "ranks": "not started"}


def test_jobs_that_a_stopped_sweep_left_did_not_fail(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Hydra's folder, made by the launcher, or with none.

    A job of an older line that has no more, too.
    """
    monkeypatch.setattr(build, "all_pictures", lambda comparison, judged: [])
    cut = make_run(tmp_path / "cut", seed=0, status="interrupted", global_step=3, max_steps=50)
    for name in ("handed", "older", "begun"):
        (tmp_path / name / ".hydra").mkdir(parents=True)
        (tmp_path / name / ".hydra" / "overrides.yaml").write_text("- seed=1\n")
        (tmp_path / name / ".hydra" / "hydra.yaml").write_text(OF_OPTRUN)
    make_run(tmp_path / "begun", seed=3, status="running", global_step=3, max_steps=50)
    names = {"cut": "interrupted", "handed": "new", "begun": "new", "nowhere": "new", "../x": "new"}
    rows = [
        {"name": name, "status": status, "overrides": ["lr=1e-3"]} for name, status in names.items()
    ]
    (tmp_path / "sweep.json").write_text(json.dumps({"format": 1, "jobs": rows}))
    stream = io.StringIO()
    made = report([tmp_path], console=Console(file=stream, width=160))
    found = {run.label: run.status for run in made.comparison.findings.runs}
    waiting = dict.fromkeys(("handed", "older", "nowhere"), "not started")
    assert found == {"cut": "interrupted", "begun": "running", **waiting}
    assert {warning.kind: warning.text.partition(" ")[0] for warning in made.warnings}[
        "not-started"
    ] == "3"
    assert "failed" not in stream.getvalue()
    assert "2 of 2 runs without a result" in stream.getvalue()
    assert "3 not started" in made.files[0].read_text()
    for torn in (
        '{"jobs": [{"name"',
        '{"jobs": [{"name": "x", "status": "new", "overrides": 5}]}',
        "[]",
        "\x00",
    ):
        (tmp_path / "sweep.json").write_text(torn)
        assert len(load_runs([tmp_path])) == 4
    assert [run.label for run in load_runs([cut])] == ["cut"], (
        "of one job, the others are not asked for"
    )


def test_one_run_has_its_own_small_table(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path / "run", max_steps=40, accuracy=True)
    stream = io.StringIO()
    made = report([run], console=Console(file=stream, width=120))
    assert [path.name for path in made.files] == [
        "report.html",
        "report.md",
        "report.csv",
        "report-curves.png",
    ]
    assert "eval/accuracy" in stream.getvalue()
    assert "verdict" not in stream.getvalue()
    assert Page(made.files[0].read_text()).tags.count("img") == 1
    (run / "metrics.jsonl").write_text("")
    report([run])


def test_nothing_but_unfinished_runs_is_no_error(tmp_path: Path, make_run: MakeRun) -> None:
    for seed in range(3):
        make_run(tmp_path / str(seed), seed=seed, status="running", global_step=3, max_steps=50)
    stream = io.StringIO()
    made = report([tmp_path], console=Console(file=stream, width=120))
    assert "No run has finished" in stream.getvalue()
    assert made.comparison.findings.contenders[0].rank is None


def test_several_sweeps_a_baseline_and_another_metric(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for optimizer in ("adamw", "lamb", "sgd"):
        for seed in range(4):
            make_run(
                tmp_path / optimizer / str(seed),
                optimizer=optimizer,
                seed=seed,
                lr=1e-3,
                max_steps=40,
                accuracy=True,
            )
    dirs = [tmp_path / "adamw", tmp_path / "lamb", tmp_path / "sgd", tmp_path / "adamw" / "0"]
    made = report(dirs, baseline="adamw", metric="eval/accuracy")
    assert len(made.comparison.findings.runs) == 12
    assert made.files[0].is_relative_to(Path("outputs", "reports"))
    assert (
        made.comparison.findings.metric,
        made.comparison.findings.mode,
        made.comparison.findings.baseline,
    ) == (
        "eval/accuracy",
        "max",
        "adamw",
    )
    assert made.comparison.findings.runs[0].label == "adamw/0"
    assert "Against adamw at lr 1e-3, the baseline" in made.verdict.text


def test_where_batch_sizes_differ_curves_are_drawn_over_the_data_seen(
    tmp_path: Path, make_run: MakeRun
) -> None:
    for number, size in enumerate((8, 8, 16)):
        config = {"training.per_device_train_batch_size": size}
        steps = 160 // size
        make_run(
            tmp_path / str(number), max_steps=steps, eval_every=5, seed=number % 2, config=config
        )
    report([tmp_path / "0", tmp_path / "1"], out=tmp_path / "alike")
    report([tmp_path], out=tmp_path / "differ")
    assert "passes over the training data" not in (tmp_path / "alike" / "report.html").read_text()
    assert "Batch sizes differ" in (tmp_path / "differ" / "report.html").read_text()
    [seen] = load_runs([tmp_path / "2"])
    assert (
        seen.interpolate("epoch", seen.series("train/loss")[0])[-1] == seen.log.records[-1]["epoch"]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": "lam"}, "Did you mean lamb"),
        ({"metric": "eval/los"}, "Did you mean eval/loss"),
        ({"by": ["optimizer.nam"]}, "Did you mean optimizer.name"),
    ],
)
def test_wrong_words_are_answered_with_the_nearest(
    sweep: Path, options: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        report([sweep], **options)  # type: ignore[arg-type]


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run found"):
        report([tmp_path])
    with pytest.raises(ConfigError, match="no such directory"):
        report([tmp_path / "none"])


@pytest.mark.slow
def test_a_thousand_runs_in_seconds(tmp_path: Path, make_run: MakeRun) -> None:
    base = make_run(tmp_path / "base", max_steps=300)
    metrics = (base / "metrics.jsonl").read_text()
    config = (base / "config.yaml").read_text()
    summary = json.loads((base / "summary.json").read_text())
    sweep = tmp_path / "sweep"
    number = 0
    for optimizer in range(10):
        for step in range(20):
            for seed in range(5):
                run = sweep / str(number)
                run.mkdir(parents=True)
                (run / "metrics.jsonl").write_text(metrics)
                text = config.replace("name: adamw", f"name: opt{optimizer}").replace(
                    "lr: 0.001", f"lr: {1e-4 * 1.5**step}"
                )
                (run / "config.yaml").write_text(text.replace("seed: 0", f"seed: {seed}"))
                last = {
                    "eval/loss": 2
                    + 0.01 * optimizer
                    + 0.002 * (step - 9) ** 2
                    + 0.003 * ((seed * 7 + number) % 5)
                }
                (run / "summary.json").write_text(
                    json.dumps(summary | {"metrics": {"last": last, "best": {}}})
                )
                number += 1
    start = time.process_time()
    made = report([sweep])
    seconds = time.process_time() - start
    assert (
        len(made.comparison.findings.runs),
        len(made.comparison.findings.configurations),
        len(made.comparison.findings.contenders),
    ) == (
        1000,
        200,
        10,
    )
    assert seconds < 20, f"{seconds:.1f} s"
    assert made.files[0].stat().st_size < 3_000_000


def test_the_report_needs_no_torch() -> None:
    assert imported("optrun.report.build", "torch", "transformers", "optrun.training") == []


def test_what_a_run_draws_and_writes_needs_no_statistics() -> None:
    """scipy.stats takes most of a second to import, and every run would wait for it."""
    assert (
        imported("optrun.report.curves, optrun.runner.card", "scipy.stats", "scipy.optimize") == []
    )


def imported(modules: str, *names: str) -> list[str]:
    """Which of these a fresh process has imported after the modules."""
    code = f"import sys, {modules}; print(*[name for name in sys.argv[1:] if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_markdown_tables_have_as_many_cells_as_columns(made: tuple[Report, str]) -> None:
    table = ranking_table(made[0].comparison.findings)
    lines = to_markdown(table).splitlines()
    assert {line.count(" | ") for line in lines} == {len(table.columns) - 1}


def test_the_heads_say_that_values_are_the_last_ones(made: tuple[Report, str]) -> None:
    """The lines of a sweep show the best value of a job, which may be another one."""
    findings = made[0].comparison.findings
    for table in (ranking_table(findings), configurations_table(findings)):
        assert f"last {findings.metric} ± sd" in table.columns
    assert "last eval/loss" in " ".join(made[1].split())


def test_a_note_on_intervals_stands_only_below_a_column_of_differences(
    made: tuple[Report, str], tmp_path: Path
) -> None:
    """A terminal of 80 columns has no room for the column."""
    wide = made[1]
    stream = io.StringIO()
    sweep = made[0].files[0].parent
    report([sweep], out=tmp_path / "again", console=Console(file=stream, width=80))
    narrow = stream.getvalue()
    assert "difference [" in wide
    assert "interval of a difference" in wide
    assert "difference [" not in narrow
    assert "interval of a difference" not in narrow


def test_in_a_narrow_terminal_no_word_of_a_run_without_a_result_breaks(
    tmp_path: Path, make_run: MakeRun
) -> None:
    for seed in range(3):
        make_run(tmp_path / f"adamw-lr0.001-seed{seed}", seed=seed, max_steps=40)
    stopped = {"exit_code": 3, "metrics": {}}
    lost = make_run(
        tmp_path / "sgd-lr1-seed0",
        optimizer="sgd",
        lr=1.0,
        max_steps=40,
        status="failed",
        summary=stopped,
    )
    (lost / "metrics.jsonl").write_text("")
    screen = Console(width=80, file=io.StringIO())
    report([tmp_path], console=screen)
    assert isinstance(screen.file, io.StringIO)
    lines = screen.file.getvalue().split("1 of 4 runs without a result:")[1].splitlines()
    assert lines[1].startswith("  sgd-lr1-seed0: failed, ")


def test_runs_that_were_given_a_device_say_which(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the table of runs and in the csv; where none was, there is no such column."""
    monkeypatch.setattr(build, "all_pictures", lambda comparison, judged: [])
    make_run(tmp_path / "plain" / "0")
    assert (
        "device" not in runs_table(load_runs([tmp_path / "plain"]), [], "eval/loss", "min").columns
    )
    for seed, device in enumerate(("0", "MIG-1/|<b>", None, 3)):
        make_run(
            tmp_path / "pinned" / str(seed),
            seed=seed,
            summary={"device": {"cuda_visible_devices": device}},
        )
    make_run(tmp_path / "pinned" / "torn", seed=9, summary={"device": "cuda"})
    table = runs_table(load_runs([tmp_path / "pinned"]), [], "eval/loss", "min")
    assert table.columns[-2:] == ["device", "note"]
    assert sorted(row[-2] for row in table.rows) == sorted(["0", "MIG-1/|<b>", "–", "3", "–"])
    report([tmp_path / "pinned"], console=Console(file=io.StringIO()))
    assert "MIG-1/|<b>" not in (tmp_path / "pinned" / "report.html").read_text(), "escaped"
    rows = list(csv.DictReader(io.StringIO((tmp_path / "pinned" / "report.csv").read_text())))
    assert {row["device"] for row in rows} == {"0", "MIG-1/|<b>", "", "3"}


def test_the_numbers_of_a_picture_hold_no_formula() -> None:
    lines = to_csv(["=a", "b"], [["=cmd()", -0.5], ["@x", float("-inf")]]).splitlines()
    assert lines == ["'=a,b,optrun_report", "'=cmd(),-0.5,1", "'@x,-inf,1"]


def test_another_question_never_takes_the_place_of_the_report_of_a_sweep(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        for seed in range(2):
            for optimizer in ("adamw", "lamb"):
                path = tmp_path / name / f"{optimizer}{seed}"
                make_run(path, optimizer=optimizer, seed=seed, max_steps=20, accuracy=True)
    sweep = Path("first")
    page = report([sweep]).files[0]
    assert page == sweep / "report.html"
    before = page.read_bytes()
    named = report([sweep], baseline="adamw", metric="eval/accuracy").files
    assert named[0].name == "report-baseline-adamw-metric-eval-accuracy.html"
    assert all(path.name.startswith("report-baseline-adamw-metric") for path in named)
    assert report([sweep], matters=0.5).files[0] == sweep / "report-matters-0.5.html"
    assert report([sweep], metric="eval/loss").files[0] == page, "the sweep's own metric"
    elsewhere = Path("elsewhere")
    for options in ({}, {"baseline": "adamw"}):
        report([sweep], out=elsewhere, **options)  # type: ignore[arg-type]
    assert sorted(path.name for path in elsewhere.glob("*.html")) == [
        "report-baseline-adamw.html",
        "report.html",
    ]
    with pytest.raises(ConfigError, match="reports on other runs: choose another out=DIR"):
        report([Path("second")], out=elsewhere)
    report([sweep.resolve()], out=elsewhere)
    together = report([sweep, Path("second")]).files[0]
    assert together.is_relative_to(Path("outputs", "reports"))
    assert not (Path("second") / "report.html").exists()
    assert before.split(b"compared by")[0] == page.read_bytes().split(b"compared by")[0]


def test_a_table_says_why_its_intervals_have_their_level(tmp_path: Path, make_run: MakeRun) -> None:
    for number, optimizer in enumerate(("adamw", "lamb", "sgd")):
        for seed in range(3):
            path = tmp_path / f"{optimizer}{seed}"
            final = 2.5 + 0.1 * number * (1 + 0.1 * seed)
            make_run(path, optimizer=optimizer, seed=seed, max_steps=20, final=final)
    for options, sentence in (
        ({}, "difference excludes 0 if, and only if, the one-sided test at 0.025 rejects."),
        ({"baseline": "adamw"}, "difference is not widened for Holm's correction of the tests."),
    ):
        stream = io.StringIO()
        console = Console(file=stream, width=200)
        pages = report([tmp_path], console=console, **options).files  # type: ignore[arg-type]
        assert sentence in stream.getvalue()
        assert sentence in pages[1].read_text()
        assert sentence.replace("'", "&#39;") in pages[0].read_text()


def test_a_line_writes_all_learning_rates_alike(tmp_path: Path, make_run: MakeRun) -> None:
    for optimizer, lr in (("adamw", 3e-3), ("lamb", 0.02)):
        for seed in range(3):
            path = tmp_path / f"{optimizer}{seed}"
            final = 2.5 + 0.1 * ((seed + (lr > 0.01)) % 2)
            make_run(path, optimizer=optimizer, lr=lr, seed=seed, max_steps=20, final=final)
    line = report([tmp_path]).verdict.text
    assert "adamw at lr 3e-3" in line
    assert "lamb at lr 2e-2" in line
