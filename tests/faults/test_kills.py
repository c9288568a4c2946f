"""Killed at random, resumed, equal to the last bit.

The proof that `optrun certify` gives, on several configurations.

`OPTRUN_KILLS` says how many kills in all (20); 200 is the whole proof.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from optrun.artifacts.checkpoint import load_checkpoint, save_checkpoint
from optrun.artifacts.retention import latest_complete
from optrun.artifacts.run_dir import RunDir
from optrun.certify.compare import compare
from optrun.cli.certify_resume import command_line
from optrun.config.request import CommandLine
from tests.faults.runs import STEPS, Go, Straight
from tests.faults.syscalls import Syscalls, die, in_child
from tests.running import TINY_BERT, optrun, optrun_process, write_labelled

KILLS = int(os.environ.get("OPTRUN_KILLS", "20"))


def certify(cwd: Path, *words: str) -> tuple[int, str, str]:
    env = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = optrun_process(
        "certify", "resume", *words, cwd=cwd, env=env, timeout=1500, module="tests.faults.slow_disk"
    )
    return done.returncode, done.stdout, done.stderr


def causal_lm(folder: Path, straight: Straight) -> list[str]:
    """Dropout, LAMB, one checkpoint kept: every save deletes."""
    return straight.words_with("optimizer=lamb", "checkpoint.keep_last=1", "checkpoint.keep_best=0")


def classification(folder: Path, straight: Straight) -> list[str]:
    """Workers, accumulation, steps that end an epoch early, layer-wise groups."""
    return [
        *(word.replace("num_hidden_layers=2", "num_hidden_layers=1") for word in TINY_BERT),
        "task=sequence_classification",
        "data=files",
        f"data.train={write_labelled(folder, 40)}",
        "training.per_device_train_batch_size=4",
        "training.gradient_accumulation_steps=2",
        "training.dataloader_num_workers=2",
        "param_groups=layerwise",
        "scheduler=linear",
        "scheduler.num_warmup_steps=3",
    ]


def lazy(folder: Path, straight: Straight) -> list[str]:
    """LazyAdam, bfloat16 arithmetic, a schedule that looks at the metric."""
    return straight.words_with(
        "optimizer=lazy_adam", "training.precision=bf16", "scheduler=plateau"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("words", "seed"), [(causal_lm, 1), (classification, 2), (lazy, 3)])
def test_resume_is_certified(words: object, seed: int, straight: Straight, tmp_path: Path) -> None:
    """Every resume starts by itself, from the newest committed checkpoint, and ends bit-equal."""
    assert callable(words)
    kills = -(-KILLS // 3)
    given = [
        *words(tmp_path, straight),
        "--steps",
        "10",
        "--kills",
        str(kills),
        "--seed",
        str(seed),
        "--json",
    ]
    code, said, errors = certify(tmp_path, *given)
    assert code == 0, said + errors
    paper = json.loads(said)
    if "training.max_steps=6" in given:
        assert "training.max_steps=6: certify takes training.max_steps=10 (--steps)" in errors
    assert paper["holds"] is True
    assert paper["difference"] is None
    assert len(paper["kills"]) == kills
    assert (
        paper["fell"].get("inside a save", 0) + paper["fell"].get("inside a deletion", 0)
        >= kills // 2
    )
    assert {section["name"] for section in paper["compared"]} >= {
        "weights",
        "optimizer state",
        "schedule",
        "random states",
        "sample order",
        "metrics lines",
    }
    assert all(section["difference"] is None for section in paper["compared"])


def test_the_first_tensor_that_differs_is_named(straight: Straight, tmp_path: Path) -> None:
    run = straight.cut(tmp_path / "run", STEPS)
    sections = compare(RunDir(straight.path), run, STEPS)
    assert [section.difference for section in sections] == [None] * len(sections)
    loaded = load_checkpoint(run.checkpoint(STEPS))
    name = sorted(loaded.optimizer)[3]
    loaded.optimizer[name].view(-1)[0] += 1
    loaded.metadata.train["batches_digest"] = "other"
    for folder in run.checkpoint(STEPS).iterdir():
        folder.unlink()
    run.checkpoint(STEPS).rmdir()
    save_checkpoint(run, loaded)
    found = {
        section.name: section.difference for section in compare(RunDir(straight.path), run, STEPS)
    }
    assert found["weights"] is None
    assert found["optimizer state"] is not None
    assert f"tensor {name}: 1 of" in found["optimizer state"]
    assert "batches_digest" in str(found["sample order"])
    assert found["random states"] is None


def test_what_a_proof_replaces_is_told() -> None:
    given = ["lr=1e-3", "training.num_train_epochs=3", "training.max_steps=500", "tracking.run=x"]
    own, replaced, _ = command_line(CommandLine(overrides=given), steps=7)
    assert "training.max_steps=7" in own
    assert "training.num_train_epochs=3" not in own
    assert [sentence.split(":")[0] for sentence in replaced] == given[1:]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "expected optrun certify resume|optimizer|transfer"),
        (("everything",), "certify takes the claim to prove"),
        (("resume", "--kills", "0"), "--kills 0: expected a whole number, 1 or more"),
        (("resume", "resume=auto"), "resume=auto: certify chooses"),
        (("resume", "checkpoint=none"), "checkpoint=none: nothing is saved"),
        (("resume", "optimizer=lamp"), "lamp"),
        (("resume", "--kill", "3"), "--kill: no such option"),
    ],
)
def test_what_cannot_be_certified_is_refused(go: Go, words: tuple[str, ...], said: str) -> None:
    code, out = go("certify", *words)
    assert code == 2
    assert said in out


@pytest.mark.slow
def test_a_run_that_ends_badly_by_itself_is_no_proof(straight: Straight, tmp_path: Path) -> None:
    given = [word for word in straight.words if not word.startswith("data.train")]
    code, _, errors = certify(tmp_path, *given, "data.train=missing.txt")
    assert code == 1
    assert "although nobody killed it" in errors
    assert "missing.txt" in errors


# Killed while going on
# ------------------------------------------------------------------------------------------------

DEATHS = 24


def going_on(run: RunDir, at: int) -> int:
    """Resume a run in a forked process that dies at a call of the operating system.

    Its exit code.
    """

    def work() -> None:
        with Syscalls(run.path, at, die):
            os._exit(optrun(f"resume={run.path}"))

    return in_child(work)


@pytest.mark.parametrize("share", [pytest.param(1, marks=pytest.mark.slow), 12])
def test_death_while_going_on(straight: Straight, go: Go, tmp_path: Path, share: int) -> None:
    """At calls all over a resume and the saves after it, with leftovers of the kill before.

    The next one is exact.
    """
    counted = straight.cut(tmp_path / "counted", 3)
    (counted.checkpoints / ".saving-step-00000004-1").mkdir()
    with Syscalls(counted.path) as calls:
        assert go("resume=counted")[0] == 0
    first_save = calls.count // 3  # steps 4, 5 and 6 are still to be saved
    places = sorted(
        {1 + number * first_save * share // DEATHS for number in range(DEATHS // share)}
    )
    for at in [*places, calls.count - 5]:
        run = straight.cut(tmp_path / str(at), 3)
        (run.checkpoints / ".saving-step-00000004-1").mkdir()
        assert going_on(run, at) == 9
        assert latest_complete(run)[0] in [run.checkpoint(step) for step in (3, 4, 5, 6)]
        assert going_on(run, min(at // 2 + 1, 10)) == 9  # and killed once more
        assert go(f"resume={at}")[0] == 0
        straight.same(run)
