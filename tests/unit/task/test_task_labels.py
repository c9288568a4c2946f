"""Labels of any name, number, truth value; what is missing or new is told with its row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from datasets import ClassLabel, Features, Value

from optrun.base.errors import ConfigError
from optrun.data.source import Source
from optrun.task.labels import label_config, read_classes, read_finite_numbers

Make = Callable[..., Source]


def read(source: Source) -> tuple[list[str], list[int], list[int]]:
    names, found = read_classes(source)
    return names, found[source.train].tolist(), found[source.eval_sets[""]].tolist()


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["pos", "neg", "pos"], ["neg", "pos"]),
        ([10, 2, 2], ["2", "10"]),
        (["10", "2", "2"], ["2", "10"]),
        ([1.0, 0.0, 1.0], ["0", "1"]),
        ([True, False, True], ["False", "True"]),
        (["NA", "null", "None"], ["NA", "None", "null"]),
        (["B", "a", "ä"], ["B", "a", "ä"]),
        ([-1, 1, -1], ["-1", "1"]),
    ],
)
def test_names(make_source: Make, given: list[Any], names: list[str]) -> None:
    found, train, held = read(make_source({"label": given}))
    assert found == names
    assert train == held
    assert sorted(set(train)) == list(range(len(names)))


def test_one_and_one_point_zero_are_the_same(make_source: Make) -> None:
    assert read(make_source({"label": ["1", "0"]}, {"label": ["1.0", "0.0"]}))[2] == [1, 0]
    assert read(make_source({"label": ["1.0", "0.0"]}, {"label": [1, 0]}))[2] == [1, 0]


def test_declared_labels_keep_their_order_and_are_matched_by_name(make_source: Make) -> None:
    source = make_source(
        {"label": [0, 1, 2]},
        {"label": [0, 1]},
        features=Features({"label": ClassLabel(names=["z", "a", "m"])}),
        held_features=Features({"label": ClassLabel(names=["a", "z"])}),
    )
    assert read(source) == (["z", "a", "m"], [0, 1, 2], [1, 0])
    named = make_source(
        {"label": [0, 1]},
        {"label": ["b", "a"]},
        features=Features({"label": ClassLabel(names=["a", "b"])}),
        held_features=Features({"label": Value("string")}),
    )
    assert read(named)[2] == [1, 0]


def test_a_row_that_a_test_split_leaves_unlabelled(make_source: Make) -> None:
    source = make_source(
        {"label": [0, 1]},
        {"label": [0, -1]},
        features=Features({"label": ClassLabel(names=["a", "b"])}),
    )
    with pytest.raises(
        ConfigError,
        match=r"data.eval: 1 labels in column label are '-1', which usually means.* no label",
    ):
        read(source)


def test_a_label_unseen_in_training(make_source: Make) -> None:
    source = make_source({"label": ["positive", "negative"]}, {"label": ["negative", "postive"]})
    with pytest.raises(
        ConfigError,
        match=r"data.eval: row 2 has the label 'postive', which data.train does not have. "
        r"Labels: negative, positive. Did you mean positive\?",
    ):
        read(source)


def test_a_rare_label_that_the_cut_left_to_evaluation_is_known(make_source: Make) -> None:
    assert read(make_source({"label": ["a", "b"]}, {"label": ["c", "a"]}, cut=True)) == (
        ["a", "b", "c"],
        [0, 1],
        [2, 0],
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["a", None], r"row 2 has no value in column label"),
        ([1.0, float("nan")], r"row 2 has no value"),
        (["a", "a"], r"one label only \(a\)"),
        ([0.5, 1.0], r"fractions there. .*task.problem_type=regression"),
        (["0.5", "1"], r"fractions there"),
        ([["a"], ["b"]], r"row 1 holds \['a'\], not one label"),
    ],
)
def test_refusals(make_source: Make, given: list[Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(make_source({"label": given}))


def test_numbers(make_source: Make) -> None:
    assert read_finite_numbers(make_source({"y": ["1.5", "-2", "1e3"]}).train, "y").tolist() == [
        1.5,
        -2.0,
        1000.0,
    ]
    assert read_finite_numbers(make_source({"y": [1, 2]}).train, "y").tolist() == [1.0, 2.0]
    for bad in (["1", "good"], ["1", "nan"], ["1", "inf"], ["1", "1e300"], ["1", "1,5"]):
        with pytest.raises(
            ConfigError, match=r"data.train: row 2 has .* in column y: .*expects finite numbers"
        ):
            read_finite_numbers(make_source({"y": bad}).train, "y")
    with pytest.raises(ConfigError, match="finite numbers"):
        read_finite_numbers(make_source({"y": [True, False]}).train, "y")


def test_configuration() -> None:
    assert label_config(["no", "yes"]) == {
        "num_labels": 2,
        "id2label": {0: "no", 1: "yes"},
        "label2id": {"no": 0, "yes": 1},
    }
