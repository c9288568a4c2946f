"""Chat templates end, and those that are no attack say what they say in transformers."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from optrun.task import bounded_template
from optrun.task.bounded_template import TemplateLimitError, render
from optrun.task.chat_template import NAMES, _read

TURNS = [
    {"role": "system", "content": "Be <b>brief</b>."},
    {"role": "user", "content": "12 % of 50?", "thinking": "hm"},
    {"role": "assistant", "content": "6"},
]
TOKENS = {"eos_token": "</s>", "bos_token": "<s>"}
DOUBLED = (
    "{% set n = namespace(x=BEGIN) %}{% for i in range(60) %}{% set n.x = MORE %}{% endfor %}{{"
    " n.x }}"
)
LONG = "{% set x = 'a' * 60000 %}"


def doubled(begin: str, more: str) -> str:
    return DOUBLED.replace("BEGIN", begin).replace("MORE", more)


def nested(name: str, kind: str) -> str:
    """Set a name to a value that holds many others, each of them again and again."""
    levels = "".join(f"{{% set {name} = {kind.format(name)} * 1000 %}}" for _ in range(4))
    return f"{{% set {name} = {kind.format(1)} %}}{levels}"


LISTS, TUPLES = nested("a", "[{}]") + nested("b", "[{}]"), nested("a", "({},)")
BOMBS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    (
        "{% for a in range(99999) %}{% for b in messages|map('upper') %}{% for c in range(9) %}{%"
        " endfor %}{% endfor %}{% for b in range(99) %}{% endfor %}{% endfor %}"
    ),
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}",
    "{{ 'a' * 100000000000 }}",
    "{{ ['a'] * 100000000000 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ 'a'|center(100000000000) }}",
    "{{ 'a'.ljust(100000000000) }}",
    "{{ 'a'.zfill(width=100000000000) }}",
    "{{ '%100000000000s' % 'a' }}",
    "{{ '%*d' % (100000000000, 1) }}",
    "{{ '%100000000000s'|format('a') }}",
    "{{ '{:100000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 100000000000) }}",
    "{{ messages|tojson(indent=100000000000) }}",
    doubled("'ab'", "n.x ~ n.x"),
    doubled("'ab'", "n.x + n.x"),
    doubled("3", "n.x * n.x"),
    doubled("['ab']", "[n.x, n.x]"),
    doubled("['ab']", "[n.x, n.x]").replace("{{ n.x }}", "{{ n.x|tojson }}"),
    LONG + "{% for i in range(90000) %}{{ x }}{% endfor %}",
    LONG + "{{ x.replace('a', x) }}",
    LONG + "{{ x.join([x] * 1000) }}",
    LONG + "{{ ([x] * 1000)|join }}",
    LONG + "{{ x|indent(60000) ~ x.expandtabs(60000) ~ x }}",
    LONG + "{% for i in range(90000) %}{% set y = x|upper %}{% endfor %}",
    LONG + "{% for i in range(90000) %}{% if 'b' in x %}{% endif %}{% endfor %}",
    LONG + "{% for i in range(90000) %}{% set y = x[::2] %}{% endfor %}",
    LONG
    + "{% macro f() %}{% for i in range(9) %}{{ x }}{% endfor %}{% endmacro %}{% set y = f() %}",
    "{#" + "a" * 2**20 + "#}",
    "{{ ('{0:9999}' * 10000).format(1) }}",
    "{{ ('%9999d' * 1000) % ((1,) * 1000) }}",
    "{{ ('%9999d' * 1000)|format(*(1,) * 1000) }}",
    "{{ '{:{}}'.format(1, '100000000000') }}",
    "{{ '{:{}{}}'.format(1, 65535, 65535) }}",
    (
        "{% for a in [1] recursive %}{% if loop.depth == 1 %}{% set outer = loop %}{% for b in"
        " range(9999) %}{{ outer(range(99999)) }}{% endfor %}{% endif %}{% endfor %}"
    ),
    LISTS + "{{ a == b }}",
    "{% for i in range(9000) %}{% set x = ('9' * 4000)|int %}{% endfor %}",
    (
        "{% set a = 7 ** 20000 %}{% set b = 3 ** 15000 %}{% for i in range(9000) %}{% set x = a //"
        " b %}{% endfor %}"
    ),
    LISTS + "{{ a is eq(b) }}",
    LISTS + "{{ [a]|select('eq', b)|list }}",
    LISTS + "{{ [a].count(b) }}",
    TUPLES + "{% set c = {a: 1} %}",
    TUPLES + "{{ {1: 2}[a] }}",
    TUPLES + "{{ {1: 2}.get(a) }}",
    (
        "{% macro f() %}{{ varargs|length }}{% endmacro %}{% for i in range(999) %}{{"
        " f(*range(99999)) }}{% endfor %}"
    ),
    LONG + "{% for i in range(90000) %}{{ x is lower }}{% endfor %}",
]


@pytest.mark.parametrize("source", BOMBS, ids=range(len(BOMBS)))
def test_a_template_ends(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_template, "STEPS", 20_000)
    monkeypatch.setattr(bounded_template, "CHARACTERS", 2**16)
    with pytest.raises(TemplateLimitError, match=r"more than [\d,]+ (steps|characters)"):
        render(conversations=[TURNS], chat_template=source)


def test_steps_are_counted_for_each_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_template, "STEPS", 1000)
    source = "{% for i in range(700) %}{% endfor %}{{ messages[0].role }}"
    for _ in range(3):
        assert render(conversations=[TURNS], chat_template=source)[0] == ["system"]


OWN = [
    (
        "{% for m in messages %}{{ loop.index0 }}{{ loop.last }}{{ loop.length }}{{ m.role|upper ~"
        " ': ' ~ m.content|trim }}{% endfor %}"
    ),
    (
        "{{ messages|map(attribute='role')|join(', ') }}{{ messages|tojson(indent=2) }}{{ '%s-%d' %"
        " ('a', 3) }}"
    ),
    (
        "{% for m in messages|selectattr('role', 'equalto', 'user') %}{{ m['content'][::-1] }}{%"
        " else %}none{% endfor %}"
    ),
    (
        "{% for m in messages if m.role != 'system' %}{{ m.content.split(' ')[-1] }}{% endfor %}{{"
        " none }}{{ [1.5] }}"
    ),
    (
        "{% if 'user' in messages[1].role and messages|length > 2 and no is undefined %}{{ no ~ 'a'"
        " }}{% endif %}"
    ),
    (
        "{% macro f(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ f(1) }}{{ '{} {:>5}'.format('a', 'b')"
        " }}{{ 'a' * 3 + 'b' }}"
    ),
    (
        "{% set n = namespace(found=false) %}{% for m in messages %}{% set n.found = true %}{%"
        " break %}{% endfor %}{{ n.found }}"
    ),
    (
        "{{ '**{}** {:*^9} {{0123456789}}'.format(1, 2) }}{{ '*%s* 100%% 0123456789' % 'a' }}{{"
        " '*%s*'|format('b') }}"
    ),
    (
        "{% for m in messages recursive %}{{ m.role }}{{ loop(m.more or []) }}{% endfor %}{{"
        " {messages[0].role: 1} }}"
    ),
]


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize(
    "source", [*map(_read, NAMES), *OWN], ids=[*NAMES, *map(str, range(len(OWN)))]
)
def test_others_are_rendered_as_by_transformers(source: str, marks: bool) -> None:
    given: Any = {
        "conversations": [TURNS],
        "chat_template": source,
        "return_assistant_tokens_mask": marks,
        **TOKENS,
    }
    if marks and "generation" not in source:
        return
    try:
        expected = render_jinja_template(**given)
    except TemplateError as error:
        with pytest.raises(TemplateError, match=type(error).__name__ if not str(error) else "."):
            render(**given)
        return
    assert render(**given) == expected
