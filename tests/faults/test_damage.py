"""Every kind of damage to a checkpoint is noticed before anything is loaded, and the right file
is named.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import resource
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optrun.artifacts.checkpoint import load_checkpoint, save_checkpoint
from optrun.artifacts.manifest import FORMAT, foreign_files, problems, read_manifest
from optrun.artifacts.retention import latest_complete
from optrun.artifacts.run_dir import RunDir
from optrun.artifacts.tensor_file import tensor_digest
from optrun.base.errors import CheckpointError
from tests.faults.checkpoints import FILES, edit_manifest, make_run, snapshot


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("whole"), (1, 2, 3))


@pytest.fixture
def run(whole: RunDir, tmp_path: Path) -> RunDir:
    shutil.copytree(whole.path, tmp_path / "run", symlinks=True)
    return RunDir(tmp_path / "run")


def falls_back(run: RunDir, file: str, to: int = 2) -> None:
    """The newest is refused, with the file's name, and an older one is used."""
    folder, wrong = latest_complete(run)
    assert folder == run.checkpoint(to)
    assert file in " ".join(wrong[run.checkpoint(3)])
    with pytest.raises(CheckpointError, match=file.replace(".", r"\.")) as refused:
        load_checkpoint(run.checkpoint(3))
    assert refused.value.exit_code == 4


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", ["half", "zero", "deleted", "longer", "zeros", "folder", "link"])
def test_each_file_harmed(run: RunDir, file: str, harm: str, tmp_path: Path) -> None:
    path = run.checkpoint(3) / file
    content = path.read_bytes()
    path.unlink()
    if harm == "folder":
        path.mkdir()
    elif harm == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    elif harm != "deleted":
        changed = {
            "half": content[: len(content) // 2],
            "zero": b"",
            "longer": content + b" ",
            "zeros": bytes(len(content)),
        }
        if harm == "longer" and file == "manifest.json":
            changed["longer"] = content + b"}"
        path.write_bytes(changed[harm])
    falls_back(run, file)


@pytest.mark.parametrize("file", FILES)
def test_files_swapped_between_checkpoints(run: RunDir, file: str) -> None:
    one, other = run.checkpoint(3) / file, run.checkpoint(2) / file
    aside = one.with_suffix(".aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    folder, wrong = latest_complete(run)
    assert folder == run.checkpoint(1)
    named = "manifest" if file == "manifest.json" else file
    assert all(named in " ".join(reasons) for reasons in wrong.values())
    assert len(wrong) == 2


def test_folder_renamed_to_another_step(run: RunDir) -> None:
    run.checkpoint(3).rename(run.checkpoint(7))
    folder, wrong = latest_complete(run)
    assert folder == run.checkpoint(2)
    assert "the folder says step 7, its manifest step 3" in wrong[run.checkpoint(7)][0]


def test_a_copy_under_a_name_of_its_own_is_a_checkpoint(run: RunDir) -> None:
    shutil.copytree(run.checkpoint(3), run.path / "kept")
    assert load_checkpoint(run.path / "kept").global_step == 3


@settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_one_flipped_bit_anywhere(whole: RunDir, place: float, bit: int) -> None:
    """Over all bytes of all files.

    Noticed, or the checkpoint that is read is the same to the last bit.
    """
    folder = whole.checkpoint(3)
    paths = [folder / file for file in FILES]
    offset = int(place * sum(path.stat().st_size for path in paths))
    for path in paths:
        if offset < path.stat().st_size:
            break
        offset -= path.stat().st_size
    content = path.read_bytes()
    harmed = bytearray(content)
    harmed[offset] ^= 1 << bit
    path.write_bytes(harmed)
    try:
        wrong = problems(folder)
        if wrong:
            assert path.name in wrong[0]
            assert latest_complete(whole)[0] == whole.checkpoint(2)
        else:
            assert path.name == "manifest.json"  # a space between two words of JSON
            after = load_checkpoint(folder)
            path.write_bytes(content)
            before = load_checkpoint(folder)
            assert after.global_step == before.global_step
            assert after.metadata == before.metadata
            for one, other in ((before.model, after.model), (before.optimizer, after.optimizer)):
                assert {n: tensor_digest(t) for n, t in one.items()} == {
                    n: tensor_digest(t) for n, t in other.items()
                }
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("format", "x" * 500, "format x"),
        ("files", [], "names ; expected"),
        (
            "files",
            [{"name": "../../passwd", "size": 1, "sha256": ""}],
            r"names \.\./\.\./passwd; expected",
        ),
        ("files", 3, "damaged: TypeError"),
        ("step", "three", "damaged: ValueError"),
        ("step", None, "damaged: TypeError"),
        ("tensors", None, "damaged: TypeError"),
        ("tensors", {}, "damaged: KeyError"),
    ],
)
def test_manifest_of_another_kind(run: RunDir, key: str, value: object, said: str) -> None:
    edit_manifest(run.checkpoint(3), lambda manifest: manifest.update({key: value}))
    with pytest.raises(CheckpointError, match=said):
        read_manifest(run.checkpoint(3))
    falls_back(run, "manifest.json")


def test_a_flipped_format_is_damage_and_no_newer_version(run: RunDir) -> None:
    path = run.checkpoint(3) / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace(f'"format": {FORMAT}', '"format": 6', 1))
    assert path.read_text() != text
    with pytest.raises(CheckpointError, match="its bytes changed"):
        read_manifest(run.checkpoint(3))
    falls_back(run, "manifest.json")


def test_state_of_another_step_with_a_manifest_that_agrees(run: RunDir) -> None:
    """Files and manifest exchanged together: the step inside tells."""
    text = (run.checkpoint(2) / "state.json").read_bytes()
    (run.checkpoint(3) / "state.json").write_bytes(text)
    entry = {"name": "state.json", "size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    edit_manifest(run.checkpoint(3), lambda manifest: manifest["files"].__setitem__(2, entry))
    with pytest.raises(CheckpointError, match=r"state\.json: step 2, the manifest says 3"):
        load_checkpoint(run.checkpoint(3))


def test_all_damaged_lists_all(run: RunDir) -> None:
    for step in (1, 2, 3):
        (run.checkpoint(step) / FILES[step]).unlink()
    folder, wrong = latest_complete(run)
    assert folder is None
    assert [reasons[0].split(": ")[0].rsplit("/", 1)[1] for reasons in wrong.values()] == [
        "manifest.json",
        "state.json",
        "optimizer.safetensors",
    ]


# What loading does besides
# ------------------------------------------------------------------------------------------


def test_what_is_saved_is_what_safetensors_reads(tmp_path: Path) -> None:
    run, saved = make_run(tmp_path), snapshot(1)
    place = save_checkpoint(run, saved)
    loaded = load_checkpoint(place)
    assert loaded.metadata == saved.metadata
    for one, other in ((saved.model, loaded.model), (saved.optimizer, loaded.optimizer)):
        assert {n: (t.dtype, t.shape, tensor_digest(t)) for n, t in one.items()} == {
            n: (t.dtype, t.shape, tensor_digest(t)) for n, t in other.items()
        }


# Hostile files
# --------------------------------------------------------------------------------------------------


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (os.mkdir, (str(self.mark),))


@pytest.mark.parametrize("file", FILES)
def test_a_pickle_in_place_of_a_file_is_not_run(run: RunDir, file: str, tmp_path: Path) -> None:
    (run.checkpoint(3) / file).write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
    falls_back(run, file)
    assert not (tmp_path / "mark").exists()


def test_a_pickle_beside_is_never_opened(run: RunDir, tmp_path: Path) -> None:
    names = ("optimizer.pt", "pytorch_model.bin", "rng_state.pth", "training_args.bin", "model.pkl")
    for name in names:
        (run.checkpoint(3) / name).write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
        (run.checkpoint(3) / name).chmod(0)
    assert load_checkpoint(run.checkpoint(3)).global_step == 3
    assert sorted(path.name for path in foreign_files(run.checkpoint(3))) == sorted(names)
    assert not (tmp_path / "mark").exists()


def test_a_link_out_of_the_run_is_not_followed(run: RunDir, tmp_path: Path) -> None:
    shutil.move(run.checkpoint(3), tmp_path / "step-00000003")
    run.checkpoint(3).symlink_to(tmp_path / "step-00000003")
    folder, wrong = latest_complete(run)
    assert folder == run.checkpoint(2)
    assert "a link" in wrong[run.checkpoint(3)][0]


@pytest.mark.parametrize(
    "content", ["[" * 2_000_000, '{"a":' * 500_000, "1" * 5000, '"' + "x" * 20_000_000]
)
def test_a_manifest_to_choke_on(run: RunDir, content: str) -> None:
    begun = time.process_time()
    (run.checkpoint(3) / "manifest.json").write_text(content)
    falls_back(run, "manifest.json")
    assert time.process_time() - begun < 5  # of this process: others on the machine do not count


def test_sizes_that_cannot_be(run: RunDir) -> None:
    """A manifest of many gigabytes, a state that claims them.

    Nothing is read.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with (run.checkpoint(3) / "manifest.json").open("r+b") as file:
        file.truncate(50 * 2**30)
    falls_back(run, "manifest.json")
    edit_manifest(run.checkpoint(2), lambda manifest: manifest["files"][2].update(size=2**40))
    assert "larger than" in problems(run.checkpoint(2))[0]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
