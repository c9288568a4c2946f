"""A stored run of the current format resumes to the bits that its own version trained.

`formats.tar.xz` holds, in a folder named by the format's number, a tiny run that an earlier optrun
stopped at step 2, and what that version had after step 4. Once a version is released, a new format
gets a folder beside the older ones.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from optrun.artifacts import manifest, provenance
from optrun.runner import train as experiment
from tests.running import optrun, records

ARCHIVE = Path(__file__).parent / "formats.tar.xz"
FORMATS = ["4"]


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def same_machine(state: dict) -> bool:
    """Bits are promised on the processor and the versions that saved them."""
    saved = state.get("environment", {})
    now = {**provenance.versions(), "processor": provenance.hardware("", 0)["processor"]}
    return bool(saved) and all(now.get(key, value) == value for key, value in saved.items())


@pytest.mark.parametrize("name", FORMATS)
def test_resumes_exactly(
    name: str, formats: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experiment, "draw_curves", lambda path: None)
    monkeypatch.chdir(formats)
    run = formats / name / "run"
    checkpoint = run / "checkpoints" / "step-00000002"
    exact = same_machine(json.loads((checkpoint / "state.json").read_text()))
    assert optrun("verify", str(run)) == 0
    assert optrun("evaluate", str(run)) == 0
    assert optrun(f"resume={run}") == 0
    said = capsys.readouterr().out
    assert "changed since" not in said
    assert "renamed" not in said
    for file in ("model.safetensors", "optimizer.safetensors"):
        found, expected = (
            load_file(path / file)
            for path in (checkpoint.with_name("step-00000004"), run.parent / "expected")
        )
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(
                found[key], value, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-6
            )
    theirs = [
        json.loads(line)
        for line in (run.parent / "expected" / "metrics.jsonl").read_text().splitlines()
    ]
    ours = records(run)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    assert [line["train/loss"] for line in ours] == pytest.approx(
        [line["train/loss"] for line in theirs], rel=0 if exact else 1e-5, abs=0
    )
    saved = json.loads((checkpoint.with_name("step-00000004") / "manifest.json").read_text())
    assert saved["format"] == manifest.FORMAT
    assert optrun("verify", str(run)) == 0


def test_the_newest_format_is_among_them() -> None:
    """Who writes a new one adds it."""
    assert max(map(int, FORMATS)) == manifest.FORMAT
