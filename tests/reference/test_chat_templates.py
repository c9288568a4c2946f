"""What is learnt of chats with the templates of models that people have, beside what TRL learns
of them.

TRL brings each template of a model, and beside most of them one of its own with generation marks,
by which it labels. Here the model's own is used: by prefix, or each answer as when it is asked for.
"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from optrun.model.tokenizer import train_tokenizer
from optrun.task.chat_template import ChatTemplate, TemplateFailed
from tests.reference.test_trl import TOOL

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="the templates are TRL's")

Turn = dict[str, Any]


def said(*contents: str, **more: Any) -> list[Turn]:
    return [
        {"role": ("user", "assistant")[at % 2], "content": text}
        | ({key: value + text for key, value in more.items()} if at % 2 else {})
        for at, text in enumerate(contents)
    ]


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CHATS: dict[str, tuple[list[Turn], Any]] = {
    "one": (said("Q1", "A1"), None),
    "two": (said("Q1", "A1", "Q2", "A2"), None),
    "system": ([{"role": "system", "content": "S"}, *said("Q1", "A1", "Q2", "A2")], None),
    "thinking": (said("Q1", "A1", "Q2", "A2", reasoning_content="R", thinking="R"), None),
    "thinking in the text": (
        said("Q1", "<think>\nR1\n</think>\n\nA1", "Q2", "<think>\nR2\n</think>\n\nA2"),
        None,
    ),
    "tools": (
        [
            *said("Q1"),
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "T1", "name": "add"},
            {"role": "assistant", "content": "A1"},
        ],
        [TOOL],
    ),
}
SAME, OPENING, OTHER, REFUSED = "=", "o", "x", "-"
"""As TRL; TRL learns the opening of an answer, too, which no model is asked for; otherwise
(docs/sft.md says how); the template refuses plain texts, or such a chat."""
EXPECTED = {  # one, two, system, thinking, thinking in the text, tools
    "cohere2": "=====-",
    "cohere": "=====-",
    "deepseek_r1_distill": "oooooo",
    "deepseekv3": "oooooo",
    "diffusion_gemma": "===x=x",
    "gemma3": "=====-",
    "gemma": "==-==-",
    "glm4moe": "xxxxxx",
    "gptoss": "oxxxxo",
    "idefics3": "------",
    "lfm2": "======",
    "lfm2_v2": "======",
    "llama3": "======",
    "llava_next": "------",
    "muse_glimmer": "oooooo",
    "nemotron_3_5_lightning": "oooxxo",
    "nemotron_3_nano": "oooxxo",
    "nemotron_3_super": "oooxxo",
    "nemotron_3_ultra": "oooxxo",
    "phi3_5": "=xxxx-",
    "phi3": "=xxxx-",
    "qwen2_5": "oooooo",
    "qwen2_5_vl": "======",
    "qwen3_5_nothink": "oooooo",
    "qwen3_5_think": "oooooo",
    "qwen3_6": "oooooo",
    "qwen3_8": "oooooo",
    "qwen3_instruct_2507": "======",
    "qwen3": "======",
    "qwen3_vl": "======",
    "smolvlm": "------",
}


def learnt(template: ChatTemplate, turns: list[Turn], tools: Any) -> list[str]:
    """What is learnt of a chat, answer by answer; spans that touch are one."""
    found = []
    for part, write in [
        (part, template.find_last_answer) for part in template.split_behind_answers(turns, tools)
    ] or [(turns, template.find_answers)]:
        text, spans = write(part, tools)
        for number, (begin, end) in enumerate(spans):
            if number and begin == spans[number - 1][1]:
                found[-1] += text[begin:end]
            else:
                found.append(text[begin:end])
    return found


def beside(ours: list[str], theirs: list[str]) -> str:
    if ours == theirs:
        return SAME
    ends = len(ours) == len(theirs) and all(
        other.endswith(one) for one, other in zip(ours, theirs, strict=True)
    )
    return OPENING if ends else OTHER


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = train_tokenizer(lambda: iter(["a b c d"] * 3), vocab_size=320, kind="chat")
    made.bos_token = "<s>"
    return made


def folder() -> Path:
    spec = find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "chat_templates"


def template_of(tokenizer: Any, path: Path) -> ChatTemplate:
    """A template in use by a copy of a tokenizer."""
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = path.read_text(encoding="utf-8")
    return ChatTemplate(tokenizer, path.stem)


def test_what_is_learnt_beside_trl(tokenizer: Any) -> None:
    found = {}
    for path in sorted(folder().glob("*_training.jinja")):
        name = path.stem.removesuffix("_training")
        own = template_of(tokenizer, path.parent / f"{name}.jinja")
        marked = template_of(tokenizer, path)
        kinds = []
        for turns, tools in CHATS.values():
            try:
                known = all(
                    own.writes_role(turns, tools, role) for role in {turn["role"] for turn in turns}
                )
                ours = learnt(own, turns, tools) if known else []
            except TemplateFailed:
                known = False
            if not known:
                kinds.append(REFUSED)
                continue
            answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
            assert len(ours) == len(answers), name
            assert all(
                text.rpartition("\n")[2] in one for text, one in zip(answers, ours, strict=True)
            ), name
            kinds.append(beside(ours, learnt(marked, turns, tools)))
        found[name] = "".join(kinds)
    assert found == EXPECTED


def test_an_answer_is_learnt_behind_what_it_is_asked_with(tokenizer: Any) -> None:
    """Where a template opens an answer as it writes it, the learnt text begins there, in every
    example.
    """
    for path in sorted(folder().glob("*.jinja")):
        own = template_of(tokenizer, path)
        if own.marked:
            continue
        try:
            parts = own.split_behind_answers(CHATS["two"][0])
        except TemplateFailed:
            continue
        for turns in parts:
            whole, ((begin, _),) = own.find_last_answer(turns)
            before = own.text(turns[:-1], generation_prompt=True)
            assert not whole.startswith(before) or begin == len(before), path.stem
