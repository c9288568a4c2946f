"""`explain` counts the steps that the run does.

Where rows become several examples each, or blocks.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optrun.explain import data as explained
from optrun.explain.build import explain
from tests.running import composed, optrun

REWRITES = """{%- for m in messages %}{%- if m.role == 'assistant' and not loop.last -%}
<|im_start|>assistant
{{ m.content.split('</think>')[-1] }}<|im_end|>
{%- else -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that takes thoughts out of the turns before the last, as those of today do."""
LINE = [
    "task=sft",
    "task.assistant_only_loss=true",
    "task.chat_template=./rewrites.jinja",
    "data=files",
    "data.train=chats.jsonl",
    "data.eval=chats.jsonl",
    "data.max_length=64",
    "model.config.n_embd=16",
    "model.config.n_layer=1",
    "model.config.n_head=2",
    "training.num_train_epochs=2",
    "training.per_device_train_batch_size=4",
    "task.sample_tokens=0",
    "checkpoint=none",
]


@pytest.fixture(autouse=True)
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rewrites.jinja").write_text(REWRITES)
    turns = [
        ("user", "what?"),
        ("assistant", "<think>so</think>that"),
        ("user", "why?"),
        ("assistant", "because"),
    ]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    Path("chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for _ in range(20)))


@pytest.mark.parametrize(
    ("words", "steps"),
    [((), 20), (("data.max_train_examples=9",), 10), (("task.packing=true",), None)],
    ids=["an answer each", "some of the rows", "packed"],
)
def test_as_many_as_the_run_does(words: tuple[str, ...], steps: int | None) -> None:
    facts = explain(composed(*LINE, *words))
    assert optrun(*LINE, *words, "hydra.run.dir=run") == 0
    assert facts.steps_from == "data"
    assert facts.steps == json.loads(Path("run/summary.json").read_text())["global_step"]
    assert steps in (None, facts.steps)


def test_of_a_sample_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explained, "MOST_ROWS", 7)
    facts = explain(composed(*LINE))
    assert facts.steps == 20
    assert any("about 40 examples" in note for note in facts.notes), facts.notes
    assert explain(composed(*LINE, "task.packing=true")).steps_from == "assumed"
