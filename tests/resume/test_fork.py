"""Runs that branch from a trunk: bit for bit the trunk where nothing is changed.

What is carried over is said.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from optrun import compose
from optrun.artifacts.forks import Trunk, reading
from optrun.artifacts.retention import Retention
from optrun.artifacts.run_dir import RunDir
from optrun.base.errors import CheckpointError, ConfigError
from optrun.config import store
from optrun.config.request import CommandLine
from optrun.runner.forks.command_line import Forks
from optrun.sweeper.jobs import Composer, build_jobs
from tests.running import TINY_GPT, optrun, records, summary, tensors, write_text

STEPS, AT = 8, 5
"""Length of the trunk, and the step at which branches leave it.

Between log lines and evaluations, in an epoch.
"""


def words(folder: Path) -> list[str]:
    """A causal LM with dropout, shuffled blocks, two micro-batches a step, and settings that
    are nobody's default.
    """
    return [
        *(word.replace("n_layer=2", "n_layer=1") for word in TINY_GPT),
        "data=files",
        f"data.train={write_text(folder, 150)}",
        "training.per_device_train_batch_size=4",
        "training.gradient_accumulation_steps=2",
        "training.logging_steps=3",
        "training.eval_steps=4",
        f"training.max_steps={STEPS}",
        "scheduler=wsd",
        "scheduler.num_decay_steps=4",
        "checkpoint.save_steps=1",
        "checkpoint.keep_last=99",
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, with a trunk of AdamW in it.

    Tests that change the trunk work on a copy.
    """
    folder = tmp_path_factory.mktemp("branches")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("optrun.runner.train.draw_curves", lambda path: None)
        assert (
            optrun(
                *words(folder), "optimizer.weight_decay=0.1", "run_name=oak", "hydra.run.dir=trunk"
            )
            == 0
        )
        yield folder


def at(step: int = AT, run: str = "trunk") -> str:
    """A checkpoint of the trunk, as it is typed."""
    return f"branch_from={run}/checkpoints/step-{step:08d}"


def same_from_there(trunk: Path, branch: Path, step: int = AT) -> None:
    """Whether a branch is its trunk to the last bit: weights, optimizer state and metrics lines."""
    assert records(branch) == [record for record in records(trunk) if record["step"] > step]
    for later in (step, STEPS):
        assert tensors(branch, later) == tensors(trunk, later)


def files(run: Path) -> dict[str, bytes]:
    """Everything in a run directory."""
    return {str(path): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def test_a_branch_of_nothing_else_is_its_trunk(place: Path) -> None:
    before = files(place / "trunk")
    assert optrun(at(), "optimizer=adamw", "scheduler=wsd", "hydra.run.dir=same") == 0
    same_from_there(place / "trunk", place / "same")
    assert files(place / "trunk") == before, "a trunk is never written to"
    said = summary(Path("same"))["branch"]
    assert (said["step"], said["changes"]) == (AT, {})
    assert "AdamW" in said["optimizer_state"]
    assert summary(Path("same"))["run_name"] == "same"
    assert summary(Path("same"))["metrics"]["best"]["eval/loss"]["step"] > AT, (
        "the trunk's best stays the trunk's"
    )
    assert optrun("verify", "same") == 0
    assert optrun("evaluate", "same") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        "lamb",
        "sgd optimizer.momentum=0.9",
        "muon",
        "schedule_free",
        "soap",
        "adafactor",
        "lazy_adam",
        "ademamix",
    ],
)
def test_every_kind_of_state_is_carried(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    choice = f"optimizer={optimizer}".split()
    assert optrun(*words(tmp_path), *choice, "param_groups=layerwise", "hydra.run.dir=trunk") == 0
    assert optrun(at(), "hydra.run.dir=branch") == 0
    same_from_there(tmp_path / "trunk", tmp_path / "branch")


def test_another_optimizer_begins_anew_and_a_resume_goes_on(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of a branch, then the other half without its trunk.

    As one that was never interrupted.
    """
    changed = [
        "optimizer=lamb",
        "branch_schedule=restart",
        "scheduler.num_warmup_steps=2",
        "training.logging_steps=1",
    ]
    assert optrun(at(), *changed, "hydra.run.dir=lamb") == 0
    shown = capsys.readouterr().out
    for fact in (
        "anew",
        "AdamW",
        "Lamb",
        "starts anew at the branch, over 3 steps",
        "adamw -> lamb",
    ):
        assert fact in shown
    assert [record["train/lr"] for record in records(Path("lamb"))][:2] == [
        0.0,
        1e-2,
    ], "lamb's own peak is 2e-2"
    assert not any(name.startswith("optimizer.") for name in tensors(place / "lamb", AT)), (
        "no state came along"
    )
    shutil.copytree("trunk", "copy")
    stopped = ["hydra.run.dir=stopped", "training.max_seconds=1e-9"]
    assert optrun(at(run="copy"), *changed, *stopped) == 75
    shutil.rmtree("copy")
    assert optrun("resume=stopped", "training.max_seconds=null") == 0
    assert records(Path("stopped")) == records(Path("lamb"))
    assert tensors(Path("stopped"), STEPS) == tensors(Path("lamb"), STEPS)


def test_killed_before_its_first_save_it_begins_from_the_trunk(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("optrun.training.checkpointing.CheckpointManager.save", _dies)
        assert optrun(at(), "hydra.run.dir=dead") == 74
    assert not list(Path("dead/checkpoints").iterdir())
    assert optrun(at(), "hydra.run.dir=dead", "resume=auto") == 0
    same_from_there(place / "trunk", place / "dead")
    assert optrun(at(6), "hydra.run.dir=dead", "resume=auto") == 2


def _dies(*_: object) -> None:
    raise OSError(5, "Input/output error")


REFUSED = {
    "seed": (["seed=3"], ["seed=3", "the trunk: 0"]),
    "length": (["training.max_steps=5"], ["training.max_steps=5", "step 5"]),
    "schedule": (
        ["scheduler.decay_steps=2"],
        ["scheduler.decay_steps", "It belongs to scheduler=cosine", "num_decay_steps"],
    ),
    "recipe": (["-cn", "stdlib_gpt"], ["-cn stdlib_gpt", "trunk"]),
    "resume": (["resume=trunk"], ["resume=trunk", "branch_from", "one of them"]),
    "model": (["model.vocab_size=400"], ["model.vocab_size=400", "320"]),
    "task": (["task=masked_lm"], ["task.name=masked_lm", "causal_lm"]),
    "batch": (["training.per_device_train_batch_size=8"], ["per_device_train_batch_size=8", "4"]),
    "accumulation": (
        ["training.gradient_accumulation_steps=1"],
        ["gradient_accumulation_steps=1", "2"],
    ),
    "rows": (["data.max_train_examples=9"], ["data.max_train_examples=9", "null"]),
    "key": (["optimizr=lamb"], ["optimizr", "optimizer"]),
    "values": (["optimizer=lamb,adamw"], ["-m"]),
}
"""Those of the same check as another are slow."""


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        pytest.param(*case, id=name, marks=[] if index < 5 else pytest.mark.slow)
        for index, (name, case) in enumerate(REFUSED.items())
    ],
)
def test_what_would_be_another_place_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], changes: list[str], facts: list[str]
) -> None:
    assert optrun(at(), *changes, "hydra.run.dir=refused") == 2
    message = capsys.readouterr().err
    for fact in facts:
        assert fact in message
    assert not Path("refused").exists()


def test_other_rows_are_refused_by_what_is_in_them(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Path("corpus.txt").read_text().splitlines()
    Path("other.txt").write_text("\n".join([*lines[:-1], "vow"]) + "\n")
    assert optrun(at(), "data.train=other.txt", "hydra.run.dir=refused") == 2
    message = capsys.readouterr().err
    assert "data.train=other.txt" in message
    assert "the training examples are not those of the trunk" in message
    assert not Path("refused").exists()


def test_what_is_no_trunk_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree("trunk", "hurt")
    folder = Path("hurt/checkpoints")
    (folder / "step-00000004" / "manifest.json").unlink()
    weights = folder / "step-00000003" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    refused = {
        "branch_from=nowhere": (2, "branch_from=nowhere: no such directory"),
        "branch_from=latest": (2, "branch_from=latest"),
        "branch_from=trunk/model": (2, "weights alone"),
        "branch_from=trunk/metrics.jsonl": (2, "neither a run directory nor a checkpoint"),
        at(4, "hurt"): (4, "manifest.json"),
        at(3, "hurt"): (4, "model.safetensors"),
        f"{at()}@0123456789abcdef": (4, "another one now"),
        "branch_from=gone@0123456789abcdef": (4, "gone"),
        "branch_schedule=restart": (2, "branch_schedule=restart"),
    }
    for token, (code, fact) in refused.items():
        assert optrun(token, "hydra.run.dir=refused") == code, token
        assert fact in capsys.readouterr().err
    assert not Path("refused").exists()
    with pytest.raises(ConfigError, match="on the command line"):
        store.typed(
            store.without_hydra(store.compose(store.open_hydra(), "config", ["branch_from=trunk"]))
        )


def test_a_trunk_that_is_being_read_is_not_deleted(place: Path) -> None:
    shutil.copytree("trunk", "old")
    run = RunDir("old")
    retention = Retention(run, keep_last=1)
    with reading(run.checkpoint(AT)):
        retention.delete_expired({2})
        assert [step for step in range(STEPS + 1) if run.checkpoint(step).is_dir()] == [
            2,
            AT,
            STEPS,
        ]
    retention.delete_expired(set())
    assert [step for step in range(STEPS + 1) if run.checkpoint(step).is_dir()] == [STEPS]
    with pytest.raises(CheckpointError), reading(run.checkpoint(AT)):
        pass


@pytest.mark.slow
def test_the_identity_of_a_job_is_what_the_trunk_holds(place: Path) -> None:
    """Not where it lies.

    Each job takes what its own trunk has, and of its settings what its optimizer knows.
    """

    def jobs(trunk: str) -> dict[str, dict]:
        tokens = [f"{trunk}", "optimizer=adamw,lamb"]
        line = CommandLine(overrides=tokens)
        forks = Forks(hydra, line)
        points = [
            [*forks.pin_trunks(tokens[:1]), f"optimizer={name}"] for name in ("adamw", "lamb")
        ]
        compose = Composer(
            hydra, "config", complete=forks.complete, require=forks.refuse_other_position
        )
        return {job.name: dict(job.values) for job in build_jobs(compose, points)}

    hydra = store.open_hydra()
    first = jobs(at())
    adamw, lamb = first.values()
    assert (adamw["optimizer"]["weight_decay"], lamb["optimizer"]["weight_decay"]) == (0.1, 0.01)
    assert (adamw["lr"], lamb["lr"]) == (2e-3, 2e-2)
    shutil.copytree("trunk", "moved")
    assert list(jobs(at(run="moved"))) == list(first)
    state = Path("moved/checkpoints/step-00000005/manifest.json")
    values = json.loads(state.read_text())
    assert Trunk.of(state.parent).digest != Trunk.of(Path("moved/checkpoints/step-00000006")).digest
    assert not set(jobs(at(6))) & set(first), values["step"]


def test_from_python(place: Path) -> None:
    config = compose([at(), "optimizer=lamb", "optimizer.weight_decay=0.3"])
    assert (config.optimizer.name, config.optimizer.weight_decay, config.lr) == ("lamb", 0.3, 2e-2)
    assert config.scheduler.num_decay_steps == 4
    assert Trunk.parse(str(config.branch_from)) == Trunk.of(Path("trunk/checkpoints/step-00000005"))


def test_explained_before_a_step(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert optrun("explain", at(6), "--json") == 0
    facts = json.loads(capsys.readouterr().out)["branch"]
    assert facts["step"] == 6
    assert "AdamW" in facts["optimizer_state"]
    assert facts["first_lr"] == pytest.approx(2e-3 * (1 - 0.5**0.5), rel=1e-6), (
        "two of four steps down, 1 - sqrt"
    )
    assert optrun("explain", at(6), "optimizer.amsgrad=true", "branch_schedule=restart") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for fact in ("step 6", "anew", "max_exp_avg_sq", "over 2 steps"):
        assert fact in shown
