"""Chat templates rendered within a bound of steps and characters, whoever wrote them.

The environment is that of transformers. Steps are counted and sizes are looked at before anything
is made, so that the bound is the same on a busy machine, in a thread and in a worker. What it
costs: a call for each loop, filter and `~`.
"""

from __future__ import annotations

import functools
import operator
import re
import string
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

Value = TypeVar("Value")
STEPS = 1_000_000
"""Turns of loops, calls, and thousands of characters."""
CHARACTERS = 2**22
"""Of any text on the way, and of the whole."""
_SOURCE = 2**20
_NUMBER = 2**16
"""Largest width, count or indentation that a filter or method is given."""
_PERCENT_FIELD = re.compile(r"%(?:%|(?:\([^)]*\))?([-+ #0-9.*]*))")
_DIGITS = re.compile(r"\d+")
_FIELD = 400
"""Characters that a field without a width makes of a number."""
_PLAIN = frozenset(
    {
        "length",
        "count",
        "first",
        "last",
        "default",
        "d",
        "select",
        "reject",
        "selectattr",
        "rejectattr",
    }
)
"""Filters that make no text, and are asked of whole conversations."""
_COMPARING = (
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    jinja2.tests.test_in,
)
_spent = threading.local()


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """A template takes too many steps, or makes too much text."""


_FILTERED: dict[type[nodes.Node], tuple[str, str]] = {
    nodes.For: ("iter", "_each"),
    nodes.Compare: ("expr", "_looked"),
    nodes.Operand: ("expr", "_looked"),
    nodes.Pair: ("key", "_looked"),
}
"""Nodes to the part that goes through a filter of ours, and to this filter."""


class _Bounds(NodeTransformer):
    """Puts a filter of ours around what loops go through, and in place of `~`."""

    def generic_visit(self, node: nodes.Node, *args: object, **kwargs: object) -> nodes.Node:
        """Change a node after those inside it."""
        super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.Concat):
            return _through("_joined", nodes.List(node.nodes, lineno=node.lineno))
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            node.node = _through("_looked", node.node)
        if type(node) in _FILTERED:
            part, name = _FILTERED[type(node)]
            inner = getattr(node, part)
            if isinstance(node, nodes.For | nodes.Compare) or not isinstance(inner, nodes.Const):
                setattr(node, part, _through(name, inner))
        return node


def _through(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """An environment whose templates end."""

    intercepted_binops = frozenset({"+", "*", "**", "%", "//"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Bounds().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree  # type: ignore[no-any-return]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> object:
        """Compute an operation whose result is of bounded size."""
        if operator == "**" and (
            (abs(left) > 1 and abs(right) > _NUMBER) or _size(left) > CHARACTERS
        ):
            raise _too_large()
        if (
            operator == "*"
            and not _are_numbers(left, right)
            and _size(left) * _size(right) > CHARACTERS
        ):
            raise _too_large()
        if operator == "%" and isinstance(left, str):
            _refuse_percent(left, right)
        for value in (left, right):
            if isinstance(value, int):
                spend(value.bit_length() // 100)
        return _made(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: object, *args: object, **kwargs: object) -> object:
        """Call what a template calls, counted."""
        owner = getattr(
            getattr(function, "__wrapped__", function), "__self__", None
        )  # the sandbox wraps `format`
        if isinstance(owner, str) and not _are_short((owner, *args, *kwargs.values())):
            _refuse_large((owner, *args, *kwargs.values()))
        if isinstance(owner, str) and getattr(function, "__name__", "") in ("format", "format_map"):
            fields = [spec for _, _, spec, _ in string.Formatter().parse(owner) if spec is not None]
            _refuse_format(owner, (*args, *kwargs.values()), fields, "{")
        if isinstance(owner, list | tuple):
            _looked(owner)
        if isinstance(function, LoopContext):  # goes through its argument once more
            args = tuple(map(_each, args))
        elif not isinstance(owner, str) and not isinstance(function, Macro):
            for value in args:  # may be compared or hashed
                _looked(value)
        spend(1 + len(args) // 10)
        return _made(super().call(context, function, *args, **kwargs))

    def getitem(self, obj: object, argument: object) -> object:
        """Look a key up, whose hash takes bounded time."""
        return super().getitem(obj, _looked(argument))


def spend(steps: int) -> None:
    """Count steps of the rendering in this thread.

    Raises:
        TemplateLimitError: There are too many.
    """
    _spent.steps = getattr(_spent, "steps", 0) + steps
    if _spent.steps > STEPS:
        raise TemplateLimitError(f"it takes more than {STEPS:,} steps: it loops too often")


def _too_large() -> TemplateLimitError:
    return TemplateLimitError(f"it makes more than {CHARACTERS:,} characters")


def _are_numbers(*values: object) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _size(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Sized | int):
        return 1
    return max(1, abs(value) if isinstance(value, int) else len(value))


def _weight(value: object) -> int:
    """Count the characters in a nested value, four for each value that is no text, as far as the bound."""
    total, nodes, left = 0, 0, [value]
    while left:
        nodes += 1
        each = left.pop()
        total += len(each) if isinstance(each, str) else 4
        if total > CHARACTERS:
            raise _too_large()
        if isinstance(each, Mapping):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            left += each
    spend(nodes // 5)
    return total


def _made(value: Value) -> Value:
    """Count what was made."""
    if isinstance(value, int):
        if not isinstance(value, bool) and value.bit_length() > _NUMBER:
            raise _too_large()
        spend(value.bit_length() // 100)
    elif isinstance(value, str | list | tuple | bytes):
        if len(value) > CHARACTERS:
            raise _too_large()
        spend(len(value) // (1000 if isinstance(value, str) else 10))
    return value


def _are_short(values: tuple[object, ...]) -> bool:
    return all(type(value) is str and len(value) < 1000 for value in values)


def _refuse_large(values: Iterable[object]) -> None:
    """Refuse what a filter or a method could make too much of.

    Of two arguments, as much as both together.
    """
    first, *others = values
    if any(isinstance(value, int) and abs(value) > _NUMBER for value in others):
        raise _too_large()
    sizes = sorted(
        (
            _weight(first),
            *(_size(value) if isinstance(value, int) else _weight(value) for value in others),
        )
    )
    spend(sizes[-1] // 1000)
    if len(sizes) > 1 and sizes[-1] * sizes[-2] > CHARACTERS * 16:
        raise _too_large()


def _refuse_percent(form: str, values: object) -> None:
    _refuse_format(form, values, _PERCENT_FIELD.findall(form), "*")


def _refuse_format(form: str, values: object, fields: Sequence[str], by_value: str) -> None:
    """Refuse fields that are wide together, or as wide as a value says."""
    if any(by_value in field for field in fields):
        raise TemplateLimitError(
            f"the width of a format is a value: it may make more than {CHARACTERS:,} characters"
        )
    numbers = [number for field in fields for number in _DIGITS.findall(field)]
    if (
        any(len(number) > 9 for number in numbers)
        or sum(map(int, numbers)) + _FIELD * len(fields) > CHARACTERS
    ):
        raise _too_large()
    _refuse_large((form, *(values if isinstance(values, tuple) else (values,))))


def _bounded(name: str, function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)  # keeps the mark of what jinja passes first
    def call(*args: object, **kwargs: object) -> object:
        given = args[1:] if hasattr(function, "jinja_pass_arg") else args
        spend(1)
        if name not in _PLAIN and not _are_short((*given, *kwargs.values())):
            _refuse_large((*given, *kwargs.values()))
        if name == "format":
            _refuse_percent(str(given[0]), (*given[1:], *kwargs.values()))
        return _made(function(*args, **kwargs))

    return call


def _each(values: Any) -> Any:
    if isinstance(values, Sized):
        spend(1 + len(values))
        return values
    return _counted(values)


def _counted(values: Iterable[Value]) -> Iterator[Value]:
    for value in values:
        spend(1)
        yield value


def _concat(pieces: Iterable[str]) -> str:
    found, total = [], 0
    for piece in pieces:
        total += len(piece)
        if total > CHARACTERS:
            raise _too_large()
        found.append(piece)
    spend(1 + total // 1000)
    return "".join(found)


def _joined(values: list[object]) -> str:
    return _concat(str(_shown(value)) for value in values)


def _shown(value: Value) -> Value:
    if isinstance(value, list | tuple | Mapping):
        _weight(value)
    return value


def _looked(value: Value) -> Value:
    """Count what it takes to compare or hash a value: all that is nested in it."""
    if isinstance(value, str | bytes):
        spend(len(value) // 1000)
    elif isinstance(value, Sized):
        _weight(value)
    return value


def _bounded_test(function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def call(*args: object) -> object:
        for value in args:
            if isinstance(value, str) or function in _COMPARING:
                _looked(value)
        return function(*args)

    return call


@functools.lru_cache
def _compiled(source: str) -> jinja2.Template:
    if len(source) > _SOURCE:
        raise TemplateLimitError(f"it has more than {_SOURCE:,} characters itself")
    theirs: Any = chat_template_utils._compile_jinja_template
    found = theirs.__wrapped__("").environment  # one that nobody else has
    found.__class__ = BoundedEnvironment
    found.globals.pop("lipsum", None)
    found.filters = {name: _bounded(name, function) for name, function in found.filters.items()}
    found.tests = {name: _bounded_test(function) for name, function in found.tests.items()}
    ours: dict[str, Callable[..., object]] = {
        "_each": _each,
        "_joined": _joined,
        "_looked": _looked,
    }
    found.filters |= ours
    found.finalize, found.concat = _shown, _concat
    return found.from_string(source)  # type: ignore[no-any-return]


def render(**arguments: object) -> Any:
    """Render as `transformers.utils.chat_template_utils.render_jinja_template`, within bounds.

    Raises:
        TemplateLimitError: It takes too many steps, or makes too much text.
        jinja2.TemplateError: As that.
    """
    _spent.steps = 0
    return _library()(**arguments)


@functools.lru_cache(maxsize=1)
def _library() -> Callable[..., object]:
    """Return transformers' function, made to compile with the bounded environment."""
    theirs = chat_template_utils.render_jinja_template
    known = {**theirs.__globals__, "_compile_jinja_template": _compiled}
    return types.FunctionType(theirs.__code__, known, argdefs=theirs.__defaults__)
