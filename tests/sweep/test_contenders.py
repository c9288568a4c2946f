"""A space per optimizer.

Who is tried with what, on equal budgets, whatever ends the search in between.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import optuna
import pytest

from optrun.base.errors import ConfigError
from optrun.config import overrides
from optrun.config.schema.sweeper import Sampler
from optrun.config.store import open_hydra
from optrun.sweeper.contenders import contenders_of, search_overrides
from tests.sweep.stand_in import UNTRAINED, searched

ADAMW, SGD = (
    "search.adamw.lr=tag(log,interval(1e-4,1e-2))",
    "search.sgd.lr=tag(log,interval(1e-2,1))",
)


def studies(folder: Path) -> dict[str, list[optuna.trial.FrozenTrial]]:
    """Trials by optimizer."""
    storage = f"sqlite:///{folder}/study.db"
    names = sorted(optuna.get_all_study_names(storage))
    return {
        name.removeprefix("optrun:"): optuna.load_study(study_name=name, storage=storage).trials
        for name in names
    }


def check(tokens: Sequence[str]) -> list[str]:
    """Check overrides of a sweep by name."""
    return overrides.parse_checked(open_hydra(), "config", tokens, sweep=True)


def test_what_is_given_for_one_wins_over_what_holds_for_all() -> None:
    own = ["search.adamw.lr=1e-3", "search.lamb.optimizer.betas=[0.9,0.99],[0.8,0.9]"]
    found = contenders_of(open_hydra(), check, ["lr=2e-3,4e-3", "seed=0"], own)
    assert {each.name: list(each.overrides) for each in found} == {
        "adamw": ["optimizer=adamw", "seed=0", "lr=1e-3"],
        "lamb": [
            "optimizer=lamb",
            "lr=2e-3,4e-3",
            "seed=0",
            "optimizer.betas=[0.9,0.99],[0.8,0.9]",
        ],
    }
    assert [each.own_keys for each in found] == [{"lr"}, {"optimizer.betas"}]


@pytest.mark.parametrize(
    ("common", "own", "facts"),
    [
        ([], ["search.adamm.lr=1,2"], ("search.adamm.lr", "adamm", "adamw")),
        (["optimizer=adamw,sgd"], ["search.lamb.lr=1,2"], ("search.lamb", "optimizer=adamw,sgd")),
        (
            [],
            ["search.sgd.optimizer.betas=[0.9,0.99]"],
            ("search.sgd.optimizer.betas", "optimizer=adamw", "momentum"),
        ),
        ([], ["search.sgd.lr=fast"], ("search.sgd.lr=fast", "number")),
        ([], ["search.adamw=1,2"], ("search.adamw=1,2", "search.OPTIMIZER.KEY=VALUES")),
        ([], ["search.adamw.seed=1,2"], ("search.adamw.seed", "the same for all")),
        ([], ["search.adamw.optimizer=sgd"], ("search.adamw.optimizer", "the same for all")),
    ],
)
def test_a_space_that_cannot_be_is_refused_by_name(
    common: list[str], own: list[str], facts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as refused:
        contenders_of(open_hydra(), check, common, own)
    for fact in facts:
        assert fact in str(refused.value)


@pytest.mark.parametrize(
    "space", [{"adamw": "1e-3,2e-3"}, {"adamw": {}}, {"adamw": {"lr": [1e-3, 2e-3]}}]
)
def test_a_file_that_is_no_space_is_refused(space: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"hydra.sweeper.search.adamw"):
        search_overrides(space)


@pytest.mark.parametrize(
    ("own", "changed", "facts"),
    [
        (["search.adamw.lr=interval(1e-2,1e-3)"], {}, ("search.adamw.lr", "interval(1e-2,1e-3)")),
        (["search.adamw.lr=interval(-1,1e-3)"], {}, ("search.adamw.lr=-1", "above 0")),
        (
            [ADAMW, "search.sgd.optimizer.momentum=0.9"],
            {},
            ("optimizer=sgd", "nothing to search over", "search.sgd.lr"),
        ),
        ([ADAMW, SGD], {"n_trials": 1}, ("n_trials=1", "adamw, sgd", "2 or more")),
    ],
)
def test_a_search_that_cannot_be_starts_nothing(
    own: list[str], changed: dict[str, int], facts: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        searched(tmp_path, own, **changed)
    for fact in facts:
        assert fact in str(refused.value)
    assert not (tmp_path / "study.db").exists()


def test_budgets_are_equal_whatever_kills_the_search(tmp_path: Path) -> None:
    """Killed twice, it is never uneven by more than one trial, and comes to what the
    undisturbed one did.
    """
    ran = []
    for dies_at in (1, 2, None):
        ran += searched(tmp_path / "killed", [ADAMW, SGD], n_trials=5, dies_at=dies_at).ran
        counts = [len(trials) for trials in studies(tmp_path / "killed").values()]
        assert max(counts) - min(counts) <= 1
    whole = searched(tmp_path / "whole", [ADAMW, SGD], n_trials=5)
    assert ran == whole.ran
    assert len(set(ran)) == 4
    assert "study of 4 trials" in whole.notes[0]
    assert "2 for each of adamw, sgd" in whole.notes[0]
    killed, straight = studies(tmp_path / "killed"), studies(tmp_path / "whole")
    for name in ("adamw", "sgd"):
        assert [trial.params for trial in killed[name]] == [
            trial.params for trial in straight[name]
        ]
        assert [trial.state.name for trial in killed[name]] == ["COMPLETE"] * 2
        assert [trial.number for trial in killed[name]] == [0, 1]


def test_one_more_optimizer_catches_up(tmp_path: Path) -> None:
    searched(tmp_path, [ADAMW, SGD], n_trials=4)
    more = [ADAMW, SGD, "search.lamb.lr=1e-3,1e-2"]
    with pytest.raises(
        ConfigError,
        match=re.escape("1 for each of 3 optimizers, but adamw has 2 already. Expected 6"),
    ):
        searched(tmp_path, more, n_trials=3)
    searched(tmp_path, more, n_trials=6)
    assert {name: len(trials) for name, trials in studies(tmp_path).items()} == {
        "adamw": 2,
        "lamb": 2,
        "sgd": 2,
    }
    with pytest.raises(
        ConfigError, match=r"search.adamw, search.lamb, search.sgd, but now there is one space"
    ):
        searched(tmp_path, [], "lr=1e-3,1e-2", "optimizer=adamw,sgd")


def test_a_trial_is_as_good_as_the_mean_of_its_seeds(tmp_path: Path) -> None:
    found = searched(tmp_path, [ADAMW, SGD], "seed=0,1,8", n_trials=2)
    assert len(found.ran) == 6
    for trials in studies(tmp_path).values():
        (trial,) = trials
        off = trial.value - 0.03  # the mean over seeds of what a seed adds
        assert any(
            row.state.best == pytest.approx(off + 0.08) for row in found.job_table.rows.values()
        )
    with pytest.raises(ConfigError, match='seed="0,1,8" then, 0 now'):
        searched(tmp_path, [ADAMW, SGD], n_trials=2)


def test_trials_of_the_same_values_are_one_job(tmp_path: Path) -> None:
    """A search of few values stopped at the first trial that proposed one again."""
    found = searched(tmp_path, ["search.adamw.lr=1e-3,2e-3"], n_trials=6)
    (trials,) = studies(tmp_path).values()
    assert len(trials) == 6
    assert len(found.job_table.rows) <= 2
    assert found.job_table.left == 0


def test_a_diverged_trial_is_told_as_a_bad_one(tmp_path: Path) -> None:
    """Told as failed, it is nothing to a sampler.

    Which then proposes what diverges again and again.
    """
    own = ["search.adamw.lr=tag(log,interval(1e-4,1))"]
    found = searched(tmp_path, own, n_trials=20, sampler=Sampler.auto, diverges_above=1e-2)
    (trials,) = studies(tmp_path).values()
    assert len(trials) == 20
    assert {trial.state for trial in trials} == {optuna.trial.TrialState.COMPLETE}
    diverged = [trial for trial in trials if trial.params["lr"] > 1e-2]
    assert diverged
    assert {trial.value for trial in diverged} == {UNTRAINED}, (
        "its untrained model is worse than all that finished"
    )
    informed = trials[5:]  # after Sobol's five
    assert sum(trial.params["lr"] > 1e-2 for trial in informed) < len(informed) / 2, (
        "half of the range diverges"
    )
    assert sum(row.state.diverged for row in found.job_table.rows.values()) == len(diverged)
