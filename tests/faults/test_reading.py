"""Files of others.

Links, FIFOs, devices, depth, size and bombs end in one sentence, in bounded time and memory.
"""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import optrun as package
from optrun.artifacts.metrics import read_summary
from optrun.base import reading
from optrun.base.errors import OptrunError, UnreadableFileError
from optrun.data import content
from optrun.report.confirmation_plan import read_plan
from optrun.report.runs import load_runs
from optrun.report.sweep_folder import find_unended_jobs, in_sweep, tuned_keys
from optrun.runner import train as experiment
from tests.faults.runs import Straight
from tests.running import optrun, sentence

GIB = 2**30
PATIENCE = 120
"""Seconds until a child is taken for one that hangs; it needs one or two."""

# What is put in place of a file
# ---------------------------------------------------------------------------------------


def link(path: Path) -> None:
    outside = path.with_name(f"{path.name}.outside")
    outside.write_bytes(path.read_bytes() if path.is_file() else b"{}")
    path.unlink(missing_ok=True)
    moved = path.parents[len(path.parents) - 4] / outside.name
    shutil.move(outside, moved)
    path.symlink_to(moved)


def zero(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    path.unlink(missing_ok=True)
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket may not be long
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def deep(path: Path) -> None:
    path.write_bytes(b'{"a":' * 200_000 + b"1" + b"}" * 200_000)


def huge(path: Path) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(10 * GIB)


def deep_line(path: Path) -> None:
    path.write_bytes(
        path.read_bytes() + b'{"step": 9, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    )


def long_line(path: Path) -> None:
    path.write_bytes(b" " * (reading.LINE_BYTES + 1))


def aliases(path: Path) -> None:
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60))]
    path.write_text("\n".join(lines))


def deep_yaml(path: Path) -> None:
    path.write_text("a: " + "[" * 5000 + "]" * 5000)


KINDS = {
    "link": "a link",
    "zero": "a link",
    "fifo": "a FIFO",
    "unix_socket": "a socket",
    "folder": "a folder",
    "deep": "nested too deeply",
    "huge": "larger than",
    "deep_line": "line 8 is no metrics record",
    "long_line": "more than 16,777,216 bytes",
    "aliases": "its aliases make more than",
    "deep_yaml": "nested more than 64 deep",
}
"""Attack to what is said of it."""

STEP = "checkpoints/step-00000004"
RUN_ATTACKS: list[tuple[str, Callable[[Path], None], str, int, str | None]] = [
    *[
        ("summary.json", how, "runs", 0, None)
        for how in (link, zero, fifo, unix_socket, folder, deep, huge)
    ],
    *[("metrics.jsonl", how, "runs", 0, None) for how in (zero, fifo, huge, deep_line, long_line)],
    ("summary.json", deep, "report", 0, None),
    *[("metrics.jsonl", how, "resume", 74, None) for how in (zero, fifo)],
    ("metrics.jsonl", folder, "resume", 4, None),
    ("metrics.jsonl", fifo, "load_run", 4, None),
    *[("config.yaml", how, "runs", 0, None) for how in (fifo, zero, aliases, deep_yaml, huge)],
    *[
        ("tokenizer/checksums.json", how, "verify", 4, None)
        for how in (link, zero, fifo, folder, deep, huge)
    ],
    ("tokenizer/checksums.json", deep, "export", 4, None),
    *[(f"{STEP}/manifest.json", how, "verify", 4, None) for how in (link, fifo, deep, huge)],
    (f"{STEP}/manifest.json", fifo, "evaluate-checkpoint", 4, None),
    (f"{STEP}/manifest.json", fifo, "branch", 4, None),
    *[(f"{STEP}/state.json", how, "evaluate-checkpoint", 4, None) for how in (link, zero, fifo)],
    (f"{STEP}/state.json", huge, "evaluate-checkpoint", 4, "10,737,418,240 bytes"),
    *[(f"{STEP}/model.safetensors", how, "verify", 4, None) for how in (link, fifo, folder)],
    (f"{STEP}/optimizer.safetensors", zero, "verify", 4, None),
    ("tokenizer/tokenizer.json", fifo, "export", 4, None),
    ("tokenizer/tokenizer.json", zero, "evaluate", 4, None),
    ("tokenizer/tokenizer.json", fifo, "predict", 4, None),
    ("optrun.log", fifo, "resume", 74, None),
    ("nonfinite", fifo, "resume", 74, None),
    (".lock", fifo, "runs", 0, ""),
    (".hydra/overrides.yaml", fifo, "runs", 0, ""),
    ("../sweep.json", fifo, "runs", 0, ""),
    ("../sweep.json", deep, "runs", 0, ""),
    ("checkpoints/best", fifo, "verify-best", 2, ""),
]


def in_bounds(work: Callable[[], int], said: Path) -> int:
    """Do something in a forked process with 1 GiB more memory.

    Its exit code, which a signal makes negative.
    """
    child = os.fork()
    if child == 0:
        code = 99
        try:
            with said.open("w") as file:
                sys.stdout = sys.stderr = file
                held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (held + GIB, held + GIB))
                code = work()
        finally:
            os._exit(code)
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail(f"it hangs: {said.read_text()}")


def each_in_bounds(works: dict[str, Callable[[], int]], said: Path) -> dict[str, tuple[int, str]]:
    """Do one thing after the other in such a process.

    By name the exit code, and what was said in one line.
    """

    def work() -> int:
        for name, each in works.items():
            print(f"\0{name}\0", end="", flush=True)
            code = each()
            print(f"\0{code}\0", end="", flush=True)
        return 0

    assert in_bounds(work, said) == 0, said.read_text()
    parts = said.read_text().split("\0")
    return {
        name: (int(code), " ".join(text.split()))
        for name, text, code in zip(parts[1::4], parts[2::4], parts[3::4], strict=True)
    }


@pytest.fixture(scope="module")
def whole(straight: Straight, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint and another one beside it, stopped at step 4."""
    place = tmp_path_factory.mktemp("whole")
    run = straight.cut(place / "sweep" / "run", 4)
    for step in (1, 2, 3):
        shutil.rmtree(run.checkpoint(step))
    shutil.copytree(run.path, place / "sweep" / "other")
    return place


def load(run: Path) -> int:
    """From Python."""
    try:
        print(package.load_run(run).metrics)
    except OptrunError as error:
        print(error)
        return error.exit_code
    return 0


def runs(run: Path) -> int:
    """What a report reads, without its pages."""
    found = load_runs([run.parent])
    (
        tuned_keys([run.parent]),
        find_unended_jobs(run.parent),
        in_sweep(run),
        read_plan(run.parent),
    )
    for each in found:
        print(each.path.name, each.problems)
    return 0


def does(verb: str, run: Path) -> int:
    """Read a run that was attacked."""
    os.chdir(run.parents[1])
    step = f"{run}/{STEP}"
    words = {
        "report": ["report", str(run.parent)],
        "verify": ["verify", str(run)],
        "verify-best": ["verify", f"{run}/checkpoints/best"],
        "resume": [f"resume={run}"],
        "evaluate": ["evaluate", str(run)],
        "evaluate-checkpoint": ["evaluate", step],
        "export": ["export", str(run), "to"],
        "predict": ["predict", str(run), "data.eval=rows.txt", "out=predicted.jsonl"],
        "branch": ["explain", f"branch_from={step}"],
    }
    calls = {"load_run": load, "runs": runs}
    return calls[verb](run) if verb in calls else optrun(*words[verb])


@pytest.mark.parametrize("verb", dict.fromkeys(verb for _, _, verb, _, _ in RUN_ATTACKS))
def test_attacks_on_run_files(
    verb: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence that names the file; of a sweep the other run is reported all the same."""
    monkeypatch.setattr(experiment, "draw_curves", lambda path: None)
    attacks = {f"{a[0].replace('/', '-')}-{a[1].__name__}": a for a in RUN_ATTACKS if a[2] == verb}
    for each, (name, attack, *_) in attacks.items():
        shutil.copytree(whole, tmp_path / each)
        (tmp_path / each / "rows.txt").write_text("a\n")
        attack(tmp_path / each / "sweep" / "run" / name)
    works = {each: partial(does, verb, tmp_path / each / "sweep" / "run") for each in attacks}
    found = each_in_bounds(works, tmp_path / "said")
    for each, (name, attack, _, code, fact) in attacks.items():
        said = found[each][1]
        assert (each, found[each][0]) == (each, code), said
        assert "Traceback" not in said, each
        if fact != "":
            page = (
                (tmp_path / each / "sweep" / "report.md").read_text() if verb == "report" else said
            )
            assert Path(name).name in page, each
            assert (fact or KINDS[attack.__name__]) in page.replace("\\", ""), (each, page)
        if verb in ("report", "runs"):
            assert "other" in said, each


# The door itself
# --------------------------------------------------------------------------------------------------


def test_the_door(tmp_path: Path) -> None:
    def knock(attack: Callable[[Path], None], path: Path) -> int:
        with pytest.raises(UnreadableFileError) as refused:
            reading.read_json(path)
        for fact in (str(path), KINDS[attack.__name__], "expected"):
            assert fact in str(refused.value)
        return 0

    works = {}
    for attack in (link, zero, fifo, unix_socket, folder, deep, huge):
        path = tmp_path / attack.__name__ / "b" / "c" / "file.json"
        path.parent.mkdir(parents=True)
        attack(path)
        works[attack.__name__] = partial(knock, attack, path)
    assert len(each_in_bounds(works, tmp_path / "said")) == len(works)


def test_links_of_a_users_own_are_followed(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text('{"a": 1}')
    (tmp_path / "link.json").symlink_to("file.json")
    assert reading.read_json(tmp_path / "link.json", follow=True) == {"a": 1}
    fifo(tmp_path / "pipe")
    (tmp_path / "link.json").unlink()
    (tmp_path / "link.json").symlink_to("pipe")
    with pytest.raises(UnreadableFileError, match="a FIFO"):
        reading.read_json(tmp_path / "link.json", follow=True)


def test_a_run_behind_a_link_is_a_run(straight: Straight, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(straight.path)
    assert optrun("verify", str(tmp_path / "linked")) == 0


@pytest.mark.parametrize(
    "nested", [b'{"a": "[[[[["}', b"[" * 64 + b"]" * 64, b'{"a":' * 63 + b"[1]" + b"}" * 63]
)
def test_what_is_no_attack_is_read(nested: bytes) -> None:
    assert reading.parse_json(nested, "x") == json.loads(nested)


@pytest.mark.parametrize("text", [b"", b"\xff\xfe[\x00]\x00", b"[1", b"nonsense", b"9" * 10_000])
def test_what_is_no_json(text: bytes) -> None:
    with pytest.raises(UnreadableFileError, match=r"file\.json: no valid JSON"):
        reading.parse_json(text, "file.json")


def test_a_summary_of_another_kind(tmp_path: Path) -> None:
    deep(tmp_path / "summary.json")
    with pytest.raises(ValueError, match="nested"):
        read_summary(tmp_path / "summary.json")


# Data and models
# --------------------------------------------------------------------------------------------------


def gz_bomb(path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=6) as file:
        for _ in range(8):
            file.write(b"a" * 2**20)


def header_bomb(path: Path) -> None:
    head = b'{"a":' * 200_000 + b"1" + b"}" * 200_000
    path.write_bytes(len(head).to_bytes(8, "little") + head)


def make_model(place: Path) -> None:
    place.mkdir()
    (place / "config.json").write_text('{"model_type": "gpt2"}')


def make_index(place: Path) -> None:
    make_model(place)
    deep(place / "model.safetensors.index.json")


def make_weights(place: Path) -> None:
    make_model(place)
    header_bomb(place / "model.safetensors")


def make_fifo_weights(place: Path) -> None:
    make_model(place)
    fifo(place / "model.safetensors")


def make_png_bomb(path: Path) -> None:
    from PIL import Image

    path.mkdir()
    Image.new("1", (20_000, 20_000)).save(path / "big.png")
    (path / "rows.jsonl").write_text(
        json.dumps({"image": str(path / "big.png"), "label": "a"}) + "\n"
    )


SMALL = ["data=files", "data.max_length=16"]
DATA_ATTACKS: list[tuple[str, Callable[[Path], Any], list[str], str]] = [
    ("corpus.txt", fifo, [*SMALL, "data.train={}"], "a FIFO"),
    ("corpus.txt", zero, [*SMALL, "data.train={}"], "a device"),
    ("corpus.txt", unix_socket, [*SMALL, "data.train={}"], "a socket"),
    ("corpus.txt.gz", gz_bomb, [*SMALL, "data.train={}"], "unpacks to more than"),
    ("rows.jsonl.gz", gz_bomb, [*SMALL, "data.train={}"], "it begins with"),
    ("rows.csv.gz", gz_bomb, [*SMALL, "data.train={}"], "unpacks to more than"),
    (
        "rows.jsonl",
        deep,
        [*SMALL, "data.streaming=true", "data.eval_fraction=0", "data.train={}"],
        "too many brackets within brackets",
    ),
    (
        "chat.jinja",
        fifo,
        ["task=sft", *SMALL, "data.train=chats.jsonl", "task.chat_template={}"],
        "a FIFO",
    ),
    ("model", make_index, ["model=pretrained", "model.path={}"], "nested too deeply"),
    (
        "model",
        make_weights,
        ["model=pretrained", "model.path={}"],
        "is not a complete safetensors file",
    ),
    ("model", make_fifo_weights, ["model=pretrained", "model.path={}"], "model.safetensors"),
]


def test_attacks_on_data_and_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(content, "_LARGEST_UNPACKED", 2**22)
    turns = [
        {"role": "user", "content": sentence(1)},
        {"role": "assistant", "content": sentence(2)},
    ]
    Path("chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 20)
    works = {}
    for name, make, words, _ in DATA_ATTACKS:
        place = tmp_path / make.__name__
        place.mkdir(exist_ok=True)
        make(place / name)
        given = [word.format(place / name) for word in words]
        works[f"{make.__name__}-{name}"] = partial(optrun, *given, "training.max_steps=1")
    found = each_in_bounds(works, tmp_path / "said")
    for name, make, _, fact in DATA_ATTACKS:
        code, said = found[f"{make.__name__}-{name}"]
        assert (make, code) == (make, 2), said
        assert "Traceback" not in said
        assert name in said
        assert fact in said
