"""What is known of the data before the first step.

Counted on examples that were written out by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from optrun.base.errors import ConfigError
from optrun.task.data_check import describe_data
from optrun.task.data_facts import DataFacts, collect_data_facts

Make = Callable[..., Any]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture
def words() -> PreTrainedTokenizerFast:
    """One token a word; `zig` and `zag` are not known."""
    known = {word: number for number, word in enumerate([*SPECIAL, *"abcdefgh"])}
    backend = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = dict(
        zip(
            ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True
        )
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


@pytest.fixture
def facts_of(make_source: Make, make_task: Make, words: Any) -> Callable[..., DataFacts]:
    def facts(
        name: str, train: Any, held: Any, *, task: dict[str, Any] | None = None, **data: Any
    ) -> DataFacts:
        source = make_source(train, held, **data)
        return collect_data_facts(make_task(name, source, words, **(task or {})), source, words)

    return facts


def test_a_classifier(facts_of: Make) -> None:
    train = {"text": ["a b c d e f", "a", "zig b c d", "a b"], "label": ["no", "yes", "no", "no"]}
    held = {"text": ["a", "c c", "a b", "a"], "label": ["yes", "no", "no", "no"]}
    facts = facts_of("sequence_classification", train, held, max_length=5)
    assert (facts.train.examples, facts.train.tokens) == (4, 5 + 3 + 5 + 4)
    (cut,) = facts.train.cuts
    assert (cut.limit, cut.rows, cut.share, cut.longest) == (
        "data.max_length=5",
        2,
        (3 + 1) / (8 + 3 + 6 + 4),
        8,
    )
    assert facts.train.unknown_share == 1 / 9, "of the ordinary tokens that are left"
    assert facts.train.labels == {"no": 3, "yes": 1}
    assert facts.eval_sets[""].cuts == []
    assert facts.eval_sets[""].unknown_share == 0
    assert facts.eval_sets[""].texts_in_train == 3, "a twice, a b"
    said = describe_data(facts)
    assert said[0].split(" · ") == ["train  4 examples", "17 tokens", "no: 75.0 %, yes: 25.0 %"]
    assert (
        "data.max_length=5 cuts 2 of 4 examples: 19.0 % of all tokens are lost; the longest has 8"
        in said[1]
    )
    assert "the tokenizer does not know 11.1 % of the tokens of data.train" in said[2]
    assert "3 of 4 texts of data.eval are in data.train, too" in said[-1]


def test_a_row_of_a_hundred_thousand_words(facts_of: Make) -> None:
    rows = {"text": ["a " * 100_000, "b"], "label": ["x", "y"]}
    (cut,) = facts_of("sequence_classification", rows, rows).train.cuts
    assert (cut.rows, cut.longest) == (1, 100_002)
    assert cut.share > 0.99


def test_each_side_of_a_pair_of_texts(facts_of: Make) -> None:
    rows = {"text": ["a b c d e f", "a"], "target": ["a", "a b c d"]}
    limits = {"task": {"max_target_length": 4}, "max_length": 5}
    facts = facts_of("seq2seq_lm", rows, rows, **limits)
    assert [cut.limit for cut in facts.train.cuts] == [
        "data.max_length=5",
        "task.max_target_length=4",
    ]
    assert [cut.longest for cut in facts.train.cuts] == [8, 6]
    pairs = {"text": ["a b c d"], "second": ["e f g h"], "label": ["x"]}
    both = {**pairs, "label": ["y"]}
    pairs = {name: [*pairs[name], *both[name]] for name in pairs}
    facts = facts_of(
        "sequence_classification", pairs, pairs, text_pair_column="second", max_length=6
    )
    assert facts.train.cuts[0].longest == 11


def test_words_with_labels(facts_of: Make) -> None:
    rows = {"tokens": [["a", "b", "c", "d"], ["e"]], "labels": [["O", "B-x", "O", "O"], ["O"]]}
    facts = facts_of("token_classification", rows, rows, max_length=5)
    assert facts.train.labels == {"B-x": 1, "O": 3}
    assert facts.train.cuts[0].rows == 1


@pytest.mark.parametrize("name", ["causal_lm", "masked_lm"])
@pytest.mark.parametrize("packing", [True, False])
def test_language_models(facts_of: Make, name: str, packing: bool) -> None:
    rows = {"text": ["a b c d e f g h", "a b c d e f", "a b"]}
    facts = facts_of(name, rows, {"text": ["a b", "c d"]}, task={"packing": packing}, max_length=8)
    assert facts.eval_sets[""].texts_in_train == 1, "documents, not blocks"
    assert facts.eval_sets[""].texts == 2
    assert facts.train.labels == {}
    if packing:
        assert facts.train.cuts == [], "documents are joined, and nothing is lost"
    else:
        (cut,) = facts.train.cuts
        whole = 10 if name == "masked_lm" else 9
        assert (cut.rows, cut.longest) == (1, whole), "one fills the length and loses nothing"


def test_next_to_nothing_is_known(facts_of: Make) -> None:
    good = {"text": ["a b", "c d"], "label": ["x", "y"]}
    bad = {"text": ["zig zag", "zag a"], "label": ["x", "y"]}
    for train, held, key in ((bad, good, "data.train"), (good, bad, "data.eval")):
        with pytest.raises(
            ConfigError,
            match=rf"{key}: 75 % of its tokens are \[UNK\].*13 entries.*model.tokenizer",
        ):
            facts_of("sequence_classification", train, held)


def test_many_labels_are_told_by_the_most_and_the_least_frequent(facts_of: Make) -> None:
    labels = [letter for number, letter in enumerate("abcdef") for _ in range(number + 1)]
    rows = {"text": [f"a b {'c ' * number}" for number in range(21)], "label": labels}
    facts = facts_of("sequence_classification", rows, rows)
    assert "6 labels, from f: 28.6 % to a: 4.8 %" in describe_data(facts)[0]


def test_a_label_for_each_example_is_doubted(facts_of: Make) -> None:
    """The texts were named as the label column, and the run ended with an accuracy of 0."""
    texts = [f"a b {'c ' * number}" for number in range(30)]
    rows = {"text": texts, "label": [f"title {number}" for number in range(30)]}
    lines = describe_data(facts_of("sequence_classification", rows, rows))
    assert any("30 labels for 30 examples" in line for line in lines), lines


def test_many_tags_of_few_sentences_are_no_doubt(facts_of: Make) -> None:
    words = [["a", "b", "c"]] * 20
    tags = [[f"t{number}", f"u{number % 7}", "o"] for number in range(20)]
    rows = {"tokens": words, "labels": tags}
    lines = describe_data(facts_of("token_classification", rows, rows))
    assert "28 labels" in lines[0]
    assert not any("nothing can be learnt" in line for line in lines), lines


def test_a_tokenizer_that_knows_every_byte_has_no_share_of_unknown(
    make_source: Make, make_task: Make
) -> None:
    source = make_source({"text": ["ünïcode 猫", "b"], "label": ["x", "y"]})
    task = make_task("sequence_classification", source)
    assert collect_data_facts(task, source, SimpleTokenizer()).train.unknown_share is None


class SimpleTokenizer:
    """Like GPT-2's: what is unknown has the id of the end."""

    unk_token_id = eos_token_id = 0


def test_images_have_labels_and_no_tokens(
    make_source: Make, make_task: Make, tmp_path: Path
) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    rows = {"image": [str(tmp_path / "a.png")] * 3, "label": ["x", "y", "y"]}
    source = make_source(rows, image_column="image")
    facts = collect_data_facts(
        make_task("image_classification", source, SimpleTokenizer()), source, SimpleTokenizer()
    )
    assert facts.train.tokens is None
    assert facts.train.labels == {"x": 1, "y": 2}
    assert describe_data(facts)[0] == "train  3 examples · x: 33.3 %, y: 66.7 %"
