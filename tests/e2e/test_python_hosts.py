"""optrun inside of programs that are no script.

An event loop, a thread of it, the kernel of a notebook.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import optrun
from optrun.base.errors import OptrunError, StoppedEarly
from optrun.training.step import TrainStep
from tests.running import TINY_GPT, records, tensors, write_text

RUN = [
    *TINY_GPT,
    "data=files",
    "data.train=corpus.txt",
    "training.max_steps=3",
    "training.logging_steps=1",
    "checkpoint.save_steps=1",
    "data.max_eval_examples=8",
]
KERNEL = """
import asyncio, io, signal, sys
from optrun.training.step import TrainStep

class Stream(io.TextIOBase):  # as ipykernel's: no terminal, and no file descriptor
    def write(self, text):
        return sys.__stdout__.write(text)

def interrupts(*steps):
    original, done = TrainStep.compute_gradients, []
    def call(self, *args):
        done.append(1)
        for number in steps:
            if number == len(done):
                signal.raise_signal(signal.SIGINT)
        return original(self, *args)
    TrainStep.compute_gradients = call
    return lambda: setattr(TrainStep, "compute_gradients", original)

async def cell(code):  # as IPKernelApp and ipykernel's pre_handler_hook
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        exec(code, names)
    except KeyboardInterrupt:
        print("cell: KeyboardInterrupt")
    except BaseException as error:
        print(f"cell: {type(error).__name__}: {error}")
    print("handler", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

async def kernel():
    for code in CELLS:
        await cell(code)

names = {"interrupts": interrupts}
sys.stdout = sys.stderr = Stream()
asyncio.run(kernel())
"""
CELLS = [
    f"import optrun; RUN = {RUN!r}",
    "undo = interrupts(2); optrun.run([*RUN, 'hydra.run.dir=one'])",
    "undo(); print('resumed', optrun.load_run('one').resume().summary['global_step'])",
    "undo = interrupts(2, 2); optrun.run([*RUN, 'hydra.run.dir=two'])",
    (
        "undo(); print('resumed', optrun.run([*RUN, 'hydra.run.dir=two',"
        " 'resume=auto']).summary['global_step'])"
    ),
    "optrun.run(['optimizer=lam'])",
    (
        "import optrun.training.hooks as h; h.Hooks.on_step = lambda *_: 1 / 0; optrun.run([*RUN,"
        " 'hydra.run.dir=three'])"
    ),
]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with data, and Ctrl-C as Python has it.

    What a shell starts in the background ignores it.
    """
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path, 60)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    original, done = TrainStep.compute_gradients, [0]

    def call(self: TrainStep, *args: Any) -> object:
        done[0] += 1
        if done[0] == step:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *args)

    monkeypatch.setattr(TrainStep, "compute_gradients", call)


def test_in_a_coroutine_ctrl_c_saves_and_the_loop_keeps_its_handlers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[str] = []

    async def program() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, heard.append, "usr1")
        before = [
            signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        ]
        with monkeypatch.context() as patch:
            interrupt_at(patch, 2)
            with pytest.raises(StoppedEarly, match="everything is saved"):
                optrun.run([*RUN, "hydra.run.dir=run"], quiet=True)
        assert before == [
            signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        ]
        signal.raise_signal(signal.SIGUSR1)
        await asyncio.sleep(0.01)
        assert optrun.load_run("run").resume(quiet=True).exit_reason == "finished"

    asyncio.run(program())
    assert heard == ["usr1"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_an_executor_the_loop_goes_on() -> None:
    """A thread hears no signal; a second call beside it is refused, and the loop has its turns."""
    turns = []

    async def program() -> list[Any]:
        loop = asyncio.get_running_loop()
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        run = loop.run_in_executor(
            None, lambda: optrun.run([*RUN, "hydra.run.dir=one"], quiet=True)
        )
        while not Path("one").exists() and not run.done():
            await asyncio.sleep(0)
        beside = await asyncio.gather(asyncio.to_thread(optrun.compose, []), return_exceptions=True)
        assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        while not run.done():
            turns.append(time.monotonic())
            await asyncio.sleep(0)
        return [await run, *beside]

    done, beside = asyncio.run(program())
    assert done.exit_reason == "finished"
    assert isinstance(beside, OptrunError)
    assert "one call at a time" in str(beside)
    assert len(turns) > 2


@pytest.mark.slow
def test_cells_of_a_notebook(tmp_path: Path) -> None:
    """Interrupted once, twice, refused and failed in turn.

    Each cell ends in one line, and the next one works.
    """
    (tmp_path / "kernel.py").write_text(f"CELLS = {CELLS!r}\n{KERNEL}")
    done = subprocess.run(
        [sys.executable, "kernel.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("handler True") == len(CELLS)
    ends = [line for line in lines if line.startswith(("cell: ", "resumed "))]
    expected = [
        "cell: StoppedEarly",
        "resumed 3",
        "cell: KeyboardInterrupt",
        "resumed 3",
        "cell: ConfigError",
    ]
    assert len(ends) == len(expected) + 1, done.stdout
    assert all(map(str.startswith, ends, [*expected, "cell: ZeroDivisionError"])), ends
    assert "Traceback" not in done.stdout + done.stderr
    assert records(Path("one")) == records(Path("two"))
    assert tensors(Path("one"), 3) == tensors(Path("two"), 3)
