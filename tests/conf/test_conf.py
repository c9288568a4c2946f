"""Every YAML composes, says every field of its dataclass with a comment, and runs no code.

Every recipe composes.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from optrun.base.formatting import rate
from optrun.config import saved, store
from optrun.config.groups import default_values
from optrun.config.schema.run import BranchSchedule
from tests.running import composed, optrun

CONF = store.config_dir()
CHOICES = sorted(
    (path.parent.name, path.stem)
    for group in store.GROUPS
    for path in (CONF / group).glob("*.yaml")
)
# What a choice cannot be composed without.
NEEDED = {
    ("model", "pretrained"): ["model.path=somewhere"],
    ("model", "from_config"): ["model.model_type=gpt2"],
    ("data", "files"): ["data.train=somewhere.csv"],
    ("adapter", "qlora"): ["model=pretrained", "model.path=somewhere"],
    ("data", "hub"): ["data.path=somewhere"],
    ("param_groups", "layerwise"): [],
    ("scheduler", "piecewise"): ["scheduler.boundaries=[10]", "scheduler.values=[1.0,0.1]"],
}


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_choice(group: str, choice: str) -> None:
    values = yaml.safe_load((CONF / group / f"{choice}.yaml").read_text())
    assert values.pop("defaults") == [f"{choice}_schema", "_self_"]
    schema = store.GROUPS[group][choice]
    fields = {field.name for field in dataclasses.fields(schema)}
    assert set(values) == fields, (
        "every field has its value in the YAML, and no other key stands there"
    )
    if (group, choice) != ("optimizer", "pytorch_optimizer"):
        assert values["name"] == choice


TOGETHER = ("optimizer", "scheduler", "tracking", "clip")
"""Groups that ask nothing of each other: one composition takes a choice of each."""
ALONE = [
    (group, name) for group, name in CHOICES if group not in TOGETHER or name == "pytorch_optimizer"
]
COLUMNS = [
    [pair for pair in CHOICES if pair[0] == group and pair not in ALONE] for group in TOGETHER
]
ROWS = [
    *([pair] for pair in ALONE),
    *([pair for pair in row if pair] for row in zip_longest(*COLUMNS)),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join("=".join(pair) for pair in row))
def test_choice_composes_and_survives_being_saved(row: list[tuple[str, str]]) -> None:
    hydra = store.open_hydra()
    needed = [word for pair in row for word in NEEDED.get(pair, [])]
    cfg = store.without_hydra(store.compose(hydra, "config", [*map("=".join, row), *needed]))
    missing = OmegaConf.missing_keys(cfg)
    assert not missing or len(row) == 1, "it would hide the others of the row"
    for key in missing:  # what only a user can say
        assert key.startswith(f"{row[0][0]}.")
    if not missing:
        values = saved.plain(cfg)
        assert store.typed(saved.with_schemas(values, "here")) == store.typed(cfg)
        if any(group == "optimizer" for group, _ in row):
            assert cfg.lr == cfg.optimizer.default_lr > 0


def test_every_value_has_its_comment() -> None:
    """A person reads the file and knows; a name alone says too little."""
    bare = []
    for path in sorted(CONF.glob("*/*.yaml")):
        lines = path.read_text().splitlines()
        assert lines[0].startswith("# "), f"{path.name} begins with what it is"
        for line in lines:
            if (
                re.match(r"^[a-z_]+: ", line)
                and "#" not in line
                and not line.startswith(("name:", "defaults:"))
            ):
                bare.append(f"{path.parent.name}/{path.name}: {line}")
    assert bare == []


def test_no_yaml_names_code() -> None:
    for path in [*CONF.rglob("*.yaml"), *store.recipes_dir().rglob("*.yaml")]:
        assert not re.search(r"(?<![a-z])_target_", path.read_text()), path


@pytest.mark.parametrize("name", sorted(path.stem for path in store.recipes_dir().glob("*.yaml")))
def test_recipe_begins_with_its_command(name: str) -> None:
    first = (store.recipes_dir() / f"{name}.yaml").read_text().splitlines()[0]
    assert first.startswith("# optrun ")
    assert f"-cn {name}" in first


def test_services_do_not_import_torch(tmp_path: Path) -> None:
    """`--help`, `--cfg`, `--info` and completion answer at once."""
    program = (
        "import os, sys; from optrun.cli import main as cli\nfor line in ('optrun ex', 'optrun"
        " explain optimizer=la', 'optrun training.'):\n    os.environ['COMP_LINE'] = line\n"
        "    cli.run(['-sc', 'query=bash'])\nfor words in"
        " (['--help'], ['--cfg', 'job', '--resolve'], ['--info', 'defaults'], ['--version'],\n     "
        "         ['lr=abc'], ['explain', '--help'], ['evaluate', '--help'], ['optimizer=lam']):\n "
        "   cli.run(words)\nheavy = {'torch', 'transformers', 'datasets', 'matplotlib', 'scipy'} &"
        " set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert list(tmp_path.iterdir()) == []


def test_cfg_shows_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        optrun("--cfg", "job", "--resolve", "optimizer=lamb", "lr=2e-3", "model.config.n_layer=3")
        == 0
    )
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["lr"] == 2e-3
    assert shown["optimizer"]["name"] == "lamb"
    assert shown["model"]["config"]["n_layer"] == 3


@pytest.mark.parametrize(
    ("given", "lr"), [([], 1e-4), (["optimizer=lamb"], 1e-3), (["lr=3e-4"], 3e-4)]
)
def test_a_pretrained_model_takes_a_share_of_the_default(given: list[str], lr: float) -> None:
    hydra = store.open_hydra()
    words = ["model=pretrained", "model.path=somewhere", "scheduler.warmup_ratio=null", *given]
    cfg = store.without_hydra(store.compose(hydra, "config", words))
    config = store.typed(cfg)
    assert config.lr == lr, "twenty times less than from scratch; what is given wins"
    note = config.default_lr_note()
    assert (note is None) == ("lr=3e-4" in given)
    if note is not None:
        pieces = (
            f"lr={rate(lr)}",
            "model.default_lr_factor=0.05",
            f"optimizer={config.optimizer.name}",
            "warmup_ratio",
        )
        assert all(piece in note for piece in pieces)
    warm = store.typed(
        store.without_hydra(store.compose(hydra, "config", [*words, "scheduler.warmup_ratio=0.1"]))
    )
    assert "warm-up" not in (warm.default_lr_note() or "")


@pytest.mark.parametrize(("adapter", "usual"), [("none", "lr=1e-6"), ("lora", "lr=1e-5")])
def test_preferences_are_told_that_the_default_is_large(adapter: str, usual: str) -> None:
    words = [
        "task=preference",
        "data=files",
        "data.train=a.jsonl",
        "model=pretrained",
        "model.path=somewhere",
    ]
    note = composed(*words, f"adapter={adapter}").default_lr_note() or ""
    assert note.startswith("warning: ")
    assert usual in note
    assert composed(*words, f"adapter={adapter}", "lr=1e-6").default_lr_note() is None


@pytest.mark.parametrize(
    ("given", "ratio"),
    [
        ([], 0.05),
        (["scheduler=wsd"], 0.05),
        (["scheduler.warmup_ratio=0.2"], 0.2),
        (["scheduler.warmup_ratio=null"], None),
        (["scheduler.num_warmup_steps=0"], None),
        (["scheduler.num_warmup_steps=7"], None),
        (["scheduler=constant"], None),
        (["optimizer=pytorch_optimizer", "optimizer.class_name=gravity"], None),
        (["training.max_steps=19"], None),
        (["training.max_steps=20"], 0.05),
    ],
)
def test_a_run_that_asks_for_no_warmup_gets_one(given: list[str], ratio: float | None) -> None:
    cfg = store.without_hydra(store.compose(store.open_hydra(), "config", given))
    assert store.typed(cfg).scheduler.warmup_ratio == ratio
    assert default_values("scheduler", "cosine")["warmup_ratio"] is None, (
        "build_scheduler adds nothing of its own"
    )


def test_a_schedule_that_a_branch_starts_anew_does_not_climb() -> None:
    node = OmegaConf.create({"scheduler": {"warmup_ratio": "${default_warmup:0.05}"}})
    for schedule, ratio in ((BranchSchedule["continue"], 0.05), (BranchSchedule["restart"], None)):
        node.branch_schedule = schedule
        assert node.scheduler.warmup_ratio == ratio


def test_completion_lists_choices_without_schemas() -> None:
    hydra = store.open_hydra()
    for group in store.GROUPS:
        options = hydra.config_loader.get_group_options(group)
        assert options
        assert not [option for option in options if option.endswith("_schema")]
