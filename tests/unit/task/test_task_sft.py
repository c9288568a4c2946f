"""Fine-tuning on chats.

Which tokens carry loss, what is cut, and packed rows that are as each alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.utils import chat_template_utils

from optrun.base.errors import ConfigError
from optrun.data.chat import Chat, question_columns, questions
from optrun.data.mixture import MixedExamples
from optrun.task.chat_task import marked_text
from optrun.task.chat_template import NAMES
from optrun.task.evaluation import IGNORED
from tests.unit.task.test_document_masking import decoder, total_loss

Make = Callable[..., Any]

UNMARKED = (
    "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
FORGETFUL = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
CHANGING = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% if loop.last and m.role != 'user' %}.{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def said(*contents: str, system: str = "") -> list[dict[str, str]]:
    turns = [
        {"role": ("user", "assistant")[number % 2], "content": text}
        for number, text in enumerate(contents)
    ]
    return [{"role": "system", "content": system}, *turns] if system else turns


CHATS = [
    said("Hi", "the cat"),
    said("a mat?", "yes", "why?", "unbelievable things", system="Bob"),
    said("Paris", "Berlin"),
]


def learnt(task: Any, tokenizer: Any, index: int = 0) -> list[str]:
    """The texts of the runs of tokens that carry loss."""
    task_shown = task.shown(tokenizer) if index == 0 else None
    assert task_shown is not None
    return re.findall(r"«(.*?)»", task_shown, flags=re.DOTALL)


@pytest.fixture
def bpe(tokenizer: Make) -> Any:
    return tokenizer("chat")


def test_chatml_by_its_marks(make_source: Make, make_task: Make, bpe: Any) -> None:
    rows = {"messages": [CHATS[1]]}
    options = {"chat_template": "chatml"}
    task = make_task(
        "sft", make_source(rows, max_length=200), bpe, assistant_only_loss=True, **options
    )
    assert learnt(task, bpe) == ["yes<|im_end|>", "unbelievable things<|im_end|>"]
    assert task.shown(bpe).startswith(
        "<|im_start|>system\nBob<|im_end|>\n<|im_start|>user\na mat?<|im_end|>\n"
    )
    batch = task.collate([task.train[0]])
    assert int((batch["labels"] != IGNORED).sum()) == task.count(batch)
    everything = make_task("sft", make_source(rows, max_length=200), bpe, **options)
    assert (
        everything.count(everything.collate([everything.train[0]]))
        == len(everything.train[0]["input_ids"]) - 1
    )


@pytest.mark.parametrize("name", NAMES)
def test_marks_of_our_templates_are_what_is_generated(
    make_source: Make, make_task: Make, bpe: Any, name: str
) -> None:
    """What is learnt begins where the opening of an answer ends."""
    chat = said("Hi", "the cat", "so", "a dog")
    task = make_task(
        "sft",
        make_source({"messages": [chat]}, max_length=500),
        bpe,
        chat_template=name,
        assistant_only_loss=True,
    )
    text, spans = task.template.find_answers(chat)
    assert [text[begin:end].strip()[:5] for begin, end in spans] == ["the c", "a dog"]
    for turns, (begin, _) in zip((chat[:1], chat[:3]), spans, strict=True):
        assert task.template.text(turns, generation_prompt=True) == text[:begin]
    assert not task.notes or "the tokenizer does not know" in task.notes[0]
    assert text == bpe.apply_chat_template(chat, tokenize=False)


@pytest.mark.parametrize(
    ("task", "rows"),
    [
        ("sft", {"prompt": ["the cat"], "completion": [" sat"]}),
        ("preference", {"prompt": ["a"], "chosen": [" b"], "rejected": [" c"]}),
    ],
)
def test_a_template_that_nobody_asked_for_is_never_rendered(
    make_source: Make,
    make_task: Make,
    bpe: Any,
    task: str,
    rows: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is a program of a stranger, and plain texts do not need it."""
    bpe.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"

    def render(**_: object) -> None:
        pytest.fail("rendered")

    monkeypatch.setattr(chat_template_utils, "render_jinja_template", render)
    assert len(make_task(task, make_source(rows, max_length=50), bpe).train) == 1


def test_a_template_runs_in_the_sandbox_of_transformers(
    make_source: Make, make_task: Make, bpe: Any
) -> None:
    for source in ("{{ messages.__class__.__mro__ }}", "{{ range(10 ** 9) | list }}"):
        bpe.chat_template = source
        with pytest.raises(ConfigError, match="cannot be written by the chat template"):
            make_task("sft", make_source({"messages": [CHATS[0]]}, max_length=50), bpe)


def test_tools_and_calls(make_source: Make, make_task: Make, bpe: Any) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = [
        *said("add"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    rows = {"messages": [chat], "tools": ['[{"function": {"name": "add"}}]']}
    task = make_task(
        "sft",
        make_source(rows, max_length=900),
        bpe,
        chat_template="chatml",
        assistant_only_loss=True,
    )
    call_text, answer = learnt(task, bpe)
    assert (
        call_text == '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    )
    assert answer == "two<|im_end|>"
    assert '<tools>\n{"function": {"name": "add"}}\n</tools>' in task.shown(bpe)


def test_by_prefix(make_source: Make, make_task: Make, bpe: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(UNMARKED)
    task = make_task(
        "sft",
        make_source({"messages": [CHATS[1]]}, max_length=200),
        bpe,
        chat_template=str(file),
        assistant_only_loss=True,
    )
    assert learnt(task, bpe) == ["yes<|im_end|>", "unbelievable things<|im_end|>"]
    assert any("by comparing the text" in note for note in task.notes)
    assert bpe.chat_template == UNMARKED, "it is saved with the model"


@pytest.mark.parametrize(
    ("column", "options", "expected"),
    [
        ({}, {}, ["the cat<|im_end|>\n"]),
        ({}, {"assistant_only_loss": True}, ["the cat<|im_end|>"]),
        (
            {},
            {"completion_only_loss": False, "assistant_only_loss": True},
            ["Ho<|im_end|>", "the cat<|im_end|>"],
        ),
    ],
)
def test_completions(
    make_source: Make, make_task: Make, bpe: Any, column: Any, options: Any, expected: Any
) -> None:
    rows = {
        "prompt": [said("Hi", "Ho", "so")],
        "completion": [[{"role": "assistant", "content": "the cat"}]],
    }
    task = make_task(
        "sft", make_source(rows, max_length=200), bpe, chat_template="chatml", **options
    )
    assert learnt(task, bpe) == expected


def test_a_prompt_is_asked_as_it_was_learnt(make_source: Make, make_task: Make, bpe: Any) -> None:
    """One that ends with a turn of the assistant, too.

    `optrun predict` asks with what stands before the completion.
    """
    rows = {
        "prompt": [said("Hi", "Ho")],
        "completion": [[{"role": "assistant", "content": "the cat"}]],
    }
    source = make_source(rows, max_length=200)
    task = make_task("sft", source, bpe, chat_template="chatml")
    (asked,) = questions(source.train, question_columns(source, source.train, None))
    assert isinstance(asked, Chat)
    assert task.shown(bpe).partition("«")[0] == task.template.text(
        asked.turns, generation_prompt=True
    )


def test_plain_completions_end(make_source: Make, make_task: Make, bpe: Any) -> None:
    rows = {"prompt": ["the cat", "a"], "completion": [" sat on a mat", " dog<|im_end|>"]}
    task = make_task("sft", make_source(rows, max_length=200), bpe)
    assert learnt(task, bpe) == [" sat on a mat<|im_end|>"]
    assert bpe.decode(task.train[1]["input_ids"]) == "a dog<|im_end|>", (
        "what ends is not ended again"
    )
    assert task.sample_prompt[1] == "the cat"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_packed_rows_are_what_they_are_alone(
    make_source: Make, make_task: Make, bpe: Any, kind: str
) -> None:
    rows = {"messages": CHATS * 3}
    options = {"chat_template": "chatml", "assistant_only_loss": True}
    alone = make_task("sft", make_source(rows, max_length=150), bpe, **options)
    packed = make_task("sft", make_source(rows, max_length=150), bpe, packing=True, **options)
    assert 1 < len(packed.train) < len(alone.train) / 2
    blocks = [packed.train[number] for number in range(len(packed.train))]
    assert len({len(block["input_ids"]) for block in blocks}) > 1, "something is padded"
    batch = packed.collate(blocks)
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert packed.count_tokens_and_examples(batch) == (
        int(alone.train.lengths.sum()),
        len(CHATS) * 3,
    )
    sums, grads = [], []
    for batches in (
        [alone.collate([alone.train[index]]) for index in range(len(alone.train))],
        [batch],
    ):
        model = decoder(kind)
        found = [total_loss(model, each) for each in batches]
        total = torch.stack([loss for loss, _ in found]).sum()
        total.backward()
        sums.append((float(total.detach()), sum(count for _, count in found)))
        grads.append([param.grad for param in model.parameters() if param.grad is not None])
    assert sums[1] == (pytest.approx(sums[0][0], rel=1e-6), sums[0][1])
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5 * float(a.abs().max()))


def test_a_padded_batch_is_its_rows(make_source: Make, make_task: Make, bpe: Any) -> None:
    task = make_task(
        "sft",
        make_source({"messages": CHATS}, max_length=150),
        bpe,
        chat_template="chatml",
    )
    batch = task.collate([task.train[index] for index in range(3)])
    lengths = task.train.lengths.tolist()
    assert batch["attention_mask"].sum(1).tolist() == lengths
    for row, length in zip(batch["labels"], lengths, strict=True):
        assert (row[length:] == IGNORED).all()


def test_what_is_cut_is_told(make_source: Make, make_task: Make, bpe: Any) -> None:
    task = make_task(
        "sft",
        make_source({"messages": CHATS}, max_length=40),
        bpe,
        chat_template="chatml",
        assistant_only_loss=True,
    )
    assert (task.train.lost > 0).tolist() == [False, True, False]
    packed = make_task(
        "sft",
        make_source({"messages": CHATS}, max_length=40),
        bpe,
        chat_template="chatml",
        assistant_only_loss=True,
        packing=True,
    )
    assert (packed.train.documents.lost > 0).tolist() == [False, True, False]


def test_rows_without_a_target_are_left_out_where_that_is_asked_for(
    make_source: Make, make_task: Make, bpe: Any
) -> None:
    long = said("the cat sat on a mat " * 5, "yes")
    rows = {"messages": [CHATS[0], long, CHATS[2]]}
    options = {"chat_template": "chatml", "assistant_only_loss": True}
    with pytest.raises(ConfigError) as refused:
        make_task("sft", make_source(rows, max_length=40), bpe, **options)
    for fact in ("data.max_length=40", "row 2", "task.overlong_rows=drop"):
        assert fact in str(refused.value)
    assert "like it" not in str(refused.value)
    for others, count in (("2 of 4 rows are like it", 1), ("3 of 5 rows are like it", 2)):
        with pytest.raises(ConfigError, match=others):
            make_task(
                "sft",
                make_source({"messages": rows["messages"] + [long] * count}, max_length=40),
                bpe,
                **options,
            )
    task = make_task("sft", make_source(rows, max_length=40), bpe, overlong_rows="drop", **options)
    assert len(task.train) == 2
    assert any("1 of 3 rows" in note and "data.max_length=40" in note for note in task.notes)
    with pytest.raises(ConfigError, match=r"every row of data\.train"):
        make_task(
            "sft",
            make_source({"messages": [long]}, max_length=40),
            bpe,
            overlong_rows="drop",
            **options,
        )


@pytest.mark.parametrize(
    ("rows", "options", "facts"),
    [
        (
            {"messages": [CHATS[0]]},
            {"chat_template": "chatlm"},
            ["task.chat_template=chatlm", "Did you mean chatml?"],
        ),
        (
            {"messages": [CHATS[0]]},
            {"chat_template": "chatml", "completion_only_loss": True},
            ["task.completion_only_loss=true", "task.assistant_only_loss=true"],
        ),
        (
            {"prompt": ["a"], "completion": ["b"]},
            {"assistant_only_loss": True},
            ["task.assistant_only_loss=true", "plain texts"],
        ),
        (
            {"messages": [[*said("a"), {"role": "tool", "content": "2"}, *said("a", "b")]]},
            {"chat_template": "zephyr"},
            ["task.chat_template=zephyr", "row 1", "not tool", "chatml"],
        ),
        (
            {"messages": [CHATS[0]], "tools": ['[{"a": 1}]']},
            {"chat_template": "alpaca"},
            ["no place for tools"],
        ),
        (
            {"messages": [CHATS[0]]},
            {"chat_template": "{% if %}"},
            ["no valid jinja", "line 1"],
        ),
        (
            {"messages": [CHATS[1]]},
            {"chat_template": FORGETFUL},
            ["does not know the role 'system'", "row 1"],
        ),
    ],
)
def test_what_is_refused(
    make_source: Make,
    make_task: Make,
    bpe: Any,
    tmp_path: Path,
    rows: Any,
    options: Any,
    facts: list[str],
) -> None:
    if "{" in options.get("chat_template", ""):
        (tmp_path / "own.jinja").write_text(options["chat_template"])
        options = options | {"chat_template": str(tmp_path / "own.jinja")}
    with pytest.raises(ConfigError) as refused:
        make_task("sft", make_source(rows, max_length=200), bpe, **options)
    for fact in facts:
        assert fact in str(refused.value)


def test_a_tokenizer_with_the_marks_of_chatml_is_used_with_it(
    make_source: Make, make_task: Make, bpe: Any, tokenizer: Make
) -> None:
    """As those that are made here are; another one is asked for a template."""
    source = make_source({"messages": CHATS}, max_length=200)
    task = make_task("sft", source, bpe, assistant_only_loss=True)
    assert learnt(task, bpe) == ["the cat<|im_end|>"]
    assert any("chatml" in note for note in task.notes)
    assert "im_start" in bpe.chat_template
    with pytest.raises(ConfigError) as refused:
        make_task("sft", source, tokenizer("stream"))
    for fact in ("task.chat_template=null", "conversations", "chatml", "zephyr", "FILE.jinja"):
        assert fact in str(refused.value)
    plain = tokenizer("chat")
    plain.chat_template = None
    make_task("sft", make_source({"prompt": ["a"], "completion": ["b"]}, max_length=200), plain)
    assert plain.chat_template is None


def test_answers_that_later_turns_change_are_examples_of_their_own(
    make_source: Make, make_task: Make, bpe: Any, tmp_path: Path
) -> None:
    """Each as when it is asked for; rows are named by their own numbers all the same."""
    (tmp_path / "own.jinja").write_text(CHANGING)
    options = {
        "chat_template": str(tmp_path / "own.jinja"),
        "assistant_only_loss": True,
        "sample_tokens": 0,
    }
    task = make_task("sft", make_source({"messages": CHATS}, max_length=200), bpe, **options)
    assert len(task.train) == 4
    texts = [marked_text(bpe, task.train[index]) for index in range(4)]
    assert texts[1].endswith("[user] a mat?[assistant] «yes.»")
    assert texts[2].endswith("[assistant] yes[user] why?[assistant]« unbelievable things.»")
    assert any("3 chats are 4 examples, one an answer" in note for note in task.notes)
    assert any("each is an example" in note for note in task.notes)
    given = {"prompt": [CHATS[1][:3]], "completion": [CHATS[1][3:]]}
    task = make_task("sft", make_source(given, max_length=200), bpe, **options)
    assert len(task.train) == 1
    assert marked_text(bpe, task.train[0]).endswith("[user] why?[assistant]« unbelievable things.»")
    long = {"messages": [CHATS[1], said("the cat sat on a mat " * 9, "b")]}
    with pytest.raises(ConfigError, match=r"row 2 of data\.train"):
        make_task("sft", make_source(long, max_length=60), bpe, **options)


def test_rows_that_are_too_short_are_refused_whatever_else_is_cut(
    make_source: Make, make_task: Make, bpe: Any
) -> None:
    """Not dropped with those that are cut, which a longer data.max_length would hold."""
    long = "the cat sat on a mat " * 5
    rows = {"prompt": [long, "", "the cat"], "completion": ["b", "a", " sat"]}
    bpe.eos_token = None
    with pytest.raises(
        ConfigError, match=r"row 2 has no token to learn: too short\. Leave such rows out"
    ):
        make_task("sft", make_source(rows, max_length=12), bpe, overlong_rows="drop")


@pytest.mark.parametrize(
    ("turns", "options"),
    [
        (
            [*said("a"), {"role": "function", "content": "2"}, *said("a", "b")],
            {"chat_template": "chatml"},
        ),
        (CHATS[1], {"chat_template": FORGETFUL}),
    ],
)
def test_a_row_that_the_template_does_not_write_is_refused_with_others(
    make_source: Make, make_task: Make, bpe: Any, tmp_path: Path, turns: Any, options: Any
) -> None:
    if "{" in options["chat_template"]:
        (tmp_path / "own.jinja").write_text(options["chat_template"])
        options = options | {"chat_template": str(tmp_path / "own.jinja")}
    with pytest.raises(ConfigError, match=r"task\.chat_template=alpaca\|chatml.*jinja") as refused:
        make_task("sft", make_source({"messages": [turns]}, max_length=200), bpe, **options)
    assert "row 1 of data.train" in str(refused.value)


def test_a_sample_is_repeatable_and_leaves_no_trace(
    make_source: Make, make_task: Make, bpe: Any
) -> None:
    task = make_task(
        "sft",
        make_source({"messages": CHATS}, max_length=150),
        bpe,
        chat_template="chatml",
        sample_tokens=5,
    )
    model = decoder("gpt2").float().train()
    before = torch.get_rng_state()
    first, second = task.sample(model, bpe, seed=0), task.sample(model, bpe, seed=1)
    assert first == second
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert first[0].endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_of_a_mixture_of_packed_chats_one_row_is_shown(
    make_source: Make, make_task: Make, bpe: Any
) -> None:
    options = {"chat_template": "chatml"}
    alone = make_task("sft", make_source({"messages": CHATS}, max_length=150), bpe, **options)
    mixed = make_task(
        "sft", make_source({"messages": CHATS}, max_length=150), bpe, packing=True, **options
    )
    mixed.train = MixedExamples(
        {"a": mixed.train, "b": alone.train}, None, "first_exhausted", seed=0
    )
    assert mixed.shown(bpe) == alone.shown(bpe)


def test_limits_pick_rows_before_they_are_packed(
    make_source: Make, make_task: Make, bpe: Any
) -> None:
    options = {"chat_template": "chatml"}
    few = make_source({"messages": CHATS * 4}, max_length=150, max_train_examples=5)
    packed = make_task("sft", few, bpe, packing=True, **options)
    alone = make_task(
        "sft",
        make_source({"messages": CHATS * 4}, max_length=150, max_train_examples=5),
        bpe,
        **options,
    )
    assert len(alone.train) == 5
    assert int(packed.train.lengths.sum()) == int(alone.train.lengths.sum())
    assert np.array_equal(packed.train.hashes, alone.train.hashes)


# What rows say
# ------------------------------------------------------------------------------------------

CALLING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<{{ call.function.name }} ARGUMENTS>{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("written", ["arguments | tojson", "arguments"])
@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', {"city": "Paris"}])
def test_arguments_of_calls_are_written_once(
    make_source: Make, make_task: Make, bpe: Any, written: str, arguments: Any
) -> None:
    """As an object, whether a row has it or its JSON text, and whatever the template does."""
    bpe.chat_template = CALLING.replace("ARGUMENTS", f"{{{{ call.function.{written} }}}}")
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    chat = [{"role": "user", "content": "Hi"}, answer]
    task = make_task("sft", make_source({"messages": [chat]}, max_length=200), bpe)
    assert '<weather {"city": "Paris"}>' in bpe.decode(task.train[0]["input_ids"])


def test_arguments_without_a_json_form_are_left_to_the_template(
    make_source: Make, make_task: Make, bpe: Any
) -> None:
    """Such as a date of a parquet file; this template writes no arguments."""
    bpe.chat_template = CALLING.replace(" ARGUMENTS", "")
    call = {"type": "function", "function": {"name": "weather", "arguments": {"day": date.max}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    chat = [{"role": "user", "content": "Hi"}, answer]
    task = make_task("sft", make_source({"messages": [chat]}, max_length=200), bpe)
    assert "<weather>" in bpe.decode(task.train[0]["input_ids"])


@pytest.mark.parametrize("key", ["tool_calls", "reasoning_content"])
def test_what_a_template_does_not_write_is_refused(
    make_source: Make, make_task: Make, bpe: Any, key: str
) -> None:
    value = [{"function": {"name": "f", "arguments": {}}}] if key == "tool_calls" else "hm"
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "b", key: value}]
    bpe.chat_template = UNMARKED
    with pytest.raises(ConfigError, match=f"does not read {key}"):
        make_task("sft", make_source({"messages": [chat]}, max_length=99), bpe)
    chat = [{"role": "user", "content": "Hi", "name": "Bob"}, {"role": "assistant", "content": "b"}]
    task = make_task("sft", make_source({"messages": [chat]}, max_length=99), bpe)
    assert [note for note in task.notes if "does not read name" in note]


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("reasoning_content", "{# of reasoning_content nothing is kept #}"),
        ("thinking", "{{ 'thinking is off ' }}"),
        ("name", "{% for tool in tools or [] %}{{ tool.name }}{% endfor %}"),
    ],
)
def test_a_word_in_a_template_writes_no_key(
    make_source: Make, make_task: Make, bpe: Any, key: str, named: str
) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "b", key: "hm"}]
    source = make_source({"messages": [chat]}, max_length=99)
    bpe.chat_template = UNMARKED + named
    if key != "name":
        with pytest.raises(ConfigError, match=f"does not read {key}"):
            make_task("sft", source, bpe)
    else:
        task = make_task("sft", source, bpe)
        assert [note for note in task.notes if "does not read name" in note]


def test_reasoning_that_a_later_turn_hides_is_read(
    make_source: Make, make_task: Make, bpe: Any
) -> None:
    """As under Qwen 3, whose template writes that of the last answer alone."""
    bpe.chat_template = UNMARKED.replace(
        "{{ m.content }}", "{% if loop.last %}{{ m.reasoning_content }}{% endif %}{{ m.content }}"
    )
    ask, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "b"}
    chat = [ask, {**answer, "reasoning_content": "the cat"}, ask, answer]
    task = make_task("sft", make_source({"messages": [chat]}, max_length=99), bpe)
    assert not [note for note in task.notes if "does not read" in note]


SAID = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "the cat"}]
HONOURED = {
    "system beside turns": {"messages": SAID, "system": "Bob"},
    "system beside a list of speakers": {
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "the cat"}],
        "system": "Bob",
    },
    "system beside prompt and completion": {
        "prompt": SAID[:1],
        "completion": SAID[1:],
        "system": "Bob",
    },
    "history": {"instruction": "Hi", "output": "the cat", "history": [["Paris", "Berlin"]]},
    "weight": {"messages": [SAID[0], {**SAID[1], "weight": 1, "train": True}]},
}


@pytest.mark.parametrize("case", HONOURED)
def test_what_a_row_says_beside_its_turns(
    make_source: Make, make_task: Make, bpe: Any, case: str
) -> None:
    row = {name: [value] for name, value in HONOURED[case].items()}
    task = make_task("sft", make_source(row, max_length=200), bpe, chat_template="chatml")
    text = bpe.decode(task.train[0]["input_ids"])
    begin = {"history": "user\nParis<|im_end|>\n<|im_start|>assistant\nBerlin", "weight": "user"}
    assert text.startswith("<|im_start|>" + begin.get(case, "system\nBob<|im_end|>"))
    assert text.rstrip().endswith("<|im_start|>assistant\nthe cat<|im_end|>")


REFUSED = {
    "weight=0": {"messages": [SAID[0], {**SAID[1], "weight": 0}]},
    "train=False": {"messages": [SAID[0], {**SAID[1], "train": False}]},
    "chat_template_kwargs": {"messages": SAID, "chat_template_kwargs": {"enable_thinking": False}},
    "weight=0.5": {"messages": [SAID[0], {**SAID[1], "weight": 0.5}]},
    "trainable=False": {"messages": [SAID[0], {**SAID[1], "trainable": False}]},
    "loss=False": {"messages": [SAID[0], {**SAID[1], "loss": False}]},
    "train_detail=": {"messages": [SAID[0], {**SAID[1], "train_detail": [{"train": False}]}]},
    "label=False": {"prompt": "Hi", "completion": " the cat", "label": False},
    "label=0": {"prompt": "Hi", "completion": " the cat", "label": 0},
    "label='false'": {"prompt": "Hi", "completion": " the cat", "label": "false"},
    "earlier turns in a column history": {"messages": SAID, "history": [["Paris", "Berlin"]]},
    "earlier turns beside a prompt": {
        "prompt": "Hi",
        "completion": " the cat",
        "history": [["Paris", "Berlin"]],
    },
    "'x=1'.* as tool_calls": {"messages": [SAID[0], {**SAID[1], "tool_calls": "x=1"}]},
    "column system": {"prompt": "Hi", "completion": " the cat", "system": "Bob"},
    "another text in column system": {
        "messages": [{"role": "system", "content": "Anna"}, *SAID],
        "system": "Bob",
    },
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_a_row_says_and_nobody_reads_is_refused(
    make_source: Make, make_task: Make, bpe: Any, said: str
) -> None:
    row = {name: [value] for name, value in REFUSED[said].items()}
    said = said.replace("beside a prompt", "in a column history")
    with pytest.raises(ConfigError, match=f"row 1 .*{said}"):
        make_task("sft", make_source(row, max_length=99), bpe, chat_template="chatml")


def test_history_of_preferences_is_refused(make_source: Make, make_task: Make, bpe: Any) -> None:
    row = {"prompt": ["Hi"], "chosen": [" the cat"], "rejected": [" a mat"], "history": [["Bob"]]}
    with pytest.raises(ConfigError, match="row 1 has earlier turns in a column history"):
        make_task("preference", make_source(row, max_length=99), bpe, chat_template="chatml")


def test_tool_calls_may_be_json_text(make_source: Make, make_task: Make, bpe: Any) -> None:
    """As rows that were written as csv or by a database have them."""
    calls = [{"type": "function", "function": {"name": "cat", "arguments": {"on": "mat"}}}]
    texts = []
    for value in (calls, json.dumps(calls)):
        answer = {"role": "assistant", "content": "", "tool_calls": value}
        row = {"messages": [[SAID[0], answer]]}
        task = make_task("sft", make_source(row, max_length=200), bpe, chat_template="chatml")
        texts.append(bpe.decode(task.train[0]["input_ids"]))
    assert texts[0] == texts[1]
    assert '"arguments": {"on": "mat"}' in texts[0]


def test_a_key_that_is_false_is_told_as_not_read(
    make_source: Make, make_task: Make, bpe: Any
) -> None:
    row = {"messages": [[SAID[0], {**SAID[1], "prefix": False}]]}
    task = make_task("sft", make_source(row, max_length=200), bpe, chat_template="chatml")
    assert [note for note in task.notes if "does not read prefix" in note]


@pytest.mark.parametrize("task", ["causal_lm", "sft", "preference"])
def test_a_row_that_has_the_begin_already_begins_once(
    make_source: Make, make_task: Make, bpe: Any, task: str
) -> None:
    from tokenizers import processors

    begin = "<|im_start|>"
    bpe.bos_token = begin
    pair = [(begin, bpe.bos_token_id)]
    bpe.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=pair
    )
    rows = {
        "causal_lm": {"text": ["the cat"]},
        "sft": {"prompt": ["the"], "completion": [" cat"]},
        "preference": {"prompt": ["the"], "chosen": [" cat"], "rejected": [" mat"]},
    }[task]
    first = next(iter(rows))
    templated = {**rows, first: [begin + rows[first][0]]}
    options = {"packing": False} if task == "causal_lm" else {}
    ids = [
        list(make_task(task, make_source(one, max_length=50), bpe, **options).train[0]["input_ids"])
        for one in (rows, templated)
    ]
    assert ids[0] == ids[1]
    assert ids[0].count(bpe.bos_token_id) == 1


@pytest.mark.parametrize("task", ["causal_lm", "sft", "preference"])
def test_a_row_ends_once_where_the_tokenizer_ends_every_text(
    make_source: Make, make_task: Make, bpe: Any, task: str
) -> None:
    from tokenizers import processors

    end = bpe.eos_token
    rows = {
        "causal_lm": {"text": ["the cat"]},
        "sft": {"prompt": ["the"], "completion": [" cat"]},
        "preference": {"prompt": ["the"], "chosen": [" cat"], "rejected": [" mat"]},
    }[task]
    options = {"packing": False} if task == "causal_lm" else {}

    def ids_of(rows: Any) -> list[int]:
        task_of_rows = make_task(task, make_source(rows, max_length=50), bpe, **options)
        return list(task_of_rows.train[0]["input_ids"])

    usual = ids_of(rows)
    bpe.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, bpe.eos_token_id)]
    )
    name = {"causal_lm": "text", "sft": "completion", "preference": "chosen"}[task]
    assert ids_of(rows) == ids_of({**rows, name: [rows[name][0] + end]}) == usual
    assert usual.count(bpe.eos_token_id) == 1
