"""Simulated runs with a known truth, written in the form that training writes them."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml
from rich.console import Console

from optrun.report.theme import SOFTWARE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from optrun.report.build import Report

LOSS_FLOOR = {"adamw": 2.60, "lamb": 2.50, "adamax": 2.72, "sgd": 3.05}
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
BEST_LR = {"adamw": 1e-3, "lamb": 4e-3, "adamax": 2e-3, "sgd": 3e-1}


def override(values: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Set dotted keys in place."""
    for key, value in config.items():
        group, _, leaf = key.partition(".")
        values[group] = {**values[group], leaf: value} if leaf else value


def remember(
    record: Mapping[str, Any], last: dict[str, float], best: dict[str, dict[str, float]]
) -> None:
    """Take a metrics line into the last and the best values, in place."""
    for name, value in record.items():
        if "/" not in name:
            continue
        last[name] = value
        sign = -1 if name.endswith(("accuracy", "f1")) else 1
        is_better = name not in best or sign * value < sign * best[name]["value"]
        if math.isfinite(value) and is_better:
            best[name] = {"value": value, "step": record["step"]}


def write_run(
    path: Path,
    *,
    optimizer: str = "adamw",
    lr: float = 1e-3,
    seed: int = 0,
    max_steps: int = 200,
    global_step: int | None = None,
    log_every: int = 5,
    eval_every: int = 25,
    floor: float | None = None,
    noise: float = 0.01,
    status: str = "finished",
    message: str = "",
    diverge_at: int | None = None,
    accuracy: bool = False,
    config: dict[str, Any] | None = None,
    summary: dict[str, Any] | None = None,
    final: float | None = None,
    before: float | None = None,
) -> Path:
    """A run whose final evaluation loss is known.

    The final loss is `floor + 0.25 * (ln lr - ln best lr)^2 / ln(10)^2 + an offset of the seed +
    noise`, or `final`.
    `before` is the evaluation before the first step.
    """
    path.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng([seed, round(1e6 * lr), sum(optimizer.encode())])
    floor = LOSS_FLOOR.get(optimizer, 2.8) if floor is None else floor
    distance = math.log10(lr / BEST_LR.get(optimizer, 1e-3))
    target = (
        floor + 0.25 * distance**2 + 0.03 * math.sin(7 * seed) + noise * random.standard_normal()
    )
    target = target if final is None else final
    done = max_steps if global_step is None else global_step
    speed = 90.0 if optimizer == "lamb" else 100.0
    flat: dict[str, Any] = {
        "lr": lr,
        "seed": seed,
        "run_name": f"run-{path.name}",
        "resume": None,
        "model": {"name": "gpt_tiny", "n_layer": 4},
        "task": {"name": "causal_lm"},
        "data": {"name": "stdlib", "seed": seed},
        "param_groups": {"name": "standard"},
        "optimizer": {
            "name": optimizer,
            "betas": [0.9, 0.999],
            "default_lr": BEST_LR.get(optimizer, 1e-3),
        },
        "scheduler": {"name": "cosine", "warmup_ratio": 0.1},
        "clip": {"name": "global_norm", "max_norm": 1.0},
        "training": {
            "name": "default",
            "max_steps": max_steps,
            "per_device_train_batch_size": 16,
            "gradient_accumulation_steps": 1,
            "logging_steps": log_every,
        },
        "checkpoint": {"name": "default", "metric": "eval/loss", "mode": "min"},
        "tracking": {"name": "none"},
    }
    override(flat, config or {})
    (path / "config.yaml").write_text(yaml.dump(flat, Dumper=DUMPER, sort_keys=False))
    last: dict[str, float] = {}
    best: dict[str, dict[str, float]] = {}
    with (path / "metrics.jsonl").open("w") as file:
        if before is not None:
            file.write(
                json.dumps({"step": 0, "epoch": 0.0, "time": 0.0, "eval/loss": before}) + "\n"
            )
        for step in range(1, done + 1):
            if step % log_every and step % eval_every and step not in (1, done):
                continue
            progress = step / max_steps
            warm = min(1.0, progress / 0.1)
            rate = lr * warm * 0.5 * (1 + math.cos(math.pi * max(0.0, progress - 0.1) / 0.9))
            level = target + (9.0 - target) * math.exp(-6.0 * progress) * (1 - progress) ** 0.5
            broken = diverge_at is not None and step >= diverge_at
            record: dict[str, Any] = {
                "step": step,
                "epoch": round(progress, 4),
                "time": round(step / speed, 3),
            }
            if step % log_every == 0 or step in (1, done):
                train = math.nan if broken else level + 0.06 * random.standard_normal()
                record |= {
                    "train/loss": train,
                    "train/lr": rate,
                    "perf/tokens_per_second": speed * 2048,
                }
                record["train/grad_norm"] = (
                    math.inf if broken else 1 + 3 * math.exp(-5 * progress) + random.gamma(2, 0.1)
                )
            if step % eval_every == 0 or step == done:
                value = (
                    math.nan
                    if broken
                    else (target if step == max_steps else level + 0.01 * random.standard_normal())
                )
                record["eval/loss"] = value
                if accuracy:
                    record["eval/accuracy"] = min(0.99, max(0.1, 1.25 - value / 4))
                    record["eval/f1"] = record["eval/accuracy"] - 0.03
                else:
                    record["eval/perplexity"] = math.exp(value)
            remember(record, last, best)
            file.write(
                json.dumps(
                    {
                        k: "NaN" if v != v else "Infinity" if v == math.inf else v
                        for k, v in record.items()
                    }
                )
            )
            file.write("\n")
    content: dict[str, Any] = {
        "format": 1,
        "status": status,
        "message": message,
        "global_step": done,
        "max_steps": max_steps,
        "epoch": done / max_steps,
        "started_at": "2026-01-02T03:04:05+00:00",
        "updated_at": "2026-01-02T03:06:05+00:00",
        "wall_seconds": done / speed + 1.0,
        "command": (
            f"optrun -m optimizer=adamw,lamb lr=1e-3,2e-3 seed=0,1,2 training.max_steps={max_steps}"
        ),
        "config_name": "config",
        "overrides": [
            f"optimizer={optimizer}",
            f"lr={lr}",
            f"seed={seed}",
            f"training.max_steps={max_steps}",
        ],
        "metrics": {
            "last": {
                k: "NaN" if v != v else "Infinity" if v == math.inf else v for k, v in last.items()
            },
            "best": best,
        },
        "main_metric": {"name": "eval/loss", "mode": "min"},
        "perf": {
            "tokens_per_second": speed * 2048,
            "samples_per_second": speed * 16,
            "peak_memory_bytes": 800_000_000,
            "optimizer_state_bytes": 26_000_000 if optimizer != "sgd" else 13_000_000,
        },
        "model": {
            "class": "GPT2LMHeadModel",
            "parameters": 3_241_000,
            "trainable_parameters": 3_241_000,
        },
        "data": {"train_examples": 4000, "eval_examples": 200, "fingerprint": "d1"},
        "versions": {
            "optrun": "0.1",
            "torch": "2.13.0",
            "transformers": "5.23.0",
            "python": "3.11.7",
        },
        "hardware": {"device": "cpu", "name": "2 cores"},
        "code": {"optrun": "abc123"},
        "resumes": [],
        "config_digest": "x",
    }
    content |= summary or {}
    (path / "summary.json").write_text(json.dumps(content))
    return path


@pytest.fixture(autouse=True)
def _unpainted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made, and painted where a test asks for `pictures`.

    The report of `made`, which is older than any test, is painted, too.
    """
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("optrun.report.build.to_png", _unpainted_png)


def _unpainted_png(figure: Figure, *, dpi: int = 160) -> bytes:
    """Make a file that a report takes for its own."""
    assert figure.axes
    assert dpi in (160, 240)
    return b"\x89PNG " + SOFTWARE.encode()


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    return write_run


def write_sweep(folder: Path) -> Path:
    """Two optimizers at three learning rates with three seeds each."""
    number = 0
    for optimizer, lrs in {"adamw": (5e-4, 1e-3, 2e-3), "lamb": (2e-3, 4e-3, 8e-3)}.items():
        for lr in lrs:
            for seed in range(3):
                write_run(
                    folder / str(number),
                    optimizer=optimizer,
                    lr=lr,
                    seed=seed,
                    max_steps=60,
                    eval_every=15,
                )
                number += 1
    return folder


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, str]:
    """One report that is only read, and what it said in the terminal."""
    from optrun.report.build import report

    stream = io.StringIO()
    folder = write_sweep(tmp_path_factory.mktemp("report") / "sweep")
    return report([folder], console=Console(file=stream, width=140)), stream.getvalue()
