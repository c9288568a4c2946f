"""Quoted commands are what a shell reads back."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import optrun
from optrun.base import shell

WORDS = [
    "lr=1e-3",
    "data.label_column=Class Index",
    "data.text_column='Sum (%)'",
    "data.train='it\\'s here.csv'",
    "resume=/tmp/it's $HOME",
    'data.delimiter=";"',
    """data.text_column='say "yes"'""",
    "model.config={d_model:128,heads:[1,2]}",
    "out=*.csv",
    "run_name='100 % `done`!'",
    "a\nb",
    "",
]


def test_a_shell_gives_the_words_back() -> None:
    command = shell.join(["printf", r"%s\0", *WORDS])
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == WORDS


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("lr=1e-3", "lr=1e-3"),
        ("data.label_column=Class Index", "'data.label_column=Class Index'"),
        ("data.text_column='Sum (%)'", "\"data.text_column='Sum (%)'\""),
    ],
)
def test_a_person_reads_them(word: str, quoted: str) -> None:
    assert shell.quote(word) == quoted


def test_nothing_else_quotes() -> None:
    files = Path(optrun.__file__).parent.rglob("*.py")
    quoting = [path.name for path in files if re.search(r"shlex\.(quote|join)\(", path.read_text())]
    assert quoting == ["shell.py"]
