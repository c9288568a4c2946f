"""The page that follows a sweep.

Made anew as runs write, served on this machine alone, ended with the last job.
"""

from __future__ import annotations

import io
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from optrun.base.errors import ConfigError
from optrun.cli.dispatch import dispatch
from optrun.report import build
from optrun.report.watch import served, watch

MakeRun = Callable[..., Path]


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "all_pictures", lambda comparison: [])


def fetch(address: str, **headers: str) -> str:
    with urllib.request.urlopen(
        urllib.request.Request(address, headers=headers), timeout=30
    ) as answer:
        return str(answer.read().decode())


def test_it_serves_the_page_as_it_stands_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("<p>first")
    (tmp_path / "secret").write_text("s")
    with served(lambda: page) as address:
        assert address.startswith("http://127.0.0.1:")
        assert fetch(address) == "<p>first"
        page.write_text("<p>second")
        assert fetch(address) == "<p>second"
        for wrong, headers in (
            (f"{address}secret", {}),
            (f"{address}../secret", {}),
            (address, {"Host": "evil.example"}),
        ):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                fetch(wrong, **headers)
    with served(lambda: None) as address:
        assert "No run has begun yet" in fetch(address)


def test_it_follows_until_the_last_job_has_ended(tmp_path: Path, make_run: MakeRun) -> None:
    for name in ("adamw", "lamb"):
        for seed in range(3):
            late = (name, seed) == ("lamb", 2)
            status = {"status": "running", "global_step": 20} if late else {}
            make_run(tmp_path / f"{name}{seed}", optimizer=name, seed=seed, max_steps=40, **status)
    stream, pages = io.StringIO(), []

    def pause(_: float) -> None:
        pages.append((tmp_path / "report.html").read_text())
        assert len(pages) < 4, "it should have ended"
        make_run(tmp_path / "lamb2", optimizer="lamb", seed=2, max_steps=40)

    made = watch([tmp_path], Console(file=stream, width=200), pause=pause)
    assert "5 of 6 runs have ended; no verdict before the last. So far: " in pages[0]
    assert 'http-equiv="refresh"' in pages[0]
    assert made is not None
    assert "have ended" not in made.verdict.text
    last = (tmp_path / "report.html").read_text()
    assert 'http-equiv="refresh"' not in last
    assert "could be the best" in stream.getvalue() or "is the best of" in stream.getvalue()
    assert json.loads((tmp_path / "report-looks.json").read_text()) == {"eval/loss": [3]}, (
        "one look, at the end"
    )


def test_ctrl_c_ends_the_page_and_not_the_sweep(tmp_path: Path, make_run: MakeRun) -> None:
    make_run(tmp_path / "a", status="running", global_step=20, max_steps=40)

    def pause(_: float) -> None:
        raise KeyboardInterrupt

    stream = io.StringIO()
    watch([tmp_path], Console(file=stream, width=200), pause=pause)
    assert "the jobs go on" in stream.getvalue()
    assert not (tmp_path / "report-looks.json").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["watch=maybe"], r"watch=maybe: expected true or false"),
        (["port=99999", "--watch"], r"port=99999: expected a port"),
        (["port=80"], r"port=80: has no effect without --watch"),
        (["matters=0"], r"matters=0: expected a number above 0"),
        (["matters=much"], r"matters=much: expected a number.*matters=0\.01"),
    ],
)
def test_wrong_words(tmp_path: Path, given: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        dispatch(["report", str(tmp_path), *given])
