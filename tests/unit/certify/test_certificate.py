"""The file of a certificate."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from optrun.cli.certificate import ProofConsole


def test_two_certificates_of_one_second_are_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda pattern: "transfer-2026-01-02-03-04-05")
    output = ProofConsole("transfer", argparse.Namespace(json=False, out=None))
    written = [output.publish({"number": number}, always=True) for number in range(3)]
    assert [json.loads(path.read_text())["number"] for path in written if path] == [0, 1, 2]
