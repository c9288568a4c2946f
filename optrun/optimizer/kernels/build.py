"""Compile `step.c` where a C compiler is found.

At `pip install` (hatch_build.py), or by `python -m` of this package.

This file imports nothing of optrun, and nothing beyond the standard library: it runs while optrun
is being installed.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("step.c")
LIBRARY = "step.so"
"""Name of the compiled file; it lies beside its source."""
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",  # the same bits with and without fused multiply-add
    "-fno-math-errno",  # or sqrt would be a call
    "-fno-trapping-math",  # or comparisons would not become vectors
    "-fPIC",
    "-shared",
    "-pthread",
)


def digest() -> str:
    """Return a digest of `step.c` and the compiler's flags; the compiled file holds it."""
    content = SOURCE.read_bytes() + " ".join(FLAGS).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def compiler() -> list[str] | None:
    """Find a C compiler: `$CC`, else cc, gcc or clang; None if there is none."""
    chosen = shlex.split(os.environ.get("CC", ""))
    if chosen:
        if shutil.which(chosen[0]):
            return chosen
        return None
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    return None


def build(folder: Path) -> str | None:
    """Compile the kernel into a folder; replaces the file `LIBRARY` there only if it succeeds.

    Returns:
        None, or why there is no new kernel.
    """
    command = compiler()
    if command is None:
        return "no C compiler was found"
    try:
        # On the same file system, so that one rename puts the library in place.
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            library = Path(temporary) / LIBRARY
            reason = _compile(command, library)
            if reason is None:
                library.replace(folder / LIBRARY)
            return reason
    except OSError as error:
        return f"{folder} cannot be written: {error}"


def _compile(command: list[str], library: Path) -> str | None:
    """Compile `step.c` into the file `library`; return why it failed, or None.

    Args:
        command: The compiler, see `compiler`.
        library: Path of the file to write.
    """
    macro = f'-DDIGEST="{digest()}"'
    arguments = [*command, *FLAGS, macro, str(SOURCE), "-o", str(library), "-lm"]
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} did not run: {error}"
    if done.returncode != 0 or not library.is_file():
        reason = done.stderr.strip() or f"exit code {done.returncode}"
        return f"{command[0]} failed: {reason}"
    return None
