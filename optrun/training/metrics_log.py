"""`metrics.jsonl` while training: what the disk refuses is kept and written later, each line once and in order."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from optrun.artifacts.metrics import MetricsWriter, take_up
from optrun.artifacts.run_manifest import RunManifest
from optrun.errors import StorageError


class MetricsLogger:
    """Writes metrics lines.

    Args:
        manifest: Of the run whose `metrics.jsonl` is written.
        refused: Called with what the disk said; may raise, otherwise the line waits for the next one.
    """

    def __init__(self, manifest: RunManifest, refused: Callable[[OSError], None]) -> None:
        self.manifest = manifest
        self.path = manifest.run.metrics
        self.refused = refused
        self._waiting: list[Mapping[str, Any]] = []
        self._lock = threading.Lock()
        self._writer: MetricsWriter | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record, and those that are still waiting before it."""
        with self._lock:
            self._waiting.append(record)
            error = self._write_waiting()
        if error is not None:
            self.refused(error)

    def _write_waiting(self) -> OSError | None:
        try:
            if self._writer is None:
                self._writer = MetricsWriter(self.path)
            while self._waiting:
                self._writer.write(self._waiting[0])
                self._waiting.pop(0)
        except OSError as error:
            return error
        return None

    def sync(self) -> None:
        """Everything up to now is on the disk when this returns: a checkpoint commits after its lines.

        Raises:
            OSError: It is not.
        """
        with self._lock:
            error = self._write_waiting()
            writer = self._writer
        if error is not None:
            raise error
        if writer is not None:
            writer.sync()

    def go_back(self, step: int) -> None:
        """Drop every line after a step: training takes these steps anew."""
        with self._lock:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            self._waiting = [record for record in self._waiting if record["step"] <= step]
            take_up(self.path, step, self.manifest.replace)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            refused = self._write_waiting() if self._waiting else None
            if self._writer is not None:
                with contextlib.suppress(OSError):
                    self._writer.close()
                self._writer = None
        if refused is not None and error is None:
            raise StorageError(
                f"{self.path}: {len(self._waiting)} lines could not be written: "
                f"{refused.strerror or errno.errorcode.get(refused.errno or 0, refused)}."
            ) from refused
