"""Training on a mixture.

Shares and losses of each source, resumed to the bit, and what is refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optrun.base.errors import ConfigError
from tests.faults.runs import cut
from tests.running import TINY_GPT, composed, optrun, records, sentence, tensors

EVERY = [
    "scheduler=constant",
    "training.logging_steps=1",
    "checkpoint.save_steps=4",
    "checkpoint.keep_last=9",
    "training.eval_steps=100",
]
MIXED = [
    "data=mixture",
    (
        "data.mixture={prose: {train: prose.jsonl}, code: {train: code_*.jsonl, text_column: body,"
        " streaming: true, eval: held.jsonl, shuffle_window: 9}}"
    ),
    "data.probabilities={prose: 0.75, code: 0.25}",
    "training.per_device_train_batch_size=8",
]


def write(folder: Path) -> None:
    for name, column, begin in (
        ("prose", "text", 0),
        ("code_0", "body", 60),
        ("code_1", "body", 90),
        ("held", "body", 0),
    ):
        rows = ({column: sentence(number)} for number in range(begin, begin + 60))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.usefixtures("no_pictures")
def test_a_mixture_trains_tells_each_source_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    words = [*MIXED, *TINY_GPT, *EVERY]
    assert optrun(*words, "training.max_steps=9", "hydra.run.dir=straight") == 0
    cut("straight", "cut", 4)
    assert optrun("resume=cut") == 0
    assert tensors(Path("cut"), 9) == tensors(Path("straight"), 9)
    kept = ("train/loss/prose", "train/loss/code", "train/share/prose", "train/share/code")
    lines = [
        {name: record[name] for name in kept if name in record}
        for record in records(Path("straight"))
    ]
    assert lines == [
        {name: record[name] for name in kept if name in record} for record in records(Path("cut"))
    ]
    for record in records(Path("straight")):
        shares = [record.get(f"train/share/{name}", 0) for name in ("prose", "code")]
        assert sum(shares) == pytest.approx(1)
        losses = [record.get(f"train/loss/{name}", 0) for name in ("prose", "code")]
        mean = sum(share * loss for share, loss in zip(shares, losses, strict=True))
        assert mean == pytest.approx(record["train/loss"], rel=0.02), (
            "blocks are nearly of the same length"
        )
    assert {"eval/prose/loss", "eval/code/loss"} <= set(records(Path("straight"))[-1])
    capsys.readouterr()
    assert optrun("explain", *words) == 0
    said = capsys.readouterr().out
    assert "train/prose" in said
    assert "train/code" in said
    Path("code_1.jsonl").write_text('{"body": "another"}\n')
    assert optrun("resume=cut", "training.max_steps=12") == 2
    assert "code_1.jsonl changed" in " ".join(capsys.readouterr().err.split())


def test_explain_counts_the_rows_of_all_sources_of_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optrun.explain import data

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "MOST_ROWS", 20)
    write(tmp_path)
    mixture = "data.mixture={a: {train: prose.jsonl}, b: {train: prose.jsonl, eval: prose.jsonl}}"
    words = ["data=mixture", mixture, "task.packing=false", *TINY_GPT]
    sampled = data.sample_data(composed(*words), [])
    assert sampled is not None
    assert (sampled.train_rows, sampled.eval_rows) == (54 + 60, 6 + 60)
    assert sampled.looked_at == (114, 66), "a mixture is read whole"
    assert sampled.examples == 2 * 54, "an epoch ends with the first source"


TWO = "data.mixture={a: {train: a.jsonl}, b: {train: b.jsonl}}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.mixture={}"], "data.mixture={}: expected a mapping from names"),
        (
            ["data.mixture={a: {trian: a.jsonl}}"],
            r"data.mixture.a.trian: no such key. Did you mean train",
        ),
        (["data.mixture={a: {eval: a.jsonl}}"], "data.mixture.a.train=null: expected a path"),
        (
            ["data.mixture={a: {train: a, streaming: true}}"],
            "data.mixture.a: data.streaming=true: expected rows to",
        ),
        (
            ["data.mixture={a: {train: a, column_names: abc}}"],
            "data.mixture.a: data.column_names=abc: expected a list",
        ),
        (
            ["data.mixture={a: {train: a, streaming: maybe}}"],
            "data.mixture.a: data.streaming=maybe: expected true or",
        ),
        (
            [TWO, "data.probabilities={a: 0.5, c: 0.5}"],
            "data.probabilities.c: there is no such source",
        ),
        ([TWO, "data.probabilities={a: 1.0}"], "data.probabilities: data.mixture.b has none"),
        ([TWO, "data.probabilities={a: 0.5, b: 0.4}"], "numbers with the sum 1, and theirs is 0.9"),
        (
            [TWO, "data.probabilities={a: 1.5, b: -0.5}"],
            "data.probabilities.a=1.5: expected a number from 0 to 1",
        ),
        (
            [TWO, "data.stopping_strategy=longest"],
            "data.stopping_strategy=longest: expected one of first_exhausted",
        ),
        (
            [TWO, "data.probabilities={a: 1.0, b: 0.0}", "data.stopping_strategy=all_exhausted"],
            (
                "data.probabilities.b=0: with data.stopping_strategy=all_exhausted an epoch would"
                " never end"
            ),
        ),
        (
            ["data.mixture={code: {train: a, eval: {py: x}}, code_py: {train: b, eval: y}}"],
            (
                "data.mixture.code_py: it is evaluated as eval/code_py, and so is"
                " data.mixture.code.eval.py. .* rename one"
            ),
        ),
        (
            ["data.mixture={Code_py: {train: b}, code: {train: a, eval: {py: x, c: y}}}"],
            (
                "data.mixture.code.eval.py: it is evaluated as eval/code_py, and so is"
                " data.mixture.Code_py."
            ),
        ),
        (
            ["data.mixture={a: {train: a, eval: {b_c: x}}, a_b: {train: b, eval: {c: y}}}"],
            (
                "data.mixture.a_b.eval.c: it is evaluated as eval/a_b_c, and so is"
                " data.mixture.a.eval.b_c."
            ),
        ),
    ],
)
def test_what_is_no_mixture_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        composed("data=mixture", *words)


def test_a_source_that_is_not_evaluated_takes_no_name() -> None:
    composed(
        "data=mixture",
        "data.mixture={code: {train: a, eval: {py: x}}, code_py: {train: b, eval_fraction: 0}}",
    )


def test_a_source_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    Path("empty.jsonl").write_text("\n\n")
    for source, message in (
        ("prosa.jsonl", "data.mixture.b: data.train=prosa.jsonl: no such file"),
        (
            "empty.jsonl",
            "data.mixture.b: data.train=empty.jsonl: cannot be read as json: no rows in it",
        ),
    ):
        words = [
            "data=mixture",
            f"data.mixture={{a: {{train: prose.jsonl}}, b: {{train: {source}}}}}",
            *TINY_GPT,
        ]
        assert optrun(*words, "training.max_steps=1") == 2
        said = " ".join(capsys.readouterr().err.split())
        assert message in said
        assert "Traceback" not in said
