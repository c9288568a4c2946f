"""The reader itself.

It plays files that it was not written for, and a wrong value of any kind makes it fail.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reference.reference_adapter import drivers
from tests.reference.reference_check import check_case
from tests.reference.reference_format import DTYPES, TORCH, FormatError, check_document
from tests.reference.reference_player import FUNCTION, SCHEDULER
from tests.reference.reference_tables import CHECKS
from tests.reference.variants import variants, write_variants

Place = tuple[Any, ...]

SAYS_NOTHING = {"id", "source", "key", "clear_grad_set_to_zero", "sparse_mode", "trainable"}
"""Names and flags whose change leaves the cases here with the same numbers."""

DRIVERS = (FUNCTION, SCHEDULER)
FILES = {file["system"]: file for file in variants()}


def check(file: dict[str, Any]) -> None:
    """Everything that pytest does with a folder of one file, in one dtype."""
    check_document("file", file)
    for case in file["cases"]:
        for driver in drivers(case):
            dtype = DTYPES.get(case.get("dtype"), torch.float64)
            check_case(file["system"], case, dtype=dtype, foreach=False, driver=driver)
    for table in CHECKS:
        entries = file.get(table, [])
        for entry in entries if isinstance(entries, list) else [entries]:
            CHECKS[table](table, entry)


@pytest.mark.parametrize("system", FILES)
def test_files_that_were_not_recorded_run(system: str) -> None:
    check(FILES[system])


def test_another_folder_is_read(tmp_path: Path) -> None:
    """The suite over a folder of such files, in which one value is wrong.

    That case fails, and no other.
    """
    write_variants(tmp_path)
    for file in tmp_path.glob("*adamax.json"):
        file.write_text(file.read_text().replace('"lr": [0.02, 0.3,', '"lr": [0.02, 0.31,'))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/reference/test_conformance.py",
    ]
    environment = {**os.environ, "OPTRUN_REFERENCE_DIR": str(tmp_path)}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout
    failed = {
        line.split("[")[1].split("]")[0]
        for line in done.stdout.splitlines()
        if line.startswith("FAILED")
    }
    ways = {
        f"unseen_paddle_adamax-piecewise-0-{driver}-{way}"
        for driver in DRIVERS
        for way in ("loop", "foreach")
    }
    assert failed == ways
    assert "lr of step 1: 0.3, recorded 0.31" in done.stdout


# -- wrong values
# --------------------------------------------------------------------------------------------------


def nodes(value: Any, path: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Every value in a file, with the way to it."""
    yield path, value
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from nodes(inner, (*path, key))


def kind_of(path: Place) -> Place:
    """The way to a value without its numbers, so that one of each kind is enough.

    A case of its own is a kind.
    """
    return tuple(
        key if not isinstance(key, int) or index == 1 else "*" for index, key in enumerate(path)
    )


def changed(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return f"{value}s"
    return value + 1 if isinstance(value, int) else value * 1.01 + 0.003


def says_nothing(path: Place, file: dict[str, Any]) -> bool:
    """Whether another value would mean the same.

    A name, a rate under a schedule, where a function fails anyway.
    """
    if path[0] == "layerwise_ratios":
        return path[-1] == "name" or (
            path[-1] != "raises" and "raises" in file["layerwise_ratios"][0]
        )
    return path[-1] in SAYS_NOTHING or path[-2:] == ("config", "lr")


def with_value(file: dict[str, Any], path: Place, value: Any) -> dict[str, Any]:
    """The file with one value set."""
    out = copy.deepcopy(file)
    inner: Any = out
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return out


def passes(file: dict[str, Any]) -> bool:
    """Whether the reader takes a file; a file that optrun or torch refuses is not taken."""
    try:
        check(file)
    except (AssertionError, FormatError, ValueError, TypeError, KeyError, IndexError, RuntimeError):
        return False
    except pytest.fail.Exception:  # pytest.raises that saw nothing raised
        return False
    return True


def alone(file: dict[str, Any], path: Place) -> dict[str, Any]:
    """The file with the entry of a list that `path` leads into, and no other entry.

    The path stays right.
    """
    out = dict(file)
    for key in ("cases", *CHECKS):
        if isinstance(file.get(key), list):
            kept = file[key][: path[1] + 1] if path[:1] == (key,) and len(path) > 1 else []
            out[key] = kept[-1:] if kept else []
    return out


def first_of_each_kind(
    file: dict[str, Any], wanted: Any
) -> Iterator[tuple[Place, Any, dict[str, Any]]]:
    """The first value of each kind, with a file that holds the entry it belongs to."""
    seen = set()
    for path, value in nodes(file):
        kind = kind_of(path)
        if not wanted(value) or kind in seen:
            continue
        seen.add(kind)
        small = alone(file, path)
        short = (path[0], 0, *path[2:]) if len(path) > 1 and isinstance(path[1], int) else path
        yield short, value, small


@pytest.mark.parametrize("system", FILES)
def test_a_wrong_value_of_any_kind_is_found(system: str) -> None:
    """A number, a word or a flag changed, anywhere: the reader fails."""
    taken, planted = [], 0
    for path, value, file in first_of_each_kind(
        FILES[system], lambda value: isinstance(value, bool | int | float | str)
    ):
        if says_nothing(path, file):
            continue
        planted += 1
        if passes(with_value(file, path, changed(value))):
            taken.append(path)
    assert not taken, taken
    assert planted > 40


@pytest.mark.parametrize("system", FILES)
def test_an_unknown_key_is_an_error_anywhere(system: str) -> None:
    """In every object of a file: what is not known is never left out."""
    taken, planted = [], 0
    for path, _, file in first_of_each_kind(FILES[system], lambda value: isinstance(value, dict)):
        planted += 1
        if passes(with_value(file, (*path, "gama"), 0.5)):
            taken.append(path)
    assert not taken, taken
    assert planted > 10


@pytest.mark.parametrize(
    ("system", "path", "value"),
    [
        ("paddle_lamb", ("cases", 1, "schedule", "kind"), "CyclicLR"),
        (
            "paddle_lamb",
            ("cases", 1, "groups", 0, "grad_clip"),
            {"kind": "adaptive", "clip_norm": 1.0},
        ),
        ("paddle_lamb", ("cases", 1, "groups", 1, "weight_decay", "kind"), "L3"),
        ("paddle_adamax", ("cases", 1, "events", 0, "op"), "set_betas"),
        ("paddle_adamax", ("cases", 1, "events", 0, "before_step"), 99),
        ("paddlenlp_adamwdl", ("cases", 1, "config", "decay"), "thrice"),
        ("paddlenlp_adamwdl", ("layerwise_ratios", 2, "raises"), "OSError"),
        ("mindspore_lazyadam", ("cases", 3, "sparse_mode"), "sum"),
        ("tfm_lamb", ("schema",), "golden-2"),
        ("tfm_lamb", ("system",), "tfm_adamw"),
    ],
)
def test_a_word_that_is_not_known_is_named(system: str, path: Place, value: Any) -> None:
    word = value if isinstance(value, str | int) else value["kind"]
    with pytest.raises(FormatError, match=str(word)):
        check(with_value(FILES[system], path, value))


def test_an_argument_without_a_default_is_missed() -> None:
    file = copy.deepcopy(FILES["paddle_lamb"])
    del file["cases"][2]["schedule"]["step_size"]
    with pytest.raises(FormatError, match="StepDecay: has no 'step_size'"):
        check(file)


@pytest.mark.parametrize("system", TORCH)
def test_a_wrong_value_of_a_package_for_torch_is_found(system: str) -> None:
    """In what was recorded; a file of these is played as it is, there are no others of its kind."""
    file = json.loads((Path(__file__).parent / f"{system}.json").read_text(encoding="utf-8"))
    file["cases"] = file["cases"][:1]
    assert passes(file)
    (case,) = file["cases"]
    name, slot = case["params"][0]["name"], next(iter(case["state"][case["params"][0]["name"]]))
    for path in (("params_after", 1, 0, 2), ("lr", 1), ("grads", 1, 0, 0)):
        value: Any = case
        for key in path:
            value = value[key]
        assert not passes(with_value(file, ("cases", 0, *path), changed(value))), path
    for path in (("gama",), ("config", "gama"), ("state", name, "gama")):
        with pytest.raises((FormatError, AssertionError)):
            check(with_value(file, ("cases", 0, *path), 0.5))
    assert not passes(with_value(file, ("cases", 0, "state", name, slot, 0), 1e3))
