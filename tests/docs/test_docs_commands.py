"""What the documentation tells people to type works.

Every command is composed, and run where that is quick.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from optrun.cli.verbs import VERBS
from optrun.config.groups import default_values
from optrun.data import stdlib
from tests.docs.commands import PAGES, ROOT, SHELLS, Command, blocks, commands
from tests.preloaded import optrun_preloaded
from tests.running import optrun, sentence, write_labelled, write_text
from tests.sweep.forked import fork_jobs

OWN_TESTS = {"docs/quickstart.md", "docs/plugins.md"}
"""Pages whose commands a test of their own runs, as they stand."""
HARMLESS = {".", "cd", "eval", "export", "git", "python3", "cat", "cp", "mkdir", "optuna-dashboard"}
RUN, SWEEP = "outputs/2026-01-02/03-04-05", "outputs/sweeps/2026-01-02/03-04-05"
OWN_YAML = "optimizer: lamb\nlr: 2e-3\n"
SMALL = {"training.max_steps": "2", "data.max_eval_examples": "8"}
"""What is put into every command that trains, so that it takes seconds."""


def pages(*, run: bool) -> list[object]:
    named = [(page, commands(page)) for page in PAGES]
    return [
        pytest.param(found, id=page.relative_to(ROOT).as_posix())
        for page, found in named
        if found and not (run and page.relative_to(ROOT).as_posix() in OWN_TESTS)
    ]


def test_every_command_stands_in_a_block_that_is_found() -> None:
    hidden = [
        f"{block.page}:{block.line}"
        for page in PAGES
        for block in blocks(page)
        if block.language not in SHELLS and re.match(r"\$? ?(optrun|make|pip|python) ", block.body)
    ]
    assert hidden == [], "begin the block with ```bash"
    assert sum(len(commands(page)) for page in PAGES) > 40


@pytest.mark.parametrize("found", pages(run=False))
def test_every_command_is_one(
    found: list[Command], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(OWN_YAML)
    for command in found:
        program, *arguments = command.arguments
        if program in ("torchrun", "srun"):
            program, *arguments = arguments[arguments.index("optrun") :]
        if program == "optrun":
            _composes(command, arguments)
        elif program == "make":
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
            assert {one for one in arguments if "=" not in one} <= set(targets), command
        elif program == "python":
            _is_module_or_file(command, arguments)
        elif program == "pip":
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
                "optional-dependencies"
            ]
            asked = [
                name
                for one in arguments
                for group in re.findall(r"\[(.*?)\]", one)
                for name in group.split(",")
            ]
            assert set(asked) <= set(extras), command
        else:
            assert program in HARMLESS, f"{command}: say in this test how it is checked"


def _composes(command: Command, arguments: list[str]) -> None:
    """The names and types of all overrides are right, whatever files they name."""
    overrides = [one for one in arguments if "=" in one and not one.startswith("-")]
    if arguments and not arguments[0].startswith("-") and "=" not in arguments[0]:
        assert arguments[0] in VERBS, command
        if arguments[0] not in ("explain", "certify"):
            return
        arguments = [
            one for one in overrides if not one.startswith("dialect=")
        ]  # the verb's own key
    if "-m" in arguments:  # Hydra composes no sweep: one of its jobs, what is searched left out
        arguments = [
            one
            for one in swept(arguments, 1, 1)
            if one != "-m" and not one.startswith("search.") and "interval(" not in one
        ]
    arguments = [
        one
        for one in arguments
        if not one.startswith(
            ("resume=", "branch_", "lr=auto", "lr_from=", "widths=", "depths=", "seeds=")
        )
    ]  # no run, no trunk, no sweep; keys of certify transfer
    if not {"--help", "--version", "--cfg", "--info", "-sc", "--plugin"} & set(arguments):
        assert optrun(*arguments, "--cfg", "job") == 0, command


def _is_module_or_file(command: Command, arguments: list[str]) -> None:
    if arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]) is not None, command
    for one in arguments[2:] if arguments[0] == "-m" else arguments[:1]:
        if one.startswith("tests/") or one.endswith(".py"):
            assert (ROOT / one.partition("::")[0]).exists(), command


def test_what_a_page_says_that_comes_out_is_compared_with_what_does() -> None:
    quoting = {block.page for page in PAGES for block in blocks(page) if block.language == "text"}
    assert quoting <= {"docs/quickstart.md"}, (
        "its own test compares; let one of these pages compare, too"
    )


@pytest.mark.parametrize("found", pages(run=False))
def test_a_sweep_gives_each_optimizer_learning_rates_around_its_own(found: list[Command]) -> None:
    """One that is ten times too low or too high makes any optimizer the loser."""
    for command in found:
        given = dict(one.split("=", 1) for one in command.arguments if "=" in one)
        own = {
            key.split(".")[1]: value
            for key, value in given.items()
            if re.fullmatch(r"search\.\w+\.lr", key)
        }
        grids = dict.fromkeys(given.get("optimizer", "adamw").split(","), given.get("lr", "")) | own
        if "-m" not in command.arguments:
            continue
        for name, grid in grids.items():
            if not (ROOT / "conf" / "optimizer" / f"{name}.yaml").is_file():
                continue  # of a page's own plugin
            rates = [float(rate) for rate in re.findall(r"\d[\d.]*(?:e-?\d+)?", grid)]
            lr = default_values("optimizer", name)["default_lr"]
            assert not rates or min(rates) / 2 <= lr <= 2 * max(rates), (
                f"{command}: {name}, whose default is {lr}"
            )


@pytest.fixture
def workplace(prepared: Path, tmp_path: Path) -> Path:
    """A reader's own folder for each page: no page depends on another, or on their order."""
    return shutil.copytree(prepared, tmp_path / "reader")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files and runs that the pages speak of."""
    folder = tmp_path_factory.mktemp("documentation")
    before = Path.cwd()
    os.chdir(folder)
    try:
        for name in ("train", "dev"):
            csv = write_labelled(folder, name=f"{name}.csv")
            csv.with_suffix(".tsv").write_text(csv.read_text().replace(",", "\t"))
        shutil.copy(write_text(folder, 150), "my.txt")
        shutil.copy("my.txt", "shakespeare.txt")
        rows = [
            {"text": sentence(n), "endings": [sentence(n + 1), sentence(n + 2)], "label": n % 2}
            for n in range(60)
        ]
        Path("endings.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
        topics = [
            {"text": sentence(n), "label": ["even"] * (n % 2 == 0) + ["third"] * (n % 3 == 0)}
            for n in range(60)
        ]
        Path("topics.jsonl").write_text("\n".join(map(json.dumps, topics)) + "\n")
        shutil.copy("train.csv", "reviews.csv")
        Path("mine.yaml").write_text(OWN_YAML)
        pairs = [{"anchor": sentence(n), "positive": sentence(n + 60)} for n in range(60)]
        Path("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)) + "\n")
        Path("reviews.txt").write_text(
            "\n".join(f"{n % 2} | {sentence(n)}" for n in range(60)) + "\n"
        )
        tiny = [
            "data=files",
            "data.train=my.txt",
            *(f"{key}={value}" for key, value in SMALL.items()),
        ]
        assert optrun(*tiny, f"hydra.run.dir={RUN}") == 0
        with pytest.MonkeyPatch.context() as patch:
            fork_jobs(patch)
            assert optrun("-m", "lr=1e-3,2e-3", *tiny, f"hydra.sweep.dir={SWEEP}") == 0
        classes = [
            "task=sequence_classification",
            "model=bert_tiny",
            "data=files",
            "data.train=train.csv",
        ]
        assert optrun(*classes, "training.max_steps=1", "hydra.run.dir=classifier") == 0
        for model in ("MODEL", "sentence-transformers/all-MiniLM-L6-v2"):
            shutil.copytree("classifier/model", model)
    finally:
        os.chdir(before)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("found", pages(run=True))
def test_every_command_runs(
    found: list[Command],
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    forked_jobs: None,
    no_pictures: None,
) -> None:
    monkeypatch.chdir(workplace)
    few = stdlib.stdlib_files()[::20]  # the tokens of all of them take seconds
    monkeypatch.setattr(stdlib, "stdlib_files", lambda: few)
    for block in blocks(ROOT / found[0].page):  # plugins that the page shows
        if block.language == "python" and (name := re.match(r"# (\w+\.py)\n", block.body)):
            Path(name[1]).write_text(block.body)
    for command in found:
        program, *arguments = command.arguments
        if (
            program != "optrun" or command.not_run or arguments[:1] == ["certify"]
        ):  # tests/faults/test_kills.py
            continue
        if {"--plugin", "distributed=ddp"} & set(
            arguments
        ):  # what it registers stays in that process; ranks
            done = optrun_preloaded(*small(arguments), cwd=workplace)
            assert done.returncode == 0, f"{command}\n{done.stderr}"
        else:
            assert optrun(*small(arguments)) == 0, command
            monkeypatch.chdir(workplace)


def small(arguments: list[str]) -> list[str]:
    """The same command on the files of the test, with few steps and two jobs."""
    places = {
        "outputs/sweeps/DATE/TIME": SWEEP,
        "outputs/DATE/TIME": RUN,
        "resume=RUN_DIR": "resume=latest",
    }
    places["seeds=5-9"] = "seeds=5-7"
    for name, path in places.items():
        arguments = [one.replace(name, path) for one in arguments]
    verb = arguments[0] if arguments and arguments[0] in VERBS else ""
    if verb or {"--help", "--version", "--cfg", "--info", "-sc"} & set(arguments):
        return arguments
    resumed = any(one.startswith("resume=") for one in arguments)
    branches = any(one.startswith("branch_from=") for one in arguments)
    resumed |= branches
    put = (
        {}
        if resumed and not any(one.startswith("training.max_steps=") for one in arguments)
        else dict(SMALL)
    )
    if resumed and put:
        put = {
            "training.max_steps": "8" if branches else "4"
        }  # beyond the trunk, which another command resumed
    if "distributed=ddp" in arguments:  # its ranks find the whole library, not a test's
        put |= {"data": "files", "data.train": "my.txt"}
    kept = [one for one in arguments if one.partition("=")[0] not in put]
    if "-m" in arguments:
        kept = swept(kept, 2, 1)
    return [*kept, *(f"{key}={value}" for key, value in put.items())]


def swept(arguments: list[str], first: int, others: int) -> list[str]:
    """So many values of the first key that is swept, and so many of the others."""
    found = []
    for one in arguments:
        key, _, value = one.partition("=")
        if "," in value and not re.search(r"[(\[{]", value):
            one = f"{key}={','.join(value.split(',')[:first])}"
            first = others
        found.append(one)
    return found
