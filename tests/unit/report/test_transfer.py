"""From sweeps at small sizes to the lr of a larger one: what comes out, and what is refused."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import optrun as package
from benchmarks import transfer as simulated
from optrun.base.errors import ConfigError
from optrun.report.lr_scaling.fit import BEND, NORMAL, fit_law, fit_lr_curve
from optrun.report.lr_scaling.predict import WIDEST, predict
from tests.running import optrun

MakeRun = Callable[..., Path]
LRS = (0.0025, 0.005, 0.01, 0.02, 0.04)
WIDTH = "model.n_embd"


def true_lr(width: float, steps: float = 200) -> float:
    return 0.01 * (width / 64) ** -0.5 * (steps / 200) ** -0.3


@pytest.fixture
def sweep(make_run: MakeRun, tmp_path: Path) -> Callable[..., Path]:
    """Sweeps whose optimum is known."""

    def made(
        sizes: dict[Any, tuple[float, ...]],
        *,
        name: str = "sweep",
        seeds: tuple[int, ...] = (0, 1, 2),
        optimizer: str = "adamw",
        at: float | None = None,
        **more: Any,
    ) -> Path:
        for size, lrs in sizes.items():
            width, steps = size if isinstance(size, tuple) else (size, 200)
            for lr in lrs:
                for seed in seeds:
                    z = math.log(
                        lr / (true_lr(width, steps) if at is None else at)
                    ) + 0.05 * math.sin(5 * seed + width)
                    words = [
                        f"optimizer={optimizer}",
                        f"lr={lr}",
                        f"seed={seed}",
                        f"{WIDTH}={width}",
                    ]
                    run = {
                        "config": {WIDTH: width},
                        "summary": {"overrides": words, "command": "optrun -m a=b"},
                    } | more
                    path = tmp_path / name / f"{optimizer}-{width}-{steps}-{lr}-{seed}"
                    make_run(
                        path,
                        lr=lr,
                        seed=seed,
                        max_steps=steps,
                        log_every=steps,
                        eval_every=steps,
                        final=2.5 + 0.2 * z**2 + 0.02 * seed,
                        optimizer=optimizer,
                        **run,
                    )
        return tmp_path / name

    return made


def test_a_power_law_is_found(
    sweep: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sweep({32: LRS, 64: LRS, 128: LRS})
    sweep({32: LRS, 64: LRS}, optimizer="sgd", at=0.02)
    assert optrun("transfer", str(folder), f"to={WIDTH}=256") == 0
    printed = " ".join(capsys.readouterr().out.split())
    answers = {each.contender: each for each in predict([folder], {WIDTH: 256}).answers}
    adamw = answers["adamw"]
    assert adamw.lr.value == pytest.approx(true_lr(256), rel=0.15)
    assert adamw.lr.low < true_lr(256) < adamw.lr.high < 3 * adamw.lr.low
    exponent = adamw.exponents[WIDTH]
    assert exponent.low < -0.5 < exponent.high < 0
    assert answers["sgd"].lr.value == pytest.approx(0.02, rel=0.15)
    assert not answers["sgd"].lr.is_bounded, "two sizes test no law"
    for fact in (f"{WIDTH}=256", "too few sizes to test the law", "would test it", f"{WIDTH}^-0."):
        assert fact in printed
    words = shlex.split(adamw.test)
    assert f"{WIDTH}=256" in words
    assert f"{WIDTH}=128" not in words
    typed = next(word for word in words if word.startswith("lr="))
    ends = [float(end) for end in typed[3:].split(",")]
    assert ends == pytest.approx([adamw.lr.low, adamw.lr.high], rel=0.01)


def test_two_keys(sweep: Callable[..., Path]) -> None:
    folder = sweep({(32, 100): LRS, (64, 100): LRS, (64, 400): LRS})
    found = package.transfer([folder], {WIDTH: 128, "training.max_steps": 800})
    lr = found.answers[0].lr
    assert lr.value == pytest.approx(true_lr(128, 800), rel=0.2)
    assert found.answers[0].exponents["training.max_steps"].value == pytest.approx(-0.3, abs=0.15)
    assert not lr.is_bounded, "three sizes for three coefficients"
    with pytest.raises(ConfigError, match=r"training\.max_steps varied"):
        package.transfer([folder], {WIDTH: 128})


def test_keys_that_moved_together(sweep: Callable[..., Path]) -> None:
    """An unnamed key goes along; where both are named, the target has to lie on their line."""
    heads = {32: 2, 64: 4, 128: 8}
    for width, count in heads.items():
        folder = sweep({width: LRS}, config={WIDTH: width, "model.n_head": count})
    found = predict([folder], {WIDTH: 512}).answers[0]
    assert found.target == {WIDTH: 512, "model.n_head": 32}
    with pytest.raises(ConfigError, match=r"n_head would be 18.75 at .* cannot be built"):
        predict([folder], {WIDTH: 300})
    assert "model.n_head=32" in found.test
    together = sweep({(32, 100): LRS, (64, 200): LRS, (128, 400): LRS}, name="together")
    found = predict([together], {WIDTH: 256, "training.max_steps": 800}).answers[0]
    assert list(found.exponents) == [WIDTH]
    assert predict([together], {WIDTH: 256}).answers[0].target["training.max_steps"] == 800
    with pytest.raises(ConfigError, match=rf"another training.max_steps and the same {WIDTH}"):
        predict([together], {WIDTH: 256, "training.max_steps": 400})


def test_one_contender_of_one_size_keeps_no_answer_from_the_others(
    sweep: Callable[..., Path],
) -> None:
    folder = sweep({32: LRS, 64: LRS})
    sweep({64: LRS}, optimizer="lamb")
    found = predict([folder], {WIDTH: 128})
    assert [each.contender for each in found.answers] == ["adamw"]
    assert "predict lr only for model.n_embd=64" in found.refused["lamb"]


def test_no_number_is_given_that_nothing_carries(
    sweep: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sweep({32: LRS, 64: LRS, 128: LRS})
    assert predict([folder], {WIDTH: 512}).answers[0].lr.is_bounded
    assert optrun("transfer", str(folder), f"to={WIDTH}=1024") == 2
    said = " ".join(capsys.readouterr().err.split())
    for fact in ("8 times beyond 128", "sweep lr at a size between"):
        assert fact in said


def test_optima_off_any_power_law_tell_nothing(sweep: Callable[..., Path]) -> None:
    for width, at in ((32, 0.006), (64, 0.016), (128, 0.006)):
        folder = sweep({width: LRS}, at=at)
    with pytest.raises(ConfigError, match=r"follow no power law.*nearer to model\.n_embd=256"):
        predict([folder], {WIDTH: 256})


def test_diverged_runs_bound_an_optimum(sweep: Callable[..., Path], make_run: MakeRun) -> None:
    folder = sweep({32: LRS, 64: LRS})
    for seed in range(3):
        make_run(
            folder / f"lost-{seed}",
            lr=0.03,
            seed=seed,
            config={WIDTH: 64},
            diverge_at=20,
            log_every=50,
        )
    optimum = predict([folder], {WIDTH: 128}).answers[0].optima[f"{WIDTH}=64"]
    assert optimum.value < optimum.high <= 0.03


@pytest.mark.parametrize(
    ("sizes", "more", "to", "facts"),
    [
        ({64: LRS}, {}, f"{WIDTH}=128", (WIDTH, "=64.", "another")),
        ({32: LRS, 64: LRS}, {}, "model.n_embed=128", ("model.n_embed", WIDTH)),
        (
            {32: LRS, 64: LRS},
            {},
            "training.max_steps=400",
            ("training.max_steps", "lr only for training.max_steps=200"),
        ),
        ({32: LRS, 64: LRS}, {}, "lr=0.1", ("lr",)),
        ({32: LRS, 64: LRS}, {}, f"{WIDTH}=1_28 a.b=1e3", ("a.b", "expected a key")),
        ({32: LRS, 64: LRS}, {}, f"{WIDTH}=-1", (WIDTH, "-1", "above 0")),
        ({32: LRS, 64: LRS}, {}, f"{WIDTH}=wide", (WIDTH, "wide", "NUMBER")),
        ({32: LRS, 64: LRS}, {}, f"{WIDTH}=128 {WIDTH}=256", (WIDTH, "twice")),
        ({32: LRS, 64: LRS}, {}, WIDTH, ("KEY=NUMBER",)),
        ({32: LRS, 64: LRS}, {}, "  ", ("to",)),
        ({32: LRS, 64: LRS[2:]}, {}, f"{WIDTH}=128", (f"{WIDTH}=64", "lowest", "lr=5e-3")),
        ({32: LRS, 64: LRS[:3]}, {}, f"{WIDTH}=128", (f"{WIDTH}=64", "highest", "lr=2e-2")),
        ({32: LRS, 64: LRS[2:4]}, {}, f"{WIDTH}=128", (f"{WIDTH}=64", "lowest of 2", "lr=5e-3")),
        ({32: LRS, 64: LRS}, {"seeds": (0,)}, f"{WIDTH}=128", ("1 seeds", "expected 2")),
        ({32: LRS, 64: LRS}, {"status": "running"}, f"{WIDTH}=128", ("no run finished",)),
    ],
)
def test_what_does_not_suffice(
    sizes: dict[int, tuple[float, ...]],
    more: dict[str, Any],
    to: str,
    facts: tuple[str, ...],
    sweep: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert optrun("transfer", str(sweep(sizes, **more)), f"to={to}") == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert all(fact in said for fact in facts), said


def test_mixed_tasks(sweep: Callable[..., Path]) -> None:
    folder = sweep({32: LRS})
    sweep({64: LRS}, config={WIDTH: 64, "task.name": "masked_lm"})
    with pytest.raises(
        ConfigError, match=r"masked_lm: to: model.n_embd=128: the sweeps predict lr only"
    ):
        predict([folder], {WIDTH: 128})


def test_words(
    tmp_path: Path, sweep: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sweep({32: LRS, 64: LRS})
    (tmp_path / "empty").mkdir()
    for words, fact in (
        ([], "expected optrun transfer DIR"),
        ([folder], "to is missing"),
        ([folder, f"to={WIDTH}=128", "too=1"], "Did you mean"),
        ([folder, f"to={WIDTH}=128", "metric="], "a value is missing"),
        ([folder, f"to={WIDTH}=128", "out=there"], "optrun report DIR draws the sweeps"),
        ([tmp_path / "nowhere", f"to={WIDTH}=128"], "no such directory"),
        ([tmp_path / "empty", f"to={WIDTH}=128"], "no run"),
    ):
        assert optrun("transfer", *map(str, words)) == 2
        assert fact in capsys.readouterr().err
    for wrong in (str(folder), 3):
        with pytest.raises(TypeError):
            package.transfer(
                wrong if wrong == str(folder) else [folder], 3 if wrong == 3 else {WIDTH: 1}
            )  # type: ignore[arg-type]


def test_a_parabola_is_recovered() -> None:
    x = np.log(np.array(LRS))
    costs = 0.3 * (x - math.log(0.012)) ** 2 + np.array([[1.0], [2.0]])
    costs[1, 0] = math.nan
    lr_curve = fit_lr_curve(x, costs)
    assert math.exp(lr_curve.best) == pytest.approx(0.012)
    assert lr_curve.variance == pytest.approx(0, abs=1e-12)


def test_exponents_of_two_keys() -> None:
    sizes = np.array([[64.0, 100.0], [128.0, 100.0], [128.0, 400.0], [256.0, 200.0]])
    x = np.log(np.geomspace(1e-3, 1e-1, 9))
    optima = np.log(0.1) - 0.5 * np.log(sizes[:, 0] / 64) - 0.3 * np.log(sizes[:, 1] / 100)
    fitted_curves = [fit_lr_curve(x, (x - best) ** 2 + np.zeros((2, 1))) for best in optima]
    law = fit_law(sizes, fitted_curves)
    assert (law.exponent(0)[0], law.exponent(1)[0]) == (pytest.approx(-0.5), pytest.approx(-0.3))
    assert not law.is_broken


def test_seeds_do_not_dilute_the_bend_of_the_law() -> None:
    """However many seeds: three sizes leave a bend open that decides far away."""
    x = np.log(np.geomspace(1e-3, 1e-1, 9))
    sizes = np.array([[1.0], [2.0], [4.0]])
    for seeds in (3, 50):
        curves = [fit_lr_curve(x, (x + 4 + 0.5 * k) ** 2 + np.zeros((seeds, 1))) for k in range(3)]
        _, low, high = fit_law(sizes, curves).predict([16.0])
        assert high - low > 2 * NORMAL * BEND
    bent = [fit_lr_curve(x, (x + 4 - 0.4 * (k == 1)) ** 2 + np.zeros((3, 1))) for k in range(3)]
    assert fit_law(sizes, bent).is_broken


@pytest.mark.parametrize("drift", [0.0, 0.05, -0.1])
@pytest.mark.parametrize(("sizes", "seeds"), [(3, 3), (4, 5)])
def test_the_interval_holds_the_truth_of_a_slightly_bent_law(
    drift: float, sizes: int, seeds: int
) -> None:
    """ln lr* bends by `drift` (ln size)^2; asked four times beyond the largest size."""
    random = np.random.default_rng([sizes, seeds])
    x = math.log(2) * np.arange(sizes)
    target = x[-1] + math.log(4)
    hits = []
    while len(hits) < 200:
        curves = []
        for at in -0.5 * x + drift * x**2:
            lrs = at + math.log(2) * (np.arange(-3, 4) + random.uniform(-0.5, 0.5))
            noise = 0.02 * random.standard_normal((seeds, 7))
            curves.append(fit_lr_curve(lrs, 0.1 * (lrs - at) ** 2 + noise))
        law = fit_law(np.exp(x)[:, None], curves)
        _, low, high = law.predict([math.exp(target)])
        if not law.is_broken and high - low < math.log(WIDEST):
            hits.append(low <= -0.5 * target + drift * target**2 <= high)
    assert np.mean(hits) >= 0.85


def test_a_swept_size_has_its_own_optimum(sweep: Callable[..., Path]) -> None:
    answer = predict([sweep({32: LRS, 64: LRS, 128: LRS})], {WIDTH: 128}).answers[0]
    assert answer.lr == answer.optima[f"{WIDTH}=128"]
    assert not answer.exponents


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """A tenth of what benchmarks/transfer.py simulates; the binomial error of 250 sweeps is 2 %."""
    for shape, grid, noise, seeds in (
        ("a parabola", "5 lrs, x 2", "noisy", 3),
        ("steeper above", "5 lrs, x 2", "very noisy", 2),
        ("flat far away", "7 lrs, x 2", "quiet", 5),
    ):
        assert simulated.covered(shape, grid, noise, seeds, 4, 250)[0] >= 0.85
