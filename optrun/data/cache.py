"""What is costly to make and a pure function of its input, kept between runs under a hash of that input."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_dir() -> Path:
    """`$OPTRUN_CACHE`, else `optrun` in the user's cache folder (`$XDG_CACHE_HOME`, `~/.cache`)."""
    chosen = os.environ.get("OPTRUN_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optrun"


def digest(*pieces: str | bytes) -> str:
    """A hexadecimal sha256 over pieces, their borders included."""
    total = hashlib.sha256()
    for piece in pieces:
        raw = piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece
        total.update(len(raw).to_bytes(8, "big"))
        total.update(raw)
    return total.hexdigest()


def cached(kind: str, key: str, make: Callable[[Path], None]) -> Path:
    """A folder with what `make` writes, made once.

    Args:
        kind: Subfolder of the cache, such as "tokens".
        key: Digest of everything the content depends on.
        make: Fills the folder it is given. It is renamed into place only when `make` returned, so that a killed process
            leaves nothing that a later one would trust; two processes may make the same thing at once.

    Returns:
        The folder. Where the cache cannot be written, a temporary one that lives as long as the process.
    """
    place = cache_dir() / kind / key
    if place.is_dir():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".making-", dir=place.parent))
    except OSError:
        aside = Path(tempfile.mkdtemp(prefix="optrun-"))
        make(aside)
        return aside
    try:
        make(aside)
        try:
            aside.rename(place)
        except OSError:
            if not place.is_dir():  # not because another process was first
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return place
