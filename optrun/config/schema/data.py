"""Where the examples come from."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from optrun import registry
from optrun.config.schema.checks import expect, expect_count, expect_fraction
from optrun.errors import refuse_url

TOKEN_TYPES = ("uint16", "uint32", "int32", "int64")
"""Types of ids in files without a header."""


@dataclass(kw_only=True)
class DataConfig:
    """What every source has."""

    EVALUATION_ROWS: ClassVar[str | None] = None
    """How other rows to evaluate on are named; None: such a source has no others."""
    PATHS: ClassVar[tuple[str, ...]] = ()
    """Keys that hold files or folders: relative ones are found again when the run goes on from another folder."""
    OF_TOKENS: ClassVar[bool] = False
    """Whether its rows are token ids, and no texts."""
    # Values where a registered source has no YAML that says them.
    name: str
    max_length: int = 128
    """Tokens of an example, at most; of a block, exactly."""
    eval_fraction: float = 0.1
    """Share of the training rows cut off for evaluation, by the seed, where no evaluation split is given; in [0, 1); 0:
    none, and no evaluation."""
    max_train_examples: int | None = None
    """Use only this many training examples (rows; blocks when packed), picked by the seed; null: all."""
    max_eval_examples: int | None = None
    """Use only this many evaluation examples, the same ones whatever the seed; null: all."""

    def __post_init__(self) -> None:
        """Refuse sizes that leave nothing to train on."""
        expect(self.max_length >= 2, "data.max_length", self.max_length, "2 tokens or more")
        expect_fraction("data.eval_fraction", self.eval_fraction)
        expect_count("data.max_train_examples", self.max_train_examples)
        expect_count("data.max_eval_examples", self.max_eval_examples)


@dataclass(kw_only=True)
class StdlibConfig(DataConfig):
    """The source text of the running Python's standard library: real input, no download."""


@dataclass(kw_only=True)
class StdlibTokensConfig(DataConfig):
    """Lines of that source, each token with its kind, for token_classification."""


@dataclass(kw_only=True)
class StdlibStatementsConfig(DataConfig):
    """Statements of it without the keyword they begin with, which is the label, for sequence_classification."""


@dataclass(kw_only=True)
class StdlibChatConfig(DataConfig):
    """Questions about its functions, answered by a rule, for sft."""


@dataclass(kw_only=True)
class DigitsConfig(DataConfig):
    """Handwritten digits that scikit-learn ships, for image_classification."""


@dataclass(kw_only=True)
class ColumnsConfig(DataConfig):
    """Sources with named columns. Null: found by itself where there is only one possibility."""

    text_column: str | None = None
    """Texts; lists of words for token_classification."""
    eval_text_column: str | None = None
    """Only where the evaluation split calls the text otherwise."""
    text_pair_column: str | None = None
    """Second text of an example."""
    label_column: str | None = None
    """Null: `label` or `labels`, if there is one; for token_classification also `tags` and `ner_tags`."""
    label_columns: list[str] | None = None
    """A column of 0 and 1 for each label (task.problem_type=multi_label_classification). Null: lists of labels in
    label_column."""
    choices_column: str | None = None
    """Lists of texts to choose from (multiple_choice). Null: `choices` or `endings`, if there is one."""
    target_column: str | None = None
    """Text to produce (seq2seq_lm). Null: `target`."""
    image_column: str | None = None
    """Images or their paths (image_classification). Null: the only column of images."""


@dataclass(kw_only=True)
class PathsConfig(DataConfig):
    """Sources that are files of the user's."""

    EVALUATION_ROWS: ClassVar[str | None] = "data.eval=FILE"
    PATHS: ClassVar[tuple[str, ...]] = ("train", "eval")
    train: Any
    """One path, a list of paths, or a glob."""
    eval: Any
    """The same, or a mapping of names to the same: several evaluation sets; null: cut from train."""

    def __post_init__(self) -> None:
        """Refuse anything but a path or a list of paths."""
        super().__post_init__()
        expect(self.eval != {}, "data.eval", self.eval, "a path, or a mapping such as {dev: dev.tsv, hard: hard.tsv}")
        for key, value in (("data.train", self.train), *((eval_key(name), paths) for name, paths in self.eval_files())):
            refuse_url(key, value)
            paths = value if isinstance(value, list | tuple) else [value]
            expect(
                bool(paths) and all(isinstance(path, str) and path.strip() for path in paths),
                key,
                value,
                "a path, a list of paths, or a glob",
            )

    def eval_files(self) -> list[tuple[str, Any]]:
        """Name and paths of each evaluation set; the name of a single one is empty.

        Raises:
            ConfigError: A name that is none.
        """
        if self.eval is None:
            return []
        if not isinstance(self.eval, Mapping):
            return [("", self.eval)]
        return list(zip(eval_set_names(self.eval), self.eval.values(), strict=True))


@dataclass(kw_only=True)
class FilesConfig(PathsConfig, ColumnsConfig):
    """The user's own csv, tsv, json, jsonl, parquet or text files."""


@dataclass(kw_only=True)
class TokensConfig(PathsConfig):
    """Token ids that another program wrote: nanoGPT's, llm.c's or Megatron's files, mapped from disk."""

    OF_TOKENS: ClassVar[bool] = True
    dtype: str | None
    """Type of the ids where a file does not say it, as nanoGPT's do not; null: `uint16`."""

    def __post_init__(self) -> None:
        """Refuse what is no type of ids."""
        super().__post_init__()
        expect(
            self.dtype is None or self.dtype in TOKEN_TYPES, "data.dtype", self.dtype, f"null, {', '.join(TOKEN_TYPES)}"
        )


@dataclass(kw_only=True)
class HubConfig(ColumnsConfig):
    """A dataset by `datasets.load_dataset`: hub name or local folder."""

    EVALUATION_ROWS: ClassVar[str | None] = "data.eval_split=NAME"
    PATHS: ClassVar[tuple[str, ...]] = ("path",)
    path: str
    subset: str | None
    """The dataset's configuration, what `load_dataset` calls `name`."""
    revision: str | None
    train_split: str
    eval_split: str | None
    """Null: `validation` or `test`, if there is one; else cut from train."""

    def __post_init__(self) -> None:
        """Refuse what is no name and no folder."""
        super().__post_init__()
        refuse_url("data.path", self.path)


def eval_key(name: str) -> str:
    """The key of an evaluation set, for messages.

    Example:
        >>> eval_key("dev"), eval_key("")
        ('data.eval.dev', 'data.eval')
    """
    return f"data.eval.{name}" if name else "data.eval"


def eval_set_names(names: Iterable[object]) -> list[str]:
    """The names of evaluation sets as they stand in `eval/NAME/accuracy`.

    Raises:
        ConfigError: One has other characters than letters, digits, `_` and `-`, is `train`, or differs from another one
            by upper and lower case alone.
    """
    seen: dict[str, str] = {}
    for name in names:
        good = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_-]+", name) is not None
        key, value = "data.eval", f"{{{name}: ...}}"
        expect(good, key, value, "names of letters, digits, _ and -, as in eval/NAME/accuracy")
        text = str(name)
        expect(text.lower() != "train", key, value, "another name: tables would show its metrics as train/loss")
        other = seen.setdefault(text.lower(), text)
        expect(other == text, key, value, f"a name that differs from {other} by more than upper and lower case")
    return list(seen.values())


SCHEMAS: dict[str, type[DataConfig]] = registry.own(
    "data",
    {
        "stdlib": (StdlibConfig, "optrun.data.stdlib:load_stdlib"),
        "stdlib_tokens": (StdlibTokensConfig, "optrun.data.stdlib_lines:load_stdlib_tokens"),
        "stdlib_statements": (StdlibStatementsConfig, "optrun.data.stdlib_lines:load_stdlib_statements"),
        "stdlib_chat": (StdlibChatConfig, "optrun.data.stdlib_chat:load_stdlib_chat"),
        "digits": (DigitsConfig, "optrun.data.sklearn_digits:load_sklearn_digits"),
        "files": (FilesConfig, "optrun.data.files:load_files"),
        "hub": (HubConfig, "optrun.data.hub:load_hub"),
        "tokens": (TokensConfig, "optrun.data.tokens:load_tokens"),
    },
)
