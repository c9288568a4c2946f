"""Training on token ids that another program wrote.

What training on their text is, resumed to the bit, or refused.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from optrun.base.errors import ConfigError
from optrun.config.schema.run import RunConfig
from tests.faults.runs import cut
from tests.running import TINY_GPT, composed, optrun, records, tensors, write_text

EVERY = [
    "scheduler=constant",
    "training.logging_steps=1",
    "checkpoint.save_steps=2",
    "training.eval_steps=2",
]


@pytest.mark.usefixtures("no_pictures")
def test_tokens_train_as_their_text_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = write_text(tmp_path)
    small, whole = [*TINY_GPT, *EVERY], "training.max_steps=4"
    assert (
        optrun(
            "data=files",
            f"data.train={text}",
            f"data.eval={text}",
            *small,
            whole,
            "hydra.run.dir=text",
        )
        == 0
    )
    tokenizer = AutoTokenizer.from_pretrained("text/tokenizer")
    ids = [*tokenizer(text.read_text(), verbose=False)["input_ids"], tokenizer.eos_token_id]
    third = len(ids) // 3
    for number, piece in enumerate((ids[:third], ids[third:])):
        np.array(piece, dtype="<u2").tofile(f"part_{number}.bin")
    named = [
        "data=tokens",
        "data.train=part_*.bin",
        "data.eval=part_*.bin",
        "model.tokenizer=text/tokenizer",
    ]
    assert optrun(*named, *small, whole, "hydra.run.dir=straight") == 0
    for step in (2, 4):
        assert tensors(Path("straight"), step) == tensors(Path("text"), step)

    cut("straight", "cut", 2)
    assert optrun("resume=cut") == 0
    assert tensors(Path("cut"), 4) == tensors(Path("straight"), 4)
    assert [record["step"] for record in records(Path("cut"))] == [1, 2, 3, 4]

    masked = ["data=tokens", "model.tokenizer=text/tokenizer", "task.document_masking=true", *small]
    for name, found, told in (
        ("two", [*ids[:40], ids[-1], *ids[40:-1]], False),
        ("one", ids[:-1], True),
    ):
        np.array(found, dtype="<u2").tofile(f"{name}.bin")
        words = [
            f"data.train={name}.bin",
            f"data.eval={name}.bin",
            "training.max_steps=1",
            f"hydra.run.dir={name}",
        ]
        assert optrun(*masked, *words) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert ("finds no documents to keep apart" in said) is told
        assert "fill no block, and are left out" in said

    np.array(ids[::-1][: len(ids) - third], dtype="<u2").tofile("part_1.bin")
    assert optrun("resume=cut", "training.max_steps=6") == 2, (
        "the data is not what the run was started with"
    )


TOKENS = ("data=tokens", "data.train=a.bin", "model.tokenizer=t")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (TOKENS[:2], "model.tokenizer=null: expected the hub name or the folder of the tokenizer"),
        ((*TOKENS, "task=masked_lm"), "task=masked_lm: expected causal_lm"),
        ((*TOKENS, "task.packing=false"), "task.packing=false: expected true"),
        ((*TOKENS, "data.dtype=uint8"), "data.dtype=uint8: expected one of uint16"),
    ],
)
def test_what_does_not_go_with_tokens_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        composed(*words)
    assert isinstance(composed(*TOKENS), RunConfig)
