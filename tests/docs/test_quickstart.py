"""The quickstart works as it stands: every block, in order, in an empty folder."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.commands import ROOT, SHELLS, Block, blocks, commands_of
from tests.preloaded import optrun_preloaded


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def makes_sense(sweep: Path) -> str:
    """Look at the best runs of the contender that a sweep ranks first.

    They have learnt what decides, not their rows, and are not at the ceiling.

    Returns:
        Its name.
    """
    with (sweep / "report.csv").open() as file:
        rows = list(csv.DictReader(file))
    winner = next(
        row["contender"] for row in rows if row["rank"] == "1"
    )  # the first named of those that share it
    by_lr: dict[str, list[Path]] = {}
    for row in rows:
        if row["contender"] == winner:
            by_lr.setdefault(row["config.lr"], []).append(sweep / row["run"])
    assert next(iter(by_lr)) not in (min(by_lr, key=float), max(by_lr, key=float))
    accuracies = []
    for run in next(iter(by_lr.values())):  # the chosen configuration stands first
        found = re.search(r"\beval +\d+ examples.*", (run / "optrun.log").read_text())
        assert found is not None
        majority = max(float(share) for share in re.findall(r"([\d.]+) %", found[0])) / 100
        assert majority < 0.6, run
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        accuracies.append(last["eval/accuracy"])
        # Measured: at most 0.08. One more wrong label in 32 rows moves a loss by about 0.1.
        assert abs(last["train/loss"] - last["eval/loss"]) < 0.2, run
    assert 0.8 < sum(accuracies) / len(accuracies) < 0.97
    return winner


@pytest.mark.slow
def test_quickstart(tmp_path: Path) -> None:
    page, said = ROOT / "docs" / "quickstart.md", ""
    for block in blocks(page):
        if block.not_run or block.body.startswith("pip install"):
            continue
        if block.language == "yaml":
            (tmp_path / "mine.yaml").write_text(block.body)
            continue
        if block.language == "text":  # what the page says that comes out; `...` differs
            pieces = in_one_line(block.body).split("...")
            pattern = r"[\d.e-]+".join(map(re.escape, pieces))
            assert re.search(pattern, in_one_line(said)), f"{block.page}:{block.line}\n{said}"
            continue
        for done in _run(block, tmp_path):
            assert done.returncode == 0, f"{block.page}:{block.line}\n{done.stdout}{done.stderr}"
            said = done.stdout
        for sweep in re.findall(r"optrun -m .*?hydra.sweep.dir=(\S+)", block.body, re.S):
            winner = makes_sense(tmp_path / sweep)
            assert f"{winner} at lr" in said.partition("Ruled out")[0]
    assert said.strip() == "good"
    for name in (
        "outputs/first/model/README.md",
        "outputs/sweeps/first/report.html",
        "my-model/model.safetensors",
    ):
        assert (tmp_path / name).is_file(), name


def _run(block: Block, folder: Path) -> Iterator[subprocess.CompletedProcess[str]]:
    """Each command of a block.

    Python in a process of its own, optrun in one that finds everything imported.
    """
    if block.language == "python":
        python = [sys.executable, "-c", block.body]
        yield subprocess.run(python, cwd=folder, capture_output=True, text=True, check=False)
    for command in commands_of(block) if block.language in SHELLS else ():
        assert command.arguments[0] == "optrun", command
        yield optrun_preloaded(*command.arguments[1:], cwd=folder, timeout=900)
