"""Fields of Megatron-Bridge's ConfigContainer as a recipe of Bridge's or a command's overrides set them, and the words
of Megatron-LM that mean the same: the inverse of settings.py. Python recipes are read from their source: nothing is
imported or run."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmlaunch.command_lines.recipe_draft import RecipeDraft
from llmlaunch.frameworks.megatron.flags.row import Parsed
from llmlaunch.frameworks.megatron.flags.table import bridge_fields
from llmlaunch.frameworks.megatron.parser import NEWEST, ParserFlag, core_parser, dest_of

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


RECIPES = Path(__file__).with_name("recipes.json")
PRECISION, OVERLAP = "mixed_precision", "comm_overlap"
ADAPTERS = ("peft.class", "peft.dim", "peft.target_modules")
OTHER_FIELDS = (
    *(PRECISION, *ADAPTERS, "tokenizer.use_tokenizer_vocab_size", "tokenizer.vocab_size", "dataset.class", "perf"),
    *("dataset.enable_offline_packing", "dataset.skip_getting_attention_mask_from_dataset", "model.cuda_graph_scope"),
)
"""Fields that are read and of which no flag of Megatron-LM says the same."""
SAVES = "checkpoint.save_interval"
HOST_SECTIONS = ("checkpoint", "logger", "rng", "validation", "rerun_state_machine")
HOST_FIELDS = (
    *("dataset.split", "dataset.random_seed", "tokenizer.tokenizer_model", "model.pipeline_dtype"),
    *("mixed_precision.pipeline_dtype", "model.apply_rope_fusion", "ddp.check_for_nan_in_grad", "model.autocast_dtype"),
)
"""What of a recipe changes neither memory nor what is learned, and an override says where it matters."""
NUMBERS, STAGES = "NullTokenizer", "model.pipeline_model_parallel_layout"
BUFFERS = ("overlap_grad_reduce", "overlap_param_gather")


@cache
def row_fields() -> Mapping[str, tuple[str, ...]]:
    """Return the flags of Megatron-LM that set each field of Bridge's."""
    rows: dict[str, tuple[str, ...]] = {}
    for flag, fields in bridge_fields().items():
        for name, _ in fields:
            rows[name] = (*rows.get(name, ()), flag)
    return rows


@cache
def known_recipes() -> Mapping[str, Any]:
    """Return the table of Bridge's recipes (tests/support/bridge_recipes.py makes it). `as` in a recipe names another,
    whose fields it has where it has none of its own."""
    table: Mapping[str, Any] = json.loads(RECIPES.read_text(encoding="utf-8"))
    return table


def plain_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some fields that are read, by their dotted names. What is UNREAD is left out, the stages alone
    are not; what is switched off is, unless a flag says that it is off."""
    values = flat(Fields({**fields}))
    kept = {
        name: value
        for name, value in values.items()
        if _is_read(name) and value is not None and (value != UNREAD or name == STAGES)
    }
    return {name: value for name, value in kept.items() if value is not False or _means_off(name)}


def _is_read(name: str) -> bool:
    section, _, field = name.partition(".")
    if (section in HOST_SECTIONS and name != SAVES) or name in HOST_FIELDS:
        return False
    targets = (f"{place}.{field}" for place in ("model", "ddp", "optimizer"))
    within = section in (PRECISION, OVERLAP) and any(each in row_fields() for each in targets)
    return name in row_fields() or name in OTHER_FIELDS or within


def _means_off(name: str) -> bool:
    if name.partition(".")[0] in (PRECISION, OVERLAP):
        return True
    return any(each == name and value is False for fields in bridge_fields().values() for each, value in fields)


def resolved(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields as Bridge has them once it has filled in what one says of others: the number formats
    (training/mixed_precision.py), the distributed optimizer (training/config.py), the overlap
    (training/comm_overlap.py) and the length (scripts/training/recipe_runner.py, Megatron-Bridge 0.6)."""
    values = dict(fields)
    stated = values.get(PRECISION)
    formats = known_recipes()["precisions"].get(stated, {}) if isinstance(stated, str) else {}
    for name, value in {**formats, **values}.items():
        section, _, field = name.partition(".")
        if section in (PRECISION, OVERLAP) and field:
            targets = (f"{place}.{field}" for place in ("model", "ddp", "optimizer"))
            values |= {each: value for each in targets if each in row_fields()}
    shards = [f"{place}.use_distributed_optimizer" for place in ("ddp", "optimizer")]
    values |= dict.fromkeys(shards, True) if any(values.get(name) for name in shards) else {}
    overlaps = any(name.startswith(f"{OVERLAP}.") for name in values)
    if overlaps and values.get(shards[0]):
        values |= {f"ddp.{name}": values.get(f"{OVERLAP}.{name}", True) for name in BUFFERS}
    if "dataset.seq_length" in values:
        values["model.seq_length"] = values["dataset.seq_length"]
    graphs = values.pop("model.cuda_graph_scope", None)  # its earlier name
    if isinstance(graphs, list) and values.get("model.cuda_graph_impl") not in (None, "none"):
        values.setdefault("model.cuda_graph_modules", graphs)
    tensor = values.get("model.tensor_model_parallel_size", 1)
    if (isinstance(tensor, int) and tensor < 2) or not values.get("model.sequence_parallel"):
        values.pop("model.tp_comm_overlap", None)
    if not values.get("tokenizer.use_tokenizer_vocab_size") or values.get("tokenizer.tokenizer_type") != NUMBERS:
        values.pop("tokenizer.vocab_size", None)  # the model's own number counts (training/setup.py)
    if values.get("dataset.skip_getting_attention_mask_from_dataset", True):
        values["dataset.create_attention_mask"] = False
    return values


def megatron_words(fields: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the words of Megatron-LM's command line that set these fields, a flag each."""
    flags = core_parser(NEWEST).flags
    for name, row in bridge_fields().items():
        if not row or name not in flags or row[0][0] not in fields:
            continue
        constants = {each: value for each, value in row if not isinstance(value, Parsed) and not callable(value)}
        if any(fields.get(each, value) != value for each, value in constants.items()):
            continue
        valued = next((each for each, _ in row if each not in constants), None)
        value = True if valued is None else fields.get(valued)
        flag = flags[name]
        if flag.values == 0:
            if (constants and valued is None) or value is (flag.sets == "True"):
                yield (name,)
        elif value is not None and value is not False and value != [] and value != UNREAD:
            yield (name, *_words(value, flag))


def bridge_arguments(draft: RecipeDraft, stated: Container[str] | None = None) -> Callable[[Sequence[str]], list[str]]:
    """Return a function that turns a flag of Megatron-LM with its values into `backend.extra_args` of Bridge. A field
    that the recipe decides cannot be one of those, and is unread if it is among `stated`."""

    def argument(group: Sequence[str]) -> list[str]:
        flag, *values = group
        known = core_parser(NEWEST).flags.get(flag)
        name = next((name for name, _ in bridge_fields().get(flag, ())), f"model.{dest_of(flag)}")
        on = field_text(known.sets == "True") if known is not None and known.values == 0 else " ".join(values)
        if name not in row_fields():
            return [f"{name}={on}"]
        if stated is None or name in stated:
            draft.leave_out((f"{name}={on}",), "no key of a recipe says it")
        return []

    return argument


def field_text(value: Any) -> str:
    """Return a value as `backend.extra_args` has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _words(value: Any, flag: ParserFlag) -> list[str]:
    if isinstance(value, (list, tuple)):
        if flag.values == 1:
            tuples = flag.type == "tuple_type"
            return [",".join(map(str, value)) if tuples else json.dumps(list(value), separators=(",", ":"))]
        return [str(each) for each in value]
    return [str(value)]
