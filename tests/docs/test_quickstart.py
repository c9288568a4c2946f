"""The quickstart works as it stands: every block, in order, in an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import ROOT, blocks


@pytest.mark.slow
def test_quickstart(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "optrun"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m optrun "$@"\n')
    program.chmod(0o755)
    folder = tmp_path / "work"
    folder.mkdir()
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    said = ""
    for block in blocks(ROOT / "docs" / "quickstart.md"):
        if block.not_run or block.body.startswith("pip install"):
            continue
        start = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}[block.language]
        done = subprocess.run(
            [*start, block.body], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{block.page}:{block.line}\n{done.stdout}{done.stderr}"
        said = done.stdout
    assert said.strip() in ("good", "bad")
    for name in ("outputs/first/model/README.md", "outputs/sweeps/first/report.html", "my-model/model.safetensors"):
        assert (folder / name).is_file(), name
