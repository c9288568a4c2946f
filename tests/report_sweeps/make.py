"""Make the stored sweeps.

`python -m tests.report_sweeps.make [NAME ...]`, and `--snapshot` for what is found in them.

Each is a real sweep of tiny models. What depends on the machine is replaced: times, speeds, memory,
paths, hardware.
`--snapshot` trains nothing; it writes anew what a report of today finds in what is stored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import socket
import sys
import tarfile
import tempfile
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from optrun.report import build
from optrun.runner import train
from optrun.sweeper import driver, launch
from tests.report_sweeps import FOLDER, NAMES, archive, found_in, snapshot, stored
from tests.running import TINY_BERT, TINY_GPT, optrun
from tests.sweep.forked import ForkServer, fork, jobs

KEPT = (
    *("*/config.yaml", "*/.hydra/overrides.yaml", "*/metrics.jsonl", "*/summary.json"),
    *("*sweep.json", "*confirmation.json", "study.log", "*.sweep/*.json"),
)
NOON = "2026-01-02T12:00:00Z"
SPEED = {"sgd": 125.0, "lamb": 80.0}
"""Steps a second, in place of what the machine took; of others 100."""
RUN = [
    "data=files",
    "training.device=cpu",
    "training.max_steps=60",
    "training.logging_steps=5",
    "training.eval_steps=15",
    "training.per_device_train_batch_size=8",
    "data.max_eval_examples=64",
    "data.eval_fraction=0.2",
]
TEXT = [*TINY_GPT, *RUN, "data.train=corpus.txt"]
LABELS = [
    *TINY_BERT,
    *RUN,
    "task=sequence_classification",
    "data.max_length=16",
    "model.config.initializer_range=0.1",
]
ALONE = "checkpoint=none"
WORDS = [
    *("river", "stone", "cloud", "forest", "engine", "market", "window", "garden"),
    *("paper", "silver", "letter", "winter", "candle", "harbor", "bridge", "meadow"),
]
CUES = {"warm": ["sun", "fire", "toast"], "cold": ["snow", "ice", "frost"]}


def write_data() -> None:
    """A text whose words follow each other by chance, and two files of labels.

    One to be learnt, one of pure chance.
    """
    chance = random.Random(1)
    follows = {word: chance.sample(WORDS, 2) for word in WORDS}

    def line() -> str:
        words = [chance.choice(WORDS)]
        while len(words) < 12:
            words.append(chance.choice(follows[words[-1]] if chance.random() < 0.9 else WORDS))
        return " ".join(words)

    def labelled(pure_chance: bool) -> str:
        label, other = chance.sample(sorted(CUES), 2)
        words = [chance.choice(CUES[label if chance.random() < 0.9 else other]) for _ in range(3)]
        words += chance.sample(WORDS, 2)
        chance.shuffle(words)
        return f"{' '.join(words)},{chance.choice(sorted(CUES)) if pure_chance else label}"

    Path("corpus.txt").write_text("\n".join(line() for _ in range(500)) + "\n")
    for name in ("labels", "chance"):
        rows = [labelled(name == "chance") for _ in range(600)]
        Path(f"{name}.csv").write_text("\n".join(["text,label", *rows]) + "\n")


def sweep(
    *words: str, before: tuple[str, ...] = (), expected: int = 0, folder: str = "sweep"
) -> None:
    """Run `optrun -m`; what is said last of a key counts."""
    last = {word.partition("=")[0]: word for word in words}
    run(*before, "-m", *last.values(), f"hydra.sweep.dir={folder}", expected=expected)


def run(*words: str, expected: int = 0) -> None:
    """Run optrun, which has to end as expected."""
    if (code := optrun(*words)) != expected:
        raise SystemExit(f"optrun {' '.join(words)}: exit code {code}, expected {expected}")


def grid() -> None:
    """Three optimizers, three learning rates, three seeds; of SGD the largest lr is best."""
    search = (
        "search.adamw.lr=3e-3,1e-2,3e-2",
        "search.lamb.lr=3e-2,1e-1,3e-1",
        "search.sgd.lr=3e-2,1e-1,3e-1",
    )
    sweep(*TEXT, ALONE, *search, "seed=0,1,2")


def one_key() -> None:
    """Nothing but the learning rate differs."""
    sweep(*TEXT, ALONE, "optimizer=adamw", "lr=1e-3,3e-3,1e-2,3e-2", "seed=0,1,2")


SEARCH = ("hydra/sweeper=optuna",)


def search() -> None:
    """Eight trials for each of two optimizers."""
    spaces = (
        "search.adamw.lr=tag(log,interval(1e-3,1e-1))",
        "search.adamw.optimizer.weight_decay=0.0,0.1",
        "search.sgd.lr=tag(log,interval(1e-2,1))",
        "search.sgd.optimizer.momentum=0.0,0.5",
    )
    sweep(*TEXT, ALONE, *SEARCH, *spaces, "hydra.sweeper.n_trials=16", "seed=0,1,2")


def pruned() -> None:
    """A search whose weaker trials stop at step 15."""
    spaces = (
        "search.adamw.lr=tag(log,interval(1e-3,1e-1))",
        "search.sgd.lr=tag(log,interval(1e-2,1))",
    )
    pruner = ("hydra.sweeper.pruner=asha", "hydra.sweeper.min_resource=15")
    trials = ("hydra.sweeper.n_trials=8", *pruner)
    sweep(*TEXT, "checkpoint.save_steps=15", *SEARCH, *spaces, *trials, "seed=0,1,2")


def diverged() -> None:
    """Accuracy over five seeds, two of which make no numbers of one optimizer."""
    spaces = ("search.adamw.lr=1e-3", "search.sgd.lr=3e-2", "search.unsteady.lr=3e-3")
    words = (*LABELS, "data.train=labels.csv", ALONE, *spaces, "seed=0,1,2,3,4")
    sweep(*words, before=("--plugin", "unsteady.py"), expected=1)


def workloads() -> None:
    """A text, labels, and labels of pure chance."""

    def grid_of(words: list[str], *more: str) -> str:
        pairs = [word.lstrip("+").split("=", 1) for word in [*words, *more]]
        return (
            "{" + ",".join(f"{key}: '{value}'" for key, value in pairs if key not in shared) + "}"
        )

    shared = {word.partition("=")[0] for word in RUN}
    grids = [
        grid_of(words, f"optimizer={optimizer}", f"lr={lr}")
        for words in (TEXT, [*LABELS, "data.train=labels.csv"], [*LABELS, "data.train=chance.csv"])
        for optimizer, lr in (("adamw", 1e-2), ("lamb", 1e-1))
    ]
    sweep(*RUN, ALONE, "seed=0,1,2", f"hydra.sweeper.grids=[{','.join(grids)}]")


def confirmed() -> None:
    """What a small sweep chose, on five fresh seeds."""
    sweep(*TEXT, ALONE, "search.adamw.lr=3e-3,1e-2", "search.lamb.lr=1e-1,3e-1", "seed=0,1,2")
    run("confirm", "sweep", "seeds=5-9")


def unfinished() -> None:
    """Runs that finished, failed, were cut, were never begun, and one that was repeated."""
    common = (*TEXT, "checkpoint.save_steps=60", "seed=0,1,2")
    adamw, sgd = "search.adamw.lr=1e-3,1e-2", "search.sgd.lr=1e-1"
    sweep(*common, adamw, sgd)
    sweep(*common, adamw, sgd, "search.lamb.lr=-1", expected=1)
    sweep(*common, adamw, sgd, "search.lamb.lr=-1,1e-1", "training.max_seconds=1e-9", expected=75)
    sweep(
        *common,
        adamw,
        sgd,
        "search.lamb.lr=-1,1e-1,3e-1",
        "hydra.sweeper.timeout=1e-9",
        expected=75,
    )
    run(
        *TEXT,
        "checkpoint.save_steps=60",
        "optimizer=sgd",
        "lr=1e-1",
        "seed=0",
        "hydra.run.dir=sweep/again",
    )


def branches() -> None:
    """Two optimizers leave the trunk of each of three seeds."""
    sweep(
        *TEXT,
        "checkpoint.save_steps=30",
        "training.max_steps=30",
        "lr=1e-2",
        "scheduler=constant",
        "seed=0,1,2",
        folder="trunks",
    )
    trunks = ",".join(str(job) for job in jobs("trunks"))
    sweep(
        "checkpoint.save_steps=60",
        "training.max_steps=60",
        f"branch_from={trunks}",
        "optimizer=adamw,lamb",
    )


KINDS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        grid,
        one_key,
        search,
        pruned,
        diverged,
        workloads,
        confirmed,
        unfinished,
        branches,
    )
}


def neutral(path: Path, place: Path) -> bytes:
    """Read a file of a sweep without what depends on the machine."""
    text = path.read_text(encoding="utf-8").replace(str(place), "/data")
    text = re.sub(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", NOON, text)
    if path.name == "summary.json":
        return _json(_summary(json.loads(text), path.parent))
    if path.name == "metrics.jsonl":
        speed = _speed(path.parent)
        return b"".join(_line(_record(json.loads(line), speed)) for line in text.splitlines())
    if path.name == "study.log":
        return b"".join(_line(_clockless(json.loads(line))) for line in text.splitlines())
    return text.encode()


def _summary(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    speed = _speed(folder)
    values |= {"wall_seconds": values["global_step"] / speed + 1, "code": {}}
    values |= {
        "hardware": {"device": "cpu", "name": "2 cores", "ranks": 1},
        "run_id": _digest(folder.name),
    }
    for section in (values.get("perf", {}), values.get("metrics", {}).get("last", {})):
        _record(section, speed)
    values.pop("manifest", None)
    return values


def _record(values: dict[str, Any], speed: float) -> dict[str, Any]:
    steady = {
        "tokens_per_second": 128 * speed,
        "samples_per_second": 8 * speed,
        "peak_memory_bytes": 500_000_000,
    }
    steady |= {f"checkpoint_{what}_seconds": 0.01 for what in ("stall", "write")}
    for name, value in steady.items():
        values |= {key: value for key in (name, f"perf/{name}") if key in values}
    if "time" in values:
        values["time"] = values["step"] / speed
    return values


def _clockless(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: NOON[:-1] + ".000000"
        if key.startswith("datetime")
        else "worker"
        if key == "worker_id"
        else value
        for key, value in values.items()
    }


def _speed(folder: Path) -> float:
    text = (folder / "config.yaml").read_text() if (folder / "config.yaml").exists() else ""
    return next(
        (speed for name, speed in SPEED.items() if f"\noptimizer:\n  name: {name}\n" in text), 100.0
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _json(values: Any) -> bytes:
    return json.dumps(values, indent=1).encode() + b"\n"


def _line(values: Any) -> bytes:
    return json.dumps(values).encode() + b"\n"


def pack(name: str, place: Path) -> None:
    """Store the sweep of a place.

    Raises:
        SystemExit: What would be stored names this machine.
    """
    folder = place / "sweep"
    names = [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    ]
    here = (
        socket.gethostname(),
        str(Path.home()),
        str(Path.cwd()),
        str(FOLDER.parents[1]),
        tempfile.gettempdir(),
    )
    with tarfile.open(archive(name), "w:xz", preset=9) as packed:
        for each in sorted(
            each for each in names if any(fnmatchcase(each, pattern) for pattern in KEPT)
        ):
            content = neutral(folder / each, place)
            if found := [word for word in here if word.encode() in content]:
                raise SystemExit(f"{name}: {each} names {found}")
            entry = tarfile.TarInfo(each)
            entry.size, entry.mtime = len(content), 1_767_355_200  # noon
            packed.addfile(entry, BytesIO(content))


def make(name: str) -> int:
    """Run a sweep in an empty folder, and store it."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder).resolve()
        with contextlib.chdir(place):
            os.environ["OPTRUN_CACHE"] = str(place / "cache")
            write_data()
            shutil.copy(FOLDER / "unsteady.py", place)
            KINDS[name]()
        pack(name, place)
    return 0


def main(arguments: list[str]) -> None:
    """Make what is named, or all; or write what is found in it."""
    names = [each for each in arguments if not each.startswith("--")]
    if "--snapshot" in arguments:
        for name in names or NAMES:
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                stored(name, Path())
                snapshot(name).write_text(
                    json.dumps(found_in(build.report([Path(name)])), indent=2) + "\n"
                )
        return
    torch.set_num_threads(1)
    launch.LaunchProcess = ForkServer  # type: ignore[misc, assignment]
    driver._POLL_SECONDS = 0.05
    train.draw_curves = lambda path: None
    build.report = lambda folders, **options: SimpleNamespace(verdict=None)  # type: ignore
    for name in (
        names or KINDS
    ):  # each in a process of its own: a plugin stays loaded, and threads survive no fork
        child = fork(partial(make, name), Path(os.devnull))
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise SystemExit(f"{name}: exit code {code}")
    sys.stdout.write(
        "".join(f"{name}: {archive(name).stat().st_size:,} bytes\n" for name in names or KINDS)
    )


if __name__ == "__main__":
    main(sys.argv[1:])
