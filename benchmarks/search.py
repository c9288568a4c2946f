"""Simulate searches of a learning rate whose best is known.

What diverged trials and few trials cost.

    python benchmarks/search.py [--studies 200]

The response is a basin over lg lr, with a second setting and a cliff: above a learning rate trials
diverge. Regret is the distance of the best trial from the best there is, the median over studies.
Most tools tell Optuna of a diverged trial `as FAIL`; optrun tells a bad value (`as bad`), see
`optrun.artifacts.objective.score_of_diverged`.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from statistics import median

import optuna
from optuna.trial import TrialState

from optrun.artifacts.objective import score_of_diverged
from optrun.config.schema.sweeper import Sampler
from optrun.sweeper.samplers import build_sampler

UNTRAINED = 11.0
SPACE = {
    "lr": optuna.distributions.FloatDistribution(1e-5, 1.0, log=True),
    "beta": optuna.distributions.FloatDistribution(0.8, 0.999),
}


def loss(lr: float, beta: float, cliff: float) -> float | None:
    """The final loss of a run; None: it diverged."""
    if lr > cliff:
        return None
    return 2.0 + 0.4 * (math.log10(lr) + 3) ** 2 + 3.0 * (beta - 0.93) ** 2


def regret(
    seed: int, trials: int, name: Sampler, *, tell_bad: bool, cliff: float
) -> tuple[float, int]:
    """Search once; the regret, and how many trials diverged."""
    study = optuna.create_study(
        direction="minimize", sampler=optuna.samplers.RandomSampler(seed=seed)
    )
    known: list[float] = []
    diverged = 0
    for number in range(trials):
        study.sampler = build_sampler(name, seed, number, trials, study=str(seed), space=SPACE)
        trial = study.ask(SPACE)
        found = loss(trial.params["lr"], trial.params["beta"], cliff)
        diverged += found is None
        known += [] if found is None else [found]
        told = found if found is not None else score_of_diverged(known, [UNTRAINED], "min")
        if found is None and not tell_bad:
            study.tell(trial, state=TrialState.FAIL)
        else:
            study.tell(trial, told)
    return min(known, default=UNTRAINED) - 2.0, diverged


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--studies", type=int, default=200, help="simulated searches a row")
    studies = parser.parse_args().studies
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    rows: list[tuple[str, Callable[[int], tuple[float, int]]]] = []
    for text, tell_bad in (("as FAIL", False), ("as bad", True)):
        rows.append(
            (
                f"24 trials, TPE, most diverge, told {text}",
                lambda seed, told=tell_bad: regret(
                    seed, 24, Sampler.tpe, tell_bad=told, cliff=2e-3
                ),
            )
        )
    for text, sampler in (
        ("at random", Sampler.random),
        ("TPE", Sampler.tpe),
        ("auto (Sobol)", Sampler.auto),
    ):
        rows.append(
            (
                f" 8 trials, {text}",
                lambda seed, name=sampler: regret(seed, 8, name, tell_bad=True, cliff=0.1),
            )
        )
    print(f"{'search':42} {'median regret':>14} {'diverged':>9}")
    for text, one in rows:
        found = [one(seed) for seed in range(studies)]
        print(
            f"{text:42} {median(each for each, _ in found):14.4f}"
            f" {median(lost for _, lost in found):9.0f}"
        )


if __name__ == "__main__":
    main()
