"""The memory formula with one term left out or its sign turned round: what a slip of the hand would make of it.

A mutant is a function's own code with one such change. It is put in place of the function's code object, so that every
module that imported the function runs it, and taken out again.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

NAME_LENGTH = 110  # of a mutant
Change = Callable[[ast.expr], ast.expr]
# Records whose fields are bytes or elements, by the name they are called by.
RECORDS = ("States", "Gradients", "InFlight", "RankParameters", "Parameters", "Matrices", "cls")
SAVED = "Saved"  # one whose first field is bytes, and whose others are names
NOTHING = ("np.zeros", "c.zeros", "0.0", "none")  # has no sign, and nothing to lose
BYTES = ("FloatColumn", "Size", "float", "Kept")  # what a function returns that is a term


@dataclass(frozen=True)
class Mutant:
    module: str
    function: FunctionType
    line: int
    change: str
    code: CodeType

    @contextmanager
    def in_place(self) -> Iterator[None]:
        original = self.function.__code__
        self.function.__code__ = self.code
        try:
            yield
        finally:
            self.function.__code__ = original

    def __str__(self) -> str:
        return f"{self.module}.py {self.function.__qualname__}: {self.change}"[:NAME_LENGTH]


@dataclass(frozen=True)
class Formula:
    """A function, method or property of a module, with its source."""

    module: str
    function: FunctionType
    node: ast.FunctionDef
    source: str

    def mutants(self) -> Iterator[Mutant]:
        """Yield every mutant: each term left out, and with the other sign."""
        for line, change, mutated in _changes(self.node):
            yield Mutant(self.module, self.function, line, change, _compiled(mutated))


def formulas_of(module: ModuleType) -> Iterator[Formula]:
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    name = module.__name__.rpartition(".")[2]

    def formula(owner: object, node: ast.FunctionDef) -> Formula:
        function = _plain(inspect.getattr_static(owner, node.name))
        return Formula(name, function, node, ast.get_source_segment(text, node) or "")

    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            yield formula(module, node)
        elif isinstance(node, ast.ClassDef):
            methods = (method for method in node.body if isinstance(method, ast.FunctionDef))
            yield from (formula(getattr(module, node.name), method) for method in methods)


def _plain(member: Any) -> FunctionType:
    """Return the function inside a property, a class method or a cache."""
    if isinstance(member, property):
        member = member.fget
    member = getattr(member, "func", member) if isinstance(member, functools.cached_property) else member
    member = getattr(member, "__func__", member)
    function = inspect.unwrap(member)
    assert isinstance(function, FunctionType), member
    return function


def _changes(function: ast.FunctionDef) -> Iterator[tuple[int, str, ast.FunctionDef]]:
    """Yield (line, what is changed, the changed function) for every term of a function."""
    for place, node in enumerate(ast.walk(function)):
        for field, index, term in _terms(node, function):
            if ast.unparse(term).startswith(NOTHING) or ast.unparse(term) == "0":
                continue
            for verb, change in (("without", _dropped), ("minus", _negated)):
                if verb == "without" and isinstance(term, ast.Name) and isinstance(node, ast.Return):
                    continue  # the terms of a name are those of the line that makes it
                mutated = copy.deepcopy(function)
                owner = list(ast.walk(mutated))[place]
                _put(owner, field, index, change)
                yield getattr(term, "lineno", 0), f"{verb} {ast.unparse(term)}", mutated


def _terms(node: ast.AST, function: ast.FunctionDef) -> Iterator[tuple[str, int | None, ast.expr]]:
    """Yield the places of terms in a node: operands of sums, values by name, fields of records, what is returned."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        yield "right", None, node.right
        if not (isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Add | ast.Sub)):
            yield "left", None, node.left
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
        yield "value", None, node.value
    elif isinstance(node, ast.Dict):
        yield from (
            ("values", i, value)
            for i, value in enumerate(node.values)
            if node.keys[i] is not None and not ast.unparse(value).startswith(SAVED)
        )
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == SAVED:
        yield "args", 0, node.args[0]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in RECORDS:
        yield from (("keywords", i, keyword.value) for i, keyword in enumerate(node.keywords))
        yield from (
            ("args", i, argument) for i, argument in enumerate(node.args) if not isinstance(argument, ast.Starred)
        )
    elif isinstance(node, ast.Return) and node.value is not None and _returns_bytes(function):
        if isinstance(node.value, ast.ListComp):
            yield "elt", None, node.value.elt
        elif isinstance(node.value, ast.Tuple):
            elements = enumerate(node.value.elts)
            yield from (("elts", i, value) for i, value in elements if not isinstance(value, ast.Starred))
        elif "tuple" not in ast.unparse(function.returns or ast.Constant(None)):
            yield "value", None, node.value


def _returns_bytes(function: ast.FunctionDef) -> bool:
    return function.returns is not None and any(kind in ast.unparse(function.returns) for kind in BYTES)


def _put(owner: ast.AST, field: str, index: int | None, change: Change) -> None:
    if field in ("elt", "elts"):
        assert isinstance(owner, ast.Return)
        owner = owner.value  # type: ignore[assignment]
    value = getattr(owner, field)
    if index is None:
        setattr(owner, field, change(value))
    elif field == "keywords":
        value[index].value = change(value[index].value)
    else:
        value[index] = change(value[index])


def _dropped(term: ast.expr) -> ast.expr:
    return ast.BinOp(ast.Constant(0.0), ast.Mult(), term)


def _negated(term: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.USub(), term)


def _compiled(function: ast.FunctionDef) -> CodeType:
    function.decorator_list = []
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    owner = ast.parse("class Owner: ...").body[0]
    assert isinstance(owner, ast.ClassDef)
    owner.body = [function]  # so that super() knows of a class
    code = compile(ast.fix_missing_locations(ast.Module([future, owner], [])), "<mutant>", "exec")
    for name in ("Owner", function.name):
        code = next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == name)
    return code
