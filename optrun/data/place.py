"""Where data lie.

A file, a folder, a name, to the keys that read it and the rows to evaluate on beside it.
"""

from __future__ import annotations

import re
from pathlib import Path

from optrun.base.errors import ConfigError
from optrun.config import registry
from optrun.data.content import COMPRESSED, name_inside
from optrun.data.files import resolve
from optrun.data.folders import files_of, is_read, why_not
from optrun.data.formats import by_ending
from optrun.data.hub_access import may_be_name

_HELD = ("dev", "valid", "validation", "val", "test", "eval")


def keys_of_place(name: str) -> dict[str, str]:
    """Find the keys by which data are read.

    Args:
        name: A file, a folder, the name of a data choice, or one of the hub.

    Returns:
        Key to value, such as `{"data": "files", "data.train": "reviews.csv"}`.

    Raises:
        ConfigError: There is no such thing, or a folder of which nobody can say what it is.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.exists() or path.is_symlink() or not may_be_name(name):
        resolve("data.train", str(path))
        kind = "tokens" if path.suffix == ".bin" else "files"
        held = next(
            (other for other in _siblings(path) if other.exists()), None
        ) or _in_other_format(path)
        return {"data": kind, "data.train": str(path)} | ({"data.eval": str(held)} if held else {})
    if name in registry.choices("data"):
        return {"data": name}
    if path.suffix.lower() in by_ending() or "/" not in name:
        resolve("data.train", name)
        return {"data": "files", "data.train": name}  # a glob
    return {"data": "hub", "data.path": name}


def _siblings(path: Path) -> list[Path]:
    """List the names that the rows to evaluate on may have beside those to train on."""
    found = re.search(r"(?i)(?<![a-z])train(?![a-z])", path.name)
    return [
        path.with_name(path.name[: found.start()] + held + path.name[found.end() :])
        for held in _HELD
        if found
    ]


def _in_other_format(path: Path) -> Path | None:
    """Find rows to evaluate on in another format than those to train on.

    A text goes with texts alone.
    """
    known, beside = by_ending(), {other.name for other in path.parent.iterdir()}
    packed = "" if path.suffix.lower() not in COMPRESSED else path.suffix
    ending = Path(path.name.removesuffix(packed)).suffix
    own = known.get(ending.lower())
    if own is None:
        return None
    for held in _siblings(path):
        stem = held.name.removesuffix(packed).removesuffix(ending)
        for other, row in known.items():
            names = [f"{stem}{other}{compressed}" for compressed in ("", *COMPRESSED)]
            found = next((name for name in names if name in beside), None)
            if found and (row.name == "text") == (own.name == "text"):
                return path.with_name(found)
    return None


def _folder(folder: Path) -> dict[str, str]:
    if is_read(folder):
        held = next(
            (other for other in _siblings(folder) if other.is_dir() and is_read(other)), None
        )
        return {"data": "files", "data.train": str(folder)} | (
            {"data.eval": str(held)} if held else {}
        )
    parts = {part.name.lower(): part for part in sorted(folder.iterdir()) if part.name[0] != "."}
    trained = next(
        (
            part
            for name, part in parts.items()
            if part.is_dir() and name == "train" and is_read(part)
        ),
        None,
    )
    trained = trained or next(
        (part for part in parts.values() if part.is_file() and _siblings(part)), None
    )
    if trained is not None:
        return keys_of_place(str(trained))
    files = files_of(folder)
    known = by_ending()
    read = {
        path: known[ending]
        for path in files
        if (ending := Path(name_inside(path)).suffix.lower()) in known
    }
    if len({row.name for row in read.values()}) == 1:
        endings = {path.suffix for path in read}
        deep = any(path.parent != folder for path in read)
        if len(endings) == 1:
            return {
                "data": "files",
                "data.train": f"{folder}/{'**/' if deep else ''}*{endings.pop()}",
            }
    raise ConfigError(f"data.train={folder}: {why_not(folder, known)}")
