"""The recipes that are sweeps: how many jobs they are, and that each kind of job runs."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from optrun.config import store
from optrun.config.hydra_internals import Hydra
from optrun.config.overrides import parse_checked
from optrun.report.build import report as made
from optrun.report.runs import load_runs
from optrun.report.workloads import split_workloads
from optrun.sweeper.jobs import Composer, build_jobs, combinations, merged, param_overrides
from tests.running import TINY_GPT, optrun, records
from tests.sweep.forked import jobs, result


def points(hydra: Hydra, name: str, *words: str) -> list[list[str]]:
    """The overrides of each job of a recipe."""
    node = OmegaConf.to_container(store.compose(hydra, name, ["hydra.mode=MULTIRUN"]).hydra.sweeper)
    below = param_overrides(node["params"])
    grids = [merged(below, [*param_overrides(grid), *words]) for grid in node["grids"] or [{}]]
    known = in_one(hydra, name, grids)
    return [
        line
        for grid in grids
        for line in combinations(hydra, [known.get(token, token) for token in grid])
    ]


def in_one(hydra: Hydra, name: str, grids: list[list[str]]) -> dict[str, str]:
    """Check each word of some grids.

    Those that differ in optimizer and rates alone are one, with all of theirs.
    """
    alike: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for grid in grids:
        own = [token.split("=", 1) for token in grid if token.startswith(("optimizer=", "lr="))]
        together = alike.setdefault(
            tuple(token for token in grid if token.split("=", 1) not in own), {}
        )
        for key, values in own:
            together.setdefault(key, []).extend(
                one for one in values.split(",") if one not in together.get(key, [])
            )
    known = {}
    for rest, together in alike.items():
        every = [*rest, *(f"{key}={','.join(values)}" for key, values in together.items())]
        known.update(zip(every, parse_checked(hydra, name, every, sweep=True), strict=True))
    return known


@pytest.mark.parametrize(
    ("name", "count", "seeds", "words"),
    [
        ("compare_optimizers", 7 * 4, 5, []),
        pytest.param(
            "optimizer_benchmark", 5 * 7 * 5, 3, [], marks=pytest.mark.slow
        ),  # composes 35 times
        ("optimizer_benchmark_minilm", 6 * 3, 3, ["model.path=somewhere", "data.train=a.tsv"]),
        ("lamb_batch_scaling", 4, 5, []),
        ("layer_decay_minilm", 3 * 4, 3, ["model.path=somewhere", "data.train=a.tsv"]),
        ("lora_minilm_sst2", 2 * 4, 3, ["model.path=somewhere", "data.train=a.tsv"]),
        ("preference_lr", 2 * 6, 3, ["model.path=somewhere"]),
        ("embedding_lr", 3 * 3, 3, ["model.path=somewhere"]),
        pytest.param(
            "transfer_width", 3 * 2 * 3 * 6, 2, [], marks=pytest.mark.slow
        ),  # composes 108 times
        ("transfer_length", 3 * 6, 3, []),
    ],
)
def test_expands(name: str, count: int, seeds: int, words: list[str]) -> None:
    hydra = store.open_hydra()
    found = points(hydra, name, *words)
    assert Counter(token for line in found for token in line if token.startswith("seed=")) == {
        f"seed={seed}": count for seed in range(seeds)
    }
    jobs = build_jobs(Composer(hydra, name), [line for line in found if "seed=0" in line])
    assert len({job.digest for job in jobs}) == len({job.name for job in jobs}) == count


def test_a_benchmark_is_tuned_equally() -> None:
    """Each optimizer has the same learning rates, as many as every other one, and the same
    seeds on each workload.
    """
    tried: dict[str, dict[str, set[tuple[float, int]]]] = {}
    for line in points(store.open_hydra(), "optimizer_benchmark"):
        job = dict(token.split("=") for token in line)
        by_task = tried.setdefault(job["optimizer"], {})
        by_task.setdefault(job["task"], set()).add((float(job["lr"]), int(job["seed"])))
    assert {task for by_task in tried.values() for task in by_task} == {
        "causal_lm",
        "masked_lm",
        "sequence_classification",
        "token_classification",
        "image_classification",
    }
    for by_task in tried.values():
        assert len(by_task) == 5
        assert len({frozenset(points) for points in by_task.values()}) == 1
    assert {len(points) for by_task in tried.values() for points in by_task.values()} == {15}


def test_batches_see_the_same_examples() -> None:
    """Batch x2, lr x sqrt(2), half the steps."""
    hydra = store.open_hydra()
    for job in build_jobs(
        Composer(hydra, "lamb_batch_scaling"), points(hydra, "lamb_batch_scaling", "seed=0")
    ):
        batch = job.values["training"]["per_device_train_batch_size"]
        assert job.values["lr"] == pytest.approx(0.02 * (batch / 16) ** 0.5, rel=5e-3)
        assert job.values["scheduler"]["warmup_ratio"] == pytest.approx(0.05 * batch / 16)
        assert job.values["data"]["max_train_examples"] % batch == 0


def test_widths_keep_their_heads() -> None:
    """Only the width and the number of heads of 16 move.

    Each optimizer has as many learning rates at each width.
    """
    tried = Counter[tuple[str, str, int]]()
    for line in points(store.open_hydra(), "transfer_width"):
        job = dict(token.lstrip("+").split("=") for token in line)
        assert int(job["model.config.n_embd"]) == 16 * int(job["model.config.n_head"])
        tried[
            job["optimizer"],
            job.get("parametrization", "standard"),
            int(job["model.config.n_embd"]),
        ] += 1
    configurations = itertools.product(
        ("adamw", "lamb", "muon"), ("standard", "mup"), (32, 64, 128)
    )
    assert tried == dict.fromkeys(configurations, 6 * 2)


@pytest.mark.slow
def test_chats_and_preferences_go_on_from_one_start(place: Path) -> None:
    words = [
        "training.max_steps=2",
        "data.max_train_examples=32",
        "data.max_eval_examples=8",
        "task.sample_tokens=0",
    ]
    shape = ["model.config.n_layer=1", "model.config.n_embd=32", "model.config.n_head=2"]
    assert optrun("-cn", "sft_tiny", *words, *shape, "hydra.run.dir=start") == 0
    given = [*words[:3], "model.path=start/model", "lr=1e-3", "seed=0", "hydra.sweep.dir=sweep"]
    assert optrun("-cn", "preference_lr", *given) == 0
    assert [row["status"] for row in result().values()] == ["finished"] * 2
    assert sorted(split_workloads(load_runs([Path("sweep")]))) == [
        "preference on stdlib_preferences",
        "sft on stdlib_chat",
    ]


@pytest.mark.slow
def test_embeddings_go_on_from_one_start(place: Path) -> None:
    words = ["training.max_steps=2", "data.max_train_examples=64", "data.max_eval_examples=8"]
    shape = ["model.config.num_hidden_layers=1", "model.config.hidden_size=32"]
    assert optrun("-cn", "embedding_tiny", *words, *shape, "hydra.run.dir=start") == 0
    given = [*words, "model.path=start/model", "lr=1e-3", "seed=0", "hydra.sweep.dir=sweep"]
    assert optrun("-cn", "embedding_lr", *given) == 0
    assert [row["status"] for row in result().values()] == ["finished"] * 3
    found = load_runs([Path("sweep")])
    assert sorted((run.optimizer, str(run.setting("adapter.name"))) for run in found) == [
        ("adamw", "lora"),
        ("adamw", "none"),
        ("lamb", "none"),
    ]


@pytest.mark.slow
def test_lengths_run_and_are_read(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        *TINY_GPT,
        "training.max_steps=2,4",
        "lr=1e-4,1e-2,1",
        "seed=0,1",
        "data.max_train_examples=64",
    ]
    words.append("optimizer=lamb")  # of three
    assert (
        optrun(
            "-cn", "transfer_length", *words, "data.max_eval_examples=8", "hydra.sweep.dir=sweep"
        )
        == 0
    )
    code = optrun("transfer", "sweep", "to=training.max_steps=8")
    said = "".join(capsys.readouterr())
    assert code in (0, 2)  # four steps may put an optimum on an edge, which is then said
    assert "training.max_steps=8" in said or "edge" in said or "its optimum is unknown" in said


@pytest.mark.slow
def test_every_workload_runs(place: Path) -> None:
    """One optimizer in each; a report tells them apart."""
    words = [
        "training.max_steps=2",
        "data.max_train_examples=32",
        "data.max_eval_examples=16",
        "optimizer=adamw",
    ]
    assert (
        optrun("-cn", "optimizer_benchmark", *words, "lr=1e-3", "seed=0", "hydra.sweep.dir=sweep")
        == 0
    )
    assert [row["status"] for row in result().values()] == ["finished"] * 5
    assert sorted(split_workloads(load_runs([Path("sweep")]))) == [
        "causal_lm on stdlib",
        "image_classification on digits",
        "masked_lm on stdlib",
        "sequence_classification on stdlib_statements",
        "token_classification on stdlib_tokens",
    ]


@pytest.mark.slow
def test_every_optimizer_runs(place: Path) -> None:
    """Without -m: the recipe says that it is a sweep. The command line wins over its grids."""
    words = [
        *TINY_GPT,
        "training.max_steps=2",
        "data.max_train_examples=32",
        "data.max_eval_examples=4",
    ]
    assert (
        optrun("-cn", "compare_optimizers", *words, "lr=1e-3", "seed=0", "hydra.sweep.dir=sweep")
        == 0
    )
    assert {row["status"] for row in result().values()} == {"finished"}
    assert len(jobs()) == 7
    sgd = next(run for run in load_runs([Path("sweep")]) if run.optimizer == "sgd")
    assert optrun(*shlex.split(sgd.command(seeds=[0, 1]))[1:], "hydra.sweep.dir=again") == 0
    assert [job.name.rpartition("-")[0] for job in jobs("again")] == [
        "sgd-lr0.001-seed0",
        "sgd-lr0.001-seed1",
    ]
    assert optrun(*shlex.split(sgd.command())[1:], "hydra.run.dir=alone") == 0
    assert records(Path("alone"))[-1]["eval/loss"] == records(sgd.path)[-1]["eval/loss"]


@pytest.mark.slow
def test_search_and_confirm(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line searches three optimizers with equal budgets, confirms the best of each, and
    says so first.
    """
    monkeypatch.setattr("optrun.report.build.to_png", lambda figure, *, dpi: b"")
    words = [*TINY_GPT, "training.max_steps=4", "training.eval_steps=4", "checkpoint=none"]
    words += ["data.max_train_examples=64", "data.max_eval_examples=8"]
    words += [
        "hydra.sweeper.n_trials=6",
        "hydra.sweeper.confirm.seeds=5-7",
        "hydra.sweep.dir=sweep",
    ]
    assert optrun("-cn", "search_and_confirm", *words) == 0
    searched = load_runs([Path("sweep")], beside=[Path("sweep/confirm")])
    steps = Counter(dict.fromkeys(("adamw", "lamb", "sgd"), 0))
    for run in searched:
        steps[str(run.optimizer)] += len({record["step"] for record in records(run.path)})
    assert len(searched) == 12
    assert len(set(steps.values())) == 1
    page = made([Path("sweep")], out=Path("said"))
    assert page.confirmed
    told = Path("said/report.md").read_text()
    assert next(line for line in told.splitlines() if line.startswith("**")).startswith(
        "**Confirmed"
    )
    assert told.count("| 0 | 2 |") == 3, "two configurations of each, none diverged"
