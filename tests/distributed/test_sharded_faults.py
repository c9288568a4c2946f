"""Sharded saves that are refused or killed, shards that are damaged.

What stands is whole, and what is not is named.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException

from optrun.artifacts import atomic
from optrun.artifacts import checkpoint as checkpoint_of
from optrun.artifacts import checkpoint_files as files_of
from optrun.artifacts import sharded as sharded_of
from optrun.artifacts.atomic import remove_folder
from optrun.artifacts.checkpoint import Snapshot, load_checkpoint, save_checkpoint
from optrun.artifacts.manifest import checksum_of, foreign_files, problems, read_manifest
from optrun.artifacts.retention import clean_leftovers, latest_complete
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.tensor_file import local_part
from optrun.base.errors import (
    CheckpointError,
    NonFiniteError,
    OptrunError,
    OtherFormatError,
    StorageError,
)
from optrun.cli import main as cli
from tests.distributed.shards import (
    assert_equal,
    edit_json,
    fsdp_snapshot,
    group,
    in_ranks,
    make_run,
    sharded_run,
    whole_state,
)
from tests.distributed.shards import snapshot as whole_snapshot
from tests.faults.syscalls import Syscalls, refuse

MODEL = "model/shard-00002-model-00001-of-00001.safetensors"
OPTIMIZER = "optimizer/shard-00001-model-00001-of-00001.safetensors"


# Refused on one rank.


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the shard")


def refused(kind: str, rank: int) -> Snapshot:
    """Make this rank's part of the next save fail."""
    taken = fsdp_snapshot(2)
    if kind == "write":
        sharded_of.write_tensors = full_disk  # type: ignore[assignment]
    elif kind == "flush":
        files_of.sync_folder = full_disk
    elif kind == "non-finite":
        local_part(taken.model["weight"])[0, 0] = float("nan")
    elif kind == "step":
        taken.global_step = 3
    elif kind == "names":
        taken.optimizer.pop("bias/master")  # type: ignore[attr-defined]
    elif kind == "defect":
        sharded_of.write_tensors = partial(int, "no number")  # type: ignore[assignment]
    return taken


def saves_and_refuses(
    folder: Path, kind: str, culprit: int, error: type[Exception], fact: str, rank: int
) -> None:
    run, saving = RunDir(folder), group()
    originals = sharded_of.write_tensors, files_of.sync_folder
    taken = refused(kind, rank) if rank == culprit else fsdp_snapshot(2)
    with pytest.raises(error) as told:
        save_checkpoint(run, taken, saving=saving)
    assert type(told.value) is error
    assert f"rank {culprit}" in str(told.value), str(told.value)
    assert fact in str(told.value), str(told.value)
    dist.barrier()
    left = [path.name for path in run.checkpoints.iterdir() if path.name.startswith(".")]
    assert left == []
    assert not run.checkpoint(2).exists()
    dist.barrier()
    sharded_of.write_tensors, files_of.sync_folder = originals
    save_checkpoint(
        run, fsdp_snapshot(2), saving=saving
    )  # all ranks stand where they stood: the next one works


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "culprit", "error", "fact"),
    [
        ("write", 1, StorageError, "No space left"),
        ("write", 0, StorageError, "No space left"),
        ("flush", 1, StorageError, "No space left"),
        ("non-finite", 1, NonFiniteError, "weight holds NaN"),
        ("step", 1, OptrunError, "step 3"),
        ("names", 1, OptrunError, "names"),
        ("defect", 1, OptrunError, "at most 2 arguments"),
    ],
)
def test_a_refusal_reaches_all(
    kind: str, culprit: int, error: type[Exception], fact: str, tmp_path: Path
) -> None:
    run = sharded_run(tmp_path / "run", (1,))
    in_ranks(run.path, partial(saves_and_refuses, run.path, kind, culprit, error, fact))
    assert problems(run.checkpoint(1)) == problems(run.checkpoint(2)) == []


def no_room(folder: Path, rank: int) -> None:
    run, saving = RunDir(folder), group()
    if rank == 0:
        atomic.MARGIN = 2**60
    with pytest.raises(StorageError, match=r"rank 0: .*are free"):
        save_checkpoint(run, fsdp_snapshot(1), saving=saving)


def test_room_is_looked_for_before_anything_is_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    in_ranks(run.path, partial(no_room, run.path))
    assert list(run.checkpoints.iterdir()) == []


def refuses_at_each_call(folder: Path, rank: int) -> None:
    """On either rank, one call of the operating system after the other fails."""
    saving, taken, counts = group(), fsdp_snapshot(2), []
    with Syscalls(folder) as calls:
        save_checkpoint(RunDir(folder), taken, saving=saving)
    dist.barrier()
    every: list[Any] = [None, None]
    dist.all_gather_object(every, calls.count)
    counts = [int(count) for count in every]
    refusals = 0
    for culprit, at in [(who, at) for who in (0, 1) for at in range(1, counts[who] + 1)]:
        run = RunDir(folder.with_name(f"{culprit}-{at}"))
        if rank == 0:
            make_run(run.path)
            save_checkpoint(run, whole_snapshot(1))
        dist.barrier()
        told = ""
        with Syscalls(run.path, at if rank == culprit else 0, refuse(errno.ENOSPC)):
            try:
                save_checkpoint(run, taken, saving=saving)
            except StorageError as error:
                told = str(error)
        dist.all_gather_object(every, told)
        assert bool(every[0]) == bool(every[1]), f"call {at} of rank {culprit}: {every}"
        assert all(f"rank {culprit}: No space" in text for text in every if text), every
        refusals += bool(told)
        committed = run.checkpoint(2).exists()  # refused at what comes after the rename
        assert problems(run.checkpoint(2) if committed else run.checkpoint(1)) == []
        save_checkpoint(run, taken, saving=saving)
        names = {"last", "step-00000001", "step-00000002"}
        assert {path.name for path in run.checkpoints.iterdir()} - names == set()
        assert problems(run.checkpoint(2)) == []
        dist.barrier()
    assert refusals >= sum(counts) - 4, "a folder that the other rank has made need not be made"


@pytest.mark.slow
def test_refusal_at_every_call_of_either_rank(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    in_ranks(run.path, partial(refuses_at_each_call, run.path))


# Killed.


def dies(stage: str, victim: int, rank: int) -> None:
    """Let a rank die when its save comes to a stage."""
    if rank != victim:
        return

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    def after(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            function(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        return call

    room, name, when = {
        "before the first shard": (sharded_of, "write_tensors", before),
        "a shard is written": (sharded_of, "write_tensors", after),
        "before the flush": (files_of, "sync_folder", before),
        "hashes are in": (checkpoint_of, "write_content", after),
        "manifest": (checkpoint_of, "write_manifest", after),
        "renamed": (checkpoint_of, "_put_in_place", after),
        "committed": (checkpoint_of, "replace_text", after),
    }[stage]
    setattr(room, name, when(getattr(room, name)))


def saves_and_dies(folder: Path, stage: str, victim: int, rank: int) -> None:
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # who started the ranks ends the others as soon as one dies
    saving = group(20)
    taken = fsdp_snapshot(2)
    dies(stage, victim, rank)
    try:
        save_checkpoint(RunDir(folder), taken, saving=saving)
    except Exception as error:
        folder.with_name("told").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)  # the default group has lost a rank, too


STAGES = [
    ("before the first shard", 1),
    ("a shard is written", 0),
    ("a shard is written", 1),
    ("before the flush", 1),
    ("hashes are in", 0),
    ("hashes are in", 1),
    ("manifest", 0),
    ("renamed", 0),
    ("committed", 0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "victim"), STAGES)
def test_a_killed_rank_leaves_the_last_whole_checkpoint(
    stage: str, victim: int, tmp_path: Path
) -> None:
    run = sharded_run(tmp_path / "run", (1,))
    with pytest.raises(ProcessExitedException):
        in_ranks(run.path, partial(saves_and_dies, run.path, stage, victim))
    told = run.path.with_name("told")
    assert told.read_text().startswith("RankLostError: another rank no longer answers")
    clean_leftovers(run)
    newest, wrong = latest_complete(run)
    assert newest is not None
    assert wrong == {}
    committed = stage in ("renamed", "committed") or (stage, victim) == ("hashes are in", 1)
    assert newest.name == ("step-00000002" if committed else "step-00000001")
    step = 2 if committed else 1
    assert_equal(load_checkpoint(newest).model, whole_state(step)[0])
    assert [path.name for path in run.checkpoints.iterdir() if path.name.startswith(".")] == []


# Damaged.


def sealed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest as one would who knows how it is sealed."""
    values = json.loads((folder / "manifest.json").read_text())
    values.pop("sha256")
    change(values)
    (folder / "manifest.json").write_text(json.dumps({**values, "sha256": checksum_of(values)}))


def flip(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def linked(path: Path) -> None:
    outside = path.parents[3] / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def stale(folder: Path) -> None:
    """The shard of the save before, under the same name."""
    (folder / MODEL).write_bytes((folder.with_name("step-00000001") / MODEL).read_bytes())


def renamed(values: dict[str, Any], old: str, new: str) -> None:
    for entry in values["files"]:
        entry["name"] = entry["name"].replace(old, new)


DAMAGE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a flipped bit": (lambda folder: flip(folder / MODEL), [MODEL, "checksum differs"]),
    "a flipped bit in a header": (
        lambda folder: flip(folder / OPTIMIZER, 20),
        [OPTIMIZER, "checksum differs"],
    ),
    "a lost shard": (lambda folder: (folder / MODEL).unlink(), [MODEL, "missing"]),
    "lost shards": (
        lambda folder: remove_folder(folder / "optimizer"),
        ["optimizer/shard-0000", "missing"],
    ),
    "a truncated shard": (
        lambda folder: os.truncate(folder / OPTIMIZER, 100),
        [OPTIMIZER, "100 bytes"],
    ),
    "a stale shard": (stale, [MODEL, "checksum differs"]),
    "an extra shard": (
        lambda folder: copy(folder / MODEL, folder / MODEL.replace("00002-model", "00003-model")),
        ["shard-00003", "does not name it"],
    ),
    "another file of tensors": (
        lambda folder: copy(folder / MODEL, folder / "model" / "adapter.safetensors"),
        ["adapter.safetensors", "does not name it"],
    ),
    "a link to a shard": (lambda folder: linked(folder / MODEL), [MODEL, "a link"]),
    "a link to a folder of shards": (lambda folder: linked(folder / "model"), ["model: a link"]),
    "state": (lambda folder: flip(folder / "state.json"), ["state.json", "checksum differs"]),
    "garbage for a manifest": (
        lambda folder: (folder / "manifest.json").write_text("[1"),
        ["manifest.json"],
    ),
    "a manifest edited": (
        lambda folder: edit_json(
            folder / "manifest.json", lambda values: values.update(world_size=1)
        ),
        ["manifest.json", "checksum differs"],
    ),
    "a rank too many": (
        lambda folder: sealed(folder, lambda values: values.update(world_size=1)),
        ["manifest.json", "names shard 00002; 1 ranks write"],
    ),
    "no world size": (
        lambda folder: sealed(folder, lambda values: values.pop("world_size")),
        ["manifest.json"],
    ),
    "a way out of the folder": (
        lambda folder: sealed(folder, lambda values: renamed(values, "model/", "model/../../")),
        ["manifest.json", "../"],
    ),
    "files of the whole form": (
        lambda folder: sealed(folder, lambda values: renamed(values, MODEL, "model.safetensors")),
        ["manifest.json", "model.safetensors"],
    ),
    "a tensor too many": (
        lambda folder: sealed(
            folder, lambda v: v["tensors"]["model"].update(x={"dtype": "float32", "shape": [1]})
        ),
        ["tensor x", "manifest only"],
    ),
    "a tensor too few": (
        lambda folder: sealed(
            folder, lambda values: values["tensors"]["optimizer"].pop("bias/exp_avg")
        ),
        ["bias/exp_avg", "files only"],
    ),
    "another shape": (
        lambda folder: sealed(
            folder, lambda values: values["tensors"]["model"]["weight"].update(shape=[8, 5])
        ),
        ["tensor weight", "[8, 5]"],
    ),
    "a shard not named": (
        lambda folder: (
            sealed(
                folder,
                lambda v: v.update(files=[entry for entry in v["files"] if entry["name"] != MODEL]),
            ),
            (folder / MODEL).unlink(),
        ),
        ["tensor mask is in", "the manifest only"],
    ),
}


def test_damage_is_named(tmp_path: Path) -> None:
    run = sharded_run(tmp_path / "run", (1, 2))
    for number, (kind, (harm, facts)) in enumerate(DAMAGE.items()):
        shutil.copytree(run.checkpoints, tmp_path / str(number) / "checkpoints")
        folder = RunDir(tmp_path / str(number)).checkpoint(2)
        harm(folder)
        with pytest.raises(CheckpointError) as told:
            load_checkpoint(folder)
        assert all(fact in str(told.value) for fact in facts), f"{kind}: {told.value}"


def test_the_older_one_is_taken(tmp_path: Path) -> None:
    run = sharded_run(tmp_path / "run", (1, 2, 3))
    flip(run.checkpoint(3) / MODEL)
    (run.checkpoint(2) / OPTIMIZER).unlink()
    newest, wrong = latest_complete(run)
    assert newest == run.checkpoint(1)
    assert [MODEL in wrong[run.checkpoint(3)][0], OPTIMIZER in wrong[run.checkpoint(2)][0]] == [
        True,
        True,
    ]


def test_strangers_are_no_damage_and_never_read(tmp_path: Path) -> None:
    run = sharded_run(tmp_path / "run", (1,))
    folder = run.checkpoint(1)
    for name in ("notes.txt", "model/.DS_Store", "model.safetensors.index.json"):
        (folder / name).write_text("x")
    assert problems(folder) == []
    strangers = [path.relative_to(folder).as_posix() for path in foreign_files(folder)]
    assert strangers == ["model/.DS_Store", "model.safetensors.index.json", "notes.txt"]


def test_a_newer_form_is_left_alone(tmp_path: Path) -> None:
    folder = sharded_run(tmp_path / "run", (1,)).checkpoint(1)
    sealed(folder, lambda values: values.update(format=5, extent=[1]))
    with pytest.raises(OtherFormatError, match="format 5, and this optrun reads format 4"):
        read_manifest(folder)


def test_verify_names_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = sharded_run(tmp_path / "run", (1, 2))
    assert cli.run(["verify", str(run.checkpoint(1))]) == 0
    assert "step-00000001" in capsys.readouterr().out
    flip(run.checkpoint(2) / MODEL)
    assert cli.run(["verify", str(run.checkpoint(2))]) == 4
    assert f"step-00000002/{MODEL}" in capsys.readouterr().err
