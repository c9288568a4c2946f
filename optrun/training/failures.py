"""What happens to a step from outside, told with the step and its data instead of a bare traceback."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from optrun.errors import OptrunError, is_out_of_memory
from optrun.training.step import Batch


class LoaderTimeout(BaseException):
    """No batch came in time; no `Exception`, so that nothing on its way takes it for its own."""


@contextmanager
def waiting_for_workers(seconds: float) -> Iterator[None]:
    """Wait for a batch, but not for ever; torch's own limit does not see a worker that stops while it hands one over.

    Args:
        seconds: The limit; 0: none. Outside the main thread, where Python takes no signals, there is none either.

    Raises:
        LoaderTimeout: The time is up; the workers have been killed, since one that hangs hears nothing else.
        RuntimeError: torch's, for a worker that was killed, now or since the last wait.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # their end is known, and no second error
        kill_workers()
        raise LoaderTimeout

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0))
    try:
        with _hearing_of_deaths():
            yield
    except (ConnectionError, EOFError) as error:
        if "Caught " in str(error):  # the worker's own, passed on by torch: it lives
            raise
        raise RuntimeError("a DataLoader worker was killed, or exited, while it handed over a batch") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


_torchs_handler: Callable[[int, FrameType | None], object] | None = None


@contextmanager
def _hearing_of_deaths() -> Iterator[None]:
    """Let torch raise at the death of a worker here, and nowhere else.

    The handler of SIGCHLD that it sets with the first loader raises wherever the main thread is: a lock that is just
    being taken is then never released, and the process hangs instead of ending.
    """
    global _torchs_handler
    before = signal.getsignal(signal.SIGCHLD)
    try:
        if _torchs_handler is not None:
            signal.signal(signal.SIGCHLD, _torchs_handler)
            _torchs_handler(signal.SIGCHLD, None)  # who died while nobody waited
        yield
    finally:
        now = signal.getsignal(signal.SIGCHLD)
        if now is not before and callable(now):
            _torchs_handler = now
        signal.signal(signal.SIGCHLD, before)


def kill_workers() -> None:
    """End every process that was forked from this one through multiprocessing."""
    for worker in multiprocessing.active_children():
        worker.kill()


@contextmanager
def of_workers(global_step: Callable[[], int], examples: Callable[[], str]) -> Iterator[None]:
    """A loader worker that was killed, or that does not answer. torch may say so at any point of a step.

    Args:
        global_step: Says how many steps are done.
        examples: Says which examples come next.

    Raises:
        OptrunError: In its place; no worker is left.
    """
    try:
        yield
    except (RuntimeError, LoaderTimeout) as error:
        death = _death(error)
        if _timed_out(error):
            what = "no loader worker has answered in time (training.dataloader_timeout)"
        elif death is not None:
            what = f"a loader worker is gone: {death}"
        else:
            raise
        kill_workers()
        raise OptrunError(
            f"step {global_step() + 1}: {what}. Its examples: {examples()}. The checkpoints are as they were; if it "
            "happens again, training.dataloader_num_workers=0 shows where."
        ) from error


def _death(error: BaseException | None) -> str | None:
    """What torch said of a worker that ended; None where it said nothing. Of several sentences the one with the signal.

    It may have caught its own error, and raised a less telling one.
    """
    said = []
    while error is not None:
        text = next(iter(str(error).splitlines()), "").rstrip(". ")
        if "DataLoader worker" in text and ("killed" in text or "exited" in text):
            said.append(text)
        error = error.__cause__ or error.__context__
    return next((text for text in said if "killed" in text), said[0] if said else None)


def _timed_out(error: BaseException | None) -> bool:
    """Whether it began with the time being up, whatever was raised while that was on its way."""
    while error is not None:
        if isinstance(error, LoaderTimeout):
            return True
        error = error.__context__
    return False


def of_memory(global_step: int, micro_batches: list[Batch]) -> AbstractContextManager[None]:
    """A step for which memory does not suffice.

    Args:
        global_step: Steps done.
        micro_batches: Of this one.

    Raises:
        OptrunError: In its place.
    """
    return _memory(
        lambda: f"step {global_step + 1}: out of memory with micro-batches of {_shapes(micro_batches[0])}",
        "Give a smaller training.per_device_train_batch_size and more training.gradient_accumulation_steps, "
        "training.precision=bf16 or training.gradient_checkpointing=true.",
    )


def of_memory_in_evaluation(batch: Batch) -> AbstractContextManager[None]:
    """A batch of an evaluation for which memory does not suffice.

    Args:
        batch: It.

    Raises:
        OptrunError: In its place.
    """
    return _memory(
        lambda: f"evaluation: out of memory with batches of {_shapes(batch)}",
        "Give a smaller training.per_device_eval_batch_size, or training.precision=bf16.",
    )


@contextmanager
def _memory(where: Callable[[], str], advice: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        line = next(iter(str(error).splitlines()), "").rstrip(". ")
        raise OptrunError(". ".join(filter(None, [where(), line, advice]))) from error


def _shapes(batch: Batch) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.items())
