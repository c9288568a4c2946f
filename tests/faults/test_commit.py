"""What stands on the disk when a save dies, or is refused, between any two calls of the
operating system.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from optrun.artifacts import run_dir as names
from optrun.artifacts.checkpoint import load_checkpoint, save_checkpoint
from optrun.artifacts.manifest import problems
from optrun.artifacts.retention import (
    Retention,
    clean_leftovers,
    latest_complete,
    point_best,
)
from optrun.artifacts.run_dir import RunDir, read_pointer
from optrun.base.errors import StorageError
from tests.faults.checkpoints import make_run, snapshot
from tests.faults.syscalls import Syscalls, calls_of, deaths, refuse


def save_and_retain(run: RunDir) -> None:
    """Everything that happens on the disk for one checkpoint."""
    place = save_checkpoint(run, snapshot(3))
    retention = Retention(run, keep_last=1)
    retention.trust(place)
    point_best(run, 3)
    retention.delete_expired({3})


def newest(run: RunDir) -> int:
    folder, _ = latest_complete(run)
    assert folder is not None
    return load_checkpoint(folder).global_step


def test_death_at_every_call(memory_path: Path) -> None:
    """At every instant a whole checkpoint is there, and the next start cleans up by itself."""
    whole = make_run(memory_path / "whole", (1, 2))
    left = deaths(whole.path, lambda: save_and_retain(whole), memory_path)
    assert len(left) > 30
    seen = set()
    for run in map(RunDir, left):
        step = newest(run)
        seen.add(step)
        assert step in (2, 3)
        clean_leftovers(run)
        save_and_retain(run)
        assert sorted(path.name for path in run.checkpoints.iterdir()) == [
            "best",
            "last",
            "step-00000003",
        ]
        assert newest(run) == 3
    assert seen == {2, 3}


def test_death_while_replacing(memory_path: Path) -> None:
    """One that was saved before the end of its step makes way for the whole one.

    Neither is lost on the way.
    """
    later = snapshot(2)
    later.metadata.train["unfinished"] = False
    whole = make_run(memory_path / "whole", (2,))
    left = deaths(whole.path, lambda: save_checkpoint(whole, later), memory_path)
    assert len(left) > 20
    for run in map(RunDir, left):
        clean_leftovers(run)
        assert newest(run) == 2
        save_checkpoint(run, later)
        assert load_checkpoint(run.checkpoint(2)).metadata == later.metadata
        assert {path.name for path in run.checkpoints.iterdir()} == {"last", "step-00000002"}


def test_refusal_at_every_call(memory_path: Path) -> None:
    """No room, at any call.

    The checkpoint before is whole, nothing half is left, and the next save succeeds.
    """
    total = calls_of(
        memory_path, lambda: save_checkpoint(make_run(memory_path / "count", (1,)), snapshot(2))
    )
    first = calls_of(memory_path, lambda: make_run(memory_path / "first", (1,)))
    for at, number in itertools.product(range(1, total - first + 1), (errno.ENOSPC, errno.EIO)):
        run = make_run(memory_path / f"{at}-{number}", (1,))
        with (
            Syscalls(run.path, at, refuse(number)),
            pytest.raises(StorageError, match="step-00000002") as refused,
        ):
            save_checkpoint(run, snapshot(2))
        assert refused.value.exit_code == 74
        assert newest(run) in (1, 2)
        assert not problems(run.checkpoint(1))
        save_checkpoint(run, snapshot(2))
        assert newest(run) == 2
        assert {path.name for path in run.checkpoints.iterdir()} == {
            "last",
            "step-00000001",
            "step-00000002",
        }


def test_refusal_says_how_much_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, (1,))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5000))
    with pytest.raises(
        StorageError, match=r"step-00000002: not saved: it needs [\d,]+ bytes, 5,000 are free"
    ):
        save_checkpoint(run, snapshot(2))
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["last", "step-00000001"]


def test_a_save_over_a_damaged_one_keeps_it_to_be_looked_at(tmp_path: Path) -> None:
    run = make_run(tmp_path, (1,))
    (run.checkpoint(1) / "state.json").write_text("{}")
    save_checkpoint(run, snapshot(1))
    assert not problems(run.checkpoint(1))
    assert (run.checkpoints / "damaged-step-00000001-1" / "state.json").read_text() == "{}"


# Retention
# --------------------------------------------------------------------------------------------------


def steps(run: RunDir) -> list[int]:
    return [
        int(path.name.removeprefix("step-"))
        for path in sorted(run.checkpoints.iterdir())
        if path.is_dir()
    ]


def test_retention_goes_by_step_not_by_time(tmp_path: Path) -> None:
    """A copied or touched old folder takes nobody's place."""
    run = make_run(tmp_path, (1, 2, 3))
    os.utime(run.checkpoint(1), (4e9, 4e9))
    for file in run.checkpoint(1).iterdir():
        os.utime(file, (4e9, 4e9))
    Retention(run, keep_last=1).delete_expired(set())
    assert steps(run) == [3]


def test_retention_compares_numbers(tmp_path: Path) -> None:
    run = make_run(tmp_path, (99_999_999, 100_000_000))
    Retention(run, keep_last=1).delete_expired(set())
    assert steps(run) == [100_000_000]


@pytest.mark.parametrize("harm", ["half", "unfinished", "flipped"])
def test_a_damaged_newest_does_not_count_as_kept(tmp_path: Path, harm: str) -> None:
    run = make_run(tmp_path, (1, 2, 3))
    if harm == "unfinished":
        (run.checkpoint(3) / "manifest.json").unlink()
    else:
        path = run.checkpoint(3) / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content[:100] if harm == "half" else content)
    Retention(run, keep_last=1).delete_expired(set())
    assert steps(run) == [2, 3]  # the good one stays, the damaged one is nobody's to delete unseen
    assert newest(run) == 2


def test_the_best_and_the_scheduled_stay(tmp_path: Path) -> None:
    run = make_run(tmp_path, (1, 2, 3, 4, 5))
    deleted = Retention(run, keep_last=2).delete_expired({1, 3})
    assert steps(run) == [1, 3, 4, 5]
    assert [path.name for path in deleted] == ["step-00000002"]


def test_deleting_follows_no_link(tmp_path: Path) -> None:
    outside = make_run(tmp_path / "outside", (1,))
    run = make_run(tmp_path / "run", (2, 3))
    (run.checkpoint(1)).symlink_to(outside.checkpoint(1))
    (run.checkpoint(2) / "link").symlink_to(outside.checkpoint(1))
    Retention(run, keep_last=1).delete_expired(set())
    clean_leftovers(run)
    assert not problems(outside.checkpoint(1))
    assert run.checkpoint(1).is_symlink()
    assert not run.checkpoint(2).exists()


def test_leftovers_go_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    run = make_run(tmp_path, (1,))
    for name in (
        ".saving-step-00000002-77",
        ".deleting-step-00000001",
        "notes",
        "damaged-step-00000001-1",
    ):
        (run.checkpoints / name).mkdir()
    (run.checkpoints / ".saving-step-00000003-1").symlink_to(tmp_path)
    assert clean_leftovers(run) == [".deleting-step-00000001", ".saving-step-00000002-77"]
    left = {path.name for path in run.checkpoints.iterdir()}
    assert left == {
        "last",
        "step-00000001",
        "notes",
        "damaged-step-00000001-1",
        ".saving-step-00000003-1",
    }


def test_pointers_are_hints(tmp_path: Path) -> None:
    run = make_run(tmp_path, (1,))
    run.best.write_text("../../../etc")
    run.last.write_bytes(b"\xff\xfe")
    assert read_pointer(run.best) is None
    assert read_pointer(run.last) is None
    assert newest(run) == 1


# Power cut
# --------------------------------------------------------------------------------------------------


class Disk:
    """What a disk may hold after a power cut: data and names count only when they were flushed.

    Folders are dicts of names, files are byte strings; each is there twice, as written and as
    flushed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now: dict[str, Any] = {}
        self.flushed: dict[str, Any] = {}
        self._load(root)

    def _load(self, folder: Path) -> None:
        self.now[str(folder)] = self.flushed[str(folder)] = None
        for path in folder.iterdir():
            if path.is_dir():
                self._load(path)
            else:
                self.now[str(path)] = self.flushed[str(path)] = path.read_bytes()

    def __call__(self, name: str, args: tuple[Any, ...]) -> None:
        """Take one call in."""
        path = args[0]
        if name == "open":
            self.now[path] = b""
        elif name == "mkdir":
            self.now[path] = None
        elif name == "write":
            self.now[path] += args[1]
        elif name in ("unlink", "rmdir"):
            self.now.pop(path)
        elif name in ("rename", "replace"):
            for held in [held for held in self.now if held == path or held.startswith(path + "/")]:
                self.now[args[1] + held[len(path) :]] = self.now.pop(held)
                if held in self.content:
                    self.content[args[1] + held[len(path) :]] = self.content.pop(held)
        elif name == "fsync":
            self._flush(path)

    content: dict[str, bytes]

    def _flush(self, path: str) -> None:
        if self.now[path] is not None:
            self.content[path] = self.now[path]
            return
        children = {held for held in (*self.now, *self.flushed) if str(Path(held).parent) == path}
        for child in children:
            gone = [held for held in self.flushed if held == child or held.startswith(child + "/")]
            below = {
                held: self.now[held]
                for held in self.now
                if held == child or held.startswith(child + "/")
            }
            for held in gone:
                self.flushed.pop(held)
            self.flushed.update(below)

    def after_cut(self, names_kept: bool, data: str) -> dict[str, Any]:
        """Files and folders as they may be found.

        Args:
            names_kept: Whether names that were not flushed are there.
            data: What stands for data that was not flushed: `kept`, `zeros` or `empty`.
        """
        found = {}
        for path, content in (self.now if names_kept else self.flushed).items():
            if content is None:
                found[path] = None
                continue
            safe = self.content.get(path)
            if data == "kept" or safe == content:
                found[path] = content
            else:
                found[path] = (
                    safe if safe is not None else bytes(len(content)) if data == "zeros" else b""
                )
        return found


def test_power_cut_after_every_call(memory_path: Path) -> None:
    """Data or names that were not flushed are lost or zero.

    A published checkpoint is whole all the same.
    """
    run = make_run(memory_path / "run", (1, 2))
    disk = Disk(run.path)
    disk.content = {path: content for path, content in disk.now.items() if content is not None}
    published, cuts = 2, []

    def record(name: str, args: tuple[Any, ...]) -> None:
        nonlocal published
        disk(name, args)
        if (
            name == "fsync"
            and args[0] == str(run.checkpoints)
            and str(run.checkpoint(3)) in disk.now
        ):
            published = 3
        for kept, data in itertools.product((True, False), ("kept", "zeros", "empty")):
            cuts.append((published, disk.after_cut(kept, data)))

    with Syscalls(run.path, record=record):
        save_and_retain(run)
    assert published == 3
    place, seen = memory_path / "after", set()
    distinct = {(least, repr(sorted(found.items()))): (least, found) for least, found in cuts}
    for least, found in distinct.values():
        shutil.rmtree(place, ignore_errors=True)
        for path, content in sorted(found.items()):
            target = place / Path(path).relative_to(run.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                target.mkdir(exist_ok=True)
            else:
                target.write_bytes(content)
        step = newest(RunDir(place))
        assert step >= least
        seen.add(step)
    assert seen == {2, 3}
    assert len(distinct) > 50


def test_manifest_is_the_last_file(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    opened: list[str] = []

    def record(name: str, args: tuple[Any, ...]) -> None:
        if name == "open":
            opened.append(Path(args[0]).name)

    with Syscalls(run.path, record=record):
        save_checkpoint(run, snapshot(1))
    assert opened[:4] == [
        names.CHECKPOINT_MODEL,
        names.CHECKPOINT_OPTIMIZER,
        names.CHECKPOINT_STATE,
        names.CHECKPOINT_MANIFEST,
    ]
