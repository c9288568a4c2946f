"""The model's tokenizer, a named one, or a byte-level BPE trained on the training text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from optrun.base.errors import ConfigError, message_in_one_line
from optrun.base.reading import expand_home
from optrun.config.schema.model import ModelConfig, PretrainedConfig
from optrun.data import hub_access as hub
from optrun.data.cache import cached, digest, versions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Loaded = TypeVar("Loaded")
TRAINING_CHARACTERS = 16_000_000
"""Characters from which a vocabulary is learnt; more change it little."""
MIN_FREQUENCY = 2
"""How often a pair must occur to become a token, as in `tokenizers.ByteLevelBPETokenizer`. With
1, each word of a small text would become a token, and nothing learnt of it would help elsewhere."""

_LIMITS_ATTRIBUTE = "optrun_limits"
_SPECIAL_TOKENS = {
    "stream": ["<|endoftext|>", "<|pad|>"],
    "pair": ["[PAD]", "[CLS]", "[SEP]", "[MASK]"],
    "seq2seq": ["<pad>", "</s>"],
    "chat": ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"],
}

_ROLES_OF_TOKENS = {
    "stream": {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "pad_token": "<|pad|>"},
    "pair": {
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    },
    "seq2seq": {"pad_token": "<pad>", "eos_token": "</s>"},
    "chat": {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"},
}
_TEMPLATES = {
    "pair": {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] $B:1 [SEP]:1"},
    "seq2seq": {"single": "$A </s>"},
}
"""Special tokens around a text, and around a pair; `:1` is the token type id."""


def load_tokenizer(config: ModelConfig, *, words: bool = False) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of `model.tokenizer`, else the one of a pretrained model.

    Its padding token is the end-of-text token if it has no other.

    Args:
        config: The model choice.
        words: Prepare it for single words: a byte-level tokenizer, for which `word` and ` word`
            differ, then puts a space before each text.

    Returns:
        A transformers tokenizer; None: a model from scratch without one, so it has to be trained.

    Raises:
        ConfigError: It cannot be loaded, or has only special tokens.
    """
    key = "model.tokenizer"
    name = config.tokenizer
    options: dict[str, str | bool | None] = {}
    if name is None and isinstance(config, PretrainedConfig):
        key = "model.path"
        name = config.path
        options = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    if name is None:
        return None
    from transformers import AutoTokenizer

    def load(path: str) -> PreTrainedTokenizerBase:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        if words and _begins_without_space(tokenizer):
            tokenizer = AutoTokenizer.from_pretrained(path, add_prefix_space=True, **options)
        return tokenizer

    tokenizer = load_by_name(key, name, "tokenizer", load)
    _refuse_empty(key, name, tokenizer)
    _remember_limits(tokenizer)
    if tokenizer.pad_token_id is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_by_name(key: str, name: str, noun: str, load: Callable[[str], Loaded]) -> Loaded:
    """Call a loader with a local folder or hub name, and explain its errors.

    Args:
        key: The configuration key of the name, for messages.
        name: A path, or a name of the hub.
        noun: What is loaded, for messages.
        load: Called with the name, in which `~` is expanded.

    Raises:
        ConfigError: `load` raised anything.
    """
    cache_only = hub.why_cache_only(name)
    path = expand_home(name)
    try:
        return load(str(path))
    except Exception as error:  # OSError, ValueError, ImportError, and the hub client's own
        if not path.exists() and hub.may_be_name(name):
            reason = hub.why_not_fetched(name, cache_only, error)
        else:
            reason = f"no {noun} can be loaded from there: {message_in_one_line(error)}"
        raise ConfigError(f"{key}={name}: {reason}") from error


def _remember_limits(tokenizer: PreTrainedTokenizerBase) -> None:
    """Store the truncation and padding of a tokenizer's file, for `save_tokenizer`.

    Each call of the tokenizer changes them.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        setattr(tokenizer, _LIMITS_ATTRIBUTE, (backend.truncation, backend.padding))


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer with its first truncation and padding, or an image processor.

    Without that, a library that reads `tokenizer.json` alone would cut every text at the length of
    the last call.

    Args:
        tokenizer: A tokenizer; `_remember_limits` has stored the two. Or an image processor, which
            has none.
        folder: Where `save_pretrained` writes.
    """
    limits = getattr(tokenizer, _LIMITS_ATTRIBUTE, None)
    if limits is not None:
        backend = tokenizer.backend_tokenizer
        truncation, padding = limits
        backend.no_truncation()
        backend.no_padding()
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)
    tokenizer.save_pretrained(str(folder))


def vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Count the rows of an embedding for a tokenizer: its largest id plus one, or its entries."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))


def _refuse_empty(key: str, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer with special tokens only.

    transformers builds such a tokenizer if its files are missing.

    Raises:
        ConfigError: With the files that it looked for.
    """
    if set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        return
    file_names = sorted(set(tokenizer.vocab_files_names.values()))
    folder = expand_home(name)
    present = ""
    if folder.is_dir():
        existing = [file for file in file_names if (folder / file).is_file()]
        present = f", of which the folder has {' and '.join(existing) or 'none'}"
    raise ConfigError(
        f"{key}={name}: there is no tokenizer: {type(tokenizer).__name__} found {len(tokenizer)}"
        " entries, all of them special tokens, so every text would be lost. It is read from"
        f" {', '.join(file_names)}{present}. Put the files there, or name another with"
        " model.tokenizer."
    )


def load_saved_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a run.

    Args:
        folder: The folder to which `save_pretrained` wrote it.

    Raises:
        ConfigError: It cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:  # OSError, ValueError, and what a damaged file brings
        raise ConfigError(
            f"{folder}: the tokenizer of the run cannot be loaded: {message_in_one_line(error)}."
            " Restore the folder. Or remove it: optrun then trains the same tokenizer again, if it"
            " reads the data that the run was trained on."
        ) from error


def _begins_without_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether a tokenizer is byte-level and puts no space before a text, as GPT-2's does."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    splitter = json.loads(backend.to_str())["pre_tokenizer"] or {}
    return splitter.get("type") == "ByteLevel" and splitter.get("add_prefix_space") is False


def train_tokenizer(
    texts: Callable[[], Iterator[str]], *, vocab_size: int, kind: str
) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer on texts; cached for the same texts and settings.

    Args:
        texts: Yields the training texts anew at each call; the first 16 million characters count.
        vocab_size: Largest number of entries, 256 bytes and special tokens included; a small text
            gives fewer.
        kind: Decides the special tokens around a text: `stream`, `pair`, `seq2seq` or `chat` (see
            `task.TextKind`).

    Returns:
        A transformers tokenizer. The same text gives the same vocabulary.

    Raises:
        ConfigError: There is no text.
    """
    from transformers import AutoTokenizer

    if not any(texts()):
        raise ConfigError(
            "data: the training rows have no text to learn a vocabulary from: the text column is"
            " empty. Name another column or file."
        )
    # The texts are read twice: for the key of the cache, and to train.
    libraries = versions("tokenizers", "transformers")
    settings = ("bpe-2", libraries, kind, str(vocab_size), str(MIN_FREQUENCY))
    folder = cached(
        "tokenizers",
        digest(*settings, *_first_characters(texts())),
        lambda folder: _train_and_save(_first_characters(texts()), vocab_size, kind, folder),
    )
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    _remember_limits(tokenizer)
    return tokenizer


def _first_characters(texts: Iterator[str]) -> Iterator[str]:
    """Yield the first 16 million characters of texts, in pieces of at most 100,000.

    The trainer would hold the words of a longer piece in memory together.
    """
    characters_left = TRAINING_CHARACTERS
    for text in texts:
        for begin in range(0, len(text), 100_000):
            if characters_left <= 0:
                return
            piece = text[begin : begin + 100_000][:characters_left]
            characters_left -= len(piece)
            yield piece


def _train_and_save(texts: Iterator[str], vocab_size: int, kind: str, folder: Path) -> None:
    """Train a byte-level BPE tokenizer with the special tokens of a kind of text, and save it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    # 1. Learn the vocabulary; special tokens have the first ids.
    special = _SPECIAL_TOKENS[kind]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_batches(texts), trainer)
    # 2. Put special tokens around each text.
    templates = _TEMPLATES.get(kind)
    if templates:
        used = [
            (token, tokenizer.token_to_id(token))
            for token in special
            if token in templates["single"].split()
        ]
        tokenizer.post_processor = processors.TemplateProcessing(**templates, special_tokens=used)
    # 3. Save it for transformers.
    inputs = ["input_ids", "attention_mask"]
    if kind == "pair":
        inputs.insert(1, "token_type_ids")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=inputs,
        clean_up_tokenization_spaces=False,
        **_ROLES_OF_TOKENS[kind],
    ).save_pretrained(str(folder))


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Yield 64 texts at a time; the last batch may have fewer."""
    while batch := list(islice(texts, 64)):
        yield batch
