"""A run of the training loop over a model of one weight.

Step, loader, hooks and judge are the real ones; evaluation and disk are stand-ins that note what
they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from optrun.artifacts.run_dir import RunDir
from optrun.config.schema.run import RunConfig
from optrun.data.loader import BatchLoader, EpochPlan
from optrun.training.callback import Callback, StopRequest, TrainingContext
from optrun.training.divergence import Divergence
from optrun.training.hooks import Hooks
from optrun.training.loop import Loop
from optrun.training.ranking import Ranking
from optrun.training.setup import TrainingSetup
from optrun.training.signals import SignalHandler
from optrun.training.state import TrainState
from optrun.training.step import StepResult, TrainStep
from tests.running import composed

EXAMPLES = [0.5, -1.0, 2.0, 0.25, 1.5, -0.75]
EPOCH = 3
"""Steps of two examples each."""


class Line(torch.nn.Module):
    """`loss = mean((w x - 1)^2)`."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(loss=((self.w * x - 1) ** 2).mean())


class Steady:
    """A schedule that hears of evaluations."""

    metric = "eval/loss"

    def __init__(self) -> None:
        self.steps, self.observed = 0, list[float]()

    def step(self) -> None:
        self.steps += 1

    def observe(self, metric: float) -> None:
        self.observed.append(metric)


class Recorder(Callback):
    """Notes what it hears; `then` is called with the name of the hook and the training."""

    key = "recorder"

    def __init__(self, events: list[str], then: Callable[[str, TrainingContext], None]) -> None:
        self.events, self.then = events, then
        self.lines: list[dict[str, Any]] = []

    def hear(self, hook: str, training: TrainingContext, said: str) -> None:
        self.events.append(said)
        self.then(hook, training)

    def on_train_begin(self, training: TrainingContext) -> None:
        self.hear("begin", training, "begin")

    def on_step(self, training: TrainingContext, result: StepResult) -> None:
        self.hear("step", training, f"step {training.global_step}")

    def on_evaluate(self, training: TrainingContext, metrics: Mapping[str, float]) -> None:
        self.hear("evaluate", training, "heard of evaluation")

    def on_log(self, training: TrainingContext, record: Mapping[str, object]) -> None:
        self.lines.append(dict(record))
        self.hear("log", training, f"line {record['step']}")

    def on_rollback(self, training: TrainingContext) -> None:
        self.hear("rollback", training, f"back at {training.global_step}")

    def on_train_end(self, training: TrainingContext, status: str) -> None:
        self.hear("end", training, status)


class Saves:
    """In place of the disk.

    Keeps the weight and the counters of each step that it is asked to save.
    """

    writing = False
    on_save: Callable[[Path], None]

    def __init__(self, loop: Run, every: int | None, *, enabled: bool) -> None:
        self.loop, self.every, self.enabled = loop, every, enabled
        self.kept: dict[int, tuple[float, dict[str, Any]]] = {}

    def is_scheduled(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0

    def last_scheduled(self, step: int) -> int:
        return step - step % (self.every or 1)

    def save(self, random: object = None, *, last: bool = False) -> None:
        state = self.loop.state
        self.loop.events.append(f"saved {state.global_step}" + (" at the end" if last else ""))
        self.kept[state.global_step] = (self.loop.model.w.item(), asdict(state))

    def save_now(self, random: object = None) -> None:
        if self.loop.state.global_step not in self.kept:
            self.save(random, last=True)

    def is_among_best(self) -> bool:
        return False

    def metrics(self) -> dict[str, float]:
        return {}

    def poll(self, *, together: bool = False) -> None: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class Run:
    """One start of a run, and what came of it."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        steps: int = 4,
        stop_at: int | None = None,
        state: TrainState | None = None,
        weight: float = 0.0,
        save_steps: int | None = None,
        saves: bool = True,
        then: Callable[[str, TrainingContext], None] = lambda hook, training: None,
        callbacks: Mapping[str, object] | None = None,
        stop: StopRequest | None = None,
        examples: list[float] = EXAMPLES,
    ) -> None:
        config: RunConfig = composed(*(f"training.{word}" for word in words))
        self.events: list[str] = []
        self.notes: list[str] = []
        self.model = Line()
        with torch.no_grad():
            self.model.w.fill_(weight)
        self.state = state or TrainState()
        self.schedule = Steady()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        step = TrainStep(
            torch.device("cpu"),
            "fp32",
            model=self.model,
            optimizer=optimizer,
            clip=lambda of: torch.stack(
                [param.grad.norm() for param in of.param_groups[0]["params"]]
            ).norm(),
            scheduler=self.schedule,
            weight=lambda batch: float(len(batch["x"])),
            count_tokens_and_examples=lambda batch: (len(batch["x"]), len(batch["x"])),
        )
        examples_of: Any = [{"x": x} for x in examples]
        loader = BatchLoader(
            examples_of,
            None,
            lambda rows: {"x": torch.tensor([row["x"] for row in rows])},
            seed=0,
            workers=0,
        )
        setup: Any = TrainingSetup(
            model=self.model,  # type: ignore[arg-type]
            train_step=step,
            task=SimpleNamespace(
                sources=(), measured=(), eval=[0], eval_sets={"": [0]}, name="line"
            ),  # type: ignore[arg-type]
            plan=EpochPlan(len(examples), 2, 1, seed=0),
            train_loader=loader,
            eval_loaders={},
            config=config.training,
            ranking=Ranking("eval/loss", "min"),
            state=self.state,
            total_steps=steps,
        )
        self.recorder = Recorder(self.events, then)
        run = RunDir(folder)
        training = TrainingContext(
            setup, run, self.notes.append, lambda *words, **_: " ".join(["optrun", *words])
        )
        training.stop = stop
        self.hooks = Hooks(training, [self.recorder], callbacks or {})
        self.handler = SignalHandler()
        self.saves: Any = Saves(self, save_steps, enabled=saves)
        self.loop = Loop(
            setup,
            self.hooks,
            Looks(self),  # type: ignore[arg-type]
            self.saves,
            Divergence(setup, run, self.saves, self.restore, self.notes.append),
            self.handler,
            stop_at=stop_at,
            clock=lambda: 0.0,
        )

    def restore(self, step: int) -> TrainState:
        weight, counters = self.saves.kept[step]
        with torch.no_grad():
            self.model.w.fill_(weight)
        return TrainState.from_dict(counters)

    def __call__(self) -> Run:
        self.loop()
        return self

    @property
    def lines(self) -> list[dict[str, Any]]:
        return self.recorder.lines


class Looks:
    """In place of an evaluation: the loss over all examples."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def due(self, step: int) -> bool:
        setup = self.run.loop.setup
        return step % (setup.config.eval_steps or EPOCH) == 0

    def __call__(self, *, trained: bool = True) -> dict[str, float]:
        self.run.events.append("evaluation" if trained else "evaluation before training")
        x = torch.tensor(EXAMPLES)
        with torch.no_grad():
            return {"eval/loss": float(((self.run.model.w * x - 1) ** 2).mean())}
