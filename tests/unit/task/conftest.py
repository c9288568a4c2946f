from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset, Features

from optrun.config.choice import choice
from optrun.config.schema.data import SCHEMAS as DATA
from optrun.config.schema.task import SCHEMAS as TASKS
from optrun.data.source import Source, Split
from optrun.model.tokenizer import train_tokenizer
from optrun.task import Task, build_task

Rows = dict[str, list[Any]]
SENTENCE = (
    "the cat sat on a mat while Anna Smith went to Paris and Berlin with Bob and unbelievable"
    " things happened"
)


@pytest.fixture
def make_source() -> Callable[..., Source]:
    """Training and evaluation rows as if read from files."""

    def make(
        train: Rows,
        held: Rows | None = None,
        *,
        features: Features | None = None,
        held_features: Features | None = None,
        cut: bool = False,
        **options: Any,
    ) -> Source:
        data = choice("data", DATA, "files", {"train": "x", "max_length": 32, **options})
        return Source(
            Split(Dataset.from_dict(train, features=features), "data.train"),
            {
                "": Split(
                    Dataset.from_dict(
                        held if held is not None else train, features=held_features or features
                    ),
                    "data.eval",
                )
            },
            data,  # type: ignore[arg-type]
            cut_from_train=cut,
        )

    return make


@pytest.fixture
def tokenizer() -> Callable[[str], Any]:
    """A small tokenizer of each kind, trained on a few words."""
    return lambda kind: train_tokenizer(lambda: iter([SENTENCE] * 3), vocab_size=320, kind=kind)


@pytest.fixture
def make_task(tokenizer: Callable[[str], Any]) -> Callable[..., Task]:
    """The task of a source, with a tokenizer of its kind."""

    def make(name: str, source: Source, prepared: Any = None, **options: Any) -> Task:
        kinds = {
            "causal_lm": "stream",
            "seq2seq_lm": "seq2seq",
            "sft": "chat",
            "preference": "chat",
        }
        with_tokenizer = prepared if prepared is not None else tokenizer(kinds.get(name, "pair"))
        assert source.columns is not None
        return build_task(
            choice("task", TASKS, name, options), source.columns, source, with_tokenizer, seed=0
        )

    return make
