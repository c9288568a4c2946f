"""Checkpoints written beside training.

One at a time, in a thread of its own, and never lost there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import ProcessGroup

from optrun.artifacts.checkpoint import Snapshot, save_checkpoint
from optrun.artifacts.retention import Retention, point_best
from optrun.artifacts.run_dir import RunDir
from optrun.base.errors import StorageError

_LOOK_SECONDS = 0.2


@dataclass
class SaveRequest:
    """A request to write one checkpoint."""

    snapshot: Snapshot
    """Its tensors belong to the writer until the result is taken."""
    ranked: Sequence[int]
    """Steps by their metric, best first, also those that have no checkpoint."""
    keep_best: int
    """How many of the best complete ones are kept."""
    keep: Collection[int]
    """Other steps to be kept."""
    before_commit: Callable[[], None]


@dataclass
class Result:
    """The outcome of a save."""

    request: SaveRequest
    folder: Path | None
    """The committed folder; None where it failed before the rename."""
    seconds: float
    error: BaseException | None = None


class AsyncWriter:
    """Writes checkpoints in a thread, one at a time.

    Args:
        run: The run directory.
        retention: Deletes older checkpoints after each commit, on the rank that holds the run's
            lock. None on the other ranks, which write their shards and nothing else.
        saving: Ranks that save together, as for `save_checkpoint`; used only in writer threads.
            Every rank must make the same requests in the same sequence.
    """

    def __init__(
        self,
        run: RunDir,
        retention: Retention | None,
        saving: ProcessGroup | None = None,
    ) -> None:
        self.run = run
        self.retention = retention
        self.saving = saving
        self._thread: threading.Thread | None = None
        self._result: Result | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is running, or its result was not taken yet."""
        return self._thread is not None

    @property
    def ended(self) -> bool:
        """Whether a save is done and its result was not taken yet."""
        return self._thread is not None and not self._thread.is_alive()

    def start(self, request: SaveRequest) -> None:
        """Start to write in a thread and return at once.

        The result of the previous save must have been taken, see `busy`.
        """
        assert self._thread is None, "one save at a time"
        self._thread = threading.Thread(
            target=self._work, args=(request,), name="optrun-saver", daemon=True
        )
        self._thread.start()

    def result(self, *, wait: bool) -> Result | None:
        """Take the result of the last save.

        A failed save is a result, too, with its error; nothing is raised.

        Args:
            wait: Wait for the result, however long the disk takes.

        Returns:
            None if no save was started since the last result, or if it is not ready and `wait` is
            false.
        """
        if self._thread is None or (not wait and self._thread.is_alive()):
            return None
        while self._thread.is_alive():
            # A signal that the kernel hands to another thread wakes nobody here: its handler runs
            # at the next look.
            self._thread.join(_LOOK_SECONDS)
        self._thread = None
        result = self._result
        self._result = None
        return result

    def _work(self, request: SaveRequest) -> None:
        """Write the checkpoint of a request and delete expired ones; the body of the thread.

        `checkpoints/best` then names the best complete checkpoint. The outcome goes to
        `self._result`, errors too; one of the disk becomes a StorageError.
        """
        start_time = time.monotonic()
        folder = None
        error: BaseException | None = None
        try:
            folder = save_checkpoint(self.run, request.snapshot, request.before_commit, self.saving)
            if self.retention is not None:
                self.retention.trust(folder)
                # Before older ones are deleted: `best` must not name one that is gone.
                best_steps = self.retention.complete(request.ranked, request.keep_best)
                point_best(self.run, best_steps[0] if best_steps else None)
                step = request.snapshot.global_step
                self.retention.delete_expired({*best_steps, *request.keep, step})
        except OSError as refused:
            error = StorageError(
                f"{refused.filename or self.run.checkpoints}: {refused.strerror or refused}."
            )
            error.__cause__ = refused
        except BaseException as failure:  # carried to the thread that asked, which raises it
            error = failure
        self._result = Result(request, folder, time.monotonic() - start_time, error)
