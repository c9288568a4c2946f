"""Optimizers of other packages, built as their users build them, where they are installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from optrun.base.options import Options
from optrun.certify.formulas import Numbers


@dataclass(frozen=True)
class Package:
    """Where a package has its class, and its arguments besides lr, betas, eps and weight decay."""

    distribution: str
    module: str
    name: str
    options: Options

    def load(self) -> type[Optimizer] | None:
        """Import the class; None where the package is not installed, or what it needs is not."""
        try:
            found = getattr(importlib.import_module(self.module), self.name)
        except Exception:  # a package beside another torch than its own raises what it likes
            return None
        assert issubclass(found, Optimizer)
        return found  # type: ignore[no-any-return]

    @property
    def title(self) -> str:
        """The package with its version."""
        return f"{self.distribution} {importlib.metadata.version(self.distribution)} {self.name}"


PACKAGES: Mapping[str, Mapping[str, Package]] = {
    "lamb": {
        "timm": Package("timm", "timm.optim.lamb", "Lamb", {"max_grad_norm": None}),
        "nvlamb": Package(
            "timm", "timm.optim.lamb", "Lamb", {"max_grad_norm": None, "always_adapt": True}
        ),
        "pytorch_optimizer": Package("pytorch_optimizer", "pytorch_optimizer", "Lamb", {}),
        "torch_optimizer": Package("torch_optimizer", "torch_optimizer", "Lamb", {}),
    },
    "adamax": {"torch": Package("torch", "torch.optim", "Adamax", {})},
    "adamw": {"torch": Package("torch", "torch.optim", "AdamW", {"foreach": False})},
}
"""timm's clip is off: a clip of gradients is a matter of `clip` here."""


class ParamsSide:
    """One side that is a torch optimizer.

    Args:
        weights: At the start.
    """

    optimizer: Optimizer

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.params = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}

    @property
    def weights(self) -> dict[str, Tensor]:
        """As they are now, by name."""
        return {name: param.detach() for name, param in self.params.items()}

    def step(self, grads: Mapping[str, Tensor | None], numbers: Mapping[str, Numbers]) -> None:
        """Step every tensor that has a gradient."""
        for name, grad in grads.items():
            self.params[name].grad = None if grad is None else grad.clone()
        self.schedule(numbers)
        self.optimizer.step()

    def schedule(self, numbers: Mapping[str, Numbers]) -> None:
        """Give each group its learning rate of a step."""
        for name, group in zip(self.params, self.optimizer.param_groups, strict=True):
            group["lr"] = numbers[name].lr


class ClassReference(ParamsSide):
    """A torch optimizer with a group for each tensor.

    Args:
        cls: Its class.
        options: Its keywords besides those of `numbers`.
        weights: At the start.
        numbers: Hyper-parameters of each tensor; what the class has no keyword for is not given.
    """

    def __init__(
        self,
        cls: type[Optimizer],
        options: Options,
        weights: Mapping[str, Tensor],
        numbers: Mapping[str, Numbers],
    ) -> None:
        super().__init__(weights)
        known = inspect.signature(cls).parameters
        first = next(iter(numbers.values()))
        shared = {key: getattr(first, key) for key in ("betas", "eps") if key in known}
        self.optimizer = cls(
            [
                {"params": [param], "lr": numbers[name].lr}
                | ({"weight_decay": numbers[name].decay} if "weight_decay" in known else {})
                for name, param in self.params.items()
            ],
            **{"lr": first.lr, **shared, **options},
        )
