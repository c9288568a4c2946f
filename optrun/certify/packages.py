"""Build the optimizers of other packages as their users do, if the packages are installed."""

import importlib
import importlib.metadata
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optrun.base.options import Options
from optrun.certify.formulas import Hyperparameters


@dataclass(frozen=True)
class Package:
    """The optimizer class of a package, and its keywords besides lr, betas, eps, weight_decay.

    Attributes:
        distribution: Name of the package for pip, whose version is shown.
        module: Module to import the class from.
        name: Name of the class.
        options: Further keywords of the constructor.
    """

    distribution: str
    module: str
    name: str
    options: Options

    def load(self) -> type[Optimizer] | None:
        """Import the class; None if the package is not installed or fails at its import."""
        try:
            cls = getattr(importlib.import_module(self.module), self.name)
        except Exception:  # made for another version of torch, a package may raise anything
            return None
        assert issubclass(cls, Optimizer)
        return cls  # type: ignore[no-any-return]

    @property
    def title(self) -> str:
        """Package, version and class, such as `timm 1.0 Lamb`; the package must be installed."""
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
"""timm's clipping of gradients is off, because optrun clips outside of the optimizer."""


class TorchStepper:
    """A torch optimizer over its own copy of the weights, to compare with another one.

    A subclass sets `optimizer`, built over `params`.

    Args:
        weights: Initial weights by name, which are copied.
    """

    optimizer: Optimizer

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.params = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}

    @property
    def weights(self) -> dict[str, Tensor]:
        """The current weights by name."""
        return {name: param.detach() for name, param in self.params.items()}

    def step(
        self,
        grads: Mapping[str, Tensor | None],
        hyperparameters: Mapping[str, Hyperparameters],
    ) -> None:
        """Set the gradients (None: the tensor has none) and the learning rates, and take a step."""
        for name, grad in grads.items():
            self.params[name].grad = None if grad is None else grad.clone()
        self.set_lr(hyperparameters)
        self.optimizer.step()

    def set_lr(self, hyperparameters: Mapping[str, Hyperparameters]) -> None:
        """Set the lr of each group for a step; each group has one parameter, in order of names."""
        for name, group in zip(self.params, self.optimizer.param_groups, strict=True):
            group["lr"] = hyperparameters[name].lr


class ClassReference(TorchStepper):
    """An optimizer of a given class, built with one group for each tensor.

    Args:
        cls: The class.
        options: Its keywords besides the hyper-parameters.
        weights: Initial weights by name.
        hyperparameters: Of each tensor. Those without a keyword of the class are left out; betas
            and eps of the first tensor hold for all.
    """

    def __init__(
        self,
        cls: type[Optimizer],
        options: Options,
        weights: Mapping[str, Tensor],
        hyperparameters: Mapping[str, Hyperparameters],
    ) -> None:
        super().__init__(weights)
        keywords = inspect.signature(cls).parameters
        first = next(iter(hyperparameters.values()))
        shared = {key: getattr(first, key) for key in ("betas", "eps") if key in keywords}
        groups: list[dict[str, Any]] = []
        for name, param in self.params.items():
            group = {"params": [param], "lr": hyperparameters[name].lr}
            if "weight_decay" in keywords:
                group["weight_decay"] = hyperparameters[name].decay
            groups.append(group)
        self.optimizer = cls(groups, **{"lr": first.lr, **shared, **options})
