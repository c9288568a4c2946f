"""Small bugs: what one place of a function could wrongly say, found in its syntax tree."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Pow: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One bug.

    Attributes:
        file: Path from the root of the repository.
        line: Where it is.
        name: What it does, unique together with file and line.
        function: Which of the module's functions holds it.
        position: Which of its places.
        change: Which change of that place.
    """

    file: str
    line: int
    name: str
    function: int
    position: int
    change: int

    @property
    def title(self) -> str:
        """How the report calls it."""
        return f"{self.file}:{self.line} {self.name}"

    def tree(self, root: Path) -> ast.Module:
        """The module with the bug."""
        tree = _parsed(root, self.file)
        place = list(_places(list(_functions(tree))[self.function]))[self.position]
        list(_changes(place))[self.change].make()
        return ast.fix_missing_locations(tree)


@dataclass(frozen=True)
class Change:
    """What can be wrong at a place, and how to make it so."""

    name: str
    line: int
    make: Callable[[], None]


def mutants(root: Path, file: str) -> Iterator[Mutant]:
    """Every bug that can be planted in the functions of a module, in order."""
    for number, function in enumerate(_functions(_parsed(root, file))):
        for position, node in enumerate(_places(function)):
            for index, change in enumerate(_changes(node)):
                name = f"col {getattr(node, 'col_offset', 0)}: {change.name}"
                yield Mutant(file, change.line, name, number, position, index)


def _parsed(root: Path, file: str) -> ast.Module:
    return ast.parse((root / file).read_text(encoding="utf-8"))


def sample(root: Path, files: list[str], count: int, seed: int) -> list[Mutant]:
    """So many of them, drawn evenly from the files by the seed."""
    every = [mutant for file in files for mutant in mutants(root, file)]
    chosen = random.Random(seed).sample(every, min(count, len(every)))
    return sorted(chosen, key=lambda mutant: mutant.title)


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Functions and methods; those inside another belong to it."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from (inner for inner in node.body if isinstance(inner, ast.FunctionDef))


def _places(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Nodes of the body that can be wrong; texts of messages and annotations are left alone."""
    waiting: list[ast.AST] = [*reversed(function.body)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.JoinedStr | ast.Assert):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        yield node
        if isinstance(node, ast.Raise):
            continue
        skipped = {
            id(getattr(node, key))
            for key in ("annotation", "returns")
            if getattr(node, key, None) is not None
        }
        waiting += [
            inner
            for inner in reversed(list(ast.iter_child_nodes(node)))
            if id(inner) not in skipped
        ]


def _changes(node: ast.AST) -> Iterator[Change]:
    """What can be wrong at a node."""
    line = getattr(node, "lineno", 0)
    for name, key, value in _new_values(node):
        yield Change(name, line, partial(setattr, node, key, value))
    for key in ("body", "orelse"):
        block = getattr(node, key, None)
        for index, statement in enumerate(block if isinstance(block, list) else ()):
            if _droppable(statement):
                text = " ".join(ast.unparse(statement).split())[:60]
                yield Change(
                    f"dropped: {text}",
                    statement.lineno,
                    partial(block.__setitem__, index, ast.Pass()),
                )


def _new_values(node: ast.AST) -> Iterator[tuple[str, str, object]]:
    """Changes that replace one attribute of a node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        new = COMPARISONS[type(node.ops[0])]
        yield f"{type(node.ops[0]).__name__} -> {new.__name__}", "ops", [new(), *node.ops[1:]]
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        new_op = OPERATORS[type(node.op)]
        yield f"{type(node.op).__name__} -> {new_op.__name__}", "op", new_op()
    elif isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield f"{type(node.op).__name__} -> {other.__name__}", "op", other()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "minus dropped", "op", ast.UAdd()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not dropped", "operand", ast.UnaryOp(ast.Not(), node.operand)
    elif isinstance(node, ast.Name) and node.id in NAMES:
        yield f"{node.id} -> {NAMES[node.id]}", "id", NAMES[node.id]
    elif (
        isinstance(node, ast.Call)
        and len(node.args) == 2
        and not any(isinstance(a, ast.Starred) for a in node.args)
    ):
        yield f"arguments of {ast.unparse(node.func)[:30]} swapped", "args", [*reversed(node.args)]
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} -> {not node.value}", "value", not node.value
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield f"{node.value} -> {node.value + 1}", "value", node.value + 1
    elif isinstance(node, ast.If | ast.IfExp):
        for truth in (True, False):
            yield f"condition -> {truth}", "test", ast.Constant(truth)


def _droppable(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    return isinstance(statement, ast.Raise | ast.AugAssign | ast.Continue | ast.Break | ast.Delete)
