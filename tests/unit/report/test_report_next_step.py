"""The command that a report ends with is taken by the program, and does what the report lacks."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from optrun.cli import confirm as verb
from optrun.cli.values import read_request
from optrun.config import overrides, store
from optrun.report import build
from optrun.report.build import report
from optrun.report.confirmation_plan import ConfirmationPlan, ConfirmationRequest, load_or_make_plan
from optrun.report.tables import ranking_table
from optrun.report.warnings import KINDS_OF_THE_CHOICE
from optrun.sweeper import jobs
from optrun.sweeper.folder import SweepDir

MakeRun = Callable[..., Path]
NOISE = (0.0, 0.03, 0.01, 0.04, 0.02, 0.0, 0.05, 0.01, 0.03, 0.02, 0.0)
"""By seed, what lamb gains: too uneven for a verdict on few seeds."""


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "all_pictures", lambda comparison, judged: [])


def _runs(
    folder: Path, make_run: MakeRun, seeds: range, gain: float = 0.0, noise: float = 1.0
) -> None:
    for seed in seeds:
        lamb = 2.6 - gain - noise * NOISE[seed]
        base = 2.6 + 0.001 * (seed % 3)
        make_run(
            folder / f"adamw{seed}", optimizer="adamw", lr=1e-3, seed=seed, max_steps=25, final=base
        )
        make_run(
            folder / f"lamb{seed}", optimizer="lamb", lr=4e-3, seed=seed, max_steps=25, final=lamb
        )


@pytest.fixture
def sweep(tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two contenders on the seeds 0 to 2; the difference is not told."""
    monkeypatch.chdir(tmp_path)
    _runs(Path("a sweep"), make_run, range(3))
    return Path("a sweep")


def _planned(line: str, sweep: Path) -> tuple[ConfirmationPlan, Path]:
    """What the verb makes of a line, and where it goes."""
    program, name, *words = shlex.split(line)
    assert (program, name) == ("optrun", "confirm")
    arguments = verb.parser().parse(words)
    assert arguments is not None
    assert [Path(each).resolve() for each in arguments.positional] == [sweep.resolve()]
    given = dict(arguments.key_values)
    folder = Path(given.pop("out", str(sweep / "confirm")))
    by = [key for key in given.pop("by", "").split(",") if key]
    return load_or_make_plan(sweep, folder, read_request(by=by, **given))[0], folder


def _confirm(
    sweep: Path, make_run: MakeRun, *, seeds: range, gain: float = 0.0, left: int = 0, **asked: str
) -> Path:
    """Confirm with results of all seeds but the last `left`."""
    folder = next(
        each for name in ("", "-2", "-3") if not (each := sweep / f"confirm{name}").exists()
    )
    load_or_make_plan(sweep, folder, ConfirmationRequest(seeds=list(seeds), **asked))[0].write(
        folder
    )  # type: ignore[arg-type]
    _runs(folder, make_run, seeds[: len(seeds) - left], gain, noise=0.1 if gain else 1.0)
    return folder


@pytest.mark.parametrize(
    "options", [{}, {"baseline": "adamw"}, {"metric": "eval/perplexity"}, {"by": ["lr"]}]
)
def test_what_is_not_told_apart_is_confirmed_as_it_was_asked(
    sweep: Path, options: dict[str, str]
) -> None:
    made, folder = _planned(report([sweep], **options).verdict.next, sweep)  # type: ignore[arg-type]
    assert folder == sweep / "confirm"
    assert made.reference == options.get("baseline")
    assert made.metric == options.get("metric", "eval/loss")
    assert made.by == options.get("by", ["optimizer.name"])
    assert min(made.seeds) == 3


def test_a_pilot_and_a_choice_among_several_are_confirmed(
    tmp_path: Path, make_run: MakeRun
) -> None:
    for name, seeds in (("pilot", range(1)), ("selected", range(3))):
        for seed in seeds:
            for lr in (1e-3, 2e-3, 4e-3):
                for optimizer in ("adamw", "lamb"):
                    final = (
                        2.5
                        + (lr != 2e-3)
                        + 0.001 * seed**2
                        + (optimizer == "lamb") * (1 + 0.002 * seed)
                    )
                    path = tmp_path / name / f"{optimizer}{lr}{seed}"
                    make_run(path, optimizer=optimizer, lr=lr, seed=seed, max_steps=25, final=final)
        made, _ = _planned(report([tmp_path / name]).verdict.next, tmp_path / name)
        assert {tuple(each[:2]) for each in made.contenders.values()} == {
            ("optimizer=adamw", "lr=0.002"),
            ("optimizer=lamb", "lr=0.002"),
        }


def test_a_winner_at_the_edge_of_its_grid_gets_a_wider_one(sweep: Path, make_run: MakeRun) -> None:
    for seed in range(3):
        for lr in (1e-3, 2e-3):
            make_run(
                sweep / f"sgd{lr}{seed}",
                optimizer="sgd",
                lr=lr,
                seed=seed,
                max_steps=25,
                final=2.5 - 100 * lr,
            )
    line = report([sweep]).verdict.next
    program, flag, *words = shlex.split(line)
    assert (program, flag) == ("optrun", "-m")
    hydra = store.open_hydra(None)
    assert words[-1] == f"hydra.sweep.dir={sweep}", "the jobs that are done are not run again"
    tokens = overrides.parse_checked(hydra, "config", words, sweep=True)
    points = list(
        jobs.combinations(hydra, [token for token in tokens if not overrides.is_hydra(token)])
    )
    assert [sorted(point) for point in points] == [
        sorted(["optimizer=sgd", "lr=4e-3", "training.max_steps=25", f"seed={seed}"])
        for seed in range(3)
    ]


def test_a_search_is_not_widened_by_one_value(sweep: Path, make_run: MakeRun) -> None:
    """Its largest lr is the largest that was drawn, and no edge."""
    for seed in range(3):
        for lr in (1e-3, 2e-3):
            make_run(
                sweep / f"sgd{lr}{seed}",
                optimizer="sgd",
                lr=lr,
                seed=seed,
                max_steps=25,
                final=2.5 - 100 * lr,
            )
    folder = SweepDir(sweep)
    folder.asking.parent.mkdir()
    folder.asking.touch()
    assert shlex.split(report([sweep]).verdict.next)[:2] == ["optrun", "confirm"]


def test_nothing_is_left_where_one_is_the_best_of_fixed_contenders(
    tmp_path: Path, make_run: MakeRun
) -> None:
    _runs(tmp_path / "fixed", make_run, range(5), gain=1.0, noise=0.1)
    made = report([tmp_path / "fixed"])
    assert made.verdict.kind == "compared"
    assert made.verdict.next == ""


def test_a_confirmation_that_leaves_several_is_followed_by_another(
    sweep: Path, make_run: MakeRun
) -> None:
    folder = _confirm(sweep, make_run, seeds=range(3, 6))
    for directory in (sweep, folder):
        line = report([directory]).verdict.next
        made, after = _planned(line, sweep)
        assert after == sweep / "confirm-2", line
        assert "by=" not in line, "nobody typed it, and it changes nothing"
        assert (min(made.seeds), made.reference, made.metric) == (6, None, "eval/loss")
    _confirm(sweep, make_run, seeds=range(6, 9), gain=0.5)
    line = report([sweep]).verdict.next
    assert not line or _planned(line, sweep)[1] == sweep / "confirm-3"


@pytest.mark.parametrize("asked", [{"baseline": "adamw"}, {"metric": "eval/perplexity"}])
def test_another_confirmation_asks_what_the_first_did(
    sweep: Path, make_run: MakeRun, asked: dict[str, str]
) -> None:
    _confirm(sweep, make_run, seeds=range(3, 6), **asked)  # type: ignore[arg-type]
    made, _ = _planned(report([sweep]).verdict.next, sweep)
    assert made.reference == asked.get("baseline")
    assert made.metric == asked.get("metric", "eval/loss")


def test_a_confirmation_that_more_seeds_would_not_change_says_what_to_take(
    sweep: Path, make_run: MakeRun
) -> None:
    folder = sweep / "confirm"
    plan, _ = load_or_make_plan(sweep, folder, ConfirmationRequest(seeds=list(range(3, 15))))
    plan.write(folder)
    for seed in range(3, 15):
        for optimizer, lr, gain in (("adamw", 1e-3, 0.0), ("lamb", 4e-3, 0.001 * (-1) ** seed)):
            path = folder / f"{optimizer}{seed}"
            final = 2.6 + 0.05 * (seed % 3) - gain
            make_run(path, optimizer=optimizer, lr=lr, seed=seed, max_steps=25, final=final)
    made = report([sweep])
    assert made.verdict.text.startswith("Undecided on fresh seeds 3-14: ")
    advice = "They differ by less than another seed changes, so either will do: take the cheaper"
    assert advice in made.verdict.text
    assert made.verdict.next == "", "one advice, not two"


def test_a_confirmation_that_tells_leaves_nothing(sweep: Path, make_run: MakeRun) -> None:
    _confirm(sweep, make_run, seeds=range(3, 8), gain=0.5)
    made = report([sweep])
    assert made.verdict.kind == "confirmed"
    assert made.verdict.next == ""


@pytest.mark.parametrize("name", ["a sweep/confirm", "elsewhere"])
def test_a_confirmation_that_is_not_done_is_gone_on_with(
    sweep: Path, make_run: MakeRun, name: str
) -> None:
    made, _ = load_or_make_plan(
        sweep, Path(name), ConfirmationRequest(seeds=[3, 4, 5, 6, 7], baseline="adamw")
    )
    made.write(Path(name))
    _runs(Path(name), make_run, range(3, 5))
    for directory in (Path(name), *([sweep] if name.startswith("a sweep") else [])):
        assert _planned(report([directory]).verdict.next, sweep) == (made, Path(name))


def test_a_record_without_its_sweep(sweep: Path, make_run: MakeRun) -> None:
    folder = _confirm(sweep, make_run, seeds=range(3, 6))
    record = json.loads((folder / "confirmation.json").read_text())
    assert (folder / record.pop("sweep")).resolve() == sweep.resolve()
    assert _planned(report([folder]).verdict.next, sweep)[1] == sweep / "confirm-2"
    (folder / "confirmation.json").write_text(json.dumps(record))
    folder.rename("elsewhere")
    made = report([Path("elsewhere")])
    assert made.verdict.text.startswith("Undecided on fresh seeds 3-5: ")
    assert made.verdict.next == "", "nobody knows of what"


def test_what_no_line_would_do_has_none(sweep: Path, tmp_path: Path, make_run: MakeRun) -> None:
    _runs(tmp_path / "other", make_run, range(3))
    assert report([sweep, tmp_path / "other"], out=tmp_path / "both").verdict.next == ""
    for path in sweep.glob("*/summary.json"):
        path.write_text(
            json.dumps(
                {**json.loads(path.read_text()), "overrides": ["model.trust_remote_code=true"]}
            )
        )
    assert report([sweep]).verdict.next == "", "the verb would refuse"
    branched = {"branch": {"folder": "trunk/checkpoints/step-00000010", "step": 10, "run_id": "t"}}
    for path in sweep.glob("*/summary.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), **branched}))
    assert report([sweep]).verdict.next == ""


def test_a_sweep_with_unended_jobs_is_finished_before_it_is_judged(
    sweep: Path, make_run: MakeRun
) -> None:
    paths = sorted(path.parent for path in sweep.glob("*/summary.json"))
    make_run(paths[0], seed=0, status="interrupted", global_step=3, max_steps=50)
    rows = [{"name": path.name, "status": "finished", "overrides": []} for path in paths]
    rows[0]["status"] = "interrupted"
    words = ["-m", "optimizer=adamw,lamb", "seed=0,1,2", "data.train=my file.csv"]
    record = {"format": 1, "tuned": [], "command": words, "jobs": rows}
    (sweep / "sweep.json").write_text(json.dumps(record))
    made = report([sweep])
    ended = f"{len(paths) - 1} of {len(paths)} runs have ended."
    assert made.verdict.text.startswith(ended)
    assert "best" not in made.verdict.text
    assert shlex.split(made.verdict.next) == ["optrun", *words, f"hydra.sweep.dir={sweep}"]
    assert made.verdict.cost.startswith("1 run")
    assert not (sweep / "report-looks.json").exists()
    columns = ranking_table(made.comparison.findings).columns
    assert {"verdict", "difference"}.isdisjoint(columns), "they would judge"
    assert not {warning.kind for warning in made.warnings} & KINDS_OF_THE_CHOICE
    # optrun.sweep(...) of Python records no -m, and options of plugins are never recorded.
    (sweep / "sweep.json").write_text(json.dumps({**record, "command": words[1:]}))
    plugin = [{"plugin": "mine.py", "path": "/x/mine.py", "sha256": "0"}]
    for path in paths:
        values = json.loads((path / "summary.json").read_text())
        (path / "summary.json").write_text(json.dumps({**values, "plugins": plugin}))
    line = shlex.split(report([sweep]).verdict.next)
    assert line[:-1] == ["optrun", "--plugin", "mine.py", *words]


def test_a_wider_grid_goes_into_the_sweep_of_its_contender(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report on the folder above two sweeps put the new runs beside these."""
    monkeypatch.chdir(tmp_path)
    for optimizer, gain in (("adamw", 0.0), ("sgd", 100.0)):
        sweep = Path("sweeps") / optimizer
        for seed in range(3):
            for lr in (1e-3, 2e-3):
                final = 2.5 - gain * lr + 0.001 * seed
                path = sweep / f"{lr}-{seed}"
                make_run(path, optimizer=optimizer, lr=lr, seed=seed, max_steps=25, final=final)
        (sweep / "sweep.json").write_text(json.dumps({"format": 1, "tuned": [], "jobs": []}))
    words = shlex.split(report([Path("sweeps")]).verdict.next)
    assert "optimizer=sgd" in words
    assert words[-1] == "hydra.sweep.dir=sweeps/sgd"


def test_failed_jobs_are_tried_again_before_the_choice_is_confirmed(
    sweep: Path, make_run: MakeRun
) -> None:
    paths = sorted(path.parent for path in sweep.glob("*/summary.json"))
    make_run(paths[0], optimizer="adamw", lr=1e-3, seed=0, max_steps=25, status="failed")
    words = ["-m", "optimizer=adamw,lamb", "seed=0,1,2"]
    jobs_of_sweep = [{"name": path.name, "status": "finished", "overrides": []} for path in paths]
    record = {"format": 1, "tuned": [], "command": words, "jobs": jobs_of_sweep}
    (sweep / "sweep.json").write_text(json.dumps(record))
    verdict = report([sweep]).verdict
    tries_again = "hydra.sweeper.retry_failed=true"
    assert shlex.split(verdict.next) == [
        "optrun",
        *words,
        tries_again,
        f"hydra.sweep.dir={sweep}",
    ]
    assert verdict.cost.startswith("1 run")
    # The command made only some of the runs: it would not try the failed one again.
    (sweep / "sweep.json").write_text(json.dumps({**record, "jobs": jobs_of_sweep[1:]}))
    assert shlex.split(report([sweep]).verdict.next)[:2] == ["optrun", "confirm"]
    # Every seed of the configuration failed: it would fail again.
    (sweep / "sweep.json").write_text(json.dumps(record))
    for seed, path in enumerate(paths[:3]):
        make_run(path, optimizer="adamw", lr=1e-3, seed=seed, max_steps=25, status="failed")
    assert tries_again not in report([sweep]).verdict.next
