"""Write the model card of a trained model: `README.md` beside the weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from posixpath import basename

from markupsafe import Markup

from optrun.artifacts.generalisation import sentence_of
from optrun.base.formatting import count, list_names, plain
from optrun.base.plain import lookup
from optrun.report.table import Table, format_metric
from optrun.report.templating import fill_markdown

_HUB_METRICS = {
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
_BOOKKEEPING = ("seconds", "runtime", "per_second", "samples", "examples", "tokens", "batches")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_ABSOLUTE = re.compile(r"""(^|[\s='",:\[{(])(~?/[^\s'",\]})]+)""")


@dataclass(frozen=True)
class TaskCard:
    """The task's part of a model card, for built-in and plugin tasks."""

    title: str = ""
    """Title for people, such as `text classification`; empty: the name of the task."""
    pipeline_tag: str = ""
    """Pipeline tag of the Hugging Face hub; empty: none."""
    auto_class: str = "AutoModel"
    processor: str = "AutoTokenizer"
    usage: Sequence[str] = ()
    """Lines of code that use `model` and `tokenizer` (or `processor`)."""
    classifies: bool = False
    """Whether the data decides how many labels the model has."""
    embeds: bool = False
    """Whether sentence-transformers loads it."""
    base: str = ""
    """For an adapter, the hub name or folder of its base; else empty."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments that load the base."""


def model_card(
    summary: Mapping[str, object],
    config: Mapping[str, object],
    task_card: TaskCard | None = None,
) -> str:
    """Write the text of `model/README.md`, the model card.

    Args:
        summary: Values of `summary.json`; missing ones are left out.
        config: The resolved configuration, nested.
        task_card: The task's part of the card; None: the task is unknown here.

    Returns:
        Markdown with YAML metadata at the top. Base model and dataset are in the metadata only if
        they are names on the hub.
    """
    task = str(lookup(config, "task", "kind") or lookup(config, "task", "name") or "")
    facts = task_card or TaskCard()
    heading = _heading(config)
    metrics = _evaluation_metrics(summary)
    parameters = lookup(summary, "model", "parameters")
    results = Table(
        ["metric, on the evaluation split", "value"],
        [False, True],
        [[key.removeprefix("eval/"), format_metric(number)] for key, number in metrics.items()],
    )
    # The values of the template; it leaves out a section whose value is empty.
    return fill_markdown(
        "card.md",
        "optrun.runner",
        metadata=Markup(_metadata(metrics, config, heading, task, facts)),
        heading=heading,
        kind=str(lookup(summary, "model", "class") or ""),
        parameters=count(parameters) if isinstance(parameters, int) else "",
        noun=facts.title or task.replace("_", " "),
        origin=_base_model_name(config),
        dataset=_data_name(config),
        summary=summary,
        results=results,
        generalisation=sentence_of(summary),
        usage=_loading_code(facts),
        command="\n".join(map(relative_names, _commands(summary))),
        config_file=relative_names(str(summary.get("config_file", ""))),
    )


def _commands(summary: Mapping[str, object]) -> list[str]:
    """List the training commands of these weights: the first, then each resume with changes.

    A resume without changes repeats the same training. One from the step of the weights, or a later
    one, has no part in them.

    Args:
        summary: Values of `summary.json`: `command`, `resumes`, and the step of the weights.

    Returns:
        Commands, each as one line, in the order they were given.
    """
    step = summary.get("global_step")
    resumes = summary.get("resumes")
    commands = [summary.get("command")]
    for resume in resumes if isinstance(resumes, list) else ():
        start = lookup(resume, "from_step")
        is_before = isinstance(step, int) and isinstance(start, int) and start < step
        if is_before and lookup(resume, "changes"):
            commands.append(lookup(resume, "command"))
    return [" ".join(str(command).splitlines()) for command in commands if command]


def _metadata(
    metrics: Mapping[str, float],
    config: Mapping[str, object],
    heading: str,
    task: str,
    facts: TaskCard,
) -> str:
    """Write the YAML metadata for the hub.

    Args:
        metrics: Evaluation metrics; those that the hub does not know, NaN and infinity are left
            out.
        config: The resolved configuration.
        heading: Name of the model on the hub.
        task: Name of the task.
        facts: The task's part of the card; without a pipeline tag there are no results.

    Returns:
        The lines between the two `---` at the top of a card.
    """
    from huggingface_hub import EvalResult, ModelCardData

    # 1. Results, and the names of their metrics.
    optimizer = str(lookup(config, "optimizer", "name") or "")
    results = []
    metric_names = []
    for key, number in metrics.items():
        split, _, name = key.removeprefix("eval/").rpartition("/")
        if name not in _HUB_METRICS or not math.isfinite(number):
            continue
        if name not in metric_names:
            metric_names.append(name)
        if facts.pipeline_tag:
            results.append(
                EvalResult(
                    task_type=facts.pipeline_tag,
                    dataset_type=str(lookup(config, "data", "name") or "data"),
                    dataset_name=plain(_data_name(config)),
                    dataset_split=split or "evaluation",
                    metric_type=name,
                    metric_value=round(number, 6),
                )
            )
    # The loss is listed only if there is no other metric.
    metric_names = [name for name in metric_names if name != "loss"] or metric_names

    # 2. The block. None leaves an entry out.
    dataset = _hub_name(config, "data", "hub")
    data = ModelCardData(
        library_name="peft" if facts.base else "transformers",
        pipeline_tag=facts.pipeline_tag or None,
        tags=[word for word in ("optrun", optimizer, task.replace("_", "-")) if word],
        base_model=_hub_name(config, "model", "pretrained") or None,
        datasets=[dataset] if dataset else None,
        metrics=metric_names or None,
        model_name=heading if results else None,
        eval_results=results or None,
    )
    return str(data.to_yaml())


def _loading_code(task: TaskCard) -> str:
    """Write Python code to load the model from this folder; an adapter on its base.

    For a classifier, for instance:

        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        folder = "."  # this folder, or its name on the hub
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForSequenceClassification.from_pretrained(folder)

    and then the lines of `task.usage`.
    """
    variable = "tokenizer" if task.processor == "AutoTokenizer" else "processor"
    imports = [f"from transformers import {task.auto_class}, {task.processor}"]
    load = [f"model = {task.auto_class}.from_pretrained(folder)"]
    if task.base:
        keywords = "".join(f", {key}={item!r}" for key, item in task.arguments.items())
        name = task.base if _HUB_NAME.fullmatch(task.base) else basename(task.base)
        imports.insert(0, "from peft import PeftModel")
        load = [
            f"base = {task.auto_class}.from_pretrained({name!r}{keywords})"
            "  # the base of this adapter",
            "model = PeftModel.from_pretrained(base, folder)",
        ]
    lines = [
        *imports,
        "",
        'folder = "."  # this folder, or its name on the hub',
        f"{variable} = {task.processor}.from_pretrained(folder)",
        *load,
        *task.usage,
    ]
    return "\n".join(lines)


def _heading(config: Mapping[str, object]) -> str:
    """Name the model and the data it was trained on."""
    model = basename(_base_model_name(config)) or str(lookup(config, "model", "name") or "model")
    return plain(f"{model} on {_data_name(config)}")


def _base_model_name(config: Mapping[str, object]) -> str:
    """Name the pretrained model of a run: its hub name, or the last part of its folder.

    Empty if the model was trained from scratch (another choice of `model`).
    """
    path = lookup(config, "model", "path")
    if lookup(config, "model", "name") != "pretrained" or not isinstance(path, str):
        return ""
    if _HUB_NAME.fullmatch(path):
        return path
    return basename(path.rstrip("/"))


def _hub_name(config: Mapping[str, object], section: str, choice: str) -> str:
    """Return `path` of a configuration section if it is a name on the hub; else empty.

    The name of a local folder means nothing to others.

    Args:
        config: The resolved configuration.
        section: The group, `model` or `data`.
        choice: The choice of the group whose `path` can be a hub name; `path` of another is not.

    Example:
        >>> _hub_name({"data": {"name": "hub", "path": "stanfordnlp/imdb"}}, "data", "hub")
        'stanfordnlp/imdb'
        >>> _hub_name({"data": {"name": "hub", "path": "/home/me/imdb"}}, "data", "hub")
        ''
    """
    path = lookup(config, section, "path")
    if lookup(config, section, "name") != choice or not isinstance(path, str):
        return ""
    return path if _HUB_NAME.fullmatch(path) else ""


def relative_names(command: str) -> str:
    """Shorten absolute paths in a command, also those that begin with `~`, to their last part.

    Folders of one machine mean nothing elsewhere.

    Example:
        >>> relative_names("optrun data.train=/home/me/train.csv 'data.eval={dev: ~/data/dev.tsv}'")
        "optrun data.train=train.csv 'data.eval={dev: dev.tsv}'"
    """
    return _ABSOLUTE.sub(lambda match: match[1] + basename(match[2].rstrip("/")), command)


def _data_name(config: Mapping[str, object]) -> str:
    """Name the data of a run for its model card.

    By its hub name, the last part of a local path, else its choice of `data`. Of several files the
    first one is named, and how many more there are.

    Example:
        >>> _data_name({"data": {"name": "files", "train": "/home/me/train.csv"}})
        'train.csv'
        >>> _data_name({"data": {"name": "mixture"}})
        'mixture'
    """
    data = str(lookup(config, "data", "name") or "unknown data")
    if data == "stdlib":
        return "the source text of Python's standard library"
    for key in ("path", "train"):
        source = lookup(config, "data", key)
        if isinstance(source, (list, tuple)) and source:
            source = list_names(source, 1)
        if isinstance(source, str) and source:
            if source.startswith(("/", "~", ".")):
                return basename(source.rstrip("/"))
            return source
    return data


def _evaluation_metrics(summary: Mapping[str, object]) -> dict[str, float]:
    """Return the last evaluation metrics, without bookkeeping such as runtimes.

    Values that are no numbers are left out; the text "NaN" of a JSON file is one.

    Example:
        >>> last = {"eval/loss": 0.5, "eval/f1": "NaN", "train/loss": 0.4, "eval/note": "x"}
        >>> _evaluation_metrics({"metrics": {"last": last}})
        {'eval/loss': 0.5, 'eval/f1': nan}
    """
    last = lookup(summary, "metrics", "last")
    metrics: dict[str, float] = {}
    for key, number in last.items() if isinstance(last, Mapping) else ():
        if number == "NaN":
            number = math.nan
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            continue
        if key.startswith("eval/") and not key.endswith(_BOOKKEEPING):
            metrics[key] = float(number)
    return metrics
