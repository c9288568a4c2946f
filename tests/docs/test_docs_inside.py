"""The page about changing optrun itself: its code is added to a copy of the package, and run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import ROOT, blocks

PAGE = "docs/extending_inside.md"
BEFORE = {
    "optrun/cli/verbs.py": '    "start": (',
    "optrun/config/schema/training.py": "    early_stopping_patience: ",
    "optrun/training/progress.py": '        return {**values, "perf/peak_memory_bytes"',
    "optrun/data/formats.py": '        Format("saved",',
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
    for name in ("optrun", "conf", "recipes"):
        shutil.copytree(ROOT / name, there / name, ignore=shutil.ignore_patterns("__pycache__"))
    touched = set()
    for block in blocks(ROOT / PAGE):
        first, *code = block.body.splitlines()
        name, _, where = first.removeprefix("# ").partition(": ")
        path = there / name
        path.write_text(inserted(path.read_text(), code, BEFORE[name]) if where else "\n".join(code) + "\n")
        touched.add(name)
    assert len(touched) == 6
    return there


def run(copy: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "from optrun.__main__ import main; main()", *words],
        cwd=copy, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_a_verb_and_a_key(copy: Path) -> None:
    words = ["training.max_steps=2", "training.logging_steps=1", "data.max_eval_examples=8", "hydra.run.dir=run"]
    run(copy, "training.weight_norm=true", *words)
    lines = [json.loads(line) for line in (copy / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["train/weight_norm"] > 1 for line in lines if "train/loss" in line)
    best = json.loads((copy / "run" / "summary.json").read_text())["metrics"]["best"]["eval/loss"]["value"]
    assert run(copy, "best", "run").strip() == f"run: {best:.4f}"
    assert "optrun best RUN_DIR [RUN_DIR ...]" in run(copy, "--help")
    assert "usage: optrun best RUN_DIR" in run(copy, "best", "--help")
    assert "Did you mean the command best?" in run(copy, "bst", code=2)
    help_text = " ".join(run(copy, "--help", "training.weight_norm").split())
    assert "training.weight_norm=false" in help_text
    assert "Log train/weight_norm, the norm of all weights together." in help_text
    assert "weight_norm" in run(copy, "training.weight_norm=maybe", code=2)


def test_a_file_format(copy: Path) -> None:
    rows = (f"[{n}]\ntext = a {('good', 'bad')[n % 2]} film\nlabel = {('pos', 'neg')[n % 2]}\n" for n in range(20))
    (copy / "films.ini").write_text("\n".join(rows))
    said = run(copy, "start", "films.ini")
    assert "format ini" in said
    assert "text is the text · label is the label" in said
    (copy / "broken.ini").write_text("text = without a section\n")
    words = ["data=files", "task=sequence_classification", "model=bert_tiny"]
    assert "broken.ini: is no ini file" in run(copy, *words, "data.train=broken.ini", code=2)
