"""Run optrun in a test as a person would: words in, exit code and files out."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from optrun.cli import main as cli
from optrun.config import overrides as words_of
from optrun.config import store
from optrun.config.schema.run import RunConfig
from optrun.data.files import Paths, read_split, resolve
from optrun.data.reading import ReadOptions

TINY_GPT = [
    "model.config.n_embd=32",
    "model.config.n_layer=2",
    "model.config.n_head=2",
    "model.config.resid_pdrop=0.1",
    "model.config.embd_pdrop=0.1",
    "model.config.attn_pdrop=0.1",
    "model.vocab_size=320",
    "data.max_length=16",
    "task.sample_tokens=0",
]
TINY_BERT = [
    "model=bert_tiny",
    "model.config.hidden_size=32",
    "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=2",
    "model.config.intermediate_size=64",
    "model.vocab_size=320",
]

TEXT = (
    "the quick brown fox jumps over a lazy dog while seven wizards mix black quartz and vow to fix"
    " it again"
)
WORDS = TEXT.split()


def sentence(number: int) -> str:
    """A sentence of unequal length, a pure function of its number."""
    length = 3 + (number * 7) % 11
    return " ".join(
        WORDS[(number * 13 + place * place + place) % len(WORDS)] for place in range(length)
    )


def write_text(folder: Path, lines: int = 400) -> Path:
    """A text file."""
    path = folder / "corpus.txt"
    path.write_text("\n".join(sentence(number) for number in range(lines)) + "\n", encoding="utf-8")
    return path


def write_labelled(folder: Path, rows: int = 60, name: str = "train.csv") -> Path:
    """A csv file with columns text and label."""
    path = folder / name
    lines = [
        "text,label",
        *(f"{sentence(number)},{'even' if number % 2 == 0 else 'odd'}" for number in range(rows)),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@functools.cache
def composed(*words: str) -> RunConfig:
    """The configuration that these words make; not to be changed."""
    hydra = store.open_hydra()
    return store.typed(
        store.without_hydra(
            store.compose(
                hydra, "config", words_of.parse_checked(hydra, "config", list(words), sweep=False)
            )
        )
    )


def optrun(*words: str) -> int:
    """Run in this process, from the current folder; returns the exit code.

    Hydra's global configuration, which `--cfg` and `--info` leave set, is as before.
    """
    from hydra.core.hydra_config import HydraConfig

    global_config = HydraConfig.instance()
    before = global_config.cfg
    try:
        return cli.run([str(word) for word in words])
    except SystemExit as stopped:  # Hydra's job leaves through it
        return int(stopped.code or 0)
    finally:
        global_config.cfg = before


def optrun_process(
    *words: str,
    cwd: Path,
    env: dict[str, str] | None = None,
    timeout: float = 300,
    module: str = "optrun",
) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own."""
    with session(
        [sys.executable, "-m", module, *words], cwd, env, stderr=subprocess.PIPE
    ) as process:
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


_LIBC = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Linux: no process outlives a test run that is killed."""
    if sys.platform == "linux":
        _LIBC.prctl(1, signal.SIGKILL)


@contextmanager
def session(
    command: list[str],
    cwd: Path,
    env: dict[str, str] | None = None,
    *,
    stderr: int = subprocess.STDOUT,
) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, of which nobody is left at the end, stopped or not."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        yield process
    finally:
        while left := members(process.pid):
            kill_all(left)
            if process.returncode is None:
                process.wait()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def kill_all(processes: list[int]) -> None:
    """End them at once, those that are still there."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def members(leader: int) -> list[int]:
    """Processes of a session or group that are still alive, by the process that began it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rsplit(")", 1)[1].split()
            if leader in (int(fields[2]), int(fields[3])) and fields[0] not in "ZX":
                found.append(int(path.parent.name))
    return found


def summary(run: Path) -> dict[str, Any]:
    """`summary.json`."""
    return dict(json.loads((run / "summary.json").read_text()))


def records(run: Path, *, before: bool = False) -> list[dict[str, Any]]:
    """`metrics.jsonl` without what depends on the clock or the machine; `before`.

    With what precedes the first step.
    """
    kept = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["step"] == 0 and not before:
            continue
        kept.append(
            {
                key: value
                for key, value in record.items()
                if key != "time" and not key.startswith("perf/")
            }
        )
    return kept


def tensors(run: Path, step: int) -> dict[str, bytes]:
    """Every tensor of a checkpoint, as bytes."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    return {
        f"{name}:{key}": value.tobytes()
        for name in ("model.safetensors", "optimizer.safetensors")
        for key, value in load_file(folder / name).items()
    }


def state(run: Path, step: int) -> dict[str, Any]:
    """`state.json` of a checkpoint without what depends on the clock or on how the run was
    asked for.
    """
    values = dict(json.loads((run / "checkpoints" / f"step-{step:08d}" / "state.json").read_text()))
    for key in ("config", "config_digest", "total_steps"):
        values.pop(key)
    values.pop("run_id")  # of which run it is
    values["train"].pop("seconds")
    for section in (values["train"], values["train"].get("without_end", {})):
        if "last" in section:
            section["last"] = {
                k: v for k, v in section["last"].items() if not k.startswith("perf/")
            }
    return values


def read_files(
    key: str,
    paths: Paths,
    options: ReadOptions = ReadOptions(),  # noqa: B008 - frozen
    notes: list[str] | None = None,
    *,
    documents: bool,
) -> Any:
    """The rows of files, as a key of the configuration reads them."""
    files = resolve(key, paths)
    return read_split(key, files, options, [] if notes is None else notes, documents=documents).rows
