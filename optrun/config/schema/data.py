"""Sources of examples."""

import codecs
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar

from optrun.base.errors import ConfigError, did_you_mean, refuse_url
from optrun.config import registry
from optrun.config.schema.checks import Checked, build, expect, expecting
from optrun.config.schema.ranges import Count, Fraction, at_least, matching, one_of, share

STOPPING_STRATEGIES = ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement")
"""Those of `datasets.interleave_datasets`."""
TOKEN_TYPES = ("uint16", "uint32", "int32", "int64")
"""Types of ids in files without a header."""


def _encoding(name: str, value: str) -> str:
    """Return the name of a text encoding known to Python; ValueError for any other."""
    try:
        codec = codecs.lookup(value)
    except (LookupError, ValueError):
        is_text = False
    else:
        is_text = getattr(codec, "_is_text_encoding", True)  # False for codecs such as base64
    if not is_text:
        raise ValueError(f"{name}={value}: expected utf-8, cp1252, gb18030 or the like.")
    return value


@dataclass(kw_only=True)
class DataConfig(Checked):
    """What every source has."""

    GROUP = "data."
    EVALUATION_ROWS: ClassVar[str | None] = None
    """How the user names other rows to evaluate on; None: this source has no others."""
    OF_TOKENS: ClassVar[bool] = False
    """Whether its rows are token ids, not texts."""
    # The defaults are for registered sources, which have no YAML.
    name: str
    max_length: Annotated[int, at_least(2)] = 128
    """Tokens of an example, at most; of a block, exactly."""
    eval_fraction: Fraction = 0.1
    """Share of the training rows cut off for evaluation, by the seed, where no evaluation split is
    given; 0: none, and no evaluation."""
    max_train_examples: Count | None = None
    """Use only this many training examples (rows; blocks when packed), picked by the seed; null:
    all."""
    max_eval_examples: Count | None = None
    """Use only this many evaluation examples, the same ones whatever the seed; null: all."""

    @property
    def streamed_by(self) -> str | None:
        """The key for streamed training rows; None: they are not streamed."""
        if getattr(self, "streaming", False):
            return "data.streaming"
        return None


@dataclass(kw_only=True)
class StdlibConfig(DataConfig):
    """The source text of the running Python's standard library: real input, no download."""


@dataclass(kw_only=True)
class StdlibTokensConfig(DataConfig):
    """Lines of the standard library, each token with its kind, for token_classification."""


@dataclass(kw_only=True)
class StdlibStatementsConfig(DataConfig):
    """Statements of the standard library without their first keyword, which is the label.

    For sequence_classification.
    """


@dataclass(kw_only=True)
class StdlibChatConfig(DataConfig):
    """Questions about functions of the standard library, answered by a rule, for sft."""


@dataclass(kw_only=True)
class StdlibPreferencesConfig(DataConfig):
    """Questions on the standard library, each with a right and a wrong answer, for preference."""


@dataclass(kw_only=True)
class StdlibPairsConfig(DataConfig):
    """Docstrings of the standard library, each with the body of its function, for embedding."""


@dataclass(kw_only=True)
class DigitsConfig(DataConfig):
    """Handwritten digits from scikit-learn, for image_classification."""


@dataclass(kw_only=True)
class ColumnsConfig(DataConfig):
    """Sources with named columns; null: the only column of its kind."""

    text_column: str | None = None
    """Texts; lists of words for token_classification."""
    text_pair_column: str | None = None
    """Second text of an example."""
    messages_column: str | None = None
    """Turns of a chat (sft). Null: `messages` or `conversations`, if there is one."""
    label_column: str | None = None
    """Null: `label` or `labels`, if there is one; for token_classification also `tags` and
    `ner_tags`."""
    label_columns: list[str] | None = None
    """A column of 0 and 1 for each label (task.problem_type=multi_label_classification).

    Null: lists of labels in
    label_column."""
    negative_columns: list[str] | None = None
    """Texts that do not belong to the first one (embedding).

    Null: `negative`, `negative_1` and so on.
    """
    target_column: str | None = None
    """Text to produce (seq2seq_lm). Null: `target`."""
    image_column: str | None = None
    """Images or their paths (image_classification). Null: the only column of images."""


@dataclass(kw_only=True)
class PathsConfig(DataConfig):
    """Sources in files of the user."""

    EVALUATION_ROWS = "data.eval=FILE"
    PATHS = ("train", "eval")
    train: Any
    """One path, a list of paths, or a glob."""
    eval: Any
    """The same, or a mapping of names to the same: several evaluation sets; null: cut from train.
    """

    def __post_init__(self) -> None:
        """Refuse anything but a path or a list of paths."""
        super().__post_init__()
        self.expect(
            self.eval != {}, "eval", "a path, or a mapping such as {dev: dev.tsv, hard: hard.tsv}"
        )
        for key, value in (
            ("data.train", self.train),
            *((eval_key(name), paths) for name, paths in self.eval_files()),
        ):
            refuse_url(key, value)
            paths = value if isinstance(value, list | tuple) else [value]
            expect(
                bool(paths) and all(isinstance(path, str) and path.strip() for path in paths),
                key,
                value,
                "a path, a list of paths, or a glob",
            )

    def eval_files(self) -> list[tuple[str, Any]]:
        """List name and paths of each evaluation set; the name of a single one is empty.

        Raises:
            ConfigError: A name is invalid, see `eval_set_names`.
        """
        if self.eval is None:
            return []
        if not isinstance(self.eval, Mapping):
            return [("", self.eval)]
        return list(zip(eval_set_names(self.eval), self.eval.values(), strict=True))


@dataclass(kw_only=True)
class StreamableConfig(ColumnsConfig):
    """Sources with an option to stream the training rows."""

    streaming: bool = False
    """True: training rows (jsonl, parquet) are read where they lie whenever they are needed; only
    where each begins is kept."""
    shuffle_window: Count = 1000
    """Rows of a window of a stream; the windows of all files are permuted, and every four shuffled
    together."""

    def __post_init__(self) -> None:
        """Refuse options without a meaning for streams."""
        super().__post_init__()
        self.expect(
            not self.streaming or self.max_train_examples is None,
            "max_train_examples",
            "null with data.streaming=true",
            "training.max_steps says how much of a stream is read.",
        )


@dataclass(kw_only=True)
class FilesConfig(PathsConfig, StreamableConfig):
    """The user's own files: csv, tsv, json, jsonl, parquet, arrow, CoNLL or text."""

    format: str | None = None
    """What the files hold where their endings do not say it: csv, tsv, json, parquet, arrow,
    text, conll; null: by their endings."""
    delimiter: (
        Annotated[str, matching('tab|[^\\w"\r\n]', 'one character, such as ";", or the word tab')]
        | None
    ) = None
    """What separates the columns of csv and tsv, one character or the word tab; null: found by the
    first rows, and said."""
    encoding: Annotated[str, _encoding] | None = None
    """Of texts, as Python names it, such as utf-8, cp1252 or gb18030; null: found, and said if it
    is not utf-8."""
    column_names: list[str] | None = None
    """Names of the columns of csv and tsv without a line of names; null: their first line has
    them."""

    def __post_init__(self) -> None:
        """Refuse a stream without rows to evaluate on, and columns without a name of their own."""
        super().__post_init__()
        names = self.column_names
        is_valid = names is None or (
            len(names) > 0 and len(set(names)) == len(names) and all(names)
        )
        self.expect(is_valid, "column_names", "a name for each column, each once, or null")
        self.expect(
            not self.streaming or self.eval is not None or self.eval_fraction == 0,
            "streaming",
            "rows to evaluate on in files of their own",
            "None are cut from a stream: name them with data.eval=FILE, or take"
            " data.eval_fraction=0.",
        )


@dataclass(kw_only=True)
class MixtureConfig(DataConfig):
    """Several sources of the user's files, mixed as `datasets.interleave_datasets` does."""

    PATHS = ("mixture.*.train", "mixture.*.eval")
    mixture: Any
    """Name to the keys of a source, which are those of data=files."""
    probabilities: Any
    """Name to the probability that an example is drawn from that source; null: by turns."""
    stopping_strategy: Annotated[str, one_of(*STOPPING_STRATEGIES)]
    """When an epoch ends: with the first source that is exhausted, or with the last."""

    def __post_init__(self) -> None:
        """Refuse invalid sources and probabilities."""
        super().__post_init__()
        example = "{code: {train: code.jsonl}, prose: {train: prose.jsonl}}"
        is_valid = isinstance(self.mixture, Mapping) and bool(self.mixture)
        self.expect(
            is_valid,
            "mixture",
            f"a mapping from names to the keys of data=files, such as {example}",
        )
        for name in self.mixture:
            has_plain_name = (
                isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_-]+", name) is not None
            )
            expect(
                has_plain_name,
                "data.mixture",
                f"{{{name}: ...}}",
                "names of letters, digits, _ and -, as in train/loss/NAME",
            )
        self._expect_probabilities()
        self._expect_distinct_sets(self.source_configs())

    def _expect_probabilities(self) -> None:
        """Require one probability for each source, with the sum 1; null passes."""
        probabilities = self.probabilities
        if probabilities is None:
            return
        key = "data.probabilities"
        expect(
            isinstance(probabilities, Mapping),
            key,
            probabilities,
            "a mapping from the names of data.mixture to numbers, or null",
        )
        for name in probabilities:
            if name not in self.mixture:
                raise ConfigError(
                    f"{key}.{name}: there is no such source."
                    f" {did_you_mean(str(name), list(self.mixture))}"
                )
        for name in self.mixture:
            value = probabilities.get(name)
            if value is None:
                raise ConfigError(
                    f"{key}: data.mixture.{name} has none. Give each source one, 0 to leave it out."
                )
            expecting(share)(f"{key}.{name}", value)
            if value == 0 and self.stopping_strategy == "all_exhausted":
                raise ConfigError(
                    f"{key}.{name}=0: with data.stopping_strategy=all_exhausted an epoch would"
                    " never end. Leave the source out."
                )
        total = math.fsum(probabilities.values())
        expect(
            abs(total - 1) <= 1e-6,
            key,
            probabilities,
            f"numbers with the sum 1, and theirs is {total:.6g}",
        )

    def _expect_distinct_sets(self, sources: Mapping[str, FilesConfig]) -> None:
        """Refuse evaluation sets of two sources with one name, since one would never be evaluated.

        The only set of a source `code` is named `code`, its set `py` is named `code_py`, and so is
        the only set of a source `code_py`. Upper and lower case make no difference, as for the sets
        of one source.
        """
        key_by_set: dict[str, str] = {}
        for source, config in sources.items():
            set_names = [set_name for set_name, _ in config.eval_files()]
            if config.eval is None and config.eval_fraction:
                set_names = [""]  # cut from the training rows
            for set_name in set_names:
                key = f"data.mixture.{source}"
                if set_name:
                    key += f".eval.{set_name}"
                metric_name = mixed_eval_name(source, set_name)
                first_key = key_by_set.setdefault(metric_name.lower(), key)
                if first_key != key:
                    raise ConfigError(
                        f"{key}: it is evaluated as eval/{metric_name}, and so is {first_key}."
                        " Expected evaluation sets of different names (SOURCE, or SOURCE_SET), by"
                        " more than upper and lower case: rename one source, or one set."
                    )

    @property
    def streamed_by(self) -> str | None:
        """The key of the first streamed source; None if none is streamed."""
        for name, source in self.source_configs().items():
            if source.streaming:
                return f"data.mixture.{name}.streaming"
        return None

    def weights(self) -> list[float] | None:
        """Return the probabilities in the order of the sources, with the sum 1; None: by turns."""
        if self.probabilities is None:
            return None
        total = math.fsum(self.probabilities.values())
        return [self.probabilities[name] / total for name in self.mixture]

    def source_configs(self) -> dict[str, FilesConfig]:
        """Build the configuration of each source, as for data=files.

        Keys of every data choice, such as `data.max_length`, are passed on; the source's own win.

        Raises:
            ConfigError: A source has a key that data=files lacks, no `train`, or an invalid value.
        """
        file_keys = {field.name for field in fields(FilesConfig)} - {"name"}
        common_keys = [field.name for field in fields(DataConfig) if field.name != "name"]
        common = {key: getattr(self, key) for key in common_keys}
        sources = {}
        for name, values in self.mixture.items():
            prefix = f"data.mixture.{name}"
            expect(
                isinstance(values, Mapping),
                prefix,
                values,
                "the keys of data=files, such as {train: FILE}",
            )
            for key in values:
                if key not in file_keys:
                    raise ConfigError(
                        f"{prefix}.{key}: no such key. {did_you_mean(str(key), sorted(file_keys))}"
                    )
            expect(
                values.get("train") is not None,
                f"{prefix}.train",
                "null",
                "a path, a list of paths, or a glob",
            )
            try:
                sources[name] = build(
                    FilesConfig, {"name": "files", "eval": None, **common, **values}, "data"
                )
            except ConfigError as error:
                raise ConfigError(f"{prefix}: {error}") from error
        return sources


@dataclass(kw_only=True)
class TokensConfig(PathsConfig):
    """Token ids from another program.

    NanoGPT's or Megatron's files, mapped from disk.
    """

    OF_TOKENS = True
    dtype: Annotated[str, one_of(*TOKEN_TYPES)] | None
    """Type of the ids where a file does not say it, as nanoGPT's do not; null: `uint16`."""


@dataclass(kw_only=True)
class HubConfig(StreamableConfig):
    """A dataset by `datasets.load_dataset`: hub name or local folder."""

    EVALUATION_ROWS = "data.eval_split=NAME"
    PATHS = ("path",)
    path: str
    subset: str | None
    """The dataset's configuration, what `load_dataset` calls `name`."""
    revision: str | None
    train_split: str
    eval_split: str | None
    """Null: `validation` or `test`, if there is one; else cut from train."""

    def __post_init__(self) -> None:
        """Refuse a URL as `data.path`."""
        super().__post_init__()
        refuse_url("data.path", self.path)


def eval_key(name: str) -> str:
    """Name the key of an evaluation set, for messages.

    Example:
        >>> eval_key("dev"), eval_key("")
        ('data.eval.dev', 'data.eval')
    """
    if name:
        return f"data.eval.{name}"
    return "data.eval"


def eval_set_names(names: Iterable[object]) -> list[str]:
    """Check the names of evaluation sets, a part of metrics: `eval/NAME/accuracy`.

    Returns:
        The names, as texts, in their order; a repeated one once.

    Raises:
        ConfigError: A name has other characters than letters, digits, `_` and `-`, is `train`, or
            differs from another one by upper and lower case only.
    """
    spelling: dict[str, str] = {}
    for name in names:
        is_plain = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_-]+", name) is not None
        key = "data.eval"
        value = f"{{{name}: ...}}"
        expect(is_plain, key, value, "names of letters, digits, _ and -, as in eval/NAME/accuracy")
        text = str(name)
        expect(
            text.lower() != "train",
            key,
            value,
            "another name: tables would show its metrics as train/loss",
        )
        first_spelling = spelling.setdefault(text.lower(), text)
        expect(
            first_spelling == text,
            key,
            value,
            f"a name that differs from {first_spelling} by more than upper and lower case",
        )
    return list(spelling.values())


def mixed_eval_name(source: str, set_name: str) -> str:
    """Name an evaluation set of one source of a mixture.

    Args:
        source: The name of the source.
        set_name: The name of the set in it; empty for an only set.

    Example:
        >>> mixed_eval_name("code", ""), mixed_eval_name("code", "py")
        ('code', 'code_py')
    """
    if set_name:
        return f"{source}_{set_name}"
    return source


SCHEMAS: Mapping[str, type[DataConfig]] = registry.add_builtin(
    "data",
    {
        "stdlib": (StdlibConfig, "optrun.data.stdlib:load_stdlib"),
        "stdlib_tokens": (StdlibTokensConfig, "optrun.data.stdlib_lines:load_stdlib_tokens"),
        "stdlib_statements": (
            StdlibStatementsConfig,
            "optrun.data.stdlib_lines:load_stdlib_statements",
        ),
        "stdlib_chat": (StdlibChatConfig, "optrun.data.stdlib_chat:load_stdlib_chat"),
        "stdlib_preferences": (
            StdlibPreferencesConfig,
            "optrun.data.stdlib_chat:load_stdlib_preferences",
        ),
        "stdlib_pairs": (StdlibPairsConfig, "optrun.data.stdlib_pairs:load_stdlib_pairs"),
        "digits": (DigitsConfig, "optrun.data.sklearn_digits:load_sklearn_digits"),
        "files": (FilesConfig, "optrun.data.files:load_files"),
        "hub": (HubConfig, "optrun.data.hub:load_hub"),
        "mixture": (MixtureConfig, "optrun.data.build:load_source"),
        "tokens": (TokensConfig, "optrun.data.tokens:load_tokens"),
    },
)
