"""Write `metrics.jsonl` during training; a line that the disk refuses is written later."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable
from pathlib import Path

from optrun.artifacts.metrics import MetricsWriter, rewind_for_resume
from optrun.base.errors import StorageError
from optrun.base.plain import PlainMapping
from optrun.config.schema.checkpoint import OnStorageError
from optrun.training.callback import Callback, TrainingContext

Refused = Callable[[Path, str, OSError], None]
"""Handler of a file that the disk refused; called with the file, the consequence in words and the
error. It may raise."""


def refusal_handler(policy: OnStorageError, note: Callable[[str], None]) -> Refused:
    """Return a function to handle a file refused by the disk: it warns or raises StorageError.

    Args:
        policy: `checkpoint.on_storage_error`; `stop` raises.
        note: Shows the warning.
    """

    def refused(path: Path, consequence: str, error: OSError) -> None:
        message = f"{path}: {error.strerror or error}; {consequence}."
        if policy is OnStorageError.stop:
            raise StorageError(message) from error
        note(f"warning: {message}")

    return refused


class MetricsLogger(Callback):
    """Appends each record as a line to `metrics.jsonl`.

    Args:
        path: The file.
        refused: Called if the disk refuses a line; if it does not raise, the line is written with
            the next one.
    """

    def __init__(self, path: Path, refused: Refused) -> None:
        self.path = path
        self.refused = refused
        self._waiting: list[PlainMapping] = []
        self._lock = threading.Lock()
        self._writer: MetricsWriter | None = None

    def on_log(self, training: TrainingContext, record: PlainMapping) -> None:  # noqa: ARG002
        """Append a record after the waiting ones; call `refused` if the disk refuses it."""
        with self._lock:
            self._waiting.append(record)
            error = self._write_waiting()
        if error is not None:
            self.refused(self.path, "the line is kept and written later", error)

    def _write_waiting(self) -> OSError | None:
        """Write the waiting records in order; return the error of the disk, or None.

        The error is returned, not raised, since each caller handles it after releasing the lock.
        """
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
        """Close the file; the next record opens it again."""
        writer = self._writer
        self._writer = None
        if writer is not None:
            writer.close()

    def sync(self) -> None:
        """Write all lines to the disk (fsync), before a checkpoint is completed.

        May be called from another thread.

        Raises:
            OSError: The disk refused.
        """
        with self._lock:
            error = self._write_waiting()
            writer = self._writer
        if error is not None:
            raise error
        # Outside of the lock: a slow fsync must not stop training at its next line.
        if writer is not None:
            writer.sync()

    def on_rollback(self, training: TrainingContext) -> None:
        """Remove all lines after the step of the rollback, from the file and of those that wait."""
        step = training.global_step
        with self._lock:
            self._close()
            self._waiting = [record for record in self._waiting if record["step"] <= step]
            rewind_for_resume(self.path, step)

    def on_train_end(self, training: TrainingContext, status: str) -> None:  # noqa: ARG002
        """Write the waiting lines, and close the file.

        Raises:
            StorageError: The disk refuses lines again; they are lost.
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
