"""Sequence, token and image classification: columns to batches, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Features, Sequence, Value
from scipy import stats

from optrun.base.errors import ConfigError
from optrun.task.evaluation import IGNORED
from optrun.task.sequence_classification import SequenceClassification
from optrun.task.token_classification import TokenClassification, WordMetrics

Make = Callable[..., Any]


def test_pairs_carry_their_segments(make_source: Make, make_task: Make, tokenizer: Make) -> None:
    rows = {"a": ["the cat", "Anna"], "b": ["sat", "went to Paris"], "label": ["yes", "no"]}
    source = make_source(rows, text_column="a", text_pair_column="b")
    task = make_task("sequence_classification", source)
    expected = tokenizer("pair")("the cat", "sat")
    assert task.train[0]["input_ids"].tolist() == expected["input_ids"]
    batch = task.collate([task.train[0], task.train[1]])
    assert (
        batch["token_type_ids"][0, : len(expected["input_ids"])].tolist()
        == expected["token_type_ids"]
    )
    assert batch["labels"].tolist() == [1, 0]
    assert task.weight(batch) == 2
    assert list(SequenceClassification.vocabulary(source)) == [
        "the cat",
        "sat",
        "Anna",
        "went to Paris",
    ]
    assert task.needs().config["id2label"] == {0: "no", 1: "yes"}


def test_labels_that_are_texts_are_not_taken_for_the_text(
    make_source: Make, make_task: Make
) -> None:
    source = make_source({"id": ["1", "2"], "review": ["the cat", "Anna"], "label": ["yes", "no"]})
    assert len(make_task("sequence_classification", source).train) == 2
    assert list(SequenceClassification.vocabulary(source)) == ["the cat", "Anna"]


def test_long_texts_are_cut_and_empty_ones_stay(make_source: Make, make_task: Make) -> None:
    task = make_task(
        "sequence_classification",
        make_source({"text": ["the cat sat " * 9, None], "label": [1, 0]}, max_length=6),
    )
    assert [len(task.train[index]["input_ids"]) for index in range(2)] == [6, 2]


def test_rows_without_text_are_counted(make_source: Make, make_task: Make) -> None:
    source = make_source(
        {"text": ["the cat", "", None, " "], "label": ["a", "b", "a", "b"]},
        {"text": ["on", "a"], "label": ["a", "b"]},
    )
    assert make_task("sequence_classification", source).notes == [
        "data.train: 3 of 4 rows have no text in column text"
    ]


def test_an_empty_text_without_special_tokens_is_refused(
    make_source: Make, make_task: Make, tokenizer: Make
) -> None:
    source = make_source({"text": ["the", ""], "label": [1, 0]}, text_column="text")
    with pytest.raises(ConfigError, match=r"data.train: row 2 has no token"):
        make_task("sequence_classification", source, tokenizer("stream"))


def test_a_limit_takes_rows_before_they_are_encoded(make_source: Make, make_task: Make) -> None:
    rows = {
        "text": [f"the cat {number}" for number in range(9)],
        "label": [number % 2 for number in range(9)],
    }
    task = make_task(
        "sequence_classification", make_source(rows, max_train_examples=3, max_eval_examples=4)
    )
    again = make_task(
        "sequence_classification", make_source(rows, max_train_examples=3, max_eval_examples=4)
    )
    assert (len(task.train), len(task.eval)) == (3, 4)
    assert task.train.fingerprint() == again.train.fingerprint()
    assert task.eval.fingerprint() == again.eval.fingerprint()


def test_regression(make_source: Make, make_task: Make) -> None:
    source = make_source({"text": ["the", "a", "cat"], "label": ["0.5", "2", "-1"]})
    task = make_task("sequence_classification", source, problem_type="regression")
    batch = task.collate([task.train[index] for index in range(3)])
    assert batch["labels"].dtype == torch.float32
    assert batch["labels"].tolist() == [0.5, 2.0, -1.0]
    assert task.needs().config == {"num_labels": 1, "problem_type": "regression"}
    with pytest.raises(
        ConfigError, match=r"row 1 has 'good' in column label: .*expects finite numbers"
    ):
        make_task(
            "sequence_classification",
            make_source({"text": ["a"], "label": ["good"]}),
            problem_type="regression",
        )


def test_regression_metrics(make_source: Make, make_task: Make) -> None:
    source = make_source({"text": ["the", "a", "cat"], "label": ["0.5", "2", "-1"]})
    rng = np.random.default_rng(0)
    made, right = rng.normal(size=(2, 12)).astype(np.float32)
    evaluation = make_task(
        "sequence_classification", source, problem_type="regression"
    ).evaluation()
    for part in (slice(0, 5), slice(5, 12)):
        logits, labels = torch.tensor(made[part])[:, None], torch.tensor(right[part])
        loss = ((logits[:, 0] - labels) ** 2).mean()
        evaluation.update(SimpleNamespace(loss=loss, logits=logits), {"labels": labels})
    found = evaluation.compute()
    assert found["mse"] == pytest.approx(float(((made - right) ** 2).mean()), rel=1e-5)
    assert found["loss"] == pytest.approx(found["mse"], rel=1e-5)
    assert found["pearson"] == pytest.approx(stats.pearsonr(made, right).statistic, rel=1e-5)
    assert found["spearman"] == pytest.approx(stats.spearmanr(made, right).statistic, rel=1e-5)


# Words
# --------------------------------------------------------------------------------------------------

NER = {
    "tokens": [["Anna", "Smith", "went", "unbelievable"], ["the", "cat"], []],
    "ner_tags": [["B-PER", "I-PER", "O", "B-LOC"], ["O", "O"], []],
}


def test_the_first_piece_carries_the_label(
    make_source: Make, make_task: Make, tokenizer: Make
) -> None:
    task = make_task("token_classification", make_source(NER))
    assert task.labels == ["B-LOC", "B-PER", "I-PER", "O"]
    words = tokenizer("pair")
    example = task.train[0]
    pieces = words.convert_ids_to_tokens(example["input_ids"])
    owners = words(NER["tokens"][0], is_split_into_words=True).word_ids()
    labels = [task.labels[number] if number != IGNORED else None for number in example["labels"]]
    firsts = [
        place
        for place, word in enumerate(owners)
        if word is not None and word not in owners[:place]
    ]
    assert [labels[place] for place in firsts] == NER["ner_tags"][0]
    assert all(labels[place] is None for place in range(len(pieces)) if place not in firsts)
    assert owners.count(3) > 1  # a word of several pieces is in it
    assert task.weight(task.collate([task.train[0], task.train[1]])) == 6
    assert len(task.train) == 2
    assert any("1 rows without a word" in note for note in task.notes)
    assert any("whole entities" in note for note in task.notes)


def test_declared_label_lists(make_source: Make, make_task: Make) -> None:
    features = Features(
        {
            "words": Sequence(Value("string")),
            "tags": Sequence(ClassLabel(names=["O", "B-X", "I-X"])),
        }
    )
    task = make_task(
        "token_classification",
        make_source({"words": [["a", "cat"]], "tags": [[1, 0]]}, features=features),
    )
    assert task.labels == ["O", "B-X", "I-X"]
    assert task.train[0]["labels"][task.train[0]["labels"] != IGNORED].tolist() == [1, 0]


def test_labels_of_any_name_are_judged_one_by_one(make_source: Make, make_task: Make) -> None:
    rows = {"tokens": [["a", "cat", "sat"]], "tags": [["DET", "NOUN", "VERB"]]}
    task = make_task("token_classification", make_source(rows))
    assert task.metric_names() == ["loss", "accuracy", "f1_macro"]
    assert task.main_metric == "f1_macro"
    assert "f1_macro is the mean over labels" in task.notes[-1]


def test_entities_of_other_schemes(make_source: Make, make_task: Make) -> None:
    rows = {"tokens": [["Anna", "Smith", "Bonn"]], "tags": [["B-PER", "L-PER", "U-LOC"]]}
    task = make_task("token_classification", make_source(rows))
    assert task.metric_names() == ["loss", "accuracy", "precision", "recall", "f1"]
    assert task.main_metric == "f1"
    assert "entities read as BILOU" in task.notes[-1]


def test_words_beyond_the_length_are_counted(make_source: Make, make_task: Make) -> None:
    rows = {"tokens": [["cat"] * 30], "tags": [["A", "B"] * 15]}
    task = make_task("token_classification", make_source(rows, max_length=8))
    assert any(
        note.startswith("data.eval: ") and "beyond data.max_length=8" in note for note in task.notes
    )


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            {"tokens": [["a"], ["a", "cat"]], "tags": [["X"], ["Y"]]},
            r"row 2 has 2 words and 1 labels",
        ),
        (
            {"tokens": ["a cat"], "tags": ["X"]},
            r"data.label_column=tags: .*row 1 has 'X' there; .*a list of labels",
        ),
        ({"tokens": [["a"]], "tags": [["X"]]}, r"one label only"),
        ({"tokens": [["a", None]], "tags": [["X", "Y"]]}, r"row 1 has no value, or a missing word"),
        ({"tokens": [["a", "b"]], "tags": [["X", None]]}, r"row 1 has no value in column tags"),
        ({"tokens": [[], []], "tags": [[], []]}, r"no label"),
        (
            {"text": ["a b"], "tags": [["X", "Y"]]},
            r"data.text_column is needed: .*no single column of word lists",
        ),
        (
            {"x": [["a", "b"]], "y": [["a", "b"]], "tags": [["X", "Y"]]},
            r"data.text_column is needed",
        ),
    ],
)
def test_word_refusals(make_source: Make, make_task: Make, rows: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_task("token_classification", make_source(rows))


def test_a_word_label_unseen_in_training(make_source: Make, make_task: Make) -> None:
    with pytest.raises(
        ConfigError, match=r"data.eval: row 1 has the label 'B-ORG', which data.train does not have"
    ):
        make_task(
            "token_classification", make_source(NER, {"tokens": [["a"]], "ner_tags": [["B-ORG"]]})
        )


def test_a_vocabulary_is_learnt_from_words_as_they_are_read(make_source: Make) -> None:
    assert list(TokenClassification.vocabulary(make_source(NER))) == [
        "Anna\nSmith\nwent\nunbelievable",
        "the\ncat",
        "",
    ]


def test_entity_f1_over_batches() -> None:
    names = ["O", "B-X", "I-X"]
    evaluation = WordMetrics(names, whole_entities=True)
    right = torch.tensor([[IGNORED, 1, 2, 0, 1], [1, IGNORED, 0, IGNORED, IGNORED]])
    made = torch.tensor([[1, 1, 2, 0, 0], [1, 1, 1, 1, 1]])
    for row in range(2):
        logits = torch.nn.functional.one_hot(made[row : row + 1], 3).float()
        evaluation.update(
            SimpleNamespace(loss=torch.tensor(1.0 + row), logits=logits),
            {"labels": right[row : row + 1]},
        )
    found = evaluation.compute()
    assert found["loss"] == pytest.approx((4 * 1 + 2 * 2) / 6)
    assert found["accuracy"] == pytest.approx(4 / 6)
    assert (found["precision"], found["recall"]) == (pytest.approx(2 / 3), pytest.approx(2 / 3))


# Images
# --------------------------------------------------------------------------------------------------


def picture(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (9, 7)) -> str:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return str(path)


@pytest.fixture
def pictures(tmp_path: Path) -> dict[str, list[Any]]:
    return {
        "image": [
            picture(tmp_path / "a.png", (255, 0, 0)),
            picture(tmp_path / "b.png", (0, 0, 255), (4, 4)),
        ],
        "label": ["red", "blue"],
    }


@pytest.fixture
def preparation() -> Any:
    from optrun.model.images import ScratchPreparation

    return ScratchPreparation(8, 3)


def test_images_become_pixels(
    make_source: Make, make_task: Make, pictures: Any, preparation: Any
) -> None:
    task = make_task(
        "image_classification", make_source(pictures, image_column="image"), preparation
    )
    examples = [task.transform(task.train[index], np.random.default_rng(0)) for index in range(2)]
    batch = task.collate(examples)
    assert batch["pixel_values"].shape == (2, 3, 8, 8)
    assert batch["pixel_values"].dtype == torch.float32
    assert batch["pixel_values"][0, :, 0, 0].tolist() == [1.0, -1.0, -1.0]
    assert [task.labels[number] for number in batch["labels"]] == ["red", "blue"]
    assert task.count_tokens_and_examples(batch) == (0, 2)
    assert task.needs().config["num_labels"] == 2


def test_image_size(make_source: Make, make_task: Make, pictures: Any, preparation: Any) -> None:
    source = make_source(pictures, image_column="image")
    task = make_task("image_classification", source, preparation, image_size=5)
    assert task.transform(task.train[0], np.random.default_rng(0))["pixel_values"].shape == (
        3,
        5,
        5,
    )
    assert task.needs().config["image_size"] == 5


def test_the_fingerprint_is_that_of_bytes_and_labels(
    make_source: Make, make_task: Make, pictures: Any, preparation: Any
) -> None:
    def fingerprint() -> str:
        made = make_task(
            "image_classification", make_source(pictures, image_column="image"), preparation
        )
        return str(made.train.fingerprint())

    before = fingerprint()
    assert fingerprint() == before
    picture(Path(pictures["image"][0]), (254, 0, 0))
    changed = fingerprint()
    assert changed != before
    pictures["label"].reverse()
    assert fingerprint() != changed


def test_image_refusals(
    make_source: Make, make_task: Make, pictures: Any, preparation: Any, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"data.image_column is needed: data.train has no column of images"
    ):
        make_task(
            "image_classification", make_source({"text": ["a", "b"], "label": [0, 1]}), preparation
        )
    pictures["image"][1] = str(tmp_path / "gone.png")
    task = make_task(
        "image_classification", make_source(pictures, image_column="image"), preparation
    )
    with pytest.raises(
        ConfigError, match=r"data.train: row 2: .*gone.png: cannot be read: No such file"
    ):
        task.train.fingerprint()
    (tmp_path / "gone.png").write_text("no picture")
    with pytest.raises(
        ConfigError, match=r"data.train: row 2 .*gone.png\): Pillow cannot read this image"
    ):
        task.train.fingerprint()
    whole = Path(pictures["image"][0]).read_bytes()
    (tmp_path / "gone.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"cannot be decoded"):
        task.transform(task.train[1], np.random.default_rng(0))
    with pytest.raises(ConfigError, match=r"data.image_column=label: .*no images and no paths"):
        make_task(
            "image_classification",
            make_source({**pictures, "label": [1, 2]}, image_column="label"),
            preparation,
        )


def test_images_without_pillow(
    make_source: Make,
    make_task: Make,
    pictures: Any,
    preparation: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = make_source(pictures, image_column="image")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(
        ConfigError, match=r"pillow, which is not installed. pip install 'optrun\[vision\]'"
    ):
        make_task("image_classification", source, preparation)


@pytest.mark.parametrize(
    ("columns", "advice"),
    [
        (
            {"Class Index": [row % 2 for row in range(40)]},
            "Columns: text, Class Index. Class Index looks like it:"
            " 'data.label_column=Class Index'",
        ),
        (
            {"id": list(range(40)), "verdict": ["good", "bad"] * 20},
            "Columns: text, id, verdict. verdict looks like it: data.label_column=verdict",
        ),
        ({"id": list(range(40))}, "Columns: text, id. optrun start FILE guesses it."),
    ],
)
def test_the_refusal_names_the_column_that_start_would_guess(
    make_source: Make, make_task: Make, columns: dict[str, Any], advice: str
) -> None:
    rows = {"text": [f"number {row} of forty" for row in range(40)], **columns}
    with pytest.raises(ConfigError) as caught:
        make_task("sequence_classification", make_source(rows))
    assert advice in str(caught.value)
