"""Write the model card of a trained model.

`README.md` beside the weights, in the form the Hugging Face hub reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import yaml  # type: ignore[import-untyped,unused-ignore]
from markupsafe import Markup

from optrun.artifacts.generalisation import sentence_of
from optrun.base.formatting import count, duration, plain
from optrun.base.plain import lookup
from optrun.report.table import NONE, Table, value
from optrun.report.templating import fill_markdown
from optrun.runner.class_tables import tables_of

_METRIC_TYPES = {
    "accuracy",
    "f1",
    "perplexity",
    "mcc",
    "matthews_correlation",
    "pearson",
    "pearsonr",
    "spearman",
    "spearmanr",
    "precision",
    "recall",
    "loss",
    "mse",
    "mae",
    "rmse",
}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_ABSOLUTE = re.compile(r"""(^|[\s='",:\[{(])(~?/[^\s'",\]})]+)""")
_HYPER_PARAMETERS = ("optimizer", "scheduler", "param_groups", "clip", "adapter")
_TRAINING = (
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "precision",
)
_NEVER = ("path", "token", "password", "secret")  # keys that say where, or to whom, not how


@dataclass(frozen=True)
class TaskCard:
    """What the card says of a task, whoever brought it."""

    title: str = ""
    """What a person calls it, such as `text classification`; empty: its name."""
    pipeline_tag: str = ""
    """Of the Hugging Face hub; empty: none."""
    auto_class: str = "AutoModel"
    processor: str = "AutoTokenizer"
    usage: Sequence[str] = ()
    """Lines of code that use `model` and `tokenizer` (or `processor`)."""
    classifies: bool = False
    """Whether the data decides how many labels the model has."""
    embeds: bool = False
    """Whether sentence-transformers loads it."""
    base: str = ""
    """Of an adapter: a hub name or a folder where the weights lie that it stands beside; empty.

    It is no adapter.
    """
    arguments: Mapping[str, object] = field(default_factory=dict)
    """What the base is loaded with."""


def model_card(
    summary: Mapping[str, object],
    config: Mapping[str, object],
    task_card: TaskCard | None = None,
    *,
    name: str = "",
) -> str:
    """Write the text of `model/README.md`.

    Args:
        summary: As in `summary.json`; what is missing is left out.
        config: The resolved configuration, nested.
        task_card: Of the task; None: it is not known here.
        name: Heading; default: made of model, optimizer and data.

    Returns:
        Markdown with YAML metadata on top: library, tags, pipeline, metrics, and base model and
        dataset where these are names of the hub.
    """
    task = str(lookup(config, "task", "kind") or lookup(config, "task", "name") or "")
    facts = task_card or TaskCard()
    heading = plain(name) or _heading(config)
    parameters = lookup(summary, "model", "parameters")
    weights, stopped = _completeness(summary)
    return fill_markdown(
        "card.md",
        "optrun.runner",
        metadata=Markup(_metadata(summary, config, heading, task, facts)),
        heading=heading,
        kind=_text(summary, "model", "class"),
        parameters=count(parameters) if isinstance(parameters, int) else "",
        noun=facts.title or task.replace("_", " "),
        origin=_origin(config),
        dataset=_dataset(config),
        examples=_examples(summary),
        weights=weights,
        stopped=stopped,
        results=_results(summary),
        classes=list(tables_of(summary)),
        main_metric=_text(summary, "main_metric", "name"),
        usage=_usage(facts),
        generalisation=sentence_of(summary),
        commands=relative_names("\n".join(_commands(summary))),
        settings=_settings(config),
        facts=_facts(summary),
    )


def _metadata(
    summary: Mapping[str, object],
    config: Mapping[str, object],
    heading: str,
    task: str,
    facts: TaskCard,
) -> str:
    """Make the YAML that the hub reads."""
    optimizer = str(lookup(config, "optimizer", "name") or "")
    tag = facts.pipeline_tag
    metadata: dict[str, object] = {"library_name": "peft" if facts.base else "transformers"}
    if tag:
        metadata["pipeline_tag"] = tag
    metadata["tags"] = [word for word in ("optrun", optimizer, task.replace("_", "-")) if word]
    if base := _hub_name(config, "model", "pretrained"):
        metadata["base_model"] = base
    if dataset := _hub_name(config, "data", "hub"):
        metadata["datasets"] = [dataset]
    sets: dict[str, dict[str, float]] = {}
    for key, number in _evaluation(summary).items():
        prefix, _, metric = key.rpartition("/")
        if metric in _METRIC_TYPES:
            sets.setdefault(prefix.removeprefix("eval").removeprefix("/") or "evaluation", {})[
                metric
            ] = number
    known = list(dict.fromkeys(metric for found in sets.values() for metric in found))
    if known:
        metadata["metrics"] = [key for key in known if key != "loss"] or known
    data = str(lookup(config, "data", "name") or "")
    if known and tag and data:
        metadata["model-index"] = [
            {
                "name": heading,
                "results": [
                    {
                        "task": {"type": tag},
                        "dataset": {"name": plain(_dataset(config)), "type": data, "split": split},
                        "metrics": [
                            {"type": key, "value": round(number, 6)}
                            for key, number in found.items()
                        ],
                    }
                    for split, found in sets.items()
                ],
            }
        ]
    return str(yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, width=1000)).rstrip()


def _examples(summary: Mapping[str, object]) -> str:
    """Say how many examples were trained and evaluated on."""
    train, evaluated = (
        lookup(summary, "data", "train_examples"),
        lookup(summary, "data", "eval_examples"),
    )
    if not (isinstance(train, int) and isinstance(evaluated, int)):
        return ""
    return (
        f"{train:,} training examples and {f'{evaluated:,}' if evaluated else 'none'} for"
        " evaluation."
    )


def _completeness(summary: Mapping[str, object]) -> tuple[str, str]:
    """Say of which step the weights are, and how the training ended, where that was not its end."""
    status, step, limit = (
        summary.get("status"),
        summary.get("global_step"),
        summary.get("max_steps"),
    )
    if isinstance(step, int) and isinstance(limit, int) and step < limit:
        reached = f"step {step:,} of {limit:,}"
        if status == "finished":
            return f"These are the weights of {reached}.", ""
        return "", f"The training stopped at {reached}."
    return "", (
        f"The training ended as: {status}."
        if status
        and status
        not in (
            "finished",
            "running",
        )
        else ""
    )


def _results(summary: Mapping[str, object]) -> Table:
    """Tabulate last and best value of every evaluation metric, as far as these weights were trained."""
    table = Table(
        ["metric, on the evaluation split", "last", "best", "at step"], [False, True, True, True]
    )
    for key, number in _evaluation(summary, finite=False).items():
        top_value, top_step = (
            lookup(summary, "metrics", "best", key, field) for field in ("value", "step")
        )
        table.rows.append(
            [
                key.removeprefix("eval/"),
                value(number),
                value(float(top_value)) if isinstance(top_value, (int, float)) else NONE,
                f"{top_step:,}" if isinstance(top_step, int) else NONE,
            ]
        )
    return table


def _usage(task: TaskCard) -> str:
    """Write a snippet that loads the model from this folder."""
    variable = "tokenizer" if task.processor == "AutoTokenizer" else "processor"
    lines = [
        f"from transformers import {task.auto_class}, {task.processor}",
        "",
        'folder = "."  # this folder, or its name on the hub',
        f"{variable} = {task.processor}.from_pretrained(folder)",
        f"model = {task.auto_class}.from_pretrained(folder)",
        *task.usage,
    ]
    if task.base:
        given = "".join(f", {key}={item!r}" for key, item in task.arguments.items())
        name = task.base if _HUB_NAME.fullmatch(task.base) else task.base.rpartition("/")[2]
        lines[0:0] = ["from peft import PeftModel"]
        lines[5:6] = [
            (
                f"base = {task.auto_class}.from_pretrained({name!r}{given})  # the weights that"
                " this adapter stands beside"
            ),
            "model = PeftModel.from_pretrained(base, folder)",
        ]
    return "\n".join(lines)


def _commands(summary: Mapping[str, object]) -> list[str]:
    """List the command that began the run, then those that went on with it in another way."""
    resumes = summary.get("resumes")
    changed = (
        [resume for resume in resumes if lookup(resume, "changes")]
        if isinstance(resumes, list)
        else []
    )
    found = [_text(summary, "command"), *(_text(resume, "command") for resume in changed)]
    return [" ".join(command.splitlines()) for command in found if command]


def _settings(config: Mapping[str, object]) -> Table:
    """Tabulate the hyper-parameters."""
    table = Table(["setting", "value"], [False, False])
    for key in ("lr", "seed"):
        if config.get(key) is not None:
            table.rows.append([key, str(config[key])])
    training = config.get("training")
    for key in _TRAINING:
        if isinstance(training, Mapping) and training.get(key) is not None:
            table.rows.append([f"training.{key}", str(training[key])])
    for group in _HYPER_PARAMETERS:
        chosen = config.get(group)
        if isinstance(chosen, Mapping) and chosen.get("name"):
            options = ", ".join(
                f"{key}={item}"
                for key, item in chosen.items()
                if key not in ("name", "default_lr")
                and item not in (None, "", [], {})
                and not key.endswith(_NEVER)
            )
            table.rows.append(
                [group, f"{chosen['name']} ({options})" if options else str(chosen["name"])]
            )
    return table


def _facts(summary: Mapping[str, object]) -> list[str]:
    """List wall time, hardware and versions, as far as they are known."""
    facts = []
    seconds = summary.get("wall_seconds")
    if isinstance(seconds, (int, float)) and math.isfinite(seconds):
        facts.append(f"{duration(seconds)} of wall time")
    for section in ("hardware", "versions"):
        values = summary.get(section)
        if isinstance(values, Mapping):
            scalars = [
                f"{key} {item}"
                for key, item in values.items()
                if isinstance(item, (str, int, float)) and item != ""
            ]
            facts += [f"{section}: {', '.join(scalars)}"] if scalars else []
    return facts


def _heading(config: Mapping[str, object]) -> str:
    model = _origin(config).rpartition("/")[2] or str(lookup(config, "model", "name") or "model")
    data, optimizer = lookup(config, "data", "name"), lookup(config, "optimizer", "name")
    return plain(
        model + (f" on {data}" if data else "") + (f" with {optimizer}" if optimizer else "")
    )


def _origin(config: Mapping[str, object]) -> str:
    """Name what a fine-tuned model began as: its hub name, or the last piece of a local folder.

    Empty from scratch.
    """
    path = lookup(config, "model", "path")
    if lookup(config, "model", "name") != "pretrained" or not isinstance(path, str):
        return ""
    return path if _HUB_NAME.fullmatch(path) else path.rstrip("/").rpartition("/")[2]


def _hub_name(config: Mapping[str, object], section: str, choice: str) -> str:
    """Find the hub name that a choice was given.

    Nothing for a local folder, whose name means nothing to others.
    """
    path = lookup(config, section, "path")
    is_chosen = lookup(config, section, "name") == choice and isinstance(path, str)
    return str(path) if is_chosen and _HUB_NAME.fullmatch(path) else ""


def relative_names(command: str) -> str:
    """Shorten absolute paths of a command to their last piece.

    Folders of one machine mean nothing elsewhere.

    Example:
        >>> relative_names("optrun data.train=/home/me/train.csv 'data.eval={dev: ~/data/dev.tsv}' lr=1e-3")
        "optrun data.train=train.csv 'data.eval={dev: dev.tsv}' lr=1e-3"
    """
    return _ABSOLUTE.sub(lambda found: found[1] + found[2].rstrip("/").rpartition("/")[2], command)


def _dataset(config: Mapping[str, object]) -> str:
    """Name the data."""
    data = str(lookup(config, "data", "name") or "unknown data")
    if data == "stdlib":
        return "the source text of Python's standard library"
    for key in ("path", "train"):
        source = lookup(config, "data", key)
        if isinstance(source, (list, tuple)) and source:
            source = f"{source[0]} and {len(source) - 1} more" if len(source) > 1 else source[0]
        if isinstance(source, str) and source:
            return (
                source.rstrip("/").rpartition("/")[2]
                if source.startswith(("/", "~", "."))
                else source
            )
    return data


def _evaluation(summary: Mapping[str, object], *, finite: bool = True) -> dict[str, float]:
    """Return the last evaluation metrics, bookkeeping left out."""
    last = lookup(summary, "metrics", "last")
    found: dict[str, float] = {}
    for key, number in last.items() if isinstance(last, Mapping) else ():
        number = math.nan if number == "NaN" else number
        if (
            str(key).startswith("eval/")
            and isinstance(number, (int, float))
            and not isinstance(number, bool)
        ):
            leaf = str(key).rpartition("/")[2]
            if not leaf.endswith(
                (
                    "seconds",
                    "runtime",
                    "per_second",
                    "samples",
                    "examples",
                    "tokens",
                    "batches",
                    "time",
                )
            ):
                found[str(key)] = float(number)
    return (
        {key: number for key, number in found.items() if math.isfinite(number)} if finite else found
    )


def _text(section: Mapping[str, object], *keys: str) -> str:
    """Look up a nested value as text; empty where there is none."""
    return str(lookup(section, *keys) or "")
