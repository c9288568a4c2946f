"""Every optimizer of the pytorch-optimizer library: what comes of it when a run names it.

Each is trained on a small model, saved as a checkpoint half-way, read back into a freshly built one
and gone on with.
What is compared does not ask how optrun deals with it: the undisturbed run was never saved and
never evaluated.
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim import Optimizer

from optrun.artifacts.checkpoint import load_checkpoint, save_checkpoint
from optrun.base.errors import ConfigError
from optrun.config import store
from optrun.config.schema.checkpoint import OnOtherOptimizer
from optrun.config.schema.run import RunConfig
from optrun.model.weights import model_tensors
from optrun.optimizer import round_trip
from optrun.optimizer.evaluation_weights import evaluation_weights
from optrun.runner.resume.restore import restore_state
from optrun.training.state import RandomStates, seed_random_states
from tests.faults.checkpoints import make_run
from tests.resume.test_registry import CPU, Half

HALF, WHOLE = 13, 28

WORKS, REFUSED = "works", "refused"

OFTEN: dict[str, dict[str, Any]] = {
    "adagc": {"warmup_steps": 5},
    "alice": {"update_interval": 5, "rank": 4, "leading_basis": 2},
    "conda": {"update_proj_gap": 5},
    "dash": {"precondition_frequency": 3},
    "sara": {"progressive_iter": 10},
    "scalableshampoo": {"start_preconditioning_step": 3, "preconditioning_compute_steps": 4},
    "shampoo": {"preconditioning_compute_steps": 3},
    "soap": {"precondition_frequency": 3},
    "spam": {"warmup_epoch": 5, "update_proj_gap": 7},
    "splus": {"inverse_steps": 5},
    "srmm": {"memory_length": 12},
    "stablespam": {"update_proj_gap": 7, "t_max": 20},
}
"""What happens at long intervals happens within the few steps here."""


class Small(nn.Module):
    """A transformer's kinds of parameters.

    A table, hidden matrices, biases, a norm, a convolution, a head.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 8)
        self.body = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.conv = nn.Conv1d(16, 8, 3, padding=1)
        self.out = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, 24)

    def forward(self, ids: torch.Tensor) -> Any:
        hidden = self.norm(self.dropout(self.body(self.embed(ids)).tanh()))
        logits = self.head(self.out(self.conv(hidden.T).T.tanh()))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, ids.roll(1, 0)))


@dataclass
class Row:
    """What came of one optimizer."""

    name: str
    verdict: str
    what: str = ""
    """Why it is refused."""
    state: float = 0.0
    """Elements of its state over those of the model."""


def names() -> list[str]:
    """Every optimizer class of the library, torch's among them too."""
    import pytorch_optimizer

    found = vars(pytorch_optimizer).values()
    return sorted(
        {cls.__name__ for cls in found if isinstance(cls, type) and issubclass(cls, Optimizer)},
        key=str.lower,
    )


@functools.cache
def _base(rules: str) -> RunConfig:
    words = [
        "optimizer=pytorch_optimizer",
        "optimizer.class_name=lion",
        "lr=1e-3",
        f"param_groups.rules={rules}",
    ]
    return store.typed(store.without_hydra(store.compose(store.open_hydra(), "config", words)))


def config_of(
    name: str, kwargs: dict[str, Any] | None = None, rules: str = "[]", **options: Any
) -> RunConfig:
    """A run with this optimizer."""
    base = _base(rules)
    return replace(
        base, optimizer=replace(base.optimizer, class_name=name, kwargs=kwargs or {}, **options)
    )


def examine(name: str) -> Row:
    """Try one as a run would.

    Raises:
        AssertionError: It is offered, and does not go on from its checkpoint as if nothing had
            been.
    """
    kind = name.lower()
    try:
        Half(config_of(kind), Small, WHOLE)
    except ConfigError as error:
        return Row(name, REFUSED, str(error))
    with mock.patch.object(round_trip, "check_round_trip"):  # what it says is not asked here
        elements = prove(config_of(kind, OFTEN.get(kind, {})))
    return Row(name, WORKS, state=elements)


def prove(config: RunConfig) -> float:
    """Undisturbed against evaluated, saved, resumed: every bit of weights, state and counters.

    Returns:
        Elements of the state over those of the model.
    """
    seed_random_states(1, CPU)
    straight = Half(config, Small, WHOLE)
    before = straight.digests()
    straight.steps(WHOLE)
    ended = straight.digests()
    assert before != {key: ended[key] for key in before}, "it moves nothing"
    seed_random_states(1, CPU)
    first = Half(config, Small, WHOLE)
    for step in range(1, HALF + 1):
        first.steps(step)
        if step % 5 == 2:
            with evaluation_weights(first.train_step.optimizer):
                pass
    with evaluation_weights(first.train_step.optimizer):
        judged = {key: tensor.clone() for key, tensor in model_tensors(first.model).items()}
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as folder:
        place = save_checkpoint(
            make_run(Path(folder) / "run"), first.take(RandomStates(CPU).packed())
        )
        first.steps(WHOLE)
        torch.manual_seed(99)
        again, snapshot = Half(config, Small, WHOLE), load_checkpoint(place)
    assert all(torch.equal(judged[key], snapshot.model[key]) for key in judged), (
        "the checkpoint holds other weights"
    )
    assert restore_state(snapshot, again.model, again.train_step, {}, OnOtherOptimizer.refuse) == []
    again.state.global_step = snapshot.global_step
    RandomStates.unpack(snapshot.metadata.random, CPU).restore()
    again.steps(WHOLE)
    assert first.digests() == ended, "saving or evaluating changed it"
    assert again.digests() == ended, "it does not come back"
    assert (
        again.take(RandomStates(CPU).packed()).metadata
        == straight.take(RandomStates(CPU).packed()).metadata
    )
    kept = sum(tensor.numel() for tensor in snapshot.optimizer.values())
    return kept / sum(tensor.numel() for tensor in snapshot.model.values())


def walk() -> list[Row]:
    """All of them."""
    return [examine(name) for name in names()]
