from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from huggingface_hub import ModelCard

from optrun.config.schema.task import SCHEMAS as TASKS
from optrun.runner.card import model_card
from optrun.runner.export import task_card


@pytest.fixture
def parts(tmp_path: Path, make_run: Callable[..., Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    run = make_run(tmp_path / "run", optimizer="lamb", lr=2e-3, max_steps=40, accuracy=True)
    return json.loads((run / "summary.json").read_text()), yaml.safe_load(
        (run / "config.yaml").read_text()
    )


@pytest.mark.parametrize("task", TASKS)
def test_the_hub_understands_every_task(
    parts: tuple[dict[str, Any], dict[str, Any]], task: str
) -> None:
    summary, config = parts
    config = {**config, "task": {"name": task}}
    text = model_card(summary, config, task_card(config))
    data = ModelCard(text).data
    assert data.library_name == "transformers"
    assert {"optrun", "lamb"} <= set(data.tags)
    assert data.pipeline_tag
    (snippet,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (imports,) = [node for node in ast.walk(ast.parse(snippet)) if isinstance(node, ast.ImportFrom)]
    assert all(hasattr(transformers, name.name) for name in imports.names)


def test_the_heading_is_model_and_data_not_their_choices(
    parts: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    summary, config = parts
    files = {"name": "files", "train": "/home/someone/reviews.csv"}
    model = {"name": "pretrained", "path": "org/mini-lm"}
    text = model_card(summary, {**config, "data": files, "model": model})
    assert "# mini-lm on reviews.csv\n" in text


def test_it_says_what_was_done(parts: tuple[dict[str, Any], dict[str, Any]]) -> None:
    text = model_card(*parts)
    for words in (
        "GPT2LMHeadModel",
        "3.24M parameters",
        "accuracy",
        "optrun -m optimizer=",
        "trained from scratch",
        "Python's standard library",
    ):
        assert words in text, words
    assert "These are the weights" not in text


def test_a_hub_name_is_the_base_model_and_a_local_folder_stays_private(
    parts: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    summary, config = parts
    hub = model_card(summary, {**config, "model": {"name": "pretrained", "path": "org/mini-lm"}})
    assert ModelCard(hub).data.base_model == "org/mini-lm"
    assert "fine-tuned from `org/mini-lm`" in hub
    local = model_card(
        summary, {**config, "model": {"name": "pretrained", "path": "/home/someone/mini-lm/"}}
    )
    assert ModelCard(local).data.base_model is None
    assert "fine-tuned from `mini-lm`" in local
    assert "someone" not in local


def test_names_of_the_hub_are_told_and_places_are_not(
    parts: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    summary, config = parts
    summary = {
        **summary,
        "command": (
            "optrun data=hub data.path=org/set model.path=/home/someone/m"
            " \"data.eval=['/x/a.csv']\""
        ),
    }
    text = model_card(summary, {**config, "data": {"name": "hub", "path": "org/set"}})
    assert ModelCard(text).data.datasets == ["org/set"]
    assert "optrun data=hub data.path=org/set model.path=m \"data.eval=['a.csv']\"" in text
    local = model_card(summary, {**config, "data": {"name": "hub", "path": "/home/someone/set"}})
    assert ModelCard(local).data.datasets is None
    assert "someone" not in local


def test_a_stopped_run_says_so_and_values_that_are_not_finite_stay_out_of_the_metadata(
    parts: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    summary, config = parts
    summary |= {"global_step": 10, "status": "interrupted"}
    summary["metrics"]["last"] = {"eval/loss": math.nan, "eval/accuracy": "NaN", "eval/f1": 0.5}
    text = model_card(summary, config)
    assert "These are the weights of step 10 of 40." in text
    assert "| loss | NaN |" in text
    assert ModelCard(text).data.metrics == ["f1"]
    assert "nan" not in text.split("---")[1].lower()


def test_nothing_known_is_still_a_card_and_hostile_names_stay_text() -> None:
    assert ModelCard(model_card({}, {})).data.library_name == "transformers"
    hostile = 'x: [\n---\n# "boo" <b>'
    choices = {
        group: {"name": hostile} for group in ("optimizer", "data", "model", "task", "scheduler")
    }
    text = model_card(
        {"status": hostile, "command": "optrun lr=1 ```\x1b[2J", "model": {"class": hostile}},
        choices,
    )
    assert hostile in ModelCard(text).data.tags
    assert "\n````sh\noptrun lr=1 ```?[2J\n````\n" in text
    body = text.split("\n---\n", 1)[1]
    assert "\n# " not in body.split("\n", 3)[3]  # the heading is the only one of its level
    assert "<b>" not in re.sub(r"`[^`]*`", "", body)


def test_the_yaml_file_of_the_command_is_folded_and_names_no_folder_of_this_machine(
    parts: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    summary, config = parts
    assert "<details>" not in model_card({**summary, "config_file": ""}, config)
    text = model_card({**summary, "config_file": "data: {train: /x/my.csv}\nlr: 1\n"}, config)
    assert "\n\n```yaml\ndata: {train: my.csv}\nlr: 1\n```\n\n</details>" in text


def test_a_prolonged_run_shows_every_command_that_made_its_weights(
    parts: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    summary, config = parts
    resumes = [
        {"from_step": 10, "command": "optrun resume=/x/run", "changes": {}},
        {
            "from_step": 20,
            "command": "optrun resume=/x/run training.max_steps=40",
            "changes": {"training.max_steps": [20, 40]},
        },
        {
            "from_step": 40,
            "command": "optrun resume=/x/run training.max_steps=60",
            "changes": {"training.max_steps": [40, 60]},
        },
    ]
    summary = {**summary, "command": "optrun lr=1", "global_step": 40, "resumes": resumes}
    text = model_card(summary, config)
    assert "```sh\noptrun lr=1\noptrun resume=run training.max_steps=40\n```" in text


def test_a_model_of_two_texts_is_called_with_two(
    parts: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    summary, config = parts
    task = {"name": "sequence_classification", "problem_type": "regression"}
    config = {**config, "task": task, "data": {"name": "files", "text_pair_column": "b"}}
    text = model_card(summary, config, task_card(config))
    assert 'tokenizer("a text", "a second text", return_tensors="pt")' in text
    assert "print(logits.item())" in text
