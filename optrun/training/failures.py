"""Explain failures of loader workers and lack of memory, with the step and its data."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from optrun.base.errors import OptrunError, is_out_of_memory
from optrun.data.loader import Batch


class LoaderTimeout(BaseException):
    """No batch came in time; a BaseException, so that no `except Exception` catches it."""


@contextmanager
def waiting_for_workers(workers: int, seconds: float) -> Iterator[None]:
    """Wait for a batch, but not for ever.

    `DataLoader(timeout=...)` is not enough: it limits the wait for the queue of results, and a
    worker that stops while it hands a tensor over
    (`torch.multiprocessing.reductions.rebuild_storage_fd` reads from a socket) blocks after it. So
    SIGALRM (`signal.setitimer`) ends the wait.

    Args:
        workers: `num_workers` of the loader; 0: what goes wrong in the data is raised as it is.
        seconds: The limit; 0: none. Outside the main thread, where Python takes no signals, there
            is none either.

    Raises:
        LoaderTimeout: The time is up; the workers have been killed, since one that hangs hears
            nothing else.
        RuntimeError: torch's, for a worker that was killed, now or since the last wait.
    """
    if not workers or threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        signal.signal(
            signal.SIGCHLD, signal.SIG_DFL
        )  # torch would raise for each worker that is killed here
        kill_workers()
        raise LoaderTimeout

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0))
    try:
        with _torch_raises_on_worker_exit():
            yield
    except (ConnectionError, EOFError) as error:
        if "Caught " in str(error):  # the worker's own, passed on by torch: it lives
            raise
        raise RuntimeError(
            "a DataLoader worker was killed, or exited, while it handed over a batch"
        ) from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


_sigchld_of_torch: Callable[[int, FrameType | None], object] | None = None


@contextmanager
def _torch_raises_on_worker_exit() -> Iterator[None]:
    """Let torch raise at the death of a worker here, and nowhere else.

    `torch.utils.data._utils.signal_handling._set_SIGCHLD_handler`, which the first DataLoader with
    workers calls, raises RuntimeError from the handler of SIGCHLD, wherever the main thread is at
    that moment (its NOTE [ Signal handling in multiprocessing data loading ]). A lock that is just
    being taken is then never released (bpo-29988), and the process hangs instead of ending. So the
    handler is in force only while a batch is awaited, and is called once by hand for workers that
    died meanwhile.
    """
    global _sigchld_of_torch
    before = signal.getsignal(signal.SIGCHLD)
    try:
        if _sigchld_of_torch is not None:
            signal.signal(signal.SIGCHLD, _sigchld_of_torch)
            _sigchld_of_torch(signal.SIGCHLD, None)
        yield
    finally:
        now = signal.getsignal(signal.SIGCHLD)
        if now is not before and callable(now):
            _sigchld_of_torch = now
        signal.signal(signal.SIGCHLD, before)


def kill_workers() -> None:
    """Kill every process that this one has started through multiprocessing."""
    for worker in multiprocessing.active_children():
        worker.kill()


@contextmanager
def of_workers(global_step: Callable[[], int], examples: Callable[[], str]) -> Iterator[None]:
    """Explain inside the context that a loader worker was killed or does not answer.

    Args:
        global_step: Returns the number of steps done.
        examples: Names the examples of the next step.

    Raises:
        OptrunError: In place of torch's error or LoaderTimeout; all workers are killed. Other
            errors are raised unchanged.
    """
    try:
        yield
    except (RuntimeError, LoaderTimeout) as error:
        death = _worker_death_message(error)
        if _timed_out(error):
            problem = "no loader worker has answered in time (training.dataloader_timeout)"
        elif death is not None:
            problem = f"a loader worker is gone: {death}"
        else:
            raise
        kill_workers()
        raise OptrunError(
            f"step {global_step() + 1}: {problem}. Its examples: {examples()}. If it "
            "happens again, training.dataloader_num_workers=0 shows where."
        ) from error


def _worker_death_message(error: BaseException | None) -> str | None:
    """Find torch's message about a dead worker in an error and its causes; None: there is none.

    The one with the signal wins: `DataLoader._try_get_data` catches it, and raises one that says
    less.
    """
    messages = []
    while error is not None:
        text = next(iter(str(error).splitlines()), "").rstrip(". ")
        if "DataLoader worker" in text and ("killed" in text or "exited" in text):
            messages.append(text)
        error = error.__cause__ or error.__context__
    return next((text for text in messages if "killed" in text), messages[0] if messages else None)


def _timed_out(error: BaseException | None) -> bool:
    """Tell whether an error is, or was raised after, a LoaderTimeout."""
    while error is not None:
        if isinstance(error, LoaderTimeout):
            return True
        error = error.__context__
    return False


def of_memory(global_step: int, micro_batches: list[Batch]) -> AbstractContextManager[None]:
    """Name the shapes and the remedy if memory runs out in a step.

    Args:
        global_step: Steps done.
        micro_batches: Of this one.

    Raises:
        OptrunError: Instead of torch's error.
    """
    return _explain_out_of_memory(
        lambda: (
            f"step {global_step + 1}: out of memory with micro-batches of"
            f" {_shapes(micro_batches[0])}"
        ),
        "Give a smaller training.per_device_train_batch_size and more"
        " training.gradient_accumulation_steps, training.precision=bf16 or"
        " training.gradient_checkpointing=true.",
    )


def of_memory_in_evaluation(batch: Batch, what: str = "evaluation") -> AbstractContextManager[None]:
    """Name shapes and remedy if memory runs out while evaluating or predicting.

    Args:
        batch: The batch.
        what: What is done with it.

    Raises:
        OptrunError: Instead of torch's error.
    """
    return _explain_out_of_memory(
        lambda: f"{what}: out of memory with batches of {_shapes(batch)}",
        "Give a smaller training.per_device_eval_batch_size, or training.precision=bf16.",
    )


@contextmanager
def _explain_out_of_memory(where: Callable[[], str], advice: str) -> Iterator[None]:
    """Turn an out-of-memory error into an OptrunError with place and advice."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        line = next(iter(str(error).splitlines()), "").rstrip(". ")
        raise OptrunError(". ".join(filter(None, [where(), line, advice]))) from error


def _shapes(batch: Batch) -> str:
    """List the names and shapes of a batch's tensors."""
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.items())
