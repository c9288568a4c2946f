"""A prediction that is killed and continued.

One line for each row, in order, none twice, and the same bytes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pandas
import pytest

from optrun.runner.prediction import partial
from tests.e2e.prediction_runs import read_rows, train, write_rows
from tests.preloaded import program
from tests.running import optrun, sentence

ROWS = 13
WINDOW = 2 * 2
"""Rows that are kept together, with batches of two of which two make a window."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("optrun.runner.train.draw_curves", lambda path: None)
        return train("causal_lm", tmp_path_factory.mktemp("killed") / "causal")


@pytest.fixture
def words(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command, whose texts are drawn by chance: the seed of each batch has to come back too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("optrun.runner.predict.BATCHES_OF_A_WINDOW", 2)
    write_rows(Path("rows.jsonl"), [{"id": n, "text": sentence(n)} for n in range(ROWS)])
    drawn = [
        "generation.do_sample=true",
        "generation.max_new_tokens=3",
        "training.per_device_eval_batch_size=2",
    ]
    return ["predict", str(run), "data.eval=rows.jsonl", *drawn]


_STRAIGHT: list[bytes] = []


def straight(words: list[str]) -> bytes:
    """What a prediction writes that is left alone; made once."""
    if not _STRAIGHT:
        assert optrun(*words, "out=straight.jsonl") == 0
        _STRAIGHT.append(Path("straight.jsonl").read_bytes())
        Path("straight.jsonl").unlink()
    return _STRAIGHT[0]


def die_at(words: list[str], where: Callable[[pytest.MonkeyPatch], None]) -> None:
    """Run in a process that kills itself at a place."""
    child = os.fork()
    if child == 0:
        with pytest.MonkeyPatch.context() as patch:
            where(patch)
            optrun(*words)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_line(patch: pytest.MonkeyPatch) -> None:
    """The third window is written as far as into its second line."""
    whole = partial.Partial.append

    def torn(self: partial.Partial, lines: list[dict[str, str]]) -> None:
        if self.done < 2 * WINDOW:
            whole(self, lines)
            return
        text = (
            json.dumps({"row": self.done + 1, **lines[0]})
            + "\n"
            + json.dumps({"row": self.done + 2, **lines[1]})
        )
        with (self.folder / partial.LINES).open("a") as file:
            file.write(text[:-4])
        kill()

    patch.setattr(partial.Partial, "append", torn)


def before_the_header(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(partial, "replace_text", lambda *_: kill())


def before_it_is_in_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(partial.Partial, "put_in_place", lambda _: kill())


def after_it_is_in_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(partial, "sync_folder", lambda _: kill())


@pytest.mark.parametrize(
    "place", [in_a_line, before_the_header, before_it_is_in_place, after_it_is_in_place]
)
def test_killed_and_continued(
    place: Callable[[pytest.MonkeyPatch], None], words: list[str]
) -> None:
    die_at([*words, "out=out.jsonl"], place)
    assert Path("out.jsonl.partial").is_dir()
    assert Path("out.jsonl").exists() == (place is after_it_is_in_place)
    assert optrun(*words, "out=out.jsonl") == 0
    assert Path("out.jsonl").read_bytes() == straight(words)
    assert [line["row"] for line in read_rows(Path("out.jsonl"))] == list(range(1, ROWS + 1))
    assert [line["id"] for line in read_rows(Path("out.jsonl"))] == list(range(ROWS))
    assert sorted(path.name for path in Path().iterdir()) == ["out.jsonl", "rows.jsonl"]


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_killed_and_continued_in_another_format(name: str, words: list[str]) -> None:
    """Killed twice: inside a line, and when the file is whole and not yet in its place."""
    for place in (in_a_line, before_it_is_in_place):
        die_at([*words, f"out={name}"], place)
        assert not Path(name).exists()
    assert optrun(*words, f"out={name}") == 0
    Path("straight.jsonl").write_bytes(straight(words))
    want = [str(line["generation"]) for line in read_rows(Path("straight.jsonl"))]
    read = pandas.read_csv if name.endswith("csv") else pandas.read_parquet
    found = read(name, **({"keep_default_na": False} if name.endswith("csv") else {}))
    assert found["row"].tolist() == list(range(1, ROWS + 1))
    assert found["id"].tolist() == list(range(ROWS))
    assert found["generation"].tolist() == want
    assert not Path(f"{name}.partial").exists()


def test_what_was_predicted_is_not_predicted_again(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    die_at([*words, "out=out.csv"], in_a_line)
    seen = []
    whole = partial.Partial.append
    monkeypatch.setattr(
        partial.Partial, "append", lambda self, lines: (seen.append(self.done), whole(self, lines))
    )
    capsys.readouterr()
    assert optrun(*words, "out=out.csv", "--json") == 0
    assert json.loads(capsys.readouterr().out)["continued"] == 2 * WINDOW
    assert seen[0] == 2 * WINDOW


def test_of_something_else(words: list[str], run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another option, other rows or another model are no continuation."""
    die_at([*words, "out=out.jsonl"], in_a_line)
    kept = Path("out.jsonl.partial/predictions.jsonl").read_bytes()

    def refused(*facts: str, words: list[str] = words) -> None:
        capsys.readouterr()
        assert optrun(*words, "out=out.jsonl") == 2
        said = capsys.readouterr().err
        assert "out.jsonl.partial are of another" in said
        assert all(fact in said for fact in facts)
        assert Path("out.jsonl.partial/predictions.jsonl").read_bytes() == kept

    refused("another seed: 0 then, 3 now", words=[*words, "seed=3"])
    refused("another generation", words=[*words, "generation.top_k=3"])
    rows = Path("rows.jsonl").read_text()
    write_rows(Path("rows.jsonl"), [{"id": n, "text": sentence(n + 1)} for n in range(ROWS)])
    refused("another file")
    Path("rows.jsonl").write_text(rows)
    earlier = str(next(iter(sorted((run / "checkpoints").glob("step-*")))))
    header = Path("out.jsonl.partial/header.json")
    header.write_text(header.read_text().replace('"model": "', '"model": "0'))
    refused("another model", words=[words[0], earlier, *words[2:]])
    Path("out.jsonl.partial/notes.txt").write_text("mine")
    capsys.readouterr()
    assert optrun(*words, "out=out.jsonl") == 2
    assert "it holds notes.txt" in capsys.readouterr().err


def test_one_process_at_a_time(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from optrun.artifacts.lock import RunLock

    Path("out.jsonl.partial").mkdir()
    with RunLock(Path("out.jsonl.partial") / partial.LOCK):
        assert optrun(*words, "out=out.jsonl") == 5
    assert optrun(*words, "out=out.jsonl") == 0


def test_ctrl_c_keeps_what_is_there(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = partial.Partial.append

    def interrupted(self: partial.Partial, lines: list[dict[str, str]]) -> None:
        if self.done:
            raise KeyboardInterrupt
        whole(self, lines)

    with monkeypatch.context() as patch:
        patch.setattr(partial.Partial, "append", interrupted)
        assert optrun(*words, "out=out.jsonl") == 75
    said = capsys.readouterr().err
    assert f"after {WINDOW} of {ROWS} rows" in said
    assert "run the same again" in said
    assert optrun(*words, "out=out.jsonl") == 0


@pytest.mark.slow
def test_killed_at_random(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The program, forked with its imports done, killed at moments of no choice of ours until it comes through."""
    monkeypatch.setattr(
        "optrun.runner.predict.BATCHES_OF_A_WINDOW", 16
    )  # as in the process of its own
    write_rows(Path("rows.jsonl"), [{"id": n, "text": sentence(n)} for n in range(1500)])
    assert optrun(*words, "out=straight.csv") == 0
    chance, kept = random.Random(0), [0]
    for _ in range(6):
        with program("optrun", [*words, "out=out.csv"], Path.cwd()) as process:
            lines = Path("out.csv.partial/predictions.jsonl")
            patience = time.monotonic() + 120
            while process.poll() is None and time.monotonic() < patience:
                if lines.exists() and lines.read_bytes().count(b"\n") > kept[-1]:
                    time.sleep(chance.random() / 2)
                    break
                time.sleep(0.01)
            process.kill()
        kept.append(lines.read_bytes().count(b"\n") if lines.exists() else kept[-1])
    assert len(set(kept)) > 2
    if not Path("out.csv").exists():
        assert optrun(*words, "out=out.csv") == 0
    assert Path("out.csv").read_bytes() == Path("straight.csv").read_bytes()
