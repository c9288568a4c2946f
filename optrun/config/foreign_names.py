"""Names of other trainers, each with its name here or the reason for its absence.

The table is `foreign_names.yaml`; it is read when something is refused.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from optrun.base import shell
from optrun.base.bounded_yaml import yaml_mapping

NOT_OFFERED = "not offered"
"""Begins the reasons among the answers of the table."""
_OFF = ("null", "none", "false", "no", "0", "0.0")
"""Words for a choice of nothing."""


@functools.cache
def table() -> dict[str, Any]:
    """Read the table of names and answers."""
    return yaml_mapping(Path(__file__).with_suffix(".yaml"))


def translate_key(key: str) -> str | None:
    """Translate a key of another program; None if the table lacks it.

    Args:
        key: As it was typed, without dashes; also below a group, as in `trainer.max_epochs`.

    Example:
        >>> translate_key("learning_rate"), translate_key("trainer.max_epochs")
        ('lr', 'training.num_train_epochs')
        >>> translate_key("optimizer.beta1")
        'optimizer.betas=[BETA1,BETA2]'
    """
    keys: dict[str, str] = table()["keys"]
    if key.startswith("hydra."):
        return keys.get(key)
    group, _, leaf = key.rpartition(".")
    if group == "optimizer" and leaf in table()["optimizer_options"]:
        return optimizer_option(leaf)
    return keys.get(key) or keys.get(leaf)


def optimizer_option(name: str) -> str | None:
    """Translate an option of other optimizers; None if the table lacks it."""
    options: dict[str, str] = table()["optimizer_options"]
    return options.get(name)


def explain_answer(answer: str, *, as_option: bool = False) -> str:
    """Write an answer of the table as a sentence.

    Args:
        answer: What `translate_key` returned.
        as_option: True for `--name`, which is no key here.

    Example:
        >>> explain_answer("lr"), explain_answer("lr", as_option=True)
        ('Here it is called lr.', 'Here it is written lr=VALUE.')
        >>> explain_answer("not offered: the labels are counted in the rows")
        'Not offered: the labels are counted in the rows.'
    """
    if answer.startswith(NOT_OFFERED):
        return f"{answer[0].upper()}{answer[1:]}."
    if not as_option:
        return f"Here it is called {answer}."
    return f"Here it is written {answer if '=' in answer else f'{answer}=VALUE'}."


def translate_choice(group: str, name: str) -> str | None:
    """Translate a choice of another program, a file or a hub name into overrides.

    None if nobody knows.

    Example:
        >>> translate_choice("model", "gpt2"), translate_choice("task", "text-classification")
        ('model=pretrained model.path=gpt2', 'task=sequence_classification')
        >>> translate_choice("data", "my.csv"), translate_choice("data", "owner/name")
        ('data=files data.train=my.csv', 'data=hub data.path=owner/name')
        >>> translate_choice("clip", "max"), translate_choice("tracking", "false")
        (None, 'tracking=none')
    """
    choices: dict[str, str] = table()["choices"].get(group, {})
    answer = choices.get(name.lower().replace("-", "_"))
    if answer is not None or not name.strip():
        return answer
    if name.strip().lower() in _OFF:
        return f"{group}=none"
    if group == "clip" and re.fullmatch(r"\d+(\.\d*)?", name):
        return f"clip=global_norm clip.max_norm={name}"
    if group == "model":
        return f"model=pretrained {shell.quote(f'model.path={name}')}"
    if group == "data":
        choice, key = ("files", "train") if _looks_like_file(name) else ("hub", "path")
        return f"data={choice} {shell.quote(f'data.{key}={name}')}"
    return None


def _looks_like_file(name: str) -> bool:
    return (
        re.search(r"\.\w{1,8}$", name) is not None
        or name.startswith((".", "/", "~"))
        or Path(name).exists()
    )
