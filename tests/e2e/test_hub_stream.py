"""`data=hub data.streaming=true` against a stand-in of the hub on this machine."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.hub_stand_in import NAME, DatasetHub, served
from tests.running import TINY_BERT, TINY_GPT, optrun, sentence, summary, tensors

CARD = b"---\nlicense: mit\n---\nrows\n"
COMMON = [
    "data=hub",
    f"data.path={NAME}",
    "data.streaming=true",
    "data.shuffle_window=7",
    "scheduler=constant",
    "training.per_device_train_batch_size=4",
    "training.logging_steps=1",
    "checkpoint.save_steps=2",
]
STREAMS = ("data.streaming", "data.shuffle_window", "checkpoint.save_steps")
KINDS = {"jsonl": [*TINY_BERT, "task=sequence_classification"], "parquet": TINY_GPT}


def files(kind: str, step: int = 1) -> dict[str, bytes]:
    """The rows in their order, or with `step=-1` in the opposite one."""
    found = {"README.md": CARD}
    for name, begin in (("train-00000", 0), ("train-00001", 40), ("validation", 80)):
        rows = [
            {"text": sentence(row), "label": "odd" if row % 2 else "even"}
            for row in range(begin, begin + 40)
        ][::step]
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        if kind == "parquet":
            file = io.BytesIO()
            pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=10)
            content = file.getvalue()
        found[f"data/{name}.{kind}"] = content
    return found


EACH_FORKED = """
import gc, json, os, sys
from optrun.cli import main as cli
import datasets, transformers.models.auto.modeling_auto, optrun.runner.train
gc.freeze()
for line in sys.stdin:
    if os.fork() == 0:
        for number, name in enumerate(("out", "err"), start=1):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        try:
            code = cli.run(json.loads(line))
        except SystemExit as left:  # Hydra's job leaves through it
            code = int(left.code or 0)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


class Place:
    """Runs that ask the stand-in, forked from one process.

    The hub's client reads its address when it is imported.
    """

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self.env = {**env, "HF_HOME": str(folder / "hf"), "OPTRUN_CACHE": str(folder / "cache")}

    def __enter__(self) -> Place:
        self.process = subprocess.Popen(
            [sys.executable, "-c", EACH_FORKED],
            env=self.env,
            cwd=self.folder,
            text=True,
            stdin=PIPE,
            stdout=PIPE,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def run(self, *words: str, code: int = 0) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        ended = self.process.stdout.readline()
        out, err = ((self.folder / name).read_text(encoding="utf-8") for name in ("out", "err"))
        assert ended == f"{code}\n", out + err
        return " ".join((out if code == 0 else err).split())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_at_its_commit_whatever_the_branch_is_at(tmp_path: Path, kind: str) -> None:
    hub = DatasetHub()
    first = hub.commit(files(kind))
    with served(hub) as env, Place(tmp_path, env) as place:
        words = [*COMMON, *KINDS[kind]]
        workers = "training.dataloader_num_workers=2"
        assert f"{NAME} is read at revision {first}" in place.run(
            *words, "training.max_steps=8", "hydra.run.dir=straight"
        )
        place.run(*words, workers, "training.max_steps=4", "hydra.run.dir=cut")
        second = hub.commit(files(kind, -1))
        hub.sent.clear()
        assert first in place.run("resume=cut", "training.max_steps=8")
        assert tensors(tmp_path / "cut", 8) == tensors(tmp_path / "straight", 8)
        assert "data/validation" not in " ".join(hub.sent), "evaluation rows were kept"
        place.run("evaluate", "cut")
        told = place.run("resume=cut", "data.revision=main", "training.max_steps=10")
        assert "data.revision null -> main" in told
        assert "start of a new epoch" in told
        assert second in told
        del hub.commits[first]
        gone = place.run("resume=straight", "training.max_steps=10", code=2)
        assert "the hub does not have this revision" in gone
    assert summary(tmp_path / "cut")["global_step"] == 10


@pytest.mark.slow
def test_what_the_hub_does_not_give_is_one_message(tmp_path: Path) -> None:
    hub = DatasetHub()
    hub.commit({"README.md": CARD, "train.jsonl": files("jsonl")["data/train-00000.jsonl"]})
    with served(hub) as env, Place(tmp_path, env) as place:
        words = [*COMMON, *KINDS["jsonl"], "training.max_steps=2"]
        told = place.run(*words, code=2)
        for fact in (
            "data.streaming=true",
            f"{NAME} has no split to evaluate on (it has train)",
            "data.eval_split",
        ):
            assert fact in told
        assert "does not have this revision" in place.run(*words, "data.revision=other", code=2)
        others = [word.replace(NAME, "someone/other") for word in words]
        assert "nothing of this name" in place.run(*others, code=2)
        hub.lies["train.jsonl"] = hub.commits[hub.main]["train.jsonl"].replace(b"fox", b"dog")
        assert "other bytes than it lists" in place.run(*words, "data.eval_fraction=0", code=1)
        hub.commit({"README.md": CARD, "train.csv": b"text,label\na,b\n" * 9})
        assert "data.streaming=true reads .jsonl" in place.run(
            *words, "data.eval_fraction=0", code=2
        )
    with Place(tmp_path, {**env, "HF_ENDPOINT": "http://127.0.0.1:9"}) as place:
        silent = place.run(*words, code=2)
    assert (
        "data.streaming=true reads from the hub while it trains, and http://127.0.0.1:9 does not"
        " answer" in silent
    )
    assert "Traceback" not in silent


def test_without_the_hub_and_of_a_folder_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    for path, facts in (
        (
            NAME,
            (f"data.path={NAME}: data.streaming=true reads from the hub", "HF_HUB_OFFLINE is set"),
        ),
        ("rows", ("data.path=rows: data.streaming=true reads a dataset of the hub", "data=files")),
    ):
        words = [word for word in COMMON if not word.startswith("data.path=")]
        assert (
            optrun(*words, *KINDS["jsonl"], f"data.path={path}", f"hydra.run.dir={path}-run") == 2
        )
        told = " ".join(capsys.readouterr().err.split())
        for fact in facts:
            assert fact in told


@pytest.mark.slow
def test_texts_of_the_hub_stay_texts_also_without_it(tmp_path: Path) -> None:
    """Labels that look like numbers and dates, fetched whole, then read from the cache alone."""
    rows = [{"text": sentence(row), "label": ("007", "2024-03-01")[row % 2]} for row in range(20)]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    hub = DatasetHub()
    hub.commit({"README.md": CARD, "train.jsonl": content, "validation.jsonl": content})
    words = [*TINY_BERT, "task=sequence_classification", "data=hub", f"data.path={NAME}"]
    steps = ["training.max_steps=1", "checkpoint=none"]
    with served(hub) as env:
        with Place(tmp_path, env) as place:
            assert "007" in place.run(*words, *steps, "hydra.run.dir=first")
        with Place(tmp_path, {**env, "HF_HUB_OFFLINE": "1"}) as place:
            assert "007" in place.run(*words, *steps, "hydra.run.dir=offline")
    for name in ("first", "offline"):
        model = json.loads((tmp_path / name / "model" / "config.json").read_text())
        assert model["id2label"] == {"0": "007", "1": "2024-03-01"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("streaming", [False, True])
def test_columns_of_the_hub_are_read_or_named(tmp_path: Path, kind: str, streaming: bool) -> None:
    """Fetched whole or streamed, a run names those without a use once."""
    hub = DatasetHub()
    hub.commit(files(kind))
    words = [*COMMON, *KINDS[kind]]
    if not streaming:
        words = [word for word in words if word.partition("=")[0] not in STREAMS]
    with served(hub) as env, Place(tmp_path, env) as place:
        told = place.run(*words, "training.max_steps=1")
    if kind == "jsonl":  # its task reads labels
        assert "not read by" not in told
    else:
        assert told.count("not read by task=causal_lm: label") == 1
