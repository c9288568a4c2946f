"""`metrics.jsonl` while training.

What the disk refuses is kept and written later, each line once and in order.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable
from pathlib import Path

from optrun.artifacts.metrics import MetricsWriter, take_up
from optrun.base.errors import StorageError
from optrun.base.plain import PlainMapping
from optrun.config.schema.checkpoint import OnStorageError
from optrun.training.callback import Callback, TrainingContext

Refused = Callable[[Path, str, OSError], None]
"""Takes the file that the disk refused, what comes of it, and the error; may raise."""


def storage_policy(policy: OnStorageError, note: Callable[[str], None]) -> Refused:
    """Make the handler for `checkpoint.on_storage_error`: a warning, or the end of the run.

    Args:
        policy: Of the configuration.
        note: Takes the warning.
    """

    def refused(path: Path, consequence: str, error: OSError) -> None:
        message = f"{path}: {error.strerror or error}; {consequence}."
        if policy is OnStorageError.stop:
            raise StorageError(message) from error
        note(f"warning: {message}")

    return refused


class MetricsLogger(Callback):
    """Writes metrics lines.

    Args:
        path: `metrics.jsonl` of the run.
        refused: Called with what the disk said; where it does not raise, the line waits for the
            next one.
    """

    def __init__(self, path: Path, refused: Refused) -> None:
        self.path = path
        self.refused = refused
        self._waiting: list[PlainMapping] = []
        self._lock = threading.Lock()
        self._writer: MetricsWriter | None = None

    def on_log(self, training: TrainingContext, record: PlainMapping) -> None:  # noqa: ARG002
        """Append one record, after the records still waiting."""
        with self._lock:
            self._waiting.append(record)
            error = self._write_waiting()
        if error is not None:
            self.refused(self.path, "the line is kept and written later", error)

    def _write_waiting(self) -> OSError | None:
        """Write the waiting records in order; return the error that stopped it, or None."""
        try:
            if self._writer is None:
                self._writer = MetricsWriter(self.path)
            while self._waiting:
                self._writer.write(self._waiting[0])
                self._waiting.pop(0)
        except OSError as error:
            return error
        return None

    def _close(self) -> None:
        writer = self._writer
        self._writer = None
        if writer is not None:
            writer.close()

    def sync(self) -> None:
        """Flush every line up to now to the disk, before the next checkpoint commits.

        Raises:
            OSError: The disk refused.
        """
        with self._lock:
            error = self._write_waiting()
            writer = self._writer
        if error is not None:
            raise error
        if writer is not None:
            writer.sync()

    def on_rollback(self, training: TrainingContext) -> None:
        """Drop every line after the step of the rollback.

        The later steps are taken anew.
        """
        step = training.global_step
        with self._lock:
            self._close()
            self._waiting = [record for record in self._waiting if record["step"] <= step]
            take_up(self.path, step)

    def on_train_end(self, training: TrainingContext, status: str) -> None:  # noqa: ARG002
        """Write the waiting lines, and close the file.

        Raises:
            StorageError: The disk refuses some lines for good.
        """
        with self._lock:
            refused = self._write_waiting() if self._waiting else None
            with contextlib.suppress(OSError):
                self._close()
        if refused is not None:
            raise StorageError(
                f"{self.path}: {len(self._waiting)} lines could not be written: "
                f"{refused.strerror or errno.errorcode.get(refused.errno or 0, refused)}."
            ) from refused
