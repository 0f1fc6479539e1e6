"""What a Python recipe of Megatron-Bridge sets, read from its source: nothing is imported or executed.

Such a recipe is a function that fills a ConfigContainer with literals (megatron/bridge/recipes, 0.6). Functions that it
calls are followed where their source is known; a value that is no literal is UNREAD.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

UNREAD = "?"
"""Stands for a value that is known to Python alone."""
HUB_MODEL, CLASS = "hub_model", "class"
FORMATS = "megatron.bridge.training.mixed_precision"
MOST_CALLS, MOST_DEPTH = 2000, 24
_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv},
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.eq, ast.IsNot: operator.ne},
    **{ast.Gt: operator.gt, ast.Lt: operator.lt, ast.GtE: operator.ge, ast.LtE: operator.le},
}


class Fields(dict[str, Any]):
    """An object with its fields; under CLASS its class, and under HUB_MODEL the model that it was made of."""


@dataclass(frozen=True)
class PythonModule:
    """A module: its functions, the literals that it names, and where its other names come from."""

    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    statements: tuple[ast.stmt, ...] = ()

    @classmethod
    def of(cls, text: str) -> PythonModule:
        """Raises SyntaxError, ValueError or RecursionError for what is no Python."""
        source = cls(statements=tuple(ast.parse(text).body))
        for statement in ast.walk(ast.Module(list(source.statements), [])):
            if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
                for name in statement.names:
                    source.imports[name.asname or name.name] = (statement.module, name.name)
        for statement in source.statements:
            if isinstance(statement, ast.FunctionDef):
                source.functions[statement.name] = statement
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                value = _literal(statement.value)
                source.values.update({target.id: value for target in targets if isinstance(target, ast.Name)})
        return source


def flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return fields by their dotted names."""
    values: dict[str, Any] = {}
    for name, value in fields.items():
        values |= flat(value, f"{prefix}{name}.") if isinstance(value, Fields) else {f"{prefix}{name}": value}
    return values


def _literal(node: ast.expr | None) -> Any:
    try:
        return UNREAD if node is None else ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return UNREAD


@dataclass
class Scope:
    """Where an expression is: its module, the values of names there, and how many calls are around it."""

    source: PythonModule
    values: dict[str, Any] = field(default_factory=dict)
    depth: int = 0


class FieldsReader:
    """Reads what functions return. `known` are functions whose Fields are known by their names."""

    def __init__(self, known: Mapping[str, Fields] = MappingProxyType({})) -> None:
        self.known, self.calls = known, 0

    def module(self, name: str) -> PythonModule | None:
        """Return the module of a dotted name, None where its source is not known."""
        return None

    def call(
        self, source: PythonModule, name: str, given: Sequence[Any] = (), named: Mapping[str, Any] = {}, depth: int = 0
    ) -> Any:
        """Return what a function returns that a module defines or imports; UNREAD where that is not known."""
        self.calls += 1
        seen = 0
        while name not in source.functions and name in source.imports and seen < MOST_DEPTH:
            module, name = source.imports[name]
            if name in self.known:
                break
            found = self.module(module)
            if found is None:
                return UNREAD
            source, seen = found, seen + 1
        if name in self.known and name not in source.functions:
            return _copied(self.known[name])
        function = source.functions.get(name)
        if function is None or depth > MOST_DEPTH or self.calls > MOST_CALLS:
            return UNREAD
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        defaults = dict(zip(reversed(names), map(_literal, reversed(function.args.defaults)), strict=False))
        keywords = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
        values = defaults | {each.arg: _literal(value) for each, value in keywords}
        values |= {**dict(zip(names, given, strict=False)), **named}
        return self.block(function.body, Scope(source, values, depth))

    def block(self, body: Sequence[ast.stmt], scope: Scope) -> Any:
        """Return what statements return; UNREAD where they return nothing."""
        for statement in body:
            if isinstance(statement, ast.Return):
                return self.value(statement.value, scope)
            if isinstance(statement, ast.Assign):
                value = self.value(statement.value, scope)
                for target in statement.targets:
                    self.assign(target, value, scope)
            elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
                known = isinstance(statement, ast.AnnAssign) and statement.value is not None
                value = self.value(statement.value, scope) if known else UNREAD
                self.assign(statement.target, value, scope)
            elif isinstance(statement, ast.Expr):
                self.value(statement.value, scope)
            elif isinstance(statement, ast.If):
                test = self.value(statement.test, scope)
                if test is UNREAD or isinstance(test, Fields):
                    continue
                value = self.block(statement.body if test else statement.orelse, scope)
                if value is not UNREAD:
                    return value
        return UNREAD

    def assign(self, target: ast.expr, value: Any, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope.values[target.id] = value
        elif isinstance(target, ast.Tuple):
            parts = value if isinstance(value, (tuple, list)) else [UNREAD] * len(target.elts)
            for each, part in zip(target.elts, parts, strict=False):
                self.assign(each, part, scope)
        elif isinstance(target, ast.Attribute):
            owner = self.value(target.value, scope, makes=True)
            if isinstance(owner, Fields):
                owner[target.attr] = value

    def value(self, node: ast.expr | None, scope: Scope, makes: bool = False) -> Any:
        """Return the value of an expression. `makes`: a field that is not there becomes Fields."""
        if isinstance(node, ast.Name):
            return scope.values.get(node.id, scope.source.values.get(node.id, self.imported(scope.source, node.id)))
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "torch":
                return _TYPES.get(node.attr, UNREAD)
            owner = self.value(node.value, scope, makes)
            if makes and isinstance(owner, Fields) and not isinstance(owner.get(node.attr), Fields):
                owner[node.attr] = Fields()
            return owner.get(node.attr, UNREAD) if isinstance(owner, Fields) else UNREAD
        if isinstance(node, ast.Call):
            return self.called(node, scope)
        if isinstance(node, (ast.BinOp, ast.Compare)):
            return self.computed(node, scope)
        if isinstance(node, (ast.List, ast.Tuple)):
            items = [self.value(each, scope) for each in node.elts]
            return UNREAD if UNREAD in items else items
        if isinstance(node, ast.IfExp):
            test = self.value(node.test, scope)
            return UNREAD if test is UNREAD else self.value(node.body if test else node.orelse, scope)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            value = self.value(node.operand, scope)
            return UNREAD if value is UNREAD else not value
        return _literal(node)

    def imported(self, source: PythonModule, name: str) -> Any:
        module, original = source.imports.get(name, ("", ""))
        found = self.module(module) if module else None
        return UNREAD if found is None else found.values.get(original, UNREAD)

    def computed(self, node: ast.BinOp | ast.Compare, scope: Scope) -> Any:
        kind: type = type(node.ops[0]) if isinstance(node, ast.Compare) else type(node.op)
        right = node.comparators[0] if isinstance(node, ast.Compare) else node.right
        values = [self.value(each, scope) for each in (node.left, right)]
        whole = all(isinstance(value, (int, float)) and abs(value) < 2**53 for value in values)
        alike = kind in (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)
        if UNREAD in values or kind not in _OPERATORS or not (whole or alike) or values[1:] == [0]:
            return UNREAD
        return _OPERATORS[kind](*values)

    def called(self, node: ast.Call, scope: Scope) -> Any:
        given = [self.value(each, scope) for each in node.args]
        named = {each.arg: self.value(each.value, scope) for each in node.keywords if each.arg}
        if isinstance(node.func, ast.Attribute):
            if node.func.attr == "from_hf_pretrained":
                return Fields({HUB_MODEL: given[0] if given else UNREAD})
            owner = self.value(node.func.value, scope)
            return owner if node.func.attr == "to_megatron_provider" else UNREAD
        if not isinstance(node.func, ast.Name):
            return UNREAD
        name = scope.source.imports.get(node.func.id, ("", node.func.id))[1]
        if name == "get_mixed_precision_config" and given and isinstance(given[0], str):
            formats = PythonModule(imports={given[0]: (FORMATS, given[0])})
            return self.call(formats, given[0], depth=scope.depth + 1)
        if name == "default_peft_config":  # of recipes/utils/dataset_utils.py
            return Fields({CLASS: given[0] if given else named.pop("peft_scheme", UNREAD), **named})
        if name[:1].isupper():
            return Fields({CLASS: name, **named})
        return self.call(scope.source, node.func.id, given, named, scope.depth + 1)


def _copied(fields: Fields) -> Fields:
    return Fields({name: _copied(value) if isinstance(value, Fields) else value for name, value in fields.items()})


def script_fields(source: PythonModule, known: Callable[[str], Fields | None]) -> Fields | None:
    """Return the container that a script fills, None where there is none: that of `main`, of its own statements, or of
    the last function that fills one. `known` returns the fields of a recipe of Bridge's by its name."""
    names = (*source.imports, *(original for _, original in source.imports.values()))
    recipes = {name: fields for name in names if (fields := known(name)) is not None}
    source.values["__name__"] = "__main__"
    bodies = [function.body for name, function in source.functions.items() if name != "main"]
    main = [source.functions["main"].body] if "main" in source.functions else []
    for body in (*main, list(source.statements), *reversed(bodies)):
        scope = Scope(source)
        returned = FieldsReader(recipes).block(body, scope)
        for value in (returned, *reversed(scope.values.values())):
            if isinstance(value, Fields) and "train" in value:
                return value
    return None
