"""What was found out by reading a file to its end, remembered as long as the file is the same one.

A file is the same while its place, device, inode, size and both of its times are: those of the content and of the
change of any of these, which no program can set back. Whoever writes into it in between is noticed; a disk that turns a
bit without a word is not.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optrun.data.cache import cache_dir, digest

YOUNG_SECONDS = 2.0
"""A file that was changed so short a time ago may change again within the tick of its file system's clock."""


def remembered(path: Path, kind: str, read: Callable[[], Any]) -> Any:
    """Give what was found out of a file, reading it only where that is not known.

    Args:
        path: The file.
        kind: What is found out, and how: another word is another memory.
        read: Reads the file; what it returns can be written as JSON.

    Raises:
        OSError: There is no such file; or whatever `read` raises.
    """
    whole = path.resolve()
    memory = cache_dir() / "known" / f"{digest(str(whole), kind)[:32]}.json"
    state = _state(whole)
    try:
        known = json.loads(memory.read_bytes())
        if known["state"] == state:
            return known["found"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    begun = time.time()
    found = read()
    if _state(whole) == state and begun - max(state[-2:]) / 1e9 > YOUNG_SECONDS:
        with contextlib.suppress(OSError):  # a cache that cannot be written costs time, and nothing else
            _write(memory, json.dumps({"file": str(whole), "state": state, "found": found}) + "\n")
    return found


def _state(path: Path) -> list[int]:
    entry = path.stat()
    return [entry.st_dev, entry.st_ino, entry.st_size, entry.st_mtime_ns, entry.st_ctime_ns]


def _write(memory: Path, text: str) -> None:
    """Whole or not at all; what is not whole is no JSON, and read again."""
    memory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=memory.parent, prefix=".making-", delete=False) as aside:
        aside.write(text)
    Path(aside.name).replace(memory)
