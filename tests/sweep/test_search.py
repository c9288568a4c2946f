"""Searches go on where they were killed."""

from __future__ import annotations

import os
import re
import shutil
import signal
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import optuna
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import RangeSweep

from optrun.base.errors import ConfigError
from optrun.config.overrides import parse_checked
from optrun.config.schema.sweeper import ConfirmConfig, OptunaConfig, Pruner, Sampler
from optrun.config.schema.task import SCHEMAS as TASKS
from optrun.config.store import compose, open_hydra
from optrun.sweeper.contender_study import ContenderStudy
from optrun.sweeper.contenders import Contender
from optrun.sweeper.jobs import Composer, merged, parse
from optrun.sweeper.samplers import build_sampler
from optrun.sweeper.search import Search
from optrun.sweeper.space import distribution
from optrun.training.step import TrainStep
from tests.running import summary
from tests.sweep import forked
from tests.sweep.forked import ForkServer, jobs, steps, sweep, whole
from tests.sweep.stand_in import searched

SEARCH = [
    "hydra/sweeper=optuna",
    "lr=tag(log,interval(1e-4,1e-1))",
    "training.max_steps=3",
    "checkpoint.save_steps=1",
]


def trials(folder: str | Path = "sweep") -> list[optuna.trial.FrozenTrial]:
    """Of the study."""
    storage = optuna.storages.RDBStorage(f"sqlite:///{Path(folder).resolve()}/study.db")
    found = optuna.load_study(study_name="optrun", storage=storage).get_trials()
    storage.remove_session()
    storage.engine.dispose()
    return found


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("lr=interval(0.1,0.2)", optuna.distributions.FloatDistribution(0.1, 0.2)),
        (
            "lr=tag(log,interval(1e-4,1e-1))",
            optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True),
        ),
        ("seed=int(interval(1,8))", optuna.distributions.IntDistribution(1, 8)),
        ("seed=tag(log,int(interval(1,8)))", optuna.distributions.IntDistribution(1, 8, log=True)),
        ("seed=range(0,10,4)", optuna.distributions.IntDistribution(0, 8, step=4)),
        ("lr=range(0.5,1.5,0.5)", optuna.distributions.FloatDistribution(0.5, 1.0, step=0.5)),
        ("optimizer=lamb,adamw", optuna.distributions.CategoricalDistribution(["lamb", "adamw"])),
        (
            "optimizer.betas=[0.9,0.99],[0.8,0.9]",
            optuna.distributions.CategoricalDistribution(["[0.9,0.99]", "[0.8,0.9]"]),
        ),
        ("seed=choice(1,2)", optuna.distributions.CategoricalDistribution(["1", "2"])),
    ],
)
def test_grammar(word: str, expected: object) -> None:
    assert distribution(parse(open_hydra(), [word])[0]) == expected


@pytest.mark.parametrize("word", ["seed=range(3,1,-1)", "lr=range(0.3,0.1,-0.1)"])
def test_a_range_that_falls_is_refused(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        distribution(parse(open_hydra(), [word])[0])
    assert str(caught.value).startswith(f"{word}: a range of a search rises.")


@pytest.mark.parametrize("start", ["0", "0.1", "-0.3", "1e-4", "5.0"])
@pytest.mark.parametrize("step", ["0.1", "0.3", "0.07", "2.5e-05", "3.0"])
def test_the_last_value_of_a_range_is_kept(start: str, step: str) -> None:
    """Optuna would warn, and cut it off, if rounding put it below its place on the grid."""
    for count in range(1, 30):
        stop = Decimal(start) + (count - Decimal("0.5")) * Decimal(step)
        (override,) = parse(open_hydra(), [f"lr=range({start},{stop},{step})"])
        domain = distribution(override)
        assert isinstance(domain, optuna.distributions.FloatDistribution)
        values = list(cast("RangeSweep", override.value()).range())
        assert [domain.low, domain.high] == pytest.approx([values[0], values[-1]], abs=1e-12)
        assert domain.high == float(Decimal(start) + (count - 1) * Decimal(step))


def test_whole_numbers_stay_whole() -> None:
    """Hydra reads the ends of an interval as floats, whatever the key."""
    words = [
        "training.per_device_train_batch_size=interval(2,8)",
        "optimizer.weight_decay=interval(0,1)",
    ]
    assert search(words).space == {
        "training.per_device_train_batch_size": optuna.distributions.IntDistribution(2, 8),
        "optimizer.weight_decay": optuna.distributions.FloatDistribution(0.0, 1.0),
    }


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (
            "model.config.resid_pdrop=interval(0,0.5)",
            optuna.distributions.FloatDistribution(0.0, 0.5),
        ),
        (
            "model.config.resid_pdrop=interval(0,1)",
            optuna.distributions.FloatDistribution(0.0, 1.0),
        ),
        (
            "model.config.resid_pdrop=range(0,1,0.5)",
            optuna.distributions.FloatDistribution(0.0, 0.5, step=0.5),
        ),
        ("model.config.n_layer=interval(1,8)", optuna.distributions.IntDistribution(1, 8)),
        ("model.config.n_layer=interval(1.0,8.0)", optuna.distributions.IntDistribution(1, 8)),
        ("model.config.n_inner=interval(8,32)", optuna.distributions.IntDistribution(8, 32)),
        (
            "model.config.n_inner=float(interval(8,32))",
            optuna.distributions.FloatDistribution(8.0, 32.0),
        ),
        (
            "model.config.layer_norm_epsilon=interval(0,0.5)",
            optuna.distributions.FloatDistribution(0.0, 0.5),
        ),
        (
            "model.config.layer_norm_epsilon=interval(0.0,1.0)",
            optuna.distributions.FloatDistribution(0.0, 1.0),
        ),
        ("training.eval_steps=interval(2,8)", optuna.distributions.IntDistribution(2, 8)),
    ],
)
def test_numbers_below_an_open_mapping(word: str, expected: object) -> None:
    """By the value that stands there without the word.

    Where there is none, by how both ends are written.
    """
    (found,) = search([word]).space.values()
    assert found == expected


def search(words: list[str]) -> ContenderStudy:
    """The study of a search over words of the command line."""
    hydra = open_hydra()
    options = OptunaConfig(
        name="optuna",
        params={},
        search={},
        confirm=ConfirmConfig(seeds=None, power=None, difference=None, baseline=None),
        timeout=None,
        retry_failed=False,
        max_batch_size=None,
        devices=None,
        n_trials=1,
        n_jobs=1,
        sampler=Sampler.tpe,
        seed=0,
        pruner=Pruner.none,
        min_resource=None,
        reduction_factor=2,
    )
    contender = Contender("", parse_checked(hydra, "config", words, sweep=True))
    (study,) = Search(hydra, Composer(hydra, "config"), options, [contender]).studies
    return study


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_neighbouring_seeds_are_other_studies() -> None:
    """Seed 1 proposed from its first trial on what seed 0 did from its second."""
    space = {"x": optuna.distributions.FloatDistribution(0.0, 1.0)}

    def proposed(sampler: Sampler, seed: int) -> list[float]:
        study = optuna.create_study()
        found = []
        for number in range(4):
            study.sampler = build_sampler(sampler, seed, number, 20, space=space)
            trial = study.ask(fixed_distributions=space)
            found.append(trial.params["x"])
            if number:  # the first two are under way together
                study.tell(trial, found[-1])
        return found

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for sampler in (Sampler.random, Sampler.tpe, Sampler.qmc):
        values = [value for seed in (-1, 0, 1) for value in proposed(sampler, seed)]
        assert len(set(values)) == len(values), sampler
        assert proposed(sampler, 1) == values[8:], "the same seed is the same study"


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_small_share_is_spread_evenly_from_its_first_trial_on() -> None:
    """Optuna's TPE proposes its first ten trials at random.

    With 8 trials each, it would never begin.
    """
    space = {
        "x": optuna.distributions.FloatDistribution(0.0, 1.0),
        "y": optuna.distributions.CategoricalDistribution("ab"),
    }
    for share, sobol in ((8, 8), (15, 15), (16, 4), (40, 10)):
        study = optuna.create_study()
        for number in range(min(share, 11)):
            study.sampler = build_sampler(Sampler.auto, 0, number, share, space=space)
            assert isinstance(study.sampler, optuna.samplers.QMCSampler) == (number < sobol), (
                share,
                number,
            )
            if number < sobol:
                trial = study.ask(fixed_distributions=space)
                study.tell(trial, trial.params["x"])
        proposed = [trial.params["x"] for trial in study.trials]
        whole = len(proposed) // 4 * 4  # each run of four covers the quarters
        cells = [[int(4 * value) for value in proposed[at : at + 4]] for at in range(0, whole, 4)]
        assert cells
        assert all(sorted(cell) == [0, 1, 2, 3] for cell in cells), (share, proposed)
        assert {trial.params["y"] for trial in study.trials} == {"a", "b"}
    assert build_sampler(Sampler.tpe, 0, 0, 24)._n_startup_trials == 6


@pytest.mark.slow
def test_a_longer_study_begins_with_the_shorter_one(place: Path) -> None:
    assert sweep(*SEARCH, "hydra.sweeper.n_trials=2", "hydra.sweeper.sampler=random") == 0
    assert sweep(*SEARCH, "hydra.sweeper.n_trials=3", "hydra.sweeper.sampler=random") == 0
    assert (
        sweep(*SEARCH, "hydra.sweeper.n_trials=3", "hydra.sweeper.sampler=random", folder="once")
        == 0
    )
    assert ForkServer.launches == [1] * 6
    grown, once = trials(), trials("once")
    assert [trial.params for trial in grown] == [trial.params for trial in once]
    assert [trial.value for trial in grown] == [trial.value for trial in once]
    assert len({trial.params["lr"] for trial in grown}) == 3
    values = sorted(summary(job)["metrics"]["best"]["eval/loss"]["value"] for job in jobs())
    assert values == sorted(trial.value for trial in grown)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("training.max_steps=2", "training.max_steps=1 then, 2 now"),
        ("optimizer.weight_decay=0.25", "optimizer.weight_decay=0.01 then, 0.25 now"),
        ("checkpoint.metric=perplexity", 'checkpoint.metric=null then, "eval/perplexity" now'),
        ("checkpoint.mode=max", 'checkpoint.mode="min" then, "max" now'),
        (
            "optimizer=lamb,adamw,sgd",
            "optimizer=lamb,adamw then, lamb,adamw,sgd now",
        ),
        (
            "lr=interval(1e-4,1e-1)",
            "lr=tag(log, interval()) then, interval() now",
        ),
        ("lr=1e-3,2e-3", "lr=tag(log, interval()) then, 0.001,0.002 now"),
        ("seed=1,2", 'seed=0 then, "1,2" now'),
    ],
)
def test_a_study_keeps_what_it_compares(changed: str, said: str, tmp_path: Path) -> None:
    """Its space, the configuration around it, and what judges it."""
    words = ["lr=tag(log,interval(1e-4,1e-1))", "optimizer=lamb,adamw", "training.max_steps=1"]
    assert len(searched(tmp_path, [], *words, n_trials=1).ran) == 1
    with pytest.raises(ConfigError, match=re.escape(said)):
        searched(tmp_path, [], *merged(words, [changed]), n_trials=3)


def test_a_study_that_is_refused_leaves_what_there_was(place: Path) -> None:
    """How it is logged, and the range, may change."""
    words = [*SEARCH, "hydra.sweeper.n_trials=1"]
    assert sweep(*words) == 0
    before = Path("sweep/sweep.json").read_bytes()
    for changed in (
        "training.max_steps=2",
        "lr=1e-3,2e-3",
    ):  # of the configuration, of the space: no trial is left
        assert sweep(*merged(words, [changed])) == 2
    assert Path("sweep/sweep.json").read_bytes() == before
    assert ForkServer.launches == [1]
    other = [
        "lr=tag(log,interval(1e-3,1e-1))",
        "training.logging_steps=5",
        "checkpoint.keep_last=1",
    ]
    assert sweep(*merged(words, other)) == 0
    assert ForkServer.launches == [1]


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_optuna_draws_the_study(place: Path) -> None:
    """As docs/sweeps.md has it."""
    assert sweep(*SEARCH, "hydra.sweeper.n_trials=2") == 0
    storage = optuna.storages.RDBStorage("sqlite:///sweep/study.db")
    study = optuna.load_study(study_name="optrun", storage=storage)
    plot = optuna.visualization.matplotlib.plot_parallel_coordinate
    plot(study).figure.savefig("search.png")
    assert Path("search.png").stat().st_size > 0
    storage.remove_session()
    storage.engine.dispose()


def test_what_a_study_left_is_brought_to_its_end(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial that failed is tried again where that is asked for, one whose job is gone always.

    Neither twice.
    """
    words = [*SEARCH, "hydra.sweeper.n_trials=2"]
    original = TrainStep.compute_gradients

    def fail(self: TrainStep, batches: list[dict], *rest: Any) -> object:
        if not (place / "failed").exists():
            (place / "failed").touch()
            raise RuntimeError("can't allocate memory")
        return original(self, batches, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "compute_gradients", fail)
        assert sweep(*words) == 1
    assert [trial.state.name for trial in trials()] == ["FAIL", "COMPLETE"]
    assert sweep(*words) == 1
    assert ForkServer.launches == [1, 1]
    for _ in range(2):
        assert sweep(*words, "hydra.sweeper.retry_failed=true") == 0
        assert [trial.state.name for trial in trials()] == ["FAIL", "COMPLETE", "COMPLETE"]
    assert ForkServer.launches == [1, 1, 1]
    late, first = trials()[2], trials()[0]
    assert (late.params, late.value) == (
        first.params,
        summary(job_of(first))["metrics"]["best"]["eval/loss"]["value"],
    )
    shutil.rmtree(job_of(first))
    assert sweep(*words) == 0
    assert ForkServer.launches == [1, 1, 1, 1]
    assert len(trials()) == 3
    assert all(whole(job, 3) for job in jobs())


def job_of(trial: optuna.trial.FrozenTrial) -> Path:
    """The job of a trial that searched the learning rate."""
    (found,) = [job for job in jobs() if f"-lr{trial.params['lr']:g}-" in job.name]
    return found


@pytest.mark.slow
def test_a_study_killed_goes_on(place: Path) -> None:
    """The process group is killed while the second trial trains.

    The same line repeats neither trial nor step.
    """
    words = [*SEARCH, "hydra.sweeper.n_trials=3"]
    pid = forked.fork(lambda: (os.setpgid(0, 0), sweep(*words))[1], place / "log")
    while len(jobs()) < 2 or len(steps_of(jobs()[-1])) < 1:
        assert os.waitpid(pid, os.WNOHANG)[0] == 0, (place / "log").read_text()[-2000:]
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert len(trials()) == 2
    assert sweep(*words) == 0
    assert [trial.state.name for trial in trials()] == ["COMPLETE"] * 3
    assert len(jobs()) == 3
    assert all(whole(job, 3) for job in jobs())


def steps_of(job: Path) -> list[int]:
    """Steps logged so far, none where the file is not there yet."""
    return steps(job) if (job / "metrics.jsonl").is_file() else []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seed=1"], "nothing to search over"),
        (["lr=interval(0.2,0.1)"], "interval(0.2,0.1)"),
        (["lr=tag(log,interval(0,0.1))"], "log"),
        (["optimizer=interval(1,2)"], "choice of names"),
        (["lr=interval(0.1,0.2)", "hydra.sweeper.sampler=best"], "sampler"),
        (["lr=interval(0.1,0.2)", "hydra.sweeper.n_trial=3"], "n_trial"),
        (["lr=interval(-1.0,fast)"], "interval"),
    ],
)
def test_a_wrong_search_starts_nothing(
    words: list[str], said: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("hydra/sweeper=optuna", *words) == 2
    assert said in capsys.readouterr().err
    assert not (Path("sweep") / "study.db").exists()


def test_the_name_means_ours_beside_a_plugin_of_that_name() -> None:
    """Hydra would check our file against the plugin's entry, and refuse."""
    ConfigStore.instance().store(
        group="hydra/sweeper", name="optuna", node={"_target_": "elsewhere", "n_trials": 7}
    )
    hydra = open_hydra()
    cfg = compose(hydra, "config", ["hydra/sweeper=optuna"])
    assert cfg.hydra.sweeper.n_trials == 20
    assert "_target_" not in cfg.hydra.sweeper


def test_direction_of_every_task() -> None:
    """The search must know it before a first trial has run."""
    assert {name: schema.MODE for name, schema in TASKS.items()} == {
        name: "min" if name.endswith("_lm") or name in ("sft", "preference") else "max"
        for name in TASKS
    }
