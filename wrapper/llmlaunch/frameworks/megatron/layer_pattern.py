"""Which layers of a model are of another kind, as Megatron-LM's arguments write it."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Sequence
from typing import Any

MOST_LAYERS = 10_000
_OPERATORS = {ast.Add: operator.add, ast.Mult: operator.mul}


def layer_pattern(value: object, layers: int) -> tuple[int, ...] | None:
    """Return 1 for each mixture layer and 0 for each dense one, as Megatron reads --moe-layer-freq: every N-th layer,
    or a pattern such as ([0]*3+[1]*58). None for what is neither."""
    if isinstance(value, str):
        text = value.strip()
        value = int(text) if re.fullmatch(r"\d{1,9}", text) else _pattern(text)
    if isinstance(value, bool) or value is None or layers > MOST_LAYERS:
        return None
    if isinstance(value, int):
        return tuple(int(value > 0 and layer % value == 0) for layer in range(layers))
    items = tuple(value) if isinstance(value, Sequence) else ()
    return items if all(item in (0, 1) for item in items) and items else None


def _pattern(text: str) -> Any:
    if len(text) > MOST_LAYERS * 4 or not re.fullmatch(r"[\[\]()\d,*+\s]+", text):
        return None
    try:
        return _evaluated(ast.parse(text, mode="eval").body)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _evaluated(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value <= MOST_LAYERS:
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_evaluated(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluated(node.left), _evaluated(node.right)
        if isinstance(node.op, ast.Mult) and _length(left) * _length(right) > MOST_LAYERS:
            raise ValueError("is too long")
        return _OPERATORS[type(node.op)](left, right)
    raise ValueError("is no pattern")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else max(int(value), 1)
