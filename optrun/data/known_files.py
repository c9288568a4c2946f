"""What was found out by reading a file to its end, remembered as long as the file is the same one.

A file is the same while its place, device, inode, size and both of its times are: those of the content and of the
change of any of these, which no program can set back. Whoever writes into it in between is noticed; a disk that turns a
bit without a word is not.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optrun.base.reading import read_json
from optrun.data.cache import YOUNG_SECONDS, cache_dir, digest, digest_files, file_state, write_whole


def remembered(path: Path, kind: str, read: Callable[[], Any]) -> Any:
    """Give what was found out of a file, reading it only where that is not known.

    Args:
        path: The file.
        kind: What is found out, and how: another word is another memory.
        read: Reads the file; what it returns can be written as JSON. A refusal is raised, so that nothing is kept: a
            later optrun may read the file.

    Raises:
        OSError: There is no such file; or whatever `read` raises.
    """
    whole = path.resolve()
    memory = cache_dir() / "known" / f"{digest(str(whole), kind)[:32]}.json"
    state = file_state(whole)
    try:
        known = read_json(memory)
        if known["state"] == state:
            return known["found"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    begun = time.time()
    found = read()
    if file_state(whole) == state and begun - max(state[-2:]) / 1e9 > YOUNG_SECONDS:
        with contextlib.suppress(OSError):  # a cache that cannot be written costs time, and nothing else
            write_whole(memory, json.dumps({"file": str(whole), "state": state, "found": found}) + "\n")
    return found


def content_of(path: Path) -> str:
    """Give a hexadecimal digest of a file's bytes; the file is read as long as that is not known."""
    found: str = remembered(path, "sha256-1", lambda: digest_files([path]))
    return found
