"""Explain failures of loader workers and lack of memory, with the step and its data."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from optrun.base.errors import OptrunError, first_line, is_out_of_memory
from optrun.data.loader import Batch
from optrun.training.signals import kill_workers


class LoaderTimeout(BaseException):
    """No batch came in time; a BaseException, so that no `except Exception` catches it."""


@contextmanager
def waiting_for_workers(workers: int, seconds: float) -> Iterator[None]:
    """Limit the time of a block for waiting for a batch of the loader's workers.

    `DataLoader(timeout=...)` is not enough: it limits the wait for the queue of results, and a
    worker that stops while it hands a tensor over
    (`torch.multiprocessing.reductions.rebuild_storage_fd` reads from a socket) blocks after it. So
    SIGALRM (`signal.setitimer`) ends the wait.

    Args:
        workers: `num_workers` of the loader; 0: there is nothing to wait for, and no limit.
        seconds: The limit; 0: none. Outside the main thread, where Python handles no signals, there
            is none either.

    Raises:
        LoaderTimeout: The time is up; all workers have been killed, since a hanging worker reacts
            to nothing else.
        RuntimeError: torch's, for a worker that was killed, now or since the last wait.
    """
    if not workers or threading.current_thread() is not threading.main_thread():
        yield
        return

    # 1. Set an alarm. Its handler interrupts the block wherever it waits.
    def give_up(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        # Its own handler of SIGCHLD would raise for each worker that is killed here.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        kill_workers()
        raise LoaderTimeout

    handler_before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)  # 0 sets none

    # 2. Run the block. If a worker dies, torch's handler of SIGCHLD raises RuntimeError in it. If
    # it dies while it hands a tensor over, the broken socket may raise first.
    try:
        with _torch_raises_on_worker_exit():
            yield
    except (ConnectionError, EOFError) as error:
        if "Caught " in str(error):  # raised inside a worker that lives, and passed on by torch
            raise
        raise RuntimeError(
            "a DataLoader worker was killed, or exited, while it handed over a batch"
        ) from error

    # 3. Remove the alarm.
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler_before)


_sigchld_of_torch: Callable[[int, FrameType | None], object] | None = None
"""torch's handler of SIGCHLD; None: torch has not installed it yet."""


@contextmanager
def _torch_raises_on_worker_exit() -> Iterator[None]:
    """Limit torch's handler for the exit of a worker to the block.

    torch would leave it installed: it raises RuntimeError wherever the main thread is when a worker
    exits. If that is where a lock is being taken, the lock is never released (bpo-29988), and the
    process hangs instead of ending. See NOTE [ Signal handling in multiprocessing data loading ]
    and `_set_SIGCHLD_handler` in `torch.utils.data._utils.signal_handling`.

    Raises:
        RuntimeError: torch's, for a worker that exited in the block or before it.
    """
    global _sigchld_of_torch
    handler_before = signal.getsignal(signal.SIGCHLD)
    try:
        # 1. Install it, and call it once for workers that exited since the last block, when nobody
        # handled their signals. None in the first block: the first DataLoader with workers, which
        # is started in it, installs the handler.
        if _sigchld_of_torch is not None:
            signal.signal(signal.SIGCHLD, _sigchld_of_torch)
            _sigchld_of_torch(signal.SIGCHLD, None)
        yield
    finally:
        # 2. Remember the handler that is there now, for the next block: it is torch's, unless no
        # DataLoader was started. Then put back the one from before.
        handler_now = signal.getsignal(signal.SIGCHLD)
        if handler_now is not handler_before and callable(handler_now):
            _sigchld_of_torch = handler_now
        signal.signal(signal.SIGCHLD, handler_before)


@contextmanager
def explain_worker_failure(
    global_step: Callable[[], int], examples: Callable[[], str]
) -> Iterator[None]:
    """Explain a killed or hanging loader worker, with the step and its examples.

    Args:
        global_step: Returns the number of steps done.
        examples: Returns the numbers of the examples of the next step, as text.

    Raises:
        OptrunError: In place of torch's error or LoaderTimeout; all workers are killed. Other
            errors are raised unchanged.
    """
    try:
        yield
    except (RuntimeError, LoaderTimeout) as error:
        death_message = _worker_death_message(error)  # torch's; None: no worker died
        if _timed_out(error):
            problem = "no loader worker has answered in time (training.dataloader_timeout)"
        elif death_message is not None:
            problem = f"a loader worker is gone: {death_message}"
        else:
            raise  # no error of a worker
        kill_workers()
        raise OptrunError(
            f"step {global_step() + 1}: {problem}. Its examples: {examples()}. If it "
            "happens again, training.dataloader_num_workers=0 shows where."
        ) from error


def _worker_death_message(error: BaseException | None) -> str | None:
    """Find torch's message about a dead worker in an error and its causes; None: there is none.

    A message with the signal ("killed by signal: ...") wins over "exited unexpectedly":
    `DataLoader._try_get_data` catches the first and raises the second.
    """
    exit_message = None  # the outermost one
    while error is not None:
        text = first_line(error)
        if "DataLoader worker" in text:
            if "killed" in text:
                return text
            if "exited" in text:
                exit_message = exit_message or text
        error = error.__cause__ or error.__context__  # the error before it
    return exit_message


def _timed_out(error: BaseException | None) -> bool:
    """Tell whether an error is a LoaderTimeout, or was raised while one was handled."""
    while error is not None:
        if isinstance(error, LoaderTimeout):
            return True
        error = error.__context__
    return False


def explain_out_of_memory(
    global_step: int, micro_batches: list[Batch]
) -> AbstractContextManager[None]:
    """Return a context to explain a lack of memory in a step, with shapes and a remedy.

    Args:
        global_step: Steps done.
        micro_batches: Micro-batches of the present step; the shapes of the first are shown.

    Raises:
        OptrunError: In place of torch's error.
    """
    return _add_place_to_out_of_memory(
        lambda: (
            f"step {global_step + 1}: out of memory with micro-batches of"
            f" {_shapes(micro_batches[0])}"
        ),
        "Give a smaller training.per_device_train_batch_size and more"
        " training.gradient_accumulation_steps, training.precision=bf16 or"
        " training.gradient_checkpointing=true.",
    )


def explain_out_of_memory_in_evaluation(
    batch: Batch, what: str = "evaluation"
) -> AbstractContextManager[None]:
    """Return a context to explain a lack of memory in a batch, with shapes and a remedy.

    Args:
        batch: The batch of the evaluation or prediction.
        what: What is done with it, for the message.

    Raises:
        OptrunError: In place of torch's error.
    """
    return _add_place_to_out_of_memory(
        lambda: f"{what}: out of memory with batches of {_shapes(batch)}",
        "Give a smaller training.per_device_eval_batch_size, or training.precision=bf16.",
    )


@contextmanager
def _add_place_to_out_of_memory(where: Callable[[], str], advice: str) -> Iterator[None]:
    """Turn an out-of-memory error into an OptrunError; `where` returns its first sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        sentences = [where(), first_line(error), advice]
        raise OptrunError(". ".join(filter(None, sentences))) from error


def _shapes(batch: Batch) -> str:
    """List the names and shapes of a batch's tensors."""
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.items())
