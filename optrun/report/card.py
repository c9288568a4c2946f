"""The model card of a trained model: `README.md` beside the weights, in the form the Hugging Face hub reads."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from optrun.formatting import count, duration, plain
from optrun.report.tables import Table, escape_markdown, to_markdown, value

_TASKS = {
    # task: (pipeline tag, auto class, what a person calls it)
    "causal_lm": ("text-generation", "AutoModelForCausalLM", "language modelling"),
    "masked_lm": ("fill-mask", "AutoModelForMaskedLM", "masked language modelling"),
    "sequence_classification": ("text-classification", "AutoModelForSequenceClassification", "text classification"),
    "token_classification": ("token-classification", "AutoModelForTokenClassification", "token classification"),
    "seq2seq_lm": ("text2text-generation", "AutoModelForSeq2SeqLM", "sequence to sequence"),
    "image_classification": ("image-classification", "AutoModelForImageClassification", "image classification"),
}
_METRIC_TYPES = {"accuracy", "f1", "perplexity", "mcc", "matthews_correlation", "pearson", "pearsonr", "spearman",
                 "spearmanr", "precision", "recall", "loss", "mse", "mae", "rmse"}  # fmt: skip
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HYPER_PARAMETERS = ("optimizer", "scheduler", "param_groups", "clip")
_TRAINING = (
    "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "precision",
)  # fmt: skip
_NEVER = ("path", "token", "password", "secret")  # keys that say where, or to whom, not how


def model_card(summary: Mapping[str, Any], config: Mapping[str, Any], *, name: str = "") -> str:
    """The text of `model/README.md`.

    Args:
        summary: As in `summary.json`; what is missing is left out.
        config: The resolved configuration, nested.
        name: Heading; default: made of model, optimizer and data.

    Returns:
        Markdown with YAML metadata on top: library, tags, pipeline, base model where it is a hub name, metrics.
    """
    task = str(_get(config, "task", "kind") or _get(config, "task", "name") or "")
    tag, auto_class, words = _TASKS.get(task, ("", "AutoModel", escape_markdown(task.replace("_", " "))))
    heading = plain(name) or _heading(config)
    parts = [
        _front_matter(summary, config, heading, task, tag),
        f"# {escape_markdown(heading)}",
        _introduction(summary, config, words),
        "## Results",
        _results(summary),
        "## Use",
        _usage(auto_class, task),
        "## Training",
        _training(summary, config),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(summary: Mapping[str, Any], config: Mapping[str, Any], heading: str, task: str, tag: str) -> str:
    """The YAML block that the hub reads."""
    optimizer = str(_get(config, "optimizer", "name") or "")
    metadata: dict[str, Any] = {"library_name": "transformers"}
    if tag:
        metadata["pipeline_tag"] = tag
    metadata["tags"] = [word for word in ("optrun", optimizer, task.replace("_", "-")) if word]
    if base := _base_model(config):
        metadata["base_model"] = base
    results = {key.rpartition("/")[2]: number for key, number in _evaluation(summary).items()}
    known = {key: number for key, number in results.items() if key in _METRIC_TYPES}
    if known:
        metadata["metrics"] = [key for key in known if key != "loss"] or list(known)
    data = str(_get(config, "data", "name") or "")
    if known and tag and data:
        metadata["model-index"] = [
            {
                "name": heading,
                "results": [
                    {
                        "task": {"type": tag},
                        "dataset": {"name": plain(_dataset(config)), "type": data, "split": "evaluation"},
                        "metrics": [{"type": key, "value": round(number, 6)} for key, number in known.items()],
                    }
                ],
            }
        ]
    text = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, width=1000)
    return f"---\n{text}---"


def _introduction(summary: Mapping[str, Any], config: Mapping[str, Any], words: str) -> str:
    """One paragraph: what it is and what it was trained on."""
    kind = _get(summary, "model", "class")
    size = _get(summary, "model", "parameters")
    lead = f"A `{_code(kind)}`" if kind else "A transformers model"
    if isinstance(size, int):
        lead += f" with {count(size)} parameters"
    base = _origin(config)
    origin = f"fine-tuned from `{_code(base)}`" if base else "trained from scratch"
    data = escape_markdown(_dataset(config))
    sentences = [f"{lead} for {words}, {origin} on {data}." if words else f"{lead}, {origin} on {data}."]
    train, evaluated = _get(summary, "data", "train_examples"), _get(summary, "data", "eval_examples")
    if isinstance(train, int) and isinstance(evaluated, int):
        held = f"{evaluated:,} for evaluation" if evaluated else "none for evaluation"
        sentences.append(f"{train:,} training examples and {held}.")
    status, step, limit = summary.get("status"), summary.get("global_step"), summary.get("max_steps")
    if isinstance(step, int) and isinstance(limit, int) and step < limit:
        place = f"step {step:,} of {limit:,}"
        went_on = status == "finished"
        sentences.append(f"These are the weights of {place}." if went_on else f"**The training stopped at {place}.**")
    elif status and status not in ("finished", "running"):
        sentences.append(f"**The training ended as: {escape_markdown(str(status))}.**")
    sentences.append("Trained with optrun.")
    return " ".join(sentences)


def _results(summary: Mapping[str, Any]) -> str:
    """Last and best value of every evaluation metric, as far as these weights were trained."""
    best = _get(summary, "metrics", "best")
    table = Table(["metric, on the evaluation split", "last", "best", "at step"], [False, True, True, True])
    for key, number in _evaluation(summary, finite=False).items():
        top = best.get(key) if isinstance(best, Mapping) else None
        top_value, top_step = _get(top, "value"), _get(top, "step")
        table.rows.append(
            [
                key.removeprefix("eval/"),
                value(number),
                value(float(top_value)) if isinstance(top_value, (int, float)) else "–",
                f"{top_step:,}" if isinstance(top_step, int) else "–",
            ]
        )
    if not table.rows:
        return "Not evaluated."
    main = _get(summary, "main_metric", "name")
    note = f"\n\nThe best checkpoint was chosen by `{_code(main)}` on this same split." if main else ""
    return to_markdown(table) + note


def _usage(auto_class: str, task: str) -> str:
    """A snippet that loads the model from this folder."""
    processor = "AutoImageProcessor" if task == "image_classification" else "AutoTokenizer"
    variable = "processor" if task == "image_classification" else "tokenizer"
    lines = [
        f"from transformers import {auto_class}, {processor}",
        "",
        'folder = "."  # this folder, or its name on the hub',
        f"{variable} = {processor}.from_pretrained(folder)",
        f"model = {auto_class}.from_pretrained(folder)",
    ]
    more = {
        "causal_lm": [
            'inputs = tokenizer("def ", return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))",
        ],
        "sequence_classification": [
            'logits = model(**tokenizer("a text", return_tensors="pt")).logits',
            "print(model.config.id2label[int(logits.argmax())] if logits.shape[-1] > 1 else float(logits))",
        ],
        "masked_lm": [
            'inputs = tokenizer(f"a {tokenizer.mask_token} text", return_tensors="pt")',
            "masked = inputs.input_ids == tokenizer.mask_token_id",
            "print(tokenizer.decode(model(**inputs).logits[masked].argmax(-1)))",
        ],
    }
    return "```python\n" + "\n".join(lines + more.get(task, [])) + "\n```"


def _training(summary: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Command, hyper-parameters, time, versions."""
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
                if key not in ("name", "default_lr") and item not in (None, "", [], {}) and not key.endswith(_NEVER)
            )
            table.rows.append([group, f"{chosen['name']} ({options})" if options else str(chosen["name"])])
    parts = []
    command = summary.get("command")
    if command:
        line = str(command).replace("\n", " ")
        fence = "```" if "```" not in line else "~~~"
        parts.append(f"{fence}sh\n{line}\n{fence}")
    if table.rows:
        parts.append(to_markdown(table))
    facts = []
    seconds = summary.get("wall_seconds")
    if isinstance(seconds, (int, float)) and math.isfinite(seconds):
        facts.append(f"{duration(seconds)} of wall time")
    hardware = _words(summary.get("hardware"))
    if hardware:
        facts.append(f"hardware: {hardware}")
    versions = _words(summary.get("versions"))
    if versions:
        facts.append(f"versions: {versions}")
    if facts:
        parts.append("\n".join(f"- {escape_markdown(fact)}" for fact in facts))
    return "\n\n".join(parts)


def _heading(config: Mapping[str, Any]) -> str:
    model = _origin(config).rpartition("/")[2] or str(_get(config, "model", "name") or "model")
    data, optimizer = _get(config, "data", "name"), _get(config, "optimizer", "name")
    return plain(model + (f" on {data}" if data else "") + (f" with {optimizer}" if optimizer else ""))


def _origin(config: Mapping[str, Any]) -> str:
    """What a fine-tuned model began as: its hub name, or the last piece of a local folder; empty from scratch."""
    path = _get(config, "model", "path")
    if _get(config, "model", "name") != "pretrained" or not isinstance(path, str):
        return ""
    return path if _HUB_NAME.fullmatch(path) else path.rstrip("/").rpartition("/")[2]


def _base_model(config: Mapping[str, Any]) -> str:
    """The hub name the model began as; nothing for a local folder, whose name means nothing to others."""
    path = _get(config, "model", "path")
    return str(path) if _origin(config) and _HUB_NAME.fullmatch(str(path)) else ""


def _dataset(config: Mapping[str, Any]) -> str:
    """What the data are called."""
    data = str(_get(config, "data", "name") or "unknown data")
    if data == "stdlib":
        return "the source text of Python's standard library"
    for key in ("path", "train"):
        source = _get(config, "data", key)
        if isinstance(source, (list, tuple)) and source:
            source = f"{source[0]} and {len(source) - 1} more" if len(source) > 1 else source[0]
        if isinstance(source, str) and source:
            return source.rstrip("/").rpartition("/")[2] if source.startswith(("/", "~", ".")) else source
    return data


def _evaluation(summary: Mapping[str, Any], *, finite: bool = True) -> dict[str, float]:
    """Last evaluation metrics, bookkeeping left out."""
    last = _get(summary, "metrics", "last")
    found: dict[str, float] = {}
    for key, number in last.items() if isinstance(last, Mapping) else ():
        number = math.nan if number == "NaN" else number
        if str(key).startswith("eval/") and isinstance(number, (int, float)) and not isinstance(number, bool):
            leaf = str(key).rpartition("/")[2]
            if not leaf.endswith(
                ("seconds", "runtime", "per_second", "samples", "examples", "tokens", "batches", "time")
            ):
                found[str(key)] = float(number)
    return {key: number for key, number in found.items() if math.isfinite(number)} if finite else found


def _words(section: Any) -> str:
    """A flat mapping as words."""
    if not isinstance(section, Mapping):
        return ""
    return ", ".join(
        f"{key} {item}" for key, item in section.items() if isinstance(item, (str, int, float)) and item != ""
    )


def _code(content: Any) -> str:
    """Text between backticks."""
    return plain(str(content)).replace("`", "'")


def _get(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
