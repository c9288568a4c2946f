"""Every optimizer and every schedule that can be chosen.

Through a checkpoint on the disk and on, bit for bit.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from optrun.artifacts.checkpoint import load_checkpoint, save_checkpoint
from optrun.artifacts.metadata import CheckpointMetadata
from optrun.artifacts.tensor_file import tensor_digest
from optrun.config import store
from optrun.config.schema.checkpoint import OnOtherOptimizer
from optrun.config.schema.run import RunConfig
from optrun.data.loader import EpochPlan
from optrun.model.weights import model_tensors
from optrun.optimizer.build import build_optimizer
from optrun.optimizer.clip import build_clip
from optrun.optimizer.state import named_state
from optrun.param_groups import build_param_groups
from optrun.runner.resume.restore import restore_state
from optrun.runner.snapshot import Snapshots
from optrun.scheduler import build_scheduler
from optrun.training.state import RandomStates, TrainState
from optrun.training.step import TrainStep
from tests.faults.checkpoints import make_run

CPU = torch.device("cpu")
HALF, WHOLE = 4, 9
OPTIMIZERS = sorted(set(store.GROUPS["optimizer"]) - {"pytorch_optimizer"})
SCHEDULERS = sorted(store.GROUPS["scheduler"])
PAIRS = list(zip(OPTIMIZERS, itertools.cycle(SCHEDULERS)))
"""Each optimizer once, and each schedule; in the slow suite each with the same of the other."""
OTHERS = [(name, same) for name in OPTIMIZERS for same in ("cosine", "plateau")]
OTHERS += [(same, name) for name in SCHEDULERS for same in ("adamw", "lamb")]
REST = [pair for pair in dict.fromkeys(OTHERS) if pair not in PAIRS]
WORDS = {
    "piecewise": ["scheduler.values=[1.0,0.1,0.5]", "scheduler.boundaries=[3,6]"],
    "step": ["scheduler.step_size=2"],
    "plateau": ["scheduler.patience=0", "scheduler.cooldown=1"],
    "muon": ["param_groups=standard"],
    "sgd": ["optimizer.momentum=0.9"],
}


class Tied(nn.Module):
    """A tied head, a frozen layer, a parameter without dimensions, dropout, a table of which
    few rows are touched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.LayerNorm(8)
        self.gain = nn.Parameter(torch.ones(()))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> Any:
        hidden = self.dropout(self.norm(self.frozen(self.body(self.embed(ids)).tanh()))) * self.gain
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.head(hidden), ids.roll(1, 0)))


def config_of(optimizer: str, scheduler: str) -> RunConfig:
    words = [*WORDS.get(optimizer, []), *WORDS.get(scheduler, [])]
    if optimizer == "adamwdl":
        words.append("optimizer.weight_decay=0.1")
    cfg = store.compose(
        store.open_hydra(), "config", [f"optimizer={optimizer}", f"scheduler={scheduler}", *words]
    )
    return store.typed(store.without_hydra(cfg))


class Half:
    """Everything that trains, and what puts it into a checkpoint."""

    def __init__(self, config: RunConfig, kind: type[nn.Module] = Tied, total: int = WHOLE) -> None:
        torch.manual_seed(1)
        self.model = kind()
        decay = getattr(config.optimizer, "weight_decay", None)
        groups = build_param_groups(
            self.model, config.param_groups, lr=config.lr, weight_decay=decay
        )
        optimizer = build_optimizer(config.optimizer, groups, lr=config.lr)
        scheduler = build_scheduler(optimizer, config.scheduler, num_training_steps=total)
        clip = build_clip(config.clip)
        self.train_step = TrainStep(
            CPU,
            "fp32",
            model=self.model,
            optimizer=optimizer,
            clip=clip,
            scheduler=scheduler,
            weight=lambda batch: len(batch["ids"]),
        )
        self.state = TrainState()
        setup: Any = SimpleNamespace(
            model=self.model,
            train_step=self.train_step,
            state=self.state,
            plan=EpochPlan(total, 1, 1, 0),
        )
        constants = CheckpointMetadata(global_step=0, model_class=kind.__name__, config_digest="")
        self.take = Snapshots(setup, constants, allow_nonfinite=False)

    def steps(self, last: int) -> None:
        """Train up to a step; a watched metric gets no better from the second evaluation on."""
        while self.state.global_step < last:
            step = self.state.global_step
            ids = torch.randint(7, (6,), generator=torch.Generator().manual_seed(step))
            result = self.train_step([{"ids": ids[:4]}, {"ids": ids[4:]}])
            assert result.finite
            self.state.global_step += 1
            if self.train_step.scheduler.metric is not None and step % 2:
                self.train_step.scheduler.observe(1.0 + step)

    def digests(self) -> dict[str, str]:
        """Of all tensors, by name."""
        tensors, _ = named_state(self.train_step.optimizer)
        return {
            name: tensor_digest(value)
            for name, value in (*model_tensors(self.model).items(), *tensors.items())
        }


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in REST)],
)
def test_goes_on_as_if_nothing_had_been(optimizer: str, scheduler: str, memory_path: Path) -> None:
    config = config_of(optimizer, scheduler)
    straight = Half(config)
    straight.steps(WHOLE)
    rates = [group["lr"] for group in straight.train_step.optimizer.param_groups]
    first = Half(config)
    first.steps(HALF)
    run = make_run(memory_path / "run")
    place = save_checkpoint(run, first.take(RandomStates(CPU).packed()))
    first.steps(WHOLE)  # what was saved is a copy

    torch.manual_seed(99)
    again, snapshot = Half(config), load_checkpoint(place)
    assert restore_state(snapshot, again.model, again.train_step, {}, OnOtherOptimizer.refuse) == []
    again.state.global_step = snapshot.global_step
    RandomStates.unpack(snapshot.metadata.random, CPU).restore()
    again.steps(WHOLE)
    assert again.digests() == straight.digests() == first.digests()
    assert [group["lr"] for group in again.train_step.optimizer.param_groups] == rates
    assert again.train_step.scheduler.state_dict() == straight.train_step.scheduler.state_dict()
    assert (
        again.take(RandomStates(CPU).packed()).metadata
        == straight.take(RandomStates(CPU).packed()).metadata
    )


def test_all_that_can_be_chosen_are_here() -> None:
    assert len(OPTIMIZERS) >= 12
    assert len(SCHEDULERS) >= 13
    assert {name for name, _ in PAIRS} == set(OPTIMIZERS)
    assert {name for _, name in PAIRS} == set(SCHEDULERS)
