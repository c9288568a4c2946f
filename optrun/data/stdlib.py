"""The source text of the running Python's standard library: real input on every machine, no download."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from optrun.base.errors import ConfigError
from optrun.config.schema.data import StdlibConfig
from optrun.data.randomness import generator
from optrun.data.source import Source, Split
from optrun.data.text_rows import TextRows

PROMPT = "def read_lines(path):\n    "
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "config"}
_TABLES = {"encodings", "pydoc_data"}  # thousands of lines of the same shape: a low loss, and nothing learnt
_LEFT_OUT = _NOT_LIBRARY | _TABLES


def stdlib_files() -> list[Path]:
    """List every `.py` file of the standard library by name, without tests, tables and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - _LEFT_OUT  # not entered: site-packages may hold a hundred times as many files
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise ConfigError(
            f"data=stdlib: no .py files below {root}: this Python came without the source of its library. "
            "Use data=files data.train=PATH."
        )
    return sorted(files)


def load_stdlib(config: StdlibConfig, *, documents: bool) -> Source:  # noqa: ARG001
    """Read training and evaluation files, disjoint, the same ones for every seed, so that seeds can be compared.

    Raises:
        ConfigError: This Python has no source files.
    """
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in stdlib_files()]
    order = generator(0, "split").permutation(len(texts))
    held = max(1, round(config.eval_fraction * len(texts))) if config.eval_fraction else 0
    # Shuffled files: the first blocks of the packed stream are not all from modules that begin with "a".
    eval_texts = [texts[index] for index in order[:held]]
    train_texts = [texts[index] for index in order[held:]]
    return Source(
        train=Split(TextRows(train_texts), "data=stdlib"),
        eval_sets={"": Split(TextRows(eval_texts), "data=stdlib (held back)")},
        columns=None,
        prompt=PROMPT,
        cut_from_train=True,
        notes=[f"{len(train_texts)} files of the standard library to train on, {held} others to evaluate on"],
    )
