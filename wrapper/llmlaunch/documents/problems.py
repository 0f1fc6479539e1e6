"""Sentences for what is wrong in a document: they name the file, the line, the key and the fix."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from llmlaunch.documents.keys import dotted, dotted_keys, mapping_in
from llmlaunch.documents.likely_meaning import NO_VOCABULARY, Vocabulary, likely_number, read_vocabulary
from llmlaunch.documents.text import WrongEntry
from llmlaunch.documents.yaml_strict import Document, KeyPath
from llmlaunch.errors import UserError
from llmlaunch.rundir.values import counted, shortened

MAX_PROBLEMS = 5
_PRIVATE = ("environment", "export")  # values that may be secrets are never repeated in a message
_NUMBER = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?")
Problem = tuple[KeyPath, str]


def with_exponents(document: Document, error: ValidationError) -> Any:
    """Return the document's value with each unquoted 1e-5 as the number it means where a number is wanted: YAML 1.1
    reads an exponent only behind a point."""
    value = document.value
    for problem in error.errors(include_url=False):
        path, raw = _path(problem), document.raw.get(_path(problem))
        if problem["type"].startswith("float_") and raw is not None and _NUMBER.fullmatch(raw) and "e" in raw.lower():
            value = _replaced(value, path, float(raw.replace("_", "")))
    return value


def _replaced(tree: Any, path: KeyPath, value: Any) -> Any:
    """Return a copy of `tree` with `value` at `path`."""
    if not path:
        return value
    copy = tree.copy()
    copy[path[0]] = _replaced(tree[path[0]], path[1:], value)
    return copy


def _path(problem: Mapping[str, Any]) -> KeyPath:
    """Return the keys down to a problem. Its `loc` also has "(tag)" for the branch of a union and "[key]" for the key
    of a mapping."""
    return tuple(part for part in problem["loc"] if isinstance(part, int) or not part.startswith(("(", "[")))


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


def problem_of(form: Any, document: Document, error: Mapping[str, Any], vocabulary: Path | None) -> Problem:
    """Return the key of one of pydantic's errors and what is wrong with it. `vocabulary` is as in `validate`."""
    words = NO_VOCABULARY if vocabulary is None else read_vocabulary(vocabulary)
    path = _path(error)
    keys, field = _find(form, path)
    kind, value = error["type"], error.get("input")
    if kind == "extra_forbidden":
        return path, words.about_unknown_key(_plain(path), str(path[-1]), value, list(keys), dotted_keys(form))
    if kind == "missing":
        about = f" ({_first_sentence(field.description)})" if field is not None and field.description else ""
        return path, f"is missing; add `{path[-1]}:`{about}"
    if kind == "value_error":
        mistake = error["ctx"]["error"]
        if isinstance(mistake, WrongEntry):
            return (*path, mistake.entry), str(mistake)
        trap = _trap(document, path, "string_type", value) if str(mistake).startswith("must be text") else ""
        likely = trap or words.about_value(_plain(path), _word(value))
        return path, f"{mistake}; {likely}" if likely else str(mistake)
    if kind in ("too_short", "too_long"):
        context = error["ctx"]
        limit = f"most {context['max_length']}" if kind == "too_long" else f"least {context['min_length']}"
        return path, f"has {counted(context['actual_length'], 'item')}; give at {limit}"
    raw = document.raw.get(path) if isinstance(value, float) else None
    shown = "" if _private(path) else f", not {_describe(value) if raw is None else shortened(raw)}"
    likely = _trap(document, path, kind, value) or _likely(document, path, error, field, words)
    return path, f"{_expected(kind, error, field)}{shown}{f'; {likely}' if likely else ''}"


def _word(value: Any) -> Any:
    """Return a value as a word of a vocabulary: YAML reads `on` as true."""
    return ("false", "true")[value] if isinstance(value, bool) else value


def _plain(path: KeyPath) -> str:
    """Return a dotted key without places in lists."""
    return ".".join(part for part in path if isinstance(part, str))


def _private(path: KeyPath) -> bool:
    return any(part in _PRIVATE for part in path)


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
    choices = _choices(error)
    mapping = " or a mapping" if str(error["loc"][-1]).startswith("(") else ""
    return f"{'one of ' if len(choices) > 1 else ''}{', '.join(choices)}{mapping}"


def _choices(error: Mapping[str, Any]) -> list[str]:
    expected = str(error.get("ctx", {}).get("expected", ""))
    return expected.replace("'", "").replace(" or ", ", ").split(", ")


def _whole(kind: str, field: FieldInfo | None) -> bool:
    return kind.startswith("int_") or (field is not None and "int" in str(field.annotation))


def _range(field: FieldInfo | None, error: Mapping[str, Any]) -> str:
    bounds = _bounds(field, error)
    names = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    limits = " and ".join(f"{name} {_figure(bounds[key])}" for key, name in names.items() if key in bounds)
    return f", {limits}" if limits else ""


def _bounds(field: FieldInfo | None, error: Mapping[str, Any]) -> dict[str, Any]:
    bounds = dict(error.get("ctx") or {})
    for constraint in _constraints(field):
        bounds |= {n: getattr(constraint, n) for n in ("ge", "gt", "le", "lt") if hasattr(constraint, n)}
    return bounds


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
    """Return what YAML made of the text, if that is the likely mistake; else an empty text."""
    raw = document.raw.get(path)
    if kind == "string_type" and raw is not None and value is not None:
        hidden = _private(path) and not isinstance(value, bool)
        text = "..." if hidden else raw
        read_as = _describe(value) if isinstance(value, bool) else "a number"
        typed = f"'{dotted(path)}=\"{text}\"'" if _typed(document, path) else f'"{text}"'
        return f"YAML reads an unquoted {text} as {read_as}: quote it: {typed}"
    if isinstance(value, str) and kind.startswith(("int_", "float_")):
        if raw is not None and _NUMBER.fullmatch(raw) and "e" in raw.lower():
            return f"YAML reads {raw} as text: write {_written_out(raw)}"
        if raw is None and _NUMBER.fullmatch(value):
            return "remove the quotes"
    if kind == "bool_type" and raw is None and isinstance(value, str) and value.lower() in ("true", "false"):
        return "remove the quotes"
    if value is None:
        return f"give it a value or {'leave the override out' if _typed(document, path) else 'remove the line'}"
    return ""


def _typed(document: Document, path: KeyPath) -> bool:
    """Return whether a value stands on the command line rather than in the file."""
    return document.where(path).startswith("override ")


def _likely(
    document: Document, path: KeyPath, error: Mapping[str, Any], field: FieldInfo | None, words: Vocabulary
) -> str:
    """Return what was most likely meant by a value of another kind or outside its range; else an empty text."""
    kind, value, key = error["type"], error.get("input"), _plain(path)
    if (
        isinstance(value, str)
        and (pair := re.fullmatch(r"(\w+)[:=](\S+)", value))
        and kind in ("dict_type", "literal_error")
    ):
        return f"write a colon and a space after the colon: {pair[1]}: {pair[2]}"
    if kind.startswith(("int_", "float_", "greater_", "less_")) and isinstance(value, (str, int, float)):
        largest = _bounds(field, error).get("le")
        number = None if isinstance(value, bool) else likely_number(key, str(value), largest)
        known = words.about_value(key, value) or (f"did you mean {number}?" if number is not None else None)
        return known or words.about_any_value(key)
    if kind in ("literal_error", "union_tag_invalid"):
        known = words.about_value(key, _word(value), _choices(error))
        if known or "a mapping" not in _choice(error):
            return known or ""
    if kind == "dict_type" and words.about_value(key, value):
        return str(words.about_value(key, value))
    if key in words.inner_keys and isinstance(value, (str, int, float)) and not key.startswith(_PRIVATE):
        shown = "..." if isinstance(value, bool) else value
        return f"did you mean {key}.{words.inner_keys[key]}{'=' if _typed(document, path) else ': '}{shown}?"
    if kind == "dict_type" and isinstance(value, list):
        return "write it without the brackets and the dashes of a list"
    if kind == "list_type" and isinstance(value, str):
        one = value.isprintable() and not _private(path)
        return f"a list of one is written [{shortened(value)}]" if one else "begin each line with a dash and a space"
    return ""


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


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].rstrip(".")
