"""Record what other packages' optimizers do.

PYTHONPATH=PACKAGES python -m tests.reference.record_dialects FILE.

Needs timm, torch_optimizer, pytorch_optimizer, and jax with optax and Keras, in folders that
PYTHONPATH names. Every package gets the weights, gradients and groups of `dialect_problem`, in
float64, and its own defaults besides; optax and Keras want a gradient for every tensor, and go
without the one that misses some.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from optrun.certify.formulas import Hyperparameters
from optrun.certify.packages import PACKAGES, ClassReference, Package
from tests.reference.dialect_problem import KEPT, LATE, LR, drawn, numbers_at, scaled_numbers_at

CORRECTED = {
    "adamw": Package(
        "timm", "timm.optim.adamw", "AdamWLegacy", {"corrected_weight_decay": True, "lr": LR}
    ),
    "lamb": Package(
        "timm",
        "timm.optim.lamb",
        "Lamb",
        {"max_grad_norm": None, "decoupled_decay": True, "corrected_weight_decay": True, "lr": LR},
    ),
}
"""timm divides by the rate that the constructor is given; groups have rates of their own."""


def main(path: Path) -> None:
    os.environ["KERAS_BACKEND"] = "jax"
    recorded = [*_torch(), *_jax()]
    document = {
        "schema": "dialects-1",
        "source": "python -m tests.reference.record_dialects, float64 on a CPU",
        "weights": {name: weight.flatten().tolist() for name, weight in drawn().weights.items()},
        "grads": [
            {
                name: None if grad is None else grad.flatten().tolist()
                for name, grad in grads.items()
            }
            for grads in drawn().grads
        ],
        "cases": recorded,
        "corrected": list(_corrected()),
    }
    path.write_text(
        json.dumps(document, separators=(",", ":")).replace('{"choice"', '\n{"choice"') + "\n"
    )
    sys.stdout.write(f"{len(recorded)} cases -> {path}\n")


def _case(
    choice: str, dialect: str, package: str, after: dict[int, dict[str, list[float]]]
) -> dict[str, Any]:
    return {"choice": choice, "dialect": dialect, "package": package, "after": after}


def _torch() -> Iterator[dict[str, Any]]:
    for choice, packages in PACKAGES.items():
        for dialect, package in packages.items():
            yield _case(choice, dialect, package.title, _played(package, numbers_at))


def _corrected() -> Iterator[dict[str, Any]]:
    for choice, package in CORRECTED.items():
        yield _case(choice, "timm", package.title, _played(package, scaled_numbers_at))


def _played(
    package: Package, numbers_at: Callable[[int], dict[str, Hyperparameters]]
) -> dict[int, dict[str, list[float]]]:
    cls = package.load()
    if cls is None:
        raise SystemExit(f"{package.distribution} is not installed.")
    given = drawn()
    side = ClassReference(cls, package.options, given.weights, numbers_at(1))
    after = {}
    for step, grads in enumerate(given.grads, start=1):
        side.step(grads, numbers_at(step))
        if step in KEPT:
            after[step] = {name: weight.flatten().tolist() for name, weight in side.weights.items()}
    return after


def _jax() -> Iterator[dict[str, Any]]:
    import jax
    import jax.numpy as jnp
    import keras
    import optax

    jax.config.update("jax_enable_x64", True)
    keras.config.set_floatx("float64")
    given, first = drawn(), numbers_at(1)
    names = [name for name in given.weights if name != LATE]
    lrs = {name: first[name].lr for name in names}
    made = {
        ("lamb", "optax"): lambda lr, decay: optax.lamb(
            lr, eps=first[names[0]].eps, weight_decay=decay
        ),
        ("adamax", "optax"): lambda lr, decay: optax.adamaxw(
            lr, eps=first[names[0]].eps, weight_decay=decay
        ),
        ("adamw", "optax"): lambda lr, decay: optax.adamw(
            lr, eps=first[names[0]].eps, weight_decay=decay
        ),
    }
    for (choice, dialect), make in made.items():
        weights = {name: jnp.asarray(given.weights[name].numpy()) for name in names}
        state: dict[str, Any] = {}
        after = {}
        for step, grads in enumerate(given.grads, start=1):
            of_step = numbers_at(step)
            for name in names:
                rule = make(of_step[name].lr, of_step[name].decay)
                state.setdefault(name, rule.init(weights[name]))
                grad = grads[name]
                assert grad is not None
                change, state[name] = rule.update(
                    jnp.asarray(grad.numpy()), state[name], weights[name]
                )
                weights[name] = optax.apply_updates(weights[name], change)
            if step in KEPT:
                after[step] = {name: [float(x) for x in weights[name].ravel()] for name in names}
        yield _case(choice, dialect, f"optax {importlib.metadata.version('optax')}", after)
    for choice, cls in (("lamb", keras.optimizers.Lamb), ("adamax", keras.optimizers.Adamax)):
        variables = {
            name: keras.Variable(given.weights[name].numpy(), dtype="float64") for name in names
        }
        sides = {
            name: cls(
                learning_rate=lrs[name],
                epsilon=first[name].eps,
                weight_decay=first[name].decay or None,
            )
            for name in names
        }
        after = {}
        for step, grads in enumerate(given.grads, start=1):
            for name in names:
                grad = grads[name]
                assert grad is not None
                sides[name].learning_rate = numbers_at(step)[name].lr
                sides[name].apply([jnp.asarray(grad.numpy())], [variables[name]])
            if step in KEPT:
                after[step] = {
                    name: [float(x) for x in variables[name].numpy().ravel()] for name in names
                }
        yield _case(choice, "keras", f"keras {importlib.metadata.version('keras')}", after)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
