"""One table of all optimizers a user can type: what they take, what they refuse, what they can do.

Laws over the table stand in `tests/unit/optimizer/test_optimizer_laws.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optrun.optimizer.build import build_optimizer

Bad = tuple[Mapping[str, Any], type[Exception], str]
"""Keywords, the error, and a regular expression in its message."""

BAD_LR: tuple[Bad, ...] = (
    ({"lr": -1}, ValueError, r"lr=-1: expected a number of 0 or more"),
    ({"lr": float("nan")}, ValueError, r"lr=nan: expected a finite number of 0 or more"),
    ({"lr": "fast"}, TypeError, r"lr='fast': expected a number of 0 or more, got str"),
    ({"lr": True}, TypeError, r"lr=True: expected a number of 0 or more, got bool"),
)
BAD_BETAS: tuple[Bad, ...] = (
    ({"betas": [0.9]}, ValueError, r"betas=\[0.9\]: expected two numbers, each in \[0, 1\)"),
    (
        {"betas": (0.9, 1.0)},
        ValueError,
        r"betas=\(0.9, 1.0\): expected two numbers, each in \[0, 1\)",
    ),
    ({"betas": 0.9}, TypeError, r"betas=0.9: expected two numbers"),
    ({"eps": -1e-8}, ValueError, r"eps=-1e-08: expected a number of 0 or more"),
)
BAD_DECAY: tuple[Bad, ...] = (
    ({"weight_decay": -0.1}, ValueError, r"weight_decay=-0.1: expected a number of 0 or more"),
)
BAD_FOREACH: tuple[Bad, ...] = (
    ({"foreach": 1}, TypeError, r"foreach=1: expected True or False, got int"),
)
ADAM_BAD = (*BAD_LR, *BAD_BETAS, *BAD_DECAY, *BAD_FOREACH)


@dataclass(frozen=True)
class Case:
    """One optimizer.

    Attributes:
        name: As in `optimizer=...`.
        good: Keyword sets that must work; the laws run over each.
        bad: Keyword sets that must be refused.
        lr: At which it descends on the quadratic.
        sparse: What a sparse gradient does: "rows", "dense" or "refused".
        foreach: Whether it has a loop and a fast path to compare.
        exact: Whether float32 follows float64 closely (Muon orthogonalises in bfloat16).
        wide: Whether moments of 16-bit parameters are float32.
        shards: Whether it steps the shards of a fully sharded model.
        idle: First gradients of a parameter that move nothing (SOAP makes its bases of one).
    """

    name: str
    good: Sequence[Mapping[str, Any]] = field(default_factory=lambda: [{}])
    bad: Sequence[Bad] = ()
    lr: float = 0.05
    sparse: str = "refused"
    foreach: bool = True
    exact: bool = True
    wide: bool = False
    shards: bool = True
    idle: int = 0

    def build(self, groups: Any, **options: Any) -> Optimizer:
        """The optimizer over (name, parameter) pairs or groups."""
        listed = list(groups)
        if not isinstance(listed[0], dict):
            listed = [{"params": listed}]
        return build_optimizer(self.name, listed, **{"lr": self.lr, **options})


CASES = [
    Case(
        "lamb",
        good=[
            {},
            {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
            {"weight_decay": 0.0, "always_adapt": True, "step_count": "optimizer"},
            {
                "exclude_from_weight_decay": ["bias$"],
                "exclude_from_layer_adaptation": ["gain"],
                "l1": 0.01,
                "l2": 0.02,
            },
            {"weight_decay": -0.05},
            {
                "bias_correction": "lr",
                "eps": 1e-3,
                "min_trust": 0.3,
                "max_trust": 2.0,
            },
            {"bias_correction": "none", "weight_decay_mode": "decoupled"},
            {
                "bias_correction": "lr_first",
                "weight_decay_mode": "fixed",
                "max_param_norm": 0.5,
                "eps_in_trust": True,
            },
            {"weight_decay_mode": "corrected", "max_param_norm": 3.0},
        ],
        bad=[
            *BAD_LR,
            *BAD_BETAS,
            *BAD_FOREACH,
            (
                {"weight_decay": float("inf")},
                ValueError,
                r"weight_decay=inf: expected a finite number",
            ),
            (
                {"exclude_from_weight_decay": "bias"},
                TypeError,
                r"expected a list of patterns, got one string",
            ),
            (
                {"exclude_from_weight_decay": ["bais"]},
                ValueError,
                r"'bais' matches none of 4 parameter names",
            ),
            (
                {"exclude_from_layer_adaptation": ["("]},
                ValueError,
                r"'\(' is no regular expression",
            ),
            (
                {"step_count": "global"},
                ValueError,
                r"step_count='global': expected one of 'parameter', 'optimizer'",
            ),
            ({"always_adapt": 1}, TypeError, r"always_adapt=1: expected True or False"),
            ({"weight_decy": 0.1}, TypeError, r"weight_decy"),
            ({"caution": True}, TypeError, r"no option 'caution'. Not offered: the direction is"),
            ({"grad_averaging": False}, TypeError, r"Not offered: the first moment is always"),
            ({"normalize_grad": True}, TypeError, r"Not offered: clip=norm clip.max_norm=1"),
            ({"eps_root": 1e-8}, TypeError, r"Not offered: eps is added outside the square root"),
            ({"min_param_norm": 1.0}, TypeError, r"Not offered: .* min_trust bounds the ratio"),
            (
                {"bias_correction": True},
                TypeError,
                r"bias_correction=True: expected one of 'moments', 'lr'",
            ),
            ({"max_trust": 0.0}, ValueError, r"max_trust=0.0: expected a number above 0"),
            (
                {"min_trust": 2.0, "max_trust": 1.0},
                ValueError,
                r"min_trust=2.0: expected at most max_trust=1.0",
            ),
            (
                {"weight_decay_mode": "scheduled", "lr": lambda _: 0.1},
                ValueError,
                r"scheduled.*peak.*build_scheduler",
            ),
        ],
        sparse="dense",
        wide=True,
    ),
    Case(
        "adamax",
        good=[
            {},
            {"weight_decay": 0.1},
            {"weight_decay": 0.05, "weight_decay_mode": "l1", "eps": 1e-3},
            {"weight_decay": 0.1, "weight_decay_mode": "decoupled", "betas": (0.0, 0.0)},
            {"eps": 1e-2, "eps_form": "gradient"},
            {"eps": 1e-2, "eps_form": "denominator", "weight_decay": 0.1},
        ],
        bad=[
            *ADAM_BAD,
            ({"weight_decay_mode": "l3"}, ValueError, r"expected one of 'l1', 'l2', 'decoupled'"),
        ],
        wide=True,
    ),
    Case(
        "adamwdl",
        good=[
            {},
            {"weight_decay": 0.3, "decay_form": "paddlenlp"},
            {"weight_decay": 0.3, "decay_form": "paddlenlp-2.2"},
            {
                "set_param_lr_fun": lambda rate, names, depth, param: (
                    0.5 if "bias" in param.name else 1.0
                )
            },
            {"apply_decay_param_fun": lambda name: name != "body.bias", "weight_decay": 0.2},
        ],
        bad=[
            *BAD_LR,
            *BAD_BETAS,
            *BAD_FOREACH,
            (
                {"decay_form": "once"},
                ValueError,
                r"decay_form='once': expected one of 'documented'",
            ),
            ({"layerwise_decay": 0}, ValueError, r"layerwise_decay=0: expected a number above 0"),
            ({"layerwise_decay": 0.8}, ValueError, r"layerwise_decay=0.8 scales no block"),
            ({"n_layers": 1.5}, TypeError, r"n_layers=1.5: expected a whole number"),
            (
                {"name_dict": {"nobody": "x"}},
                ValueError,
                r"name_dict lacks the parameter 'body.weight'",
            ),
            (
                {"set_param_lr_fun": lambda *_: None},
                TypeError,
                r"set_param_lr_fun returned None for 'body.weight'",
            ),
            ({"set_param_lr_fun": 0.5}, TypeError, r"expected a function or None"),
        ],
        wide=True,
    ),
    Case(
        "lazy_adam",
        good=[
            {},
            {"weight_decay": 0.1, "nesterov": True},
            {"loss_scale": 8.0, "eps_form": "mindspore", "eps": 1e-3, "weight_decay": 0.05},
            {
                "grad_centralization": True,
                "exclude_from_weight_decay": ["bias"],
                "weight_decay": 0.1,
            },
        ],
        bad=[
            *ADAM_BAD,
            ({"loss_scale": 0}, ValueError, r"loss_scale=0: expected a number above 0"),
            ({"eps_form": "torch"}, ValueError, r"expected one of 'documented', 'mindspore'"),
            ({"nesterov": "yes"}, TypeError, r"nesterov='yes': expected True or False"),
        ],
        sparse="rows",
        wide=True,
    ),
    Case(
        "lion",
        good=[{}, {"betas": (0.5, 0.8), "weight_decay": 0.3}],
        bad=[
            *BAD_LR,
            *BAD_BETAS[:-1],
            *BAD_DECAY,
            *BAD_FOREACH,
            ({"eps": 1e-8}, TypeError, r"eps"),
        ],
        wide=True,
    ),
    Case(
        "schedule_free",
        good=[{}, {"weight_decay": 0.1, "r": 1.0, "weight_lr_power": 0.5, "betas": (0.6, 0.9)}],
        bad=[
            *ADAM_BAD,
            ({"betas": (0.0, 0.9)}, ValueError, r"betas=\(0.0, 0.9\): .*the first above 0"),
        ],
        wide=True,
    ),
    Case(
        "ademamix",
        good=[
            {},
            {
                "betas": (0.5, 0.8, 0.9),
                "alpha": 2.0,
                "alpha_warmup_steps": 4,
                "beta3_warmup_steps": 8,
                "eps": 1e-3,
            },
        ],
        bad=[
            *BAD_LR,
            *BAD_DECAY,
            *BAD_FOREACH,
            (
                {"betas": (0.9, 0.999)},
                ValueError,
                r"betas=\(0.9, 0.999\): expected three numbers, each in \[0, 1\)",
            ),
            ({"alpha": -1.0}, ValueError, r"alpha=-1.0: expected a number of 0 or more"),
            (
                {"beta3_warmup_steps": 2.5},
                TypeError,
                r"beta3_warmup_steps=2.5: expected a whole number",
            ),
        ],
        wide=True,
    ),
    Case(
        "mars",
        good=[{}, {"betas": (0.8, 0.9), "gamma": 0.5, "optimize_1d": True, "weight_decay": 0.1}],
        bad=[
            *ADAM_BAD,
            ({"gamma": -0.1}, ValueError, r"gamma=-0.1: expected a number of 0 or more"),
            ({"betas_1d": (0.9, 1.0)}, ValueError, r"betas_1d=\(0.9, 1.0\): expected two numbers"),
        ],
        wide=True,
    ),
    Case(
        "soap",
        good=[
            {},
            {
                "betas": (0.8, 0.9),
                "shampoo_beta": 0.7,
                "precondition_frequency": 2,
                "precondition_1d": True,
            },
        ],
        bad=[
            *BAD_LR,
            *BAD_BETAS,
            *BAD_DECAY,
            ({"shampoo_beta": 1.0}, ValueError, r"shampoo_beta=1.0: expected a number in \[0, 1\)"),
            (
                {"precondition_frequency": 0},
                ValueError,
                r"precondition_frequency=0: expected a whole number, 1 or more",
            ),
        ],
        foreach=False,
        exact=False,
        wide=True,
        shards=False,
        idle=1,
    ),
    Case(
        "adamw",
        good=[
            {},
            {"weight_decay": 0.1, "amsgrad": True},
            {"weight_decay": 0.01, "weight_decay_mode": "fixed"},
            {"weight_decay": 0.1, "weight_decay_mode": "corrected"},
        ],
        bad=[
            *ADAM_BAD,
            (
                {"weight_decay_mode": "l2"},
                ValueError,
                r"weight_decay_mode='l2': expected one of 'decoupled'",
            ),
        ],
    ),
    Case("adam", good=[{}, {"weight_decay": 0.1}], bad=ADAM_BAD),
    Case(
        "sgd",
        good=[{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}],
        bad=[
            *BAD_LR,
            *BAD_DECAY,
            ({"momentum": 1.0}, ValueError, r"momentum=1.0: expected a number in \[0, 1\)"),
        ],
        sparse="dense",
    ),
    Case("adafactor", bad=[*BAD_LR, *BAD_DECAY], lr=0.2, shards=False),
    Case(
        "muon",
        good=[{}, {"companion_lr_scale": 0.5, "betas": (0.8, 0.9)}],
        bad=[*BAD_LR, ({"ns_steps": 2.5}, TypeError, r"ns_steps=2.5: expected a whole number")],
        foreach=False,
        exact=False,
    ),
]

IDS = [case.name for case in CASES]

GOOD = [(case, options) for case in CASES for options in case.good]
GOOD_IDS = [f"{case.name}-{index}" for case in CASES for index in range(len(case.good))]


def toy(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.nn.Parameter]:
    """Four parameters by name: a matrix, a bias, a number, and a vector that begins at 0."""
    generator = torch.Generator().manual_seed(seed)
    values = {
        "body.weight": torch.randn(16, 12, generator=generator, dtype=torch.float64),
        "body.bias": torch.randn(7, generator=generator, dtype=torch.float64),
        "gain": torch.randn((), generator=generator, dtype=torch.float64),
        "start": torch.zeros(5, dtype=torch.float64),
    }
    return {name: torch.nn.Parameter(value.to(dtype)) for name, value in values.items()}


def quadratic(params: Mapping[str, Tensor]) -> Tensor:
    """Sum of squared distances from 2 sin(0), 2 sin(1), ...; its minimum is 0."""
    total = torch.zeros((), dtype=torch.float64)
    for param in params.values():
        target = 2 * torch.sin(torch.arange(param.numel(), dtype=torch.float64)).reshape(
            param.shape
        )
        total = total + (param.double() - target).square().sum()
    return total


def set_grads(params: Mapping[str, Tensor], step: int, seed: int = 1) -> None:
    """The same pseudo-random gradients for every run, whatever its dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    for param in params.values():
        grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        param.grad = grad.to(param.dtype)
