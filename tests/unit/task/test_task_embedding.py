"""Losses, gradients, pooling and folders of embeddings are those of sentence-transformers.

What is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score
from transformers import AutoModel, AutoTokenizer

from optrun.base.errors import ConfigError
from optrun.data.loader import SCORES, TEXTS
from optrun.task import contrastive
from optrun.task.pooling import Pooling, choose_pooling
from optrun.task.retrieval import score_retrieval
from tests.reference import record_embeddings as record

Make = Callable[..., Any]
RECORDED = json.loads(record.FILE.read_text())
NUMBERS = torch.arange(record.ROWS * record.TEXTS).reshape(record.ROWS, record.TEXTS)
TRIPLETS = {
    "anchor": ["the cat", "a mat", "Anna went", "Bob sat"],
    "positive": ["a cat sat", "the mat", "to Paris", "on a mat"],
    "negative": ["Berlin", "Anna", "a cat", "things happened"],
}
SCORED = {
    "sentence1": TRIPLETS["anchor"],
    "sentence2": TRIPLETS["positive"],
    "score": [0.1, 0.9, 0.5, -0.2],
}


def loss_of(name: str, vectors: torch.Tensor) -> torch.Tensor:
    scores = torch.tensor(record.SCORES)
    kind, _, more = name.partition(" ")
    if kind == "triplet":
        return contrastive.triplet(vectors, distance=more, margin=1.0)
    if kind == "cosine_similarity":
        return contrastive.cosine_similarity(vectors, scores)
    if kind == "cosent":
        return contrastive.cosent(vectors, scores, scale=20.0)
    texts, scale, symmetric = (2 if more else 3), (5.0 if more else 20.0), "symmetric" in kind
    return contrastive.multiple_negatives_ranking(
        vectors[:, :texts], NUMBERS[:, :texts], scale=scale, symmetric=symmetric
    )


@pytest.mark.parametrize("name", RECORDED["losses"])
def test_losses_and_gradients_are_those_of_sentence_transformers(name: str) -> None:
    given = record.vectors().requires_grad_()
    loss = loss_of(name, given)
    loss.backward()
    assert loss.item() == pytest.approx(RECORDED["losses"][name]["loss"], rel=1e-6)
    assert given.grad is not None
    assert given.grad.flatten().tolist() == pytest.approx(
        RECORDED["losses"][name]["gradient"], rel=1e-6, abs=1e-6
    )


@pytest.mark.parametrize("name", RECORDED["embeddings"])
def test_a_folder_means_to_sentence_transformers_what_it_means_here(
    name: str, tmp_path: Path
) -> None:
    """Its embeddings of the folder that is written here are ours.

    And the folder is read as it was meant.
    """
    mode, side = name.split()
    normalize = dict(record.POOLINGS)[mode]
    record.write_folder(tmp_path, mode, normalize=normalize, left=side == "left")
    pooling, where = choose_pooling(str(tmp_path), None, None, None)
    assert pooling == Pooling(mode, normalize)
    assert "modules.json" in where
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    model = AutoModel.from_pretrained(str(tmp_path)).eval()
    asked = {
        "padding": True,
        "truncation": True,
        "max_length": record.LONGEST,
        "return_tensors": "pt",
    }
    inputs = tokenizer(record.SAID, **asked)
    with torch.no_grad():
        found = pooling(model(**inputs), inputs["attention_mask"])
    assert found.flatten().tolist() == pytest.approx(
        np.ravel(RECORDED["embeddings"][name]).tolist(), abs=1e-6
    )


def test_a_text_that_stands_twice_is_no_negative_of_itself() -> None:
    vectors = record.vectors()[:4, :2]
    texts = torch.tensor(
        [[0, 1], [2, 3], [0, 4], [5, 1]]
    )  # rows 0 and 2 ask the same, 0 and 3 have the same answer, which so is one to row 2 as well
    whole = contrastive.multiple_negatives_ranking(vectors, texts, scale=5.0)
    unit = torch.nn.functional.normalize(vectors, dim=-1)
    logits, rows = (
        5 * unit[:, 0] @ unit[:, 1].T,
        {0: [0, 1], 1: [0, 1, 2, 3], 2: [1, 2], 3: [1, 2, 3]},
    )
    alone = [logits[row, known].logsumexp(0) - logits[row, row] for row, known in rows.items()]
    assert whole.item() == pytest.approx(float(torch.stack(alone).mean()), rel=1e-6)


def test_retrieval_is_that_of_every_pair_one_by_one() -> None:
    draw = np.random.default_rng(0)
    texts = np.stack(
        [draw.integers(0, 12, 40), draw.integers(100, 130, 40), draw.integers(100, 140, 40)], axis=1
    )
    by_number = {number: draw.normal(size=6) for number in np.unique(texts)}
    vectors = np.array([[by_number[number] for number in row] for row in texts], dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    found = score_retrieval(vectors, texts, [1, 7])
    documents = np.unique(texts[:, 1:])
    ndcg, first, recall = [], [], []
    for asked in np.unique(texts[:, 0]):
        own = set(texts[texts[:, 0] == asked, 1])
        unit = {number: vector / np.linalg.norm(vector) for number, vector in by_number.items()}
        scores = np.array([unit[asked] @ unit[number] for number in documents])
        right = np.array([number in own for number in documents])
        ndcg.append(ndcg_score([right], [scores], k=10))
        ranked = right[np.argsort(-scores)]
        first.append(1 / (1 + ranked.argmax()) if ranked[:10].any() else 0)
        recall.append(ranked[:7].sum() / len(own))
    assert found["ndcg_at_10"] == pytest.approx(np.mean(ndcg), rel=1e-6)
    assert found["mrr_at_10"] == pytest.approx(np.mean(first), rel=1e-6)
    assert found["recall_at_7"] == pytest.approx(np.mean(recall), rel=1e-6)


def test_a_batch_has_every_text_below_the_other(
    make_task: Make, make_source: Make, tokenizer: Make
) -> None:
    task = make_task("embedding", make_source(TRIPLETS))
    batch = task.collate([task.train[n] for n in range(4)])
    assert (batch["input_ids"].shape[0], batch[TEXTS].shape, task.count(batch)) == (12, (4, 3), 4)
    said = [
        tokenizer("pair").decode(row, skip_special_tokens=True).strip()
        for row in batch["input_ids"]
    ]
    assert said == [TRIPLETS[name][row] for row in range(4) for name in TRIPLETS]
    assert len(batch[TEXTS].unique()) == 12
    task.pooling = Pooling("mean", True)
    outputs = SimpleNamespace(
        last_hidden_state=torch.randn(12, batch["input_ids"].shape[1], 4), loss=None
    )
    metrics = task.evaluation()
    metrics.update(outputs, batch)
    assert list(metrics.compute()) == [
        "loss",
        "recall_at_1",
        "recall_at_10",
        "mrr_at_10",
        "ndcg_at_10",
        "accuracy",
    ]
    scored = make_task("embedding", make_source(SCORED), loss="cosent")
    assert scored.collate([scored.train[0], scored.train[1]])[SCORES].tolist() == pytest.approx(
        [0.1, 0.9]
    )
    assert (scored.main_metric, scored.metric_names()) == (
        "spearman",
        ["loss", "spearman", "pearson"],
    )


@pytest.mark.parametrize(
    ("names", "options", "expected"),
    [
        (
            ["query", "positive", "negative_2", "negative_1"],
            {},
            ["query", "positive", "negative_1", "negative_2"],
        ),
        (["left", "right"], {}, ["left", "right"]),
        (["question", "answer", "id"], {}, ["question", "answer"]),
        (
            ["a", "b", "c"],
            {"text_column": "c", "text_pair_column": "a", "negative_columns": ["b"]},
            ["c", "a", "b"],
        ),
        (["a", "b"], {"text_column": "b"}, ["b", "a"]),
    ],
)
def test_columns_by_their_names(
    names: list[str],
    options: dict[str, Any],
    expected: list[str],
    make_task: Make,
    make_source: Make,
) -> None:
    rows = {name: [f"{name} {n}" for n in range(3)] for name in names}
    task = make_task("embedding", make_source(rows, **options))
    assert list(task.names.values()) == [expected, expected]


@pytest.mark.parametrize(
    ("rows", "options", "task", "facts"),
    [
        (TRIPLETS, {"text_column": "anchr"}, {}, ["data.text_column=anchr", "Did you mean anchor"]),
        (
            TRIPLETS,
            {"negative_columns": ["negativ"]},
            {},
            ["data.negative_columns=negativ", "Did you mean negative"],
        ),
        (
            {"a": ["x"] * 3, "b": ["y"] * 3, "c": ["z"] * 3},
            {},
            {},
            ["data.text_column and data.text_pair_column are"],
        ),
        ({"text": ["x"] * 3}, {}, {}, ["needed", "anchor and positive"]),
        (SCORED, {}, {}, ["multiple_negatives_ranking", "column score", "task.loss=cosent"]),
        (SCORED, {"label_column": "score"}, {}, ["multiple_negatives_ranking", "column score"]),
        (TRIPLETS, {}, {"loss": "cosent"}, ["data.label_column is needed"]),
        (
            {**SCORED, "score": [0, 5, 1, 2]},
            {},
            {"loss": "cosine_similarity"},
            ["row 2", "5", "-1 to 1", "cosent"],
        ),
        (
            {**SCORED, "score": ["a", "b", "c", "d"]},
            {},
            {"loss": "cosent"},
            ["row 1 has 'a' in column score"],
        ),
        (
            {**SCORED, "negative": TRIPLETS["negative"]},
            {},
            {"loss": "cosent"},
            ["rows without negatives"],
        ),
        (
            {k: TRIPLETS[k] for k in ("anchor", "positive")},
            {},
            {"loss": "triplet"},
            ["needs one column of negatives"],
        ),
        (
            TRIPLETS,
            {"target_column": "negative"},
            {},
            ["data.target_column=negative", "does not use this key"],
        ),
        (TRIPLETS, {}, {"scale": 0.0}, ["task.scale=0.0", "above 0"]),
        (TRIPLETS, {}, {"recall_at": [0]}, ["task.recall_at=[0]"]),
        (TRIPLETS, {}, {"metrics": ["spearman"]}, ["spearman", "task=embedding"]),
    ],
)
def test_refused(
    rows: dict[str, Any],
    options: dict[str, Any],
    task: dict[str, Any],
    facts: list[str],
    make_task: Make,
    make_source: Make,
) -> None:
    with pytest.raises(ConfigError) as refused:
        make_task("embedding", make_source(rows, **options), **task)
    for fact in facts:
        assert fact in str(refused.value)


def test_a_step_of_one_row_has_no_negatives(make_task: Make, make_source: Make) -> None:
    pairs = {name: TRIPLETS[name] for name in ("anchor", "positive")}
    with pytest.raises(
        ConfigError, match=r"training.per_device_train_batch_size: a step has 1 row"
    ):
        make_task("embedding", make_source(pairs)).expect_step(1)
    make_task("embedding", make_source(TRIPLETS)).expect_step(1)  # one of its own
    with pytest.raises(ConfigError, match="one source"):
        make_task("embedding", make_source(pairs)).join([])


@pytest.mark.parametrize(
    ("modules", "pooling", "facts"),
    [
        (
            [{"type": "x.Transformer"}, {"type": "x.Pooling"}, {"type": "x.Dense"}],
            {},
            ["Dense", "task.pooling"],
        ),
        (
            [{"type": "x.Transformer"}, {"type": "x.Pooling", "path": "1"}],
            {"pooling_mode": "max"},
            ["pooling is max"],
        ),
        ({}, {}, ["no module"]),
    ],
)
def test_a_folder_that_says_what_is_not_here(
    modules: Any, pooling: Any, facts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1" / "config.json").write_text(json.dumps(pooling))
    with pytest.raises(ConfigError) as refused:
        choose_pooling(str(tmp_path), None, None, None)
    for fact in [f"model.path={tmp_path}", *facts]:
        assert fact in str(refused.value)
    assert choose_pooling(str(tmp_path), None, "cls", False)[0] == Pooling("cls", False)


def test_a_negative_that_belongs_to_the_same_text_is_none() -> None:
    """Row 0's third text is the second one of row 1, which asks the same."""
    texts = torch.tensor([[1, 2, 3], [1, 3, 4], [5, 6, 2]])
    found = contrastive.mark_false_negatives(texts)
    columns = [2, 3, 6, 3, 4, 2]
    assert [[columns[at] for at in row.nonzero().flatten().tolist()] for row in found] == [
        [3, 3, 2],
        [2, 3, 2],
        [],
    ]


def test_left_padding_becomes_right_padding(
    make_source: Make, make_task: Make, tokenizer: Make
) -> None:
    """sentence-transformers pads as the tokenizer says, and counts positions from the begin."""
    left = tokenizer("pair")
    left.padding_side = "left"
    task = make_task("embedding", make_source(TRIPLETS), left)
    assert left.padding_side == "right"
    assert any("pads on the right" in note for note in task.notes)
