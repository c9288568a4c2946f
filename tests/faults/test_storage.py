"""A disk that is full, slow, read-only or gone.

The checkpoints before are whole, and nothing is hidden.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from optrun.artifacts import async_writer as saver_of
from optrun.artifacts import checkpoint_files as files_of
from optrun.artifacts.checkpoint import (
    MARGIN,
    Snapshot,
    load_checkpoint,
    make_checkpoints_dir,
    save_checkpoint,
)
from optrun.artifacts.lock import RunLock
from optrun.artifacts.manifest import problems
from optrun.artifacts.metrics import MetricsWriter, read_metrics
from optrun.artifacts.retention import latest_complete
from optrun.artifacts.run_dir import RunDir
from optrun.base.errors import StorageError
from optrun.data.loader import BatchLoader
from optrun.launch.single_run import refuse_used
from optrun.runner.checkpoint_space import space_warning
from optrun.runner.console import run_log
from optrun.runner.export import publish
from optrun.task.base import Task
from optrun.training.step import TrainStep
from tests.faults.checkpoints import make_run, snapshot
from tests.faults.runs import STEPS, Go, Straight
from tests.faults.syscalls import Syscalls, in_child, refuse
from tests.running import optrun, records, summary, tensors


class Full:
    """A disk on which saving fails for a while.

    Args:
        monkeypatch: Puts it in place.
        refused: Which calls of `save_checkpoint`, from 1, fail at their third write.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refused: set[int]) -> None:
        self.calls: list[int] = []

        def save(run: RunDir, taken: Snapshot, *given: Any) -> Path:
            self.calls.append(taken.global_step)
            if len(self.calls) not in refused:
                return save_checkpoint(run, taken, *given)
            with Syscalls(run.checkpoints, 6, refuse(errno.ENOSPC)):
                return save_checkpoint(run, taken, *given)

        monkeypatch.setattr(saver_of, "save_checkpoint", save)


def test_a_full_disk_is_told_and_tried_again(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on, the checkpoint is written when there is room, and no number is another
    for it.
    """
    full = Full(monkeypatch, {2})
    monkeypatch.setattr(TrainStep, "compute_gradients", slowly(TrainStep.compute_gradients))
    words = straight.words_with(
        "checkpoint.save_steps=4", "checkpoint.keep_best=0", "training.max_steps=12"
    )
    code, said = go(*words, "hydra.run.dir=run")
    assert code == 0
    assert full.calls == [4, 8, 8, 12]
    assert "step-00000008: the checkpoint could not be saved: No space left on device" in said
    # Step 8 fails within that step or during a later one, and the next try comes a step behind
    # that.
    assert re.search(
        r"newest good checkpoint: step-00000004; next try after step (9|10|11|12)\. ", said
    )
    run = RunDir("run")
    assert [problems(run.checkpoint(step)) for step in (4, 8, 12)] == [[], [], []]
    assert not list(run.checkpoints.glob(".*"))
    words = straight.words_with(
        "checkpoint.save_steps=4", "checkpoint.keep_best=0", "training.max_steps=12"
    )
    assert go(*words, "hydra.run.dir=good")[0] == 0
    assert tensors(run.path, 8) == tensors(Path("good"), 8)
    assert tensors(run.path, 12) == tensors(Path("good"), 12)
    assert records(run.path) == records(Path("good"))


def slowly(function: Any) -> Any:
    """The same, 50 ms later: saves end between steps."""

    def call(*args: Any) -> Any:
        time.sleep(0.05)
        return function(*args)

    return call


def test_stop_ends_cleanly_and_resumes_exactly(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        Full(patch, {3})
        code, said = go(
            *straight.words_with("checkpoint.on_storage_error=stop"), "hydra.run.dir=run"
        )
    assert code == 74
    assert "it takes" in said
    assert "are free" in said
    assert summary(Path("run"))["status"] == "failed"
    assert latest_complete(RunDir("run"))[0] == RunDir("run").checkpoint(2)
    assert go("resume=run", "checkpoint.on_storage_error=continue")[0] == 0
    straight_records = records(straight.path)
    assert records(Path("run")) == straight_records
    assert tensors(Path("run"), STEPS) == tensors(straight.path, STEPS)


def test_the_last_save_has_no_later(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be saved at the end, or when asked to stop, is an error.

    75 would promise what is not there.
    """
    with monkeypatch.context() as patch:
        Full(patch, {6, 7, 8})
        code, _ = go(*straight.words, "hydra.run.dir=run")
    assert code == 74
    assert latest_complete(RunDir("run"))[0] == RunDir("run").checkpoint(5)
    with monkeypatch.context() as patch:
        Full(patch, set(range(1, 20)))
        words = straight.words_with("checkpoint.save_steps=null", "training.max_seconds=1e-9")
        code, _ = go(*words, "hydra.run.dir=two")
    assert code == 74
    assert go("resume=run")[0] == 0
    straight.same(Path("run"))


def test_not_enough_room_is_said_before_the_first_step(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=300_000))
    code, said = go(*straight.words, "hydra.run.dir=run")
    assert code == 74
    assert said.index("are still to come") < said.index("step 1/6")
    assert "292" in said or "293" in said  # KiB free


@pytest.mark.parametrize(("missing", "warned"), [(0, False), (1, True)])
def test_the_warning_counts_all_that_a_save_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int, warned: bool
) -> None:
    """A byte less than the save itself asks for is too little."""
    run, taken = make_run(tmp_path), snapshot(1)
    config = SimpleNamespace(keep_last=0, keep_best=0)
    usage = shutil.disk_usage(tmp_path)._replace(free=taken.size + MARGIN - missing)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert (space_warning(run, config, taken.size) is not None) == warned  # type: ignore[arg-type]
    if warned:
        with pytest.raises(StorageError, match="are free"):
            save_checkpoint(run, taken)
    else:
        save_checkpoint(run, taken)


@contextmanager
def no_file_larger(size: int) -> Iterator[None]:
    """The kernel refuses to write behind so many bytes of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    heard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, heard)


def test_a_file_size_limit_is_a_full_disk(tmp_path: Path) -> None:
    """The kernel itself refuses in the middle of a file."""
    run = make_run(tmp_path, (1,))
    with no_file_larger(300_000), pytest.raises(StorageError, match="File too large"):
        save_checkpoint(run, snapshot(2, numbers=200_000))
    assert latest_complete(run)[0] == run.checkpoint(1)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["last", "step-00000001"]


def test_full_at_any_byte(memory_path: Path) -> None:
    """Fifty limits over the whole size of a checkpoint's largest file.

    Refused below it, saved from it on.
    """
    run, taken = make_run(memory_path, (1,)), snapshot(2, numbers=2000)
    largest = max(path.stat().st_size for path in save_checkpoint(run, taken).iterdir())
    chance = random.Random(0)

    for limit in [*(chance.randrange(largest) for _ in range(48)), largest - 1, largest]:
        shutil.rmtree(run.checkpoint(2), ignore_errors=True)
        said = ""
        try:
            with no_file_larger(limit):
                save_checkpoint(run, taken)
        except StorageError as error:
            said = str(error)
        assert ("File too large" in said) == (limit < largest), limit
        assert latest_complete(run)[0] == run.checkpoint(2 if limit == largest else 1), limit
        assert not list(run.checkpoints.glob(".*")), limit


_PUBLISH_ON_A_SMALL_DISK = """
import sys
from pathlib import Path
import torch, tokenizers, transformers
from optrun.base.errors import StorageError, is_refused_by_disk
from optrun.runner import folders

disk, what, room = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
    n_layer=1, n_head=1, n_embd=64, vocab_size=6000))
words = {f"word{number}": number for number in range(60_000)}
tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))
(disk / "other").write_bytes(bytes(4 * 2**20 - room))
try:
    with folders.write_through_temporary(disk / "model") as aside:
        if what == "model":
            from optrun.runner.export import write_model
            write_model(aside, model, None, {}, {"task": None})
        else:
            tokenizer.save(str(aside / "tokenizer.json"))
except StorageError as error:
    print("refused", is_refused_by_disk(error), sorted(path.name for path in disk.iterdir()))
"""


@pytest.mark.parametrize(("what", "room"), [("model", 1_500_000), ("tokenizer", 600_000)])
def test_a_library_that_passes_on_a_text_alone(what: str, room: int, tmp_path: Path) -> None:
    """Safetensors and tokenizers say in words alone that the disk is full."""
    script = tmp_path / "publish.py"
    script.write_text(_PUBLISH_ON_A_SMALL_DISK)
    (tmp_path / "disk").mkdir()
    mount = f"mount -t tmpfs -o size=4m none {tmp_path}/disk"
    line = f"{mount} && exec {sys.executable} {script} {tmp_path}/disk {what} {room}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", line], capture_output=True, text=True)
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip("no disk can be mounted here")
    assert done.stdout.splitlines()[-1:] == ["refused True ['other']"], done.stderr


@pytest.mark.slow
def test_full_anywhere_in_a_run(straight: Straight, go: Go) -> None:
    """What is no checkpoint as well: the configuration, metrics, the summary.

    It is told and mended, or an error.
    """
    words = [*straight.words_with("training.max_steps=1"), "checkpoint=none"]
    words = [word for word in words if not word.startswith("checkpoint.")]
    with Syscalls(Path.cwd() / "whole") as calls:
        assert go(*words, "hydra.run.dir=whole")[0] == 0
    codes = []
    for number in range(1, calls.count + 1, max(calls.count // 10, 1)):
        with Syscalls(Path.cwd() / str(number), number, refuse(errno.ENOSPC)):
            code, said = go(*words, f"hydra.run.dir={number}")
        codes.append(code)
        assert code == 0 or "No space left on device" in said, said
    assert set(codes) == {0, 74}


def test_a_disk_that_names_no_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(words: list[str]) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("optrun.cli.train.run", full)
    assert optrun() == 74
    assert "error: storage refused: No space left on device. Make room" in capsys.readouterr().err


def test_a_log_that_cannot_be_written_hides_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)

    def full(_: logging.FileHandler) -> Any:
        return Path("/dev/full").open("a")

    monkeypatch.setattr(logging.FileHandler, "_open", full)

    def work() -> None:
        with run_log(run):
            logging.getLogger("optrun").info("a line")
            raise StorageError("the real reason")

    with pytest.raises(StorageError, match="the real reason"):
        work()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_a_model_that_cannot_be_published(straight: Straight, tmp_path: Path, part: str) -> None:
    """Libraries in Rust pass on what the disk says in a text of their own."""
    model = AutoModelForCausalLM.from_pretrained(straight.path / "model")
    tokenizer = AutoTokenizer.from_pretrained(straight.path / "model")
    if part == "tokenizer":
        model.save_pretrained = lambda folder: None
    with (
        no_file_larger(5000),
        pytest.raises(StorageError, match="model: cannot be written: File too large"),
    ):
        publish(RunDir(tmp_path), model, tokenizer, {}, {}, None)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_only_be_read(memory_path: Path) -> None:
    """No checkpoint, no lock, no start: each says which path.

    What is there stays readable and as it was.
    """
    run = make_run(memory_path / "run", (1,))
    for folder in (run.path, run.checkpoints, run.checkpoint(1)):
        folder.chmod(0o555)
    memory_path.chmod(0o555)

    def work() -> None:
        if os.geteuid() == 0:  # to whom no folder is closed
            os.setgid(65534)
            os.setuid(65534)
        with pytest.raises(
            StorageError,
            match=r"step-00000002: the checkpoint could not be saved: Permission denied",
        ):
            save_checkpoint(run, snapshot(2))
        with (
            pytest.raises(
                StorageError, match=r"\.lock: the lock cannot be taken: Permission denied"
            ),
            RunLock(run.lock),
        ):
            pass
        with pytest.raises(StorageError, match=r"hydra\.run\.dir=.*new: no permission to write in"):
            refuse_used(memory_path / "new")
        with pytest.raises(StorageError, match=r"run2/checkpoints: cannot be made: No such file"):
            make_checkpoints_dir(RunDir(memory_path / "run2"))
        assert load_checkpoint(run.checkpoint(1)).global_step == 1

    try:
        assert in_child(work) == 0
    finally:
        for folder in (memory_path, run.path, run.checkpoints, run.checkpoint(1)):
            folder.chmod(0o755)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["last", "step-00000001"]


def test_metrics_wait_for_room_and_no_checkpoint_commits_before_its_lines(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = MetricsWriter.write, [0]

    def write(self: MetricsWriter, record: dict[str, Any]) -> None:
        calls[0] += 1
        if 3 <= calls[0] <= 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsWriter, "write", write)
        code, said = go(*straight.words, "hydra.run.dir=run")
    assert code == 0
    assert "metrics.jsonl: No space left on device; the line is kept and written later" in said
    assert records(Path("run")) == records(straight.path)
    assert tensors(Path("run"), STEPS) == tensors(straight.path, STEPS)
    calls[0] = 0
    with monkeypatch.context() as patch:
        patch.setattr(MetricsWriter, "write", write)
        code, said = go(
            *straight.words_with("checkpoint.on_storage_error=stop"), "hydra.run.dir=two"
        )
    assert code == 74


def test_a_line_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    def write() -> None:
        with MetricsWriter(path) as metrics:
            for step in range(10):
                metrics.write({"step": step, "train/loss": 1.25})

    with no_file_larger(100), pytest.raises(OSError, match="No space left"):
        write()
    log = read_metrics(path)
    assert log.problems == []
    assert [record["step"] for record in log.records] == [0, 1, 2]


def test_a_summary_that_cannot_be_written_ends_nothing(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optrun.runner import summary as summary_of

    original, calls = summary_of.write_summary, [0]

    def write(path: Path, values: dict[str, Any], **options: Any) -> None:
        calls[0] += 1
        if calls[0] in (2, 3):  # with the first lines; one that is written is the last for a second
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(path, values, **options)

    monkeypatch.setattr(summary_of, "write_summary", write)
    code, said = go(*straight.words, "hydra.run.dir=run")
    assert code == 0
    assert "summary.json: No space left on device; it is written again later" in said
    straight.same(Path("run"))


@pytest.mark.parametrize("gone", ["checkpoints", "everything"])
def test_a_folder_removed_during_the_run_is_not_made_anew(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    original, calls = saver_of.save_checkpoint, [0]

    def save(run: RunDir, *args: Any) -> Path:
        calls[0] += 1
        if calls[0] == 3:
            (run.checkpoints if gone == "checkpoints" else run.path).rename("gone")
        return original(run, *args)

    monkeypatch.setattr(saver_of, "save_checkpoint", save)
    code, said = go(*straight.words_with("checkpoint.on_storage_error=stop"), "hydra.run.dir=run")
    assert code == 74
    assert "No such file or directory" in said
    assert not RunDir("run").checkpoints.exists()


def test_a_slow_disk_neither_overlaps_nor_queues_nor_sees_later_updates(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save takes longer than the interval.

    One at a time, every one that is due, each of its own step.
    """
    original, running, most = saver_of.save_checkpoint, [0], [0]

    def save(*args: Any) -> Path:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.15)
        place = original(*args)
        running[0] -= 1
        return place

    monkeypatch.setattr(saver_of, "save_checkpoint", save)
    assert go(*straight.words, "hydra.run.dir=run")[0] == 0
    assert most == [1]
    straight.same(Path("run"))
    for step in range(1, STEPS + 1):
        assert tensors(Path("run"), step) == tensors(straight.path, step)
    stalls = [json.loads(line) for line in (Path("run") / "metrics.jsonl").read_text().splitlines()]
    assert stalls[-1]["perf/checkpoint_stall_seconds"] > 0.05
    assert stalls[-1]["perf/checkpoint_write_seconds"] > 0.15


def test_an_error_beside_training_is_raised_in_it(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only refusals of the disk: nothing is lost in the thread."""

    def broken(*args: Any) -> Any:
        raise MemoryError("no memory for the manifest")

    monkeypatch.setattr(files_of, "checksummed_text", broken)
    with pytest.raises(MemoryError, match="no memory for the manifest"):
        go(*straight.words, "hydra.run.dir=run")
    assert not list(RunDir("run").checkpoints.glob("*"))
    assert summary(Path("run"))["status"] == "failed"


@pytest.mark.parametrize(("place", "name"), [(BatchLoader, "evaluation"), (Task, "collate")])
def test_an_error_in_data_or_evaluation_leaves_the_checkpoints(
    straight: Straight, go: Go, monkeypatch: pytest.MonkeyPatch, place: Any, name: str
) -> None:
    from optrun.task.causal_lm import CausalLm

    place = CausalLm if place is Task else place
    original, calls = getattr(place, name), [0]
    kind = (
        RuntimeError if name == "evaluation" else EOFError
    )  # as the end of a file that is cut, not of a worker

    def broken(self: Any, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] == (2 if name == "evaluation" else 5):
            raise kind("a defect")
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, broken)
        with pytest.raises(kind, match="a defect"):
            go(*straight.words, "hydra.run.dir=run")
    assert summary(Path("run"))["status"] == "failed"
    assert latest_complete(RunDir("run"))[0] is not None
    assert go("resume=run")[0] == 0
    straight.same(Path("run"))
