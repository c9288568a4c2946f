"""The wheel, installed elsewhere, does the same from an empty directory.

Configuration, recipes and pages are in it.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from optrun.config import store
from optrun.optimizer.kernels.build import compiler
from optrun.optimizer.kernels.library import load
from tests.running import TINY_GPT, summary

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content in a folder of its own.

    What it depends on comes from this environment.
    """
    folder = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(ROOT),
    ]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    site = folder / "site"
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    return site


def run(site: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    program = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import optrun; from optrun.cli.main import"
        " run; "
    )
    program += f"assert optrun.__file__.startswith({str(site)!r}); sys.exit(run({list(words)!r}))"
    return subprocess.run(
        [sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_from_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    shipped = {
        path.relative_to(installed / "optrun").as_posix() for path in installed.rglob("*.yaml")
    }
    here = {
        f"conf/{path.relative_to(store.config_dir()).as_posix()}"
        for path in store.config_dir().rglob("*.yaml")
    }
    here |= {f"recipes/{path.name}" for path in store.recipes_dir().glob("*.yaml")}
    here.add("config/foreign_names.yaml")  # a table of the package, no choice
    assert shipped == here
    if compiler() is not None:
        kernels = installed / "optrun" / "optimizer" / "kernels"
        assert load(kernels).loaded is not None
        assert "-none-any" not in next(installed.parent.glob("*.whl")).name
    done = run(installed, tmp_path, "--help")
    assert f"Pages: {installed}/optrun/docs/index.md" in done.stdout.splitlines()
    pages = {path.relative_to(installed / "optrun").as_posix() for path in installed.rglob("*.md")}
    assert pages >= {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")}
    done = run(installed, tmp_path, *TINY_GPT, "training.max_steps=2", "data.max_eval_examples=8")
    assert done.returncode == 0, done.stderr
    assert summary(next(tmp_path.glob("outputs/*/*")))["status"] == "finished"
    done = run(installed, tmp_path, "report", "outputs")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "outputs" / "report.html").is_file()
    for name in sorted(path.stem for path in store.recipes_dir().glob("*.yaml")):
        done = run(installed, tmp_path, "-cn", name, "--cfg", "job")
        assert done.returncode == 0, done.stderr
    done = run(
        installed,
        tmp_path,
        "-cn",
        "stdlib_gpt",
        "training.max_steps=1",
        *TINY_GPT,
        "data.max_eval_examples=8",
    )
    assert done.returncode == 0, done.stderr
