"""From pydantic's errors to sentences that name the file, the line, the key and the fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from llmlaunch.documents.keys import keys_in, mapping_in, narrowed
from llmlaunch.documents.text import WrongEntry
from llmlaunch.documents.yaml_strict import Document, KeyPath
from llmlaunch.errors import UserError
from llmlaunch.rundir.values import counted, shortened

__all__ = ["BadKey", "dotted", "known_and_nearest", "report", "validate"]

MAX_PROBLEMS = 5
_PRIVATE = ("environment", "export")  # values that may be secrets are never repeated in a message
_NUMBER = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?")

Problem = tuple[KeyPath, str]


class BadKey(UserError):
    """A wrong value at `key` of a mapping; the caller knows which file the mapping stands in."""

    def __init__(self, key: KeyPath, problem: str) -> None:
        super().__init__(f"{dotted(key)}: {problem}" if key else problem)
        self.key, self.problem = key, problem


def dotted(path: Iterable[str | int]) -> str:
    """Return `("backend", "extra_args", 0)` as `backend.extra_args[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{_clean(part)}"
    return text.lstrip(".")


def known_and_nearest(word: str, known_names: Sequence[str]) -> str:
    """Return the end of a sentence about an unknown word: the nearest known word, else all of them."""
    wanted, names = word.lower(), list(known_names)
    near = difflib.get_close_matches(wanted.replace("-", "_"), names) or difflib.get_close_matches(wanted, names)
    near.sort(key=lambda name: name[:3] != wanted[:3])  # people get the beginning of a word right
    near = near or [name for name in names if len(wanted) > 2 and wanted in name]
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"


def validate(form: Any, document: Document, hints: Mapping[KeyPath, str] | None = None) -> dict[str, Any]:
    """Return what `document` says of the keys of `form` (`documents/keys.py`), without defaults.

    `hints` are sentences for keys that are unknown for a reason worth telling. Raises `UserError` with one line for
    each of the first few problems.
    """
    try:
        values: dict[str, Any] = _adapter(narrowed(form, keys_in(document.value))).validate_python(document.value)
        return values
    except ValidationError as error:
        # A key that is missing is often the same mistake as one that is unknown: that one stands first.
        errors = sorted(error.errors(include_url=False), key=lambda e: e["type"] == "missing")
        problems = [_problem(form, document, dict(e), hints or {}) for e in errors]
    raise report(document, problems)


@cache
def _adapter(form: Any) -> TypeAdapter[Any]:
    return TypeAdapter(form)


def report(document: Document, problems: Sequence[Problem]) -> UserError:
    """Return one error for several problems, in the order of the file.

    Of each key it has the first problem, which often explains the others.
    """
    first: dict[KeyPath, str] = {}
    for path, text in problems:
        first.setdefault(path, text)
    lines = [_line(document, path, text) for path, text in first.items()]
    if len(lines) > MAX_PROBLEMS:
        more = len(lines) - MAX_PROBLEMS
        lines = [*lines[:MAX_PROBLEMS], f"{document.name}: and {more} more"]
    return UserError("\n".join(lines))


def _line(document: Document, path: KeyPath, text: str) -> str:
    return f"{document.where(path)}: {dotted(path)}: {text}" if path else f"{document.where()}: {text}"


def _problem(form: Any, document: Document, error: Mapping[str, Any], hints: Mapping[KeyPath, str]) -> Problem:
    # loc carries "(tag)" for the branch of a union and "[key]" for the key of a mapping, beside the real path
    path: KeyPath = tuple(p for p in error["loc"] if isinstance(p, int) or not p.startswith(("(", "[")))
    keys, field = _find(form, path)
    kind, value = error["type"], error.get("input")
    if kind == "extra_forbidden":
        if path in hints:
            return path, hints[path]
        return path, f"is not a known key; {known_and_nearest(str(path[-1]), list(keys))}"
    if kind == "missing":
        about = f" ({_first_sentence(field.description)})" if field is not None and field.description else ""
        return path, f"is missing; add `{path[-1]}:`{about}"
    if kind == "value_error":
        mistake = error["ctx"]["error"]
        return (*path, mistake.entry) if isinstance(mistake, WrongEntry) else path, str(mistake)
    if kind in ("too_short", "too_long"):
        context = error["ctx"]
        limit = f"most {context['max_length']}" if kind == "too_long" else f"least {context['min_length']}"
        return path, f"has {counted(context['actual_length'], 'item')}; give at {limit}"
    shown = "" if any(p in _PRIVATE for p in path) else f", not {_describe(value)}"
    return path, f"{_expected(kind, error, field)}{shown}{_trap(document, path, kind, value)}"


def _expected(kind: str, error: Mapping[str, Any], field: FieldInfo | None) -> str:
    if kind in ("literal_error", "union_tag_invalid"):
        return f"must be {_choice(error)}"
    if kind.startswith(("int_", "float_", "greater_", "less_", "finite_")):
        noun = "a whole number" if _whole(kind, field) else "a finite number"
        return f"must be {noun}{_range(field, error)}"
    sentences = {
        "string_type": "must be text",
        "bool_type": "must be true or false",
        "list_type": "must be a list",
        "dict_type": "must be a mapping",
    }
    return sentences.get(kind, str(error["msg"]))


def _choice(error: Mapping[str, Any]) -> str:
    expected = str(error.get("ctx", {}).get("expected", "")).replace("'", "").replace(" or ", ", ")
    mapping = " or a mapping" if str(error["loc"][-1]).startswith("(") else ""
    return f"one of {expected}{mapping}" if "," in expected else f"{expected}{mapping}"


def _whole(kind: str, field: FieldInfo | None) -> bool:
    return kind.startswith("int_") or (field is not None and "int" in str(field.annotation))


def _range(field: FieldInfo | None, error: Mapping[str, Any]) -> str:
    bounds = dict(error.get("ctx") or {})
    for constraint in _constraints(field):
        bounds |= {n: getattr(constraint, n) for n in ("ge", "gt", "le", "lt") if hasattr(constraint, n)}
    names = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    limits = " and ".join(f"{name} {_figure(bounds[key])}" for key, name in names.items() if key in bounds)
    return f", {limits}" if limits else ""


def _constraints(field: FieldInfo | None) -> Iterator[Any]:
    """Yield the constraints of a field, and those of the type that it or null may hold."""
    if field is None:
        return
    yield from field.metadata
    for part in get_args(field.annotation):
        if get_origin(part) is Annotated:
            yield from _constraints(FieldInfo.from_annotation(part))


def _figure(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)


def _trap(document: Document, path: KeyPath, kind: str, value: Any) -> str:
    """Say what YAML made of the text, if that is the likely mistake."""
    raw = document.raw.get(path)
    if kind == "string_type" and raw is not None and value is not None:
        return f'; YAML reads an unquoted {raw} as {_describe(value)}: quote it: "{raw}"'
    if isinstance(value, str) and kind.startswith(("int_", "float_")):
        if raw is not None and _NUMBER.fullmatch(raw) and "e" in raw.lower():
            with_point = f"{_with_point(raw)} or " if kind.startswith("float_") else ""
            return f"; YAML reads {raw} as text: write {with_point}{_written_out(raw)}"
        if raw is None and _NUMBER.fullmatch(value):
            return "; remove the quotes"
    if value is None:
        return "; give it a value or remove the line"
    return ""


def _with_point(raw: str) -> str:
    number, _, exponent = raw.lower().partition("e")
    sign = "" if exponent.startswith(("+", "-")) else "+"
    return f"{number if '.' in number else number + '.0'}e{sign}{exponent}"


def _written_out(raw: str) -> str:
    if abs(int(raw.lower().partition("e")[2])) > 18:
        return "it out"
    number = float(raw.replace("_", ""))
    return str(int(number)) if number.is_integer() else repr(number)


def _find(form: Any, path: KeyPath) -> tuple[Mapping[str, Any], FieldInfo | None]:
    """Return the keys of the mapping that holds the last key of `path`, and what is known of that key."""
    mapping, field = mapping_in(form), None
    for part in path:
        if field is not None:
            inner = mapping_in(field.annotation)
            if inner is None:
                return mapping.__annotations__, None
            mapping = inner
        annotation = mapping.__annotations__.get(part)
        if annotation is None:
            return mapping.__annotations__, None
        field = FieldInfo.from_annotation(get_args(annotation)[0])  # without Required or NotRequired
    return mapping.__annotations__, field


def _describe(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = ascii(value) if isinstance(value, str) else str(value) if value == value else ".nan"
    return shortened(text)


def _clean(key: str) -> str:
    shown = key if key.isprintable() and key else ascii(key)
    return shortened(shown)


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].rstrip(".")
