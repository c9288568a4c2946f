"""The certificate of an optimizer.

What is equal is called equal, and a planted difference is called by its name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from optrun.certify import optimizer as certificate
from optrun.certify.optimizer import Verdict, defaults_of
from optrun.config.dialects import dialect_options
from optrun.optimizer import build_optimizer
from tests.running import optrun

STEPS = 9


def groups(scale: float = 1.0) -> list[dict[str, Any]]:
    def params(prefix: str, count: int) -> list[Any]:
        shape = (3, 2)
        return [
            (f"{prefix}.{i}", torch.nn.Parameter(torch.empty(shape, device="meta")))
            for i in range(count)
        ]

    return [
        {"params": params("w", 6), "weight_decay": 0.1, "lr_scale": scale},
        {"params": params("b", 5), "weight_decay": 0.0, "lr_scale": 0.5},
    ]


def certify(
    monkeypatch: pytest.MonkeyPatch,
    choice: str,
    dialect: str,
    *,
    scale: float = 1.0,
    **planted: Any,
) -> Verdict:
    """With a preset in force, and options over it."""
    options = {**defaults_of(choice), **dialect_options(choice, dialect, **planted)}

    def build(config: Any, *args: Any, **kwargs: Any) -> Any:
        return build_optimizer(
            choice, *args, **kwargs, **({} if kwargs.keys() - {"lr"} else options)
        )

    monkeypatch.setattr(certificate, "build_optimizer", build)
    return certificate.certify(
        choice,
        groups(scale),
        choice=choice,
        dialect=dialect,
        lr=0.02,
        options=options,
        steps=STEPS,
        seed=0,
    )


@pytest.mark.parametrize(
    ("choice", "dialect", "planted", "term"),
    [
        ("lamb", "timm", {"bias_correction": "none"}, "bias correction"),
        ("lamb", "pytorch_optimizer", {"bias_correction": "moments"}, "bias correction"),
        ("lamb", "deepspeed", {"max_trust": 3.0}, "clamp of the trust ratio"),
        ("lamb", "nvlamb", {"min_trust": 0.01}, "clamp of the trust ratio"),
        ("lamb", "torch_optimizer", {"max_param_norm": None}, "clamp of the weights' norm"),
        ("lamb", "optax", {"weight_decay_mode": "decoupled"}, "weight decay"),
        ("lamb", "keras", {"max_trust": 3.0}, "clamp of the trust ratio"),
        ("lamb", "pytorch_optimizer", {"eps_in_trust": False}, "eps in the trust ratio"),
        ("lamb", "timm", {"step_count": "parameter"}, "step count"),
        ("lamb", "tensorflow", {"always_adapt": False}, "adaptation of tensors without decay"),
        ("adamax", "torch", {"eps_form": "decayed", "eps": 1e-3}, "place of eps"),
        ("adamax", "keras", {"weight_decay_mode": "l2"}, "weight decay"),
        ("adamw", "paper", {"weight_decay_mode": "decoupled"}, "weight decay"),
        ("adamw", "torch", {"weight_decay_mode": "fixed"}, "weight decay"),
    ],
)
def test_a_planted_difference_is_named(
    monkeypatch: pytest.MonkeyPatch, choice: str, dialect: str, planted: dict[str, Any], term: str
) -> None:
    preset, option = (
        {**defaults_of(choice), **dialect_options(choice, dialect)},
        next(iter(planted)),
    )
    verdict = certify(monkeypatch, choice, dialect, **planted)
    assert not verdict.equal
    assert verdict.terms == [term]
    assert verdict.overrides == [f"optimizer.{option}={json.dumps(preset[option]).strip(chr(34))}"]


@pytest.mark.parametrize(
    ("choice", "dialect"), [("lamb", "timm"), ("adamax", "keras"), ("adamw", "paper")]
)
def test_what_is_equal_is_called_so(
    monkeypatch: pytest.MonkeyPatch, choice: str, dialect: str
) -> None:
    verdict = certify(monkeypatch, choice, dialect)
    assert verdict.equal
    assert verdict.largest < 1e-12
    assert not verdict.overrides


@pytest.mark.parametrize(("choice", "dialect"), [("lamb", "timm"), ("adamw", "paper")])
def test_a_group_whose_rate_is_0_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, choice: str, dialect: str
) -> None:
    assert certify(monkeypatch, choice, dialect, scale=0.0).equal


def test_two_terms_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = certify(monkeypatch, "lamb", "deepspeed", bias_correction="none", max_trust=None)
    assert verdict.parting is not None
    assert verdict.parting.step == 1
    assert set(verdict.terms) == {"bias correction", "clamp of the trust ratio"}
    assert set(verdict.overrides) == {"optimizer.bias_correction=lr", "optimizer.max_trust=10.0"}
    assert verdict.to_dict()["equal"] is False


PLUGIN = """
from dataclasses import dataclass
import torch
import optrun
from optrun.config.schema.optimizer_base import OptimizerConfig


@dataclass(kw_only=True)
class MineConfig(OptimizerConfig):
    default_lr: float = 1e-3
    weight_decay: float = 0.01


@optrun.register_optimizer("mine", schema=MineConfig)
class Mine(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                s["step"] += 1
                s["m"].mul_(b1).add_(p.grad, alpha=1 - b1)
                s["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                m, v = s["m"] / (1 - b1 ** s["step"]), s["v"] / (1 - b2 ** s["step"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                u = m / (v.sqrt() + group["eps"])
                adapt = group["weight_decay"] > 0 and p.norm() > 0 and u.norm() > 0
                p.sub_(group["lr"] * (min(p.norm() / u.norm(), 1.0) if adapt else 1.0) * u)
"""


def test_a_class_of_the_users_on_either_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its decay is decoupled, with a ratio of at most 1; found without being told of either."""
    from optrun.config.registry import plugins

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PLUGIN)
    line = ["--plugin", "mine.py", "certify", "optimizer", "--steps", "5", "model.config.n_layer=1"]
    try:
        assert optrun(*line, "optimizer=lamb", "dialect=mine") == 1
        said = capsys.readouterr().out
        for fact in (
            "Mine, the class of optimizer=mine",
            "weight decay",
            "clamp of",
            "optimizer.max_trust=1.0",
        ):
            assert fact in said
        assert optrun(*line, "optimizer=mine", "dialect=timm") == 1
        assert "certify optimizer optimizer=lamb dialect=mine" in capsys.readouterr().out
    finally:
        for name in list(plugins.LOADED):
            plugins.forget(name)


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ([], ["dialect=NAME", "timm", "--plugin"]),
        (["dialect=tim"], ["dialect=tim", "Did you mean timm?"]),
        (["dialect=timm", "optimizer=adamw"], ["adamw", "optimizer=lamb has it"]),
        (["dialect=timm", "optimizer=muon"], ["optimizer=muon has no dialects", "optimizer=lamb"]),
        (["dialect=muon"], ["dialect=muon", "Muon cannot be built", "2D"]),
        (["dialect=timm", "resume=latest"], ["resume=latest", "leave it out"]),
        (
            ["dialect=timm", "parametrization=mup", "parametrization.base.n_embd=64"],
            ["parametrization=mup", "transfer"],
        ),
        (["dialect=timm", "--kills", "2"], ["--kills", "certify resume"]),
        (
            ["dialect=timm", "optimizer=lamb", "optimizer.max_coeff=3"],
            ["optimizer.max_coeff", "optimizer.max_trust"],
        ),
        (
            ["dialect=timm", "optimizer=lamb", "optimizer.min_trust=2", "optimizer.max_trust=1"],
            ["max_trust=1", "2"],
        ),
    ],
)
def test_refused_in_one_message(
    words: list[str],
    facts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert optrun("certify", "optimizer", *words) == 2
    message = capsys.readouterr().err
    assert message.count("error:") == 1
    for fact in facts:
        assert fact in message
