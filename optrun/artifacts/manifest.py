"""What a checkpoint says it holds, and whether it does.

A folder is a checkpoint when its manifest is there and every file agrees with it. That one predicate, `problems`,
answers for loading, for retention and for `optrun verify`. Only files that the manifest names are ever opened, and the
manifest may name three, all safetensors or JSON; of a sharded checkpoint, in place of the two safetensors files, those
in two folders with a shard of each rank.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from optrun.artifacts import run_dir as names
from optrun.artifacts.checksum import Checksum, checksum_in, digest_of_file
from optrun.artifacts.run_dir import parse_step
from optrun.base.errors import CheckpointError, ForeignCheckpointError, OtherFormatError, refuse_format
from optrun.base.reading import JSON_BYTES, kind_of, open_file, read_json

FORMAT = 4
"""The only one that is read. The number of another one stands in the same place, so that a refusal names it."""
CONTENT = (names.CHECKPOINT_MODEL, names.CHECKPOINT_OPTIMIZER, names.CHECKPOINT_STATE)
TENSOR_FILES = (names.CHECKPOINT_MODEL, names.CHECKPOINT_OPTIMIZER)
SHARD_FOLDERS = (names.CHECKPOINT_MODEL_SHARDS, names.CHECKPOINT_OPTIMIZER_SHARDS)
_SHARD = re.compile(rf"({'|'.join(SHARD_FOLDERS)})/shard-\d{{5}}-model-00001-of-00001\.safetensors")
"""As `torch.distributed.checkpoint` names them; the number is that of the rank, from 1."""


def is_content(folder: Path, name: str) -> bool:
    """Tell whether a path inside a checkpoint is one that its manifest names, by the form alone."""
    return name in CONTENT or (_SHARD.fullmatch(name) is not None and not (folder / TENSOR_FILES[0]).exists())


def shards(files: Iterable[str], folder: str) -> list[str]:
    """List those of a checkpoint's files that are shards in one of its folders, by rank."""
    return sorted(name for name in files if _SHARD.fullmatch(name) and name.startswith(f"{folder}/"))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint.

    Returns:
        As written, with `listed` beside it: file name to size and `Checksum`.
        `tensors` holds a section for each of `TENSOR_FILES`, or, where `sharded` says so, for each of `SHARD_FOLDERS`.

    Raises:
        OtherFormatError: A version with another format wrote it.
        CheckpointError: It is missing, unreadable, torn, or names other files than a checkpoint has.
    """
    path = folder / names.CHECKPOINT_MANIFEST
    if folder.is_symlink():
        raise CheckpointError(f"{folder}: a link: what lies outside of a run directory is not read.")
    try:
        values = read_json(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path}: missing: this folder is no complete checkpoint.") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}.") from error
    try:
        manifest = dict(values)
        check_format(path, manifest, FORMAT)
        listed = {str(entry["name"]): (int(entry["size"]), checksum_in(entry)) for entry in manifest["files"]}
        step, manifest["run_id"] = int(manifest["step"]), manifest["run_id"]
        sharded = "world_size" in manifest
        sections = SHARD_FOLDERS if sharded else TENSOR_FILES
        tensors = {section: _tensors(manifest["tensors"][section], sharded) for section in sections}
        strange = _strange_files(manifest, listed, sharded)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged: {type(error).__name__} while reading it.") from error
    if strange is not None:
        raise CheckpointError(f"{path}: {strange}")
    if listed[names.CHECKPOINT_STATE][0] > JSON_BYTES:
        raise CheckpointError(f"{path}: names a {names.CHECKPOINT_STATE} larger than {JSON_BYTES:,} bytes.")
    known = {"listed": listed, "step": step, "tensors": tensors, "sharded": sharded}
    return {**manifest, **known}


def _strange_files(manifest: Mapping[str, Any], listed: Mapping[str, Any], sharded: bool) -> str | None:
    """Describe what is wrong with the files that a manifest names; None: nothing."""
    shown = ", ".join(sorted(listed))[:200]
    if not sharded:
        return None if set(listed) == set(CONTENT) else f"names {shown}; expected {', '.join(CONTENT)}."
    ranks = int(manifest["world_size"])
    files = set(listed) - {names.CHECKPOINT_STATE}
    if names.CHECKPOINT_STATE not in listed or not all(map(_SHARD.fullmatch, files)):
        return f"names {shown}; expected {names.CHECKPOINT_STATE} and shards in {' and '.join(SHARD_FOLDERS)}."
    numbers = {int(name.partition("shard-")[2][:5]) for name in files}
    if not numbers <= set(range(1, ranks + 1)):
        return f"names a shard of rank {max(numbers) - 1}, of {ranks} ranks."
    return None


def _tensors(section: Any, sharded: bool) -> dict[str, dict[str, Any]]:
    return {
        str(name): {
            "dtype": str(e["dtype"]),
            "shape": [int(size) for size in e["shape"]],
            "xxh3": None if sharded else str(e["xxh3"]),  # of shards the files' own checksums stand for it
        }
        for name, e in section.items()
    }


def refuse_other_format(folder: Path) -> None:
    """Refuse another format before its checkpoint is put out of the way: the optrun that wrote it can use it.

    Raises:
        OtherFormatError: It is of another format.
    """
    try:
        read_manifest(folder)
    except OtherFormatError:
        raise
    except (CheckpointError, OSError):
        return


def refuse_foreign(folder: Path, run_id: str | None) -> None:
    """Refuse a checkpoint of another run, however it came to lie where it does.

    Args:
        folder: Its manifest can be read.
        run_id: Of the run it lies in; None: it is not known.

    Raises:
        ForeignCheckpointError: It is of another one.
        CheckpointError: As `read_manifest`.
    """
    own = read_manifest(folder)["run_id"]
    if None not in (own, run_id) and own != run_id:
        raise ForeignCheckpointError(f"{folder}: of another run ({str(own)[:12]}), not of the one it lies in.")


def problems(folder: Path, run_id: str | None = None, share: tuple[int, int] = (0, 1)) -> list[str]:
    """List what is wrong with a checkpoint, file by file; an empty list means it is whole.

    Args:
        folder: The checkpoint.
        run_id: Of the run it lies in, as for `refuse_foreign`.
        share: Read the files of one of several readers alone: its number from 0, and how many there are.
    """
    try:
        refuse_foreign(folder, run_id)
        manifest = read_manifest(folder)
        found = []
        named = parse_step(folder.name)
        if named is not None and named != manifest["step"]:
            found.append(f"{folder}: the folder says step {named}, its manifest step {manifest['step']}.")
        found += _strange_shards(folder, manifest["listed"])
        reader, readers = share
        largest_first = sorted(manifest["listed"], key=lambda name: (-manifest["listed"][name][0], name))
        own = set(largest_first[reader::readers])
        for name, (size, checksum) in manifest["listed"].items():
            problem = file_problem(folder / name, size, checksum) if name in own else None
            if problem is not None:
                found.append(problem)
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:
        return [f"{error.filename or folder}: cannot be read: {error.strerror or error}."]
    return found


def _strange_shards(folder: Path, listed: Mapping[str, Any]) -> list[str]:
    """List links in place of folders, and unnamed shards: other readers take all that lie there."""
    found = []
    for name in SHARD_FOLDERS if any(map(_SHARD.fullmatch, listed)) else ():
        if (folder / name).is_symlink():
            found.append(f"{folder / name}: a link: what lies outside of a checkpoint is not read.")
        elif (folder / name).is_dir():
            strange = [path for path in (folder / name).iterdir() if f"{name}/{path.name}" not in listed]
            found += [
                f"{path}: a shard of another save: the manifest does not name it."
                for path in sorted(strange)
                if path.name.endswith(".safetensors")
            ]
    return found


def file_problem(path: Path, size: int, checksum: Checksum | str) -> str | None:
    """Describe what is wrong with one file; None: nothing.

    Args:
        path: The file.
        size: Bytes.
        checksum: With its algorithm, or a sha256.
    """
    try:
        kind = kind_of(path)
        held = path.lstat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return f"{path}: missing."
    if kind is not None:
        return f"{path}: {kind}."
    if held != size:
        return f"{path}: {held:,} bytes, {size:,} expected."
    checksum = checksum if isinstance(checksum, Checksum) else Checksum("sha256", checksum)
    with open_file(path) as file:
        if digest_of_file(file, checksum.algorithm) != checksum.hexdigest:
            return f"{path}: its bytes changed since it was written (checksum differs)."
    return None


def foreign_files(folder: Path) -> list[Path]:
    """List what lies in a checkpoint and is none of its files: never opened."""
    try:
        own = {*read_manifest(folder)["listed"], names.CHECKPOINT_MANIFEST}
    except (CheckpointError, OSError):
        own = {*CONTENT, names.CHECKPOINT_MANIFEST}
    folders = {name.partition("/")[0] for name in own if "/" in name}
    found = []
    for path in folder.iterdir():
        if path.name in folders and path.is_dir() and not path.is_symlink():
            found += [inner for inner in path.iterdir() if f"{path.name}/{inner.name}" not in own]
        elif path.name not in own:
            found.append(path)
    return sorted(found)


def seal(manifest: Mapping[str, Any]) -> str:
    """Compute the sha256 over what a manifest says, whatever its spaces and line ends; hexadecimal."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def check_format(path: Path, manifest: dict[str, Any], known: int) -> None:
    """Read the format first, since another optrun may list and seal in another way; then take off the seal.

    Args:
        path: The file.
        manifest: What it says; `sha256`, its seal, is taken out.
        known: The format that this version reads.

    Raises:
        OtherFormatError: It is of another format.
        CheckpointError: The seal is not that of the content. With our number it would be: only the number was changed.
    """
    version, sealed = manifest.get("format"), manifest.pop("sha256", None)
    ours = sealed == seal({**manifest, "format": known})
    if not ours:
        refuse_format(path, version, known)
        if version != known:
            raise CheckpointError(f"{path}: format {str(version)[:20]}, this optrun reads format {known}.")
    if not ours or version != known:
        raise CheckpointError(f"{path}: its bytes changed since it was written (checksum differs).")


def make_manifest(
    global_step: int,
    created_at: str,
    files: Mapping[str, tuple[int, Checksum]],
    tensors: Mapping[str, Any],
    digest: str,
    run_id: str | None = None,
    ranks: Mapping[str, Any] | None = None,
) -> bytes:
    """Write the text of a manifest.

    Args:
        global_step: Optimizer steps done.
        created_at: ISO 8601, UTC.
        files: Name to size and checksum.
        tensors: Section, one of `TENSOR_FILES` or of `SHARD_FOLDERS`, to its tensors.
        digest: Of the configuration.
        run_id: Of the run.
        ranks: Of a sharded checkpoint: `world_size` and `mesh`.

    Raises:
        ValueError: It would be larger than what is read again.
    """
    manifest = {
        "format": FORMAT,
        "run_id": run_id,
        "step": global_step,
        "created_at": created_at,
        "config_digest": digest,
        **(ranks or {}),
        "files": [
            {"name": name, "size": size, checksum.algorithm: checksum.hexdigest}
            for name, (size, checksum) in files.items()
        ],
        "tensors": tensors,
    }
    text = json.dumps({**manifest, "sha256": seal(manifest)}, indent=1).encode()
    return refuse_larger(text, names.CHECKPOINT_MANIFEST)


def refuse_larger(text: bytes, name: str) -> bytes:
    """Give back what is to be written, if it is read again.

    Raises:
        ValueError: It is larger than that.
    """
    if len(text) > JSON_BYTES:
        raise ValueError(f"{name} would be {len(text):,} bytes; more than {JSON_BYTES:,} are not read again.")
    return text
