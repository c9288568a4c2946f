"""The code that CONTRIBUTING.md adds to optrun itself: put into a copy of the package, and run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.docs.commands import ROOT, blocks
from tests.preloaded import optrun_preloaded
from tests.running import TINY_GPT, write_text

PAGE = "CONTRIBUTING.md"
SECTION = "## A verb, a key, a file format"
BEFORE = {
    "optrun/cli/verbs.py": '    "start": (',
    "optrun/config/schema/training.py": "    early_stopping_patience: ",
    "optrun/training/progress.py": '        values["perf/peak_memory_bytes"]',
    "optrun/data/formats.py": '        Format("text",',
}
"""What is inserted goes before this line; imports go before the first one."""


def inserted(text: str, new: list[str], before: str) -> str:
    lines = text.splitlines()
    imports = [line for line in new if line.startswith("from ")]
    at = next(number for number, line in enumerate(lines) if line.startswith(before))
    lines[at:at] = [line for line in new if line not in imports]
    if imports:
        first = next(number for number, line in enumerate(lines) if line.startswith("from optrun"))
        lines[first:first] = imports
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    there = tmp_path_factory.mktemp("copy")
    for name in ("optrun", "conf", "recipes", "docs"):
        shutil.copytree(
            ROOT / name, there / name
        )  # with what is compiled, which goes by the files' dates
    touched = set()
    section = (ROOT / PAGE).read_text().split(SECTION)[1].split("\n## ")[0]
    for block in blocks(ROOT / PAGE):
        if block.body not in section:
            continue
        first, *code = block.body.splitlines()
        name, _, where = first.removeprefix("# ").partition(": ")
        path = there / name
        path.write_text(
            inserted(path.read_text(), code, BEFORE[name]) if where else "\n".join(code) + "\n"
        )
        touched.add(name)
    assert len(touched) == 6
    return there


ROWS = "".join(
    f"[{n}]\ntext = a {('good', 'bad')[n % 2]} film\nlabel = {('pos', 'neg')[n % 2]}\n\n"
    for n in range(20)
)
LINES = {
    "train": (
        "training.weight_norm=true training.max_steps=2 training.logging_steps=1"
        " data.max_eval_examples=8 data=files data.train=corpus.txt hydra.run.dir=run"
        f" {' '.join(TINY_GPT)}"
    ),
    "best": "best run",
    "help": "--help",
    "help of a verb": "best --help",
    "a verb misspelt": "bst",
    "help of a key": "--help training.weight_norm",
    "a wrong value": "training.weight_norm=maybe",
    "a proposal": "start films.ini",
    "a broken file": (
        "data=files task=sequence_classification model=bert_tiny data.train=broken.ini"
    ),
}
"""What is typed, one after another in one process, which has torch but takes optrun from the copy.
"""
ONE_BY_ONE = """
import contextlib, io, json, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "optrun"]:
    del sys.modules[name]
from optrun.cli import main
for name, line in json.loads(sys.argv[1]).items():
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main.run(line.split())
        except SystemExit as stopped:
            code = stopped.code or 0
    print("said" + json.dumps([name, code, said.getvalue()]))
print(main.__file__)
"""


@pytest.fixture(scope="module")
def said(copy: Path) -> dict[str, tuple[int, str]]:
    """Code and output of each line."""
    write_text(copy, 60)
    (copy / "films.ini").write_text(ROWS)
    (copy / "broken.ini").write_text("text = without a section\n")
    (copy / "one_by_one.py").write_text(ONE_BY_ONE)
    done = optrun_preloaded(
        json.dumps(LINES), cwd=copy, env={"PYTHONPATH": str(copy)}, module="one_by_one"
    )
    assert done.returncode == 0, done.stderr
    *lines, ran = done.stdout.splitlines()
    assert ran == str(copy / "optrun" / "cli" / "main.py")
    found = [json.loads(line[4:]) for line in lines if line.startswith("said")]
    return {name: (code, text) for name, code, text in found}


def test_a_verb_and_a_key(copy: Path, said: dict[str, tuple[int, str]]) -> None:
    assert said["train"][0] == 0, said["train"]
    lines = [json.loads(line) for line in (copy / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["train/weight_norm"] > 1 for line in lines if "train/loss" in line)
    best = json.loads((copy / "run" / "summary.json").read_text())["metrics"]["best"]["eval/loss"][
        "value"
    ]
    assert said["best"] == (0, f"run: {best:.4f}\n")
    code, text = said["help"]
    assert (code, "optrun best RUN_DIR [...]" in text) == (0, True)
    code, text = said["help of a verb"]
    assert (code, "usage: optrun best RUN_DIR" in text) == (0, True)
    code, text = said["a verb misspelt"]
    assert (code, "Did you mean the command best?" in text) == (2, True)
    code, text = said["help of a key"]
    assert code == 0
    assert "training.weight_norm=false" in text
    assert "Log train/weight_norm, the norm of all weights together." in " ".join(text.split())
    code, text = said["a wrong value"]
    assert (code, "weight_norm" in text) == (2, True)


def test_a_file_format(said: dict[str, tuple[int, str]]) -> None:
    code, text = said["a proposal"]
    assert code == 0, text
    assert "text (text), label (label)" in text
    code, text = said["a broken file"]
    assert (code, "broken.ini: is no ini file" in text) == (2, True)
