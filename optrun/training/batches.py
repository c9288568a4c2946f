"""The batches of each step, fetched as they are needed."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain

from optrun.data.loader import Batch
from optrun.distributed.heartbeat import Phase, beat
from optrun.training import failures
from optrun.training.setup import TrainingSetup
from optrun.training.signals import SignalHandler


@dataclass(eq=False)
class Batches:
    """Fetches the micro-batches of each step, starting at the run's position in the data."""

    setup: TrainingSetup
    """Has the loader, the plan of examples and the state."""
    signal_handler: SignalHandler
    """Requests by signal."""
    before_fork: Callable[[], None]
    """Called before the loader's workers are forked, when no other thread may hold a lock."""
    _steps: Generator[list[Batch]] | None = None
    _position: int = 0
    """Steps of data before the step that is fetched next."""

    def fetch(self) -> list[Batch]:
        """Wait for the micro-batches of the next step.

        The first call starts the loader's workers. A signal to stop ends the wait; no batch is
        lost.

        Raises:
            Stopped: There was a request to stop, and this process is the only rank.
            RuntimeError: A worker was killed.
            LoaderTimeout: No batch came within `training.dataloader_timeout`.
        """
        setup = self.setup
        world = setup.train_step.world
        beat(Phase.loading, setup.state.global_step)
        # A process alone is interrupted by Stopped as soon as a signal arrives. Several ranks agree
        # to stop before the forward passes; none of them stops here alone.
        with self.signal_handler.immediate() if world.size == 1 else nullcontext():
            # 1. Start the loader, at the first call and after `close`.
            if self._steps is None:
                self.before_fork()
                self._position = setup.state.position
                # Yields this rank's micro-batches of each step from that position on.
                self._steps = setup.train_loader.training(
                    setup.plan, self._position, world.rank, world.size
                )

            # 2. Wait for the step's micro-batches; raises if a worker dies or takes too long.
            with failures.waiting_for_workers(
                setup.train_loader.workers, setup.config.dataloader_timeout
            ):
                micro_batches = next(self._steps)
        self._position += 1
        return micro_batches

    def close(self) -> None:
        """End the loader's workers; the next `fetch` restarts at the run's position in the data."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def steps_before(self) -> int:
        """Count the optimizer steps before the step of the next fetch.

        Fetching may be a step ahead of the counters of the state: by 1 if a step is pending.
        """
        state = self.setup.state
        # `state.position` counts steps of data, which are more than those done after a rollback.
        return state.global_step + self._next_position() - state.position

    def _next_position(self) -> int:
        """Return the number of steps of data before the next fetch."""
        if self._steps is None:
            return self.setup.state.position
        return self._position

    def next_examples(self) -> str:
        """List the numbers of the first 16 examples of the next step, over all ranks.

        Example: "3, 17, 4", or with more than 16 examples "3, 17, ..., 8, ...".
        """
        # The plan has a list for each micro-batch, with the epoch and the number of each example.
        micro_batches = next(self.setup.plan.steps(self._next_position()))
        indices = [index for _, index in chain.from_iterable(micro_batches)]
        text = ", ".join(map(str, indices[:16]))
        if len(indices) > 16:
            return f"{text}, ..."
        return text
