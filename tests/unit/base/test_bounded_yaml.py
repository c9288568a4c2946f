"""A short text that means a giant is refused at once, wherever it is read."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from optrun.base.bounded_yaml import UnboundedYamlError, yaml_mapping, yaml_text
from optrun.base.errors import ConfigError, UnreadableFileError
from optrun.config import saved, store
from optrun.config.original_cwd import original_cwd
from optrun.report import runs


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]")
    return "\n".join(lines)


MERGED = "a: &a {x: 1, y: 2}\n" + "\n".join(
    f"{name}: &{name} {{p: *{before}, q: *{before}, r: *{before}}}"
    for before, name in zip("abcdefghijkl", "bcdefghijklm", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        *(bomb(5), bomb(9), bomb(40), MERGED),
        *("a: " + "[" * 100_000, "a: &a {b: *a}", "- " * 100_000, "x: 1\n" * 2_000_000),
    ],
    ids=[
        *(
            "hundred thousand",
            "billion",
            "more",
            "mappings",
            "deep",
            "itself",
            "deep dashes",
            "large",
        ),
    ],
)
def test_refused_in_no_time(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    started = time.process_time()  # others on the machine do not count
    with pytest.raises((UnboundedYamlError, UnreadableFileError)):
        yaml_text(path)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        saved.read_config(path)
    with pytest.raises(ValueError, match=r"config\.yaml"):
        runs.read_config(path)
    (tmp_path / "hydra.yaml").write_text(text)
    assert original_cwd(tmp_path) is None
    assert time.process_time() - started < 5, "and not minutes"


@pytest.mark.parametrize(
    ("group", "name", "words"),
    [
        (".", "mine", []),
        ("optimizer", "config", ["optimizer=mine"]),
        ("hydra/launcher", "config", ["hydra/launcher=mine"]),
    ],
)
def test_a_folder_of_the_users_own(group: str, name: str, words: list[str], tmp_path: Path) -> None:
    """What is chosen is bounded; what merely lies there is not looked at."""
    (tmp_path / group).mkdir(parents=True, exist_ok=True)
    (tmp_path / group / "mine.yaml").write_text(bomb(9))
    hydra = store.open_hydra(str(tmp_path))
    with pytest.raises(ConfigError, match=r"mine\.yaml: not read: its aliases make more than"):
        store.compose(hydra, name, words)
    store.compose(hydra, "config", [])


def test_aliases_of_a_sensible_size_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("a: &a {x: [1, 2]}\nb: *a\nc: {<<: *a, y: 3}\n")
    assert yaml_mapping(path)["c"] == {"x": [1, 2], "y": 3}
    assert saved.read_config(path)["b"] == {"x": [1, 2]}
    path.write_text("no: [valid")
    assert yaml_text(path) == "no: [valid"
