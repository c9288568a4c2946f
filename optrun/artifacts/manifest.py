"""Manifests: the list of a folder's files with their checksums, and the check of a checkpoint.

A manifest is JSON: its `format`, facts of its kind, `files` with size and checksum of each, and
`sha256`, a checksum of all of that. `saved_folder` writes the same format for `model/`.

A folder is a checkpoint when its manifest is there and every file agrees with it. That one
predicate, `problems`, answers for loading, for retention and for `optrun verify`. Only files that
the manifest names are ever opened, and the manifest may name three, all safetensors or JSON; of a
sharded checkpoint, in place of the two safetensors files, those in two folders with a shard of each
rank.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from optrun.artifacts import run_dir as names
from optrun.artifacts.checksum import Entry, TensorEntry, file_problem
from optrun.artifacts.run_dir import parse_step
from optrun.base.errors import (
    CheckpointError,
    ForeignCheckpointError,
    OtherFormatError,
    refuse_format,
)
from optrun.base.plain import PlainDict
from optrun.base.reading import JSON_BYTES, read_json

FORMAT = 4
"""Of checkpoints, the only one that is read.

Another one stands in the same place, so that a refusal names it.
"""
CONTENT = (names.CHECKPOINT_MODEL, names.CHECKPOINT_OPTIMIZER, names.CHECKPOINT_STATE)
TENSOR_FILES = (names.CHECKPOINT_MODEL, names.CHECKPOINT_OPTIMIZER)
SHARD_FOLDERS = (names.CHECKPOINT_MODEL_SHARDS, names.CHECKPOINT_OPTIMIZER_SHARDS)
_SHARD = re.compile(
    rf"({'|'.join(SHARD_FOLDERS)})/shard-(?P<number>\d{{5}})-model-00001-of-00001\.safetensors"
)
"""As `torch.distributed.checkpoint` names them; the number is that of the rank, from 1."""


# The format
# --------------------------------------------------------------------------------------------------


def checksum_of(manifest: Mapping[str, object]) -> str:
    """Compute the sha256 of a manifest's content, independent of its whitespace.

    The digest is hexadecimal.
    """
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def checksummed_text(
    version: int, facts: Mapping[str, object], files: Mapping[str, Entry]
) -> bytes:
    """Build the text of a manifest, with a checksum of itself.

    Args:
        version: Version of the format.
        facts: The other keys of the manifest.
        files: Path inside the folder -> entry.
    """
    manifest = {
        "format": version,
        **facts,
        "files": [entry.to_dict(name) for name, entry in files.items()],
    }
    return json.dumps({**manifest, "sha256": checksum_of(manifest)}, indent=1).encode()


def read_checksummed(path: Path, supported_format: int) -> tuple[PlainDict, dict[str, Entry]]:
    """Read a manifest and verify its own checksum; call it inside `manifest_errors`.

    Args:
        path: The file.
        supported_format: The format that this version reads.

    Returns:
        The values other than the checksum, and path inside the folder -> entry for each file.

    Raises:
        OtherFormatError: An optrun with an earlier or later format wrote the manifest.
        CheckpointError: The format is no number, or the content changed since it was written.
    """
    values = dict(read_json(path))
    version = values.get("format")
    recorded_checksum = values.pop("sha256", None)
    # The checksum of another format may be computed in another way, so it proves nothing. If it
    # fits with the number of this format, only that number was edited.
    fits_this_format = recorded_checksum == checksum_of({**values, "format": supported_format})
    if version == supported_format and fits_this_format:
        return values, {str(entry["name"]): Entry.read(entry) for entry in values["files"]}
    if version == supported_format or fits_this_format:
        raise CheckpointError(f"{path}: its bytes changed since it was written (checksum differs).")
    refuse_format(path, version, supported_format)  # OtherFormatError if it is an integer
    raise CheckpointError(
        f"{path}: format {str(version)[:20]}, this optrun reads format {supported_format}."
    )


@contextmanager
def manifest_errors(path: Path) -> Iterator[None]:
    """Turn errors of reading a manifest into a CheckpointError.

    Raises:
        CheckpointError: Replaces any error of reading or interpreting the manifest.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path}: missing: this folder is no complete checkpoint.") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: damaged: {type(error).__name__} while reading it."
        ) from error


def refuse_larger(text: bytes, name: str) -> None:
    """Refuse a text to write that is too large to be read back.

    Raises:
        ValueError: The text is too large.
    """
    if len(text) > JSON_BYTES:
        raise ValueError(
            f"{name} would be {len(text):,} bytes; more than {JSON_BYTES:,} are not read again."
        )


# A checkpoint
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointManifest:
    """The manifest of a checkpoint: its files, tensors and origin."""

    step: int
    """Optimizer steps done."""
    run_id: str | None
    """Of the run; None: of none."""
    files: dict[str, Entry]
    """By path inside of the checkpoint."""
    tensors: dict[str, dict[str, TensorEntry]]
    """Of each of `TENSOR_FILES`, or of a sharded one of `SHARD_FOLDERS`."""
    ranks: int | None
    """How many wrote it together; None: one process alone."""

    @property
    def sections(self) -> dict[str, list[str]]:
        """Map each section to its tensor files, in the order of ranks.

        The sections are the model and the optimizer. A section is called by its file,
        `model.safetensors`, or by its folder of shards, `model`.
        """
        if self.ranks is None:
            return {name: [name] for name in TENSOR_FILES}
        shards = sorted(filter(_SHARD.fullmatch, self.files))  # by folder, then by rank
        return {
            folder: [name for name in shards if name.startswith(f"{folder}/")]
            for folder in SHARD_FOLDERS
        }


def _read_tensor_entries(section: PlainDict) -> dict[str, TensorEntry]:
    """Read the dtype and shape of each tensor of a section, the model's or the optimizer's."""
    entries: dict[str, TensorEntry] = {}
    for name, entry in section.items():
        shape = [int(size) for size in entry["shape"]]
        entries[name] = {"dtype": str(entry["dtype"]), "shape": shape}
    return entries


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint.

    Raises:
        OtherFormatError: A version with another format wrote it.
        CheckpointError: The manifest is missing, unreadable or torn, or names foreign files.
    """
    path = folder / names.CHECKPOINT_MANIFEST
    if folder.is_symlink():
        raise CheckpointError(
            f"{folder}: a link: what lies outside of a run directory is not read."
        )
    with manifest_errors(path):
        values, files = read_checksummed(path, FORMAT)
        # The number of ranks is recorded only if there were several writers.
        ranks = int(values["world_size"]) if "world_size" in values else None
        sections = TENSOR_FILES if ranks is None else SHARD_FOLDERS
        tensors = {name: _read_tensor_entries(values["tensors"][name]) for name in sections}
        _refuse_strange_files(path, files, ranks)
        return CheckpointManifest(int(values["step"]), values["run_id"], files, tensors, ranks)


def _refuse_strange_files(path: Path, files: Mapping[str, Entry], ranks: int | None) -> None:
    """Refuse a manifest with other file names than a checkpoint's, or with too large a state file.

    A checkpoint of one process has the files in `CONTENT`. One of several ranks has the state file,
    and shards of these ranks in `SHARD_FOLDERS`; whether every rank has a shard is not checked
    here.

    Args:
        path: The manifest, for messages.
        files: Its files.
        ranks: How many ranks wrote the checkpoint; None: one process alone.

    Raises:
        CheckpointError: The message names the files, the shard or the size limit.
    """
    file_names = ", ".join(sorted(files))[:200]
    # 1. The names: of one process, or of several ranks.
    if ranks is None:
        if set(files) != set(CONTENT):
            raise CheckpointError(f"{path}: names {file_names}; expected {', '.join(CONTENT)}.")
    else:
        shards = [_SHARD.fullmatch(name) for name in set(files) - {names.CHECKPOINT_STATE}]
        if names.CHECKPOINT_STATE not in files or not all(shards):
            expected = f"{names.CHECKPOINT_STATE} and shards in {' and '.join(SHARD_FOLDERS)}"
            raise CheckpointError(f"{path}: names {file_names}; expected {expected}.")
        # Numbers of shards that no rank has.
        strange = {int(shard["number"]) for shard in shards if shard} - set(range(1, ranks + 1))
        if strange:
            raise CheckpointError(
                f"{path}: names shard {min(strange):05d}; {ranks} ranks write 00001 to {ranks:05d}."
            )
    # 2. The size of the state file.
    if files[names.CHECKPOINT_STATE].size > JSON_BYTES:
        raise CheckpointError(
            f"{path}: names a {names.CHECKPOINT_STATE} larger than {JSON_BYTES:,} bytes."
        )


def refuse_other_format(folder: Path) -> None:
    """Refuse a checkpoint of another format: another version of optrun can still use it.

    Call it before a checkpoint is renamed as damaged. Any other fault of the manifest is ignored.

    Raises:
        OtherFormatError: Another format than this version reads.
    """
    try:
        read_manifest(folder)
    except OtherFormatError:
        raise
    except (CheckpointError, OSError):
        return


def refuse_foreign(folder: Path, run_id: str | None) -> None:
    """Refuse a checkpoint of another run in this run's directory; unknown ids pass.

    Args:
        folder: A checkpoint with a readable manifest.
        run_id: Id of the run whose directory holds the checkpoint; None: unknown.

    Raises:
        ForeignCheckpointError: The checkpoint belongs to another run.
        CheckpointError: As `read_manifest`.
    """
    checkpoint_run_id = read_manifest(folder).run_id
    if run_id is None or checkpoint_run_id in (None, run_id):
        return
    raise ForeignCheckpointError(
        f"{folder}: of another run ({str(checkpoint_run_id)[:12]}), not of the one it lies in."
    )


def problems(folder: Path, run_id: str | None = None) -> list[str]:
    """List the damage of a checkpoint, one message a file; empty if it is intact.

    Every byte is read. Nothing is raised: a manifest or a folder that cannot be read is the only
    message.

    Args:
        folder: The checkpoint.
        run_id: Id of the run whose directory holds the checkpoint; None: unknown.
    """
    try:
        refuse_foreign(folder, run_id)
        manifest = read_manifest(folder)
        messages = []
        named_step = parse_step(folder.name)
        if named_step is not None and named_step != manifest.step:
            messages.append(
                f"{folder}: the folder says step {named_step}, its manifest step {manifest.step}."
            )
        messages += _strange_shards(folder, manifest.files)
        for name, entry in sorted(manifest.files.items()):
            problem = file_problem(folder / name, entry)
            if problem is not None:
                messages.append(problem)
    except CheckpointError as error:
        return [str(error)]
    except OSError as error:
        return [f"{error.filename or folder}: cannot be read: {error.strerror or error}."]
    return messages


def _strange_shards(folder: Path, files: Iterable[str]) -> list[str]:
    """Describe shards that the manifest does not name, and shard folders that are links.

    optrun would not read such a shard, but other programs read every shard in the folder.

    Args:
        folder: The checkpoint.
        files: Paths in the manifest; without a shard among them the result is empty.
    """
    messages: list[str] = []
    if not any(map(_SHARD.fullmatch, files)):
        return messages
    for name in SHARD_FOLDERS:
        shards = folder / name
        if shards.is_symlink():
            messages.append(f"{shards}: a link: what lies outside of a checkpoint is not read.")
        elif shards.is_dir():
            messages += [
                f"{path}: a shard of another save: the manifest does not name it."
                for path in sorted(shards.glob("*.safetensors"))
                if f"{name}/{path.name}" not in files
            ]
    return messages


def foreign_files(folder: Path) -> list[Path]:
    """List the files and folders that do not belong into a checkpoint.

    optrun never opens them. What belongs is what the manifest names, and the manifest. If it cannot
    be read, the files of a checkpoint written by one process belong. Folders of shards are looked
    into, other folders are foreign as a whole.
    """
    try:
        content = {*read_manifest(folder).files, names.CHECKPOINT_MANIFEST}
    except (CheckpointError, OSError):
        content = {*CONTENT, names.CHECKPOINT_MANIFEST}
    # Folders of shards: "model" of "model/shard-...".
    folders = {name.partition("/")[0] for name in content if "/" in name}
    foreign = []
    for path in folder.iterdir():
        if path.name in folders and path.is_dir() and not path.is_symlink():
            for shard in path.iterdir():
                if f"{path.name}/{shard.name}" not in content:
                    foreign.append(shard)
        elif path.name not in content:
            foreign.append(path)
    return sorted(foreign)
