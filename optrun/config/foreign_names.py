"""Names of other trainers, each with its name here or the reason for its absence.

The table is `foreign_names.yaml`; it is read when something is refused.
"""

import functools
import re
from pathlib import Path
from typing import Any

from optrun.base import shell
from optrun.base.bounded_yaml import yaml_mapping

NOT_OFFERED = "not offered"
"""Begins an entry of the table that gives a reason in place of a name."""
_OFF = ("null", "none", "false", "no", "0", "0.0")
"""Words for turning a group off."""


@functools.cache
def table() -> dict[str, Any]:
    """Read the table of foreign names and their translations."""
    return yaml_mapping(Path(__file__).with_suffix(".yaml"))


def translate_key(key: str) -> str | None:
    """Translate a key of another program into one of ours; None if the table lacks it.

    The whole key is looked up first, then its last part. An entry may also be a reason, see
    `NOT_OFFERED`.

    Args:
        key: As typed, without dashes; also below a group, as in `trainer.max_epochs`.

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
    """Translate an option of another package's optimizer; None if the table lacks it."""
    options: dict[str, str] = table()["optimizer_options"]
    return options.get(name)


def explain_translation(translation: str, *, as_option: bool = False) -> str:
    """Write an entry of the table as a sentence.

    Args:
        translation: What `translate_key` returned: a name, or a reason.
        as_option: Whether an option `--name` was typed; the sentence then shows `key=VALUE`.

    Example:
        >>> explain_translation("lr"), explain_translation("lr", as_option=True)
        ('Here it is called lr.', 'Here it is written lr=VALUE.')
        >>> explain_translation("not offered: the labels are counted in the rows")
        'Not offered: the labels are counted in the rows.'
    """
    if translation.startswith(NOT_OFFERED):
        return f"{translation[0].upper()}{translation[1:]}."
    if not as_option:
        return f"Here it is called {translation}."
    if "=" in translation:
        return f"Here it is written {translation}."
    return f"Here it is written {translation}=VALUE."


def translate_choice(group: str, name: str) -> str | None:
    """Translate `GROUP=NAME` of another program, or with a file or hub name, into overrides.

    The table comes first, then words for "off", a number for `clip`, and any other name as a path
    of `model` or `data`. None if no rule applies. An entry may also be a reason, see `NOT_OFFERED`.

    Example:
        >>> translate_choice("model", "gpt2"), translate_choice("task", "text-classification")
        ('model=pretrained model.path=gpt2', 'task=sequence_classification')
        >>> translate_choice("data", "my.csv"), translate_choice("data", "owner/name")
        ('data=files data.train=my.csv', 'data=hub data.path=owner/name')
        >>> translate_choice("clip", "max"), translate_choice("tracking", "false")
        (None, 'tracking=none')
    """
    choices: dict[str, str] = table()["choices"].get(group, {})
    translation = choices.get(name.lower().replace("-", "_"))
    if translation is not None or not name.strip():
        return translation
    if name.strip().lower() in _OFF:
        return f"{group}=none"
    if group == "clip" and re.fullmatch(r"\d+(\.\d*)?", name):  # a norm
        return f"clip=global_norm clip.max_norm={name}"
    if group == "model":
        return f"model=pretrained {shell.quote(f'model.path={name}')}"
    if group != "data":
        return None
    choice = "hub"
    key = "data.path"
    if _looks_like_file(name):
        choice = "files"
        key = "data.train"
    return f"data={choice} {shell.quote(f'{key}={name}')}"


def _looks_like_file(name: str) -> bool:
    """Tell whether a name has an ending, begins like a path, or exists here."""
    if re.search(r"\.\w{1,8}$", name) or name.startswith((".", "/", "~")):
        return True
    return Path(name).exists()
