"""What a run directory says is shown as text, and a URL is no path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optrun.report.curves import draw_curves
from tests.faults.runs import Go, Straight

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m"


def hostile(run: Path) -> None:
    """Escapes in names, values and units, wherever a run file has some."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line[f"eval/{ESCAPE}loss"] = float(line["step"])
        line["note"] = ESCAPE
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    values = json.loads((run / "summary.json").read_text())
    values["metrics"]["last"][f"eval/{ESCAPE}"] = 1.0
    values["metrics"]["best"][f"eval/{ESCAPE}"] = {"value": 1.0, "step": 3}
    values["main_metric"] = {"name": f"eval/{ESCAPE}loss", "mode": "min"}
    for key in ("run_name", "message", "status", "command"):
        values[key] = ESCAPE
    (run / "summary.json").write_text(json.dumps(values))
    text = (run / "config.yaml").read_text()
    escaped = json.dumps(ESCAPE)
    (run / "config.yaml").write_text(text.replace("run_name: null", f"run_name: {escaped}"))


def controls(content: bytes) -> list[str]:
    text = content.decode("utf-8", "replace")
    return sorted(
        {
            hex(ord(letter))
            for letter in text
            if (letter < " " and letter not in "\n\t\r") or "\x7f" <= letter <= "\x9f"
        }
    )


def test_escapes_in_run_files_reach_no_reader(straight: Straight, go: Go, tmp_path: Path) -> None:
    run = straight.cut(tmp_path / "run", 3)
    hostile(run.path)
    code, said = go("report", "run")
    assert code == 0
    assert controls(said.encode()) == []
    for name in ("report.html", "report.md", "report.csv"):
        assert controls((run.path / name).read_bytes()) == [], name
    assert "data:image/png;base64," in (run.path / "report.html").read_text()
    draw_curves(run.path)
    assert b"\x1b]0;owned" not in run.curves.read_bytes()


S3 = "s3://bucket/run"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["hydra.run.dir=s3://bucket/run"], "hydra.run.dir"),
        (["-m", "seed=0,1", "hydra.sweep.dir=gs://bucket/run"], "hydra.sweep.dir"),
        (["resume=s3://bucket/run"], "resume"),
        (["resume=latest", "hydra.run.dir=s3://bucket/run"], "hydra.run.dir"),
        (["resume=auto", "hydra.run.dir=s3://bucket/run"], "hydra.run.dir"),
        (["data=files", "data.train=https://user:word@host/a.csv"], "data.train"),
        (["data=files", "data.train=[a.csv,s3://bucket/b.csv]"], "data.train"),
        (["data=files", "data.train=a.csv", "data.eval=file:///a.csv"], "data.eval"),
        (["data=hub", "data.path=hf://datasets/imdb"], "data.path"),
        (["model=pretrained", "model.path=https://huggingface.co/gpt2"], "model.path"),
        (["model.tokenizer=s3://bucket/t"], "model.tokenizer"),
        (["--config-dir", "s3://bucket/conf"], "--config-dir"),
        (["report", S3], "DIR"),
        (["report", ".", "out=s3://bucket/run"], "out"),
        (["verify", S3], "RUN_DIR"),
        (["evaluate", S3], "RUN_DIR"),
        (["export", ".", S3], "DEST"),
        (["certify", "resume", "--out", S3], "--out"),
        (["explain", "model.tokenizer=s3://bucket/t"], "model.tokenizer"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_url_where_a_path_is_meant(words: list[str], key: str, go: Go, tmp_path: Path) -> None:
    code, said = go(*words)
    assert code == 2
    assert key in said
    assert "user:word" not in said
    assert ("a URL" in said) or ("secret" in said)
    assert list(tmp_path.iterdir()) == []
