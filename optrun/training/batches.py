"""The batches of each step, fetched as they are needed."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from optrun.data.loader import Batch
from optrun.distributed.heartbeat import Phase, beat
from optrun.training import failures
from optrun.training.setup import TrainingSetup
from optrun.training.signals import SignalHandler


@dataclass(eq=False)
class Batches:
    """Fetches the micro-batches of each step, from where the state stands in the data."""

    setup: TrainingSetup
    """Its loader, plan and state."""
    signal_handler: SignalHandler
    """Requests by signal."""
    before_fork: Callable[[], None]
    """Called before the loader's workers are forked: no other thread may hold a lock then."""
    _steps: Generator[list[Batch]] | None = None

    def fetch(self) -> list[Batch]:
        """Wait for the next step's batches; nothing is lost if a request to stop ends the wait.

        Raises:
            Stopped: There was such a request, and this process is the only rank.
            RuntimeError: A worker is gone.
        """
        setup, world = self.setup, self.setup.train_step.world
        beat(Phase.loading, setup.state.global_step)
        # Of several ranks none leaves alone: they agree before the forward passes.
        with self.signal_handler.immediate() if world.size == 1 else nullcontext():
            if self._steps is None:
                self.before_fork()
                self._steps = setup.train_loader.training(
                    setup.plan, setup.state.position, world.rank, world.size
                )
            with failures.waiting_for_workers(
                setup.train_loader.workers, setup.config.dataloader_timeout
            ):
                return next(self._steps)

    def close(self) -> None:
        """End the loader's workers; the next fetch begins anew from where the state stands then."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def naming_workers(self) -> AbstractContextManager[None]:
        """Name the step and its examples when a worker was killed or does not answer."""
        return failures.of_workers(lambda: self.setup.state.global_step, self._next_examples)

    def _next_examples(self) -> str:
        indices = [
            index
            for keys in next(self.setup.plan.steps(self.setup.state.position))
            for _, index in keys
        ]
        return f"{', '.join(map(str, indices[:16]))}{', ...' if len(indices) > 16 else ''}"
