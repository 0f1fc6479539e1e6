"""Schemas of the files of a run directory. A schema is a TypedDict or a dataclass: its fields are the keys of a JSON
object, each with its type and, in the string below it, its meaning.

Writers build dicts of that type, which mypy checks, and `sound` and `read_as` read them. docs/run-files.md is generated
from the same fields (tests/support/run_files_page.py). Scalar types with a unit or a special form are defined here.
"""

from __future__ import annotations

import sys
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from .files import object_in
from .values import byte_count, is_host, number, time_or_none

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Check = Callable[[Any], Any]

T = TypeVar("T")


class Scalar(NamedTuple):
    """A kind of number or text: its name in the documentation, and its check, which returns None for any other
    value."""

    words: str
    check: Check


def _host(value: object) -> object:
    return value if is_host(value) else None


def _finite(value: object) -> float | None:
    """Return the number, or None for any other value. JSON numbers have already been read as finite or as None."""
    return value if type(value) in (int, float) else None  # type: ignore[return-value]


def _exact(kind: type) -> Check:
    return lambda value: value if type(value) is kind else None


Bytes = Annotated[int, Scalar("bytes", byte_count)]
Volume = Annotated[float, Scalar("bytes", number)]  # computed, so it may not be a whole number
Count = Annotated[int, Scalar("count", byte_count)]
Step = Annotated[int, Scalar("step", byte_count)]
Seconds = Annotated[float, Scalar("seconds", number)]
Amount = Annotated[float, Scalar("number", number)]
Time = Annotated[float, Scalar("unix seconds", time_or_none)]
Host = Annotated[str, Scalar("name of a node", _host)]


def _nothing() -> Any:
    """Return the marker for a type without an empty value: the key is left out."""
    return ...


_PLAIN: Mapping[str, tuple[Check, Callable[[], Any]]] = {
    "int": (_exact(int), _nothing),
    "float": (_finite, _nothing),
    "bool": (_exact(bool), bool),
    "str": (_exact(str), str),
    "Any": (lambda value: value, _nothing),
}
"""The check of each plain type, and what makes the value that stands for one of another type."""


def read_as(kind: type[T], path: Path) -> T:
    """Return the JSON object in `path` as a `kind`. Raises OSError if the file cannot be opened, and ValueError if it
    does not hold such an object."""
    record = sound(kind, object_in(path))
    if record is None:
        raise ValueError("lacks a key that is required")
    return record


def sound(kind: type[T], value: object) -> T | None:
    """Return the keys of a JSON object that `kind` has, or None if `value` is not an object or lacks a required key of
    the right type.

    Any other value of the wrong type becomes null if null is allowed; otherwise it becomes false, or an empty text,
    list or object. A number or name has no empty value and is left out, as is an item of a list or object.
    """
    if not isinstance(value, dict):
        return None
    schema: Any = kind
    record: dict[str, Any] = {}
    for name, check, substitute, required in _fields(schema):
        if name in value:
            item = check(value[name])
            if item is None and substitute is not None:
                item = ... if required else substitute()
            if item is not ...:
                record[name] = item
        if required and name not in record:
            return None
    return record  # type: ignore[return-value]


def exact(kind: type, value: object) -> dict[str, Any]:
    """Return the keys of a JSON object that `kind` has, for a file that is useless unless all of it is correct. Raises
    TypeError if `value` is not an object, or if one of these keys has a value of another type."""
    record = sound(kind, value)
    if not isinstance(value, dict) or not isinstance(record, dict):
        raise TypeError("no object")
    wrong = [name for name in annotations_of(kind) if name in value and record.get(name) != value[name]]
    if wrong:
        raise TypeError(f"{', '.join(wrong)}: of another type")
    return record


def sound_list(kind: type[T], values: object) -> list[T]:
    """Return the objects of `kind` in a list; empty if `values` is not a list."""
    records = (sound(kind, value) for value in values) if isinstance(values, list) else ()
    return [record for record in records if record is not None]


def annotations_of(kind: type) -> dict[str, str]:
    """Return the type of each field of a schema as it is written in the source."""
    return {
        name: hint if isinstance(hint, str) else hint.__forward_arg__ for name, hint in kind.__annotations__.items()
    }


class _Field(NamedTuple):
    name: str
    check: Check
    substitute: Callable[[], Any] | None  # makes the substitute for a value of another type; None for null
    required: bool


@cache
def _fields(kind: Any) -> tuple[_Field, ...]:
    names, required = vars(sys.modules[kind.__module__]), getattr(kind, "__required_keys__", ())
    fields = []
    for name, hint in annotations_of(kind).items():
        plain = hint[: -len(" | None")] if hint.endswith(" | None") else hint
        check, substitute = _checked(plain, names)
        fields.append(_Field(name, check, substitute if plain == hint else None, name in required))
    return tuple(fields)


def _checked(hint: str, names: Mapping[str, Any]) -> tuple[Check, Callable[[], Any]]:
    """Return the check of a type as written in the source, and the function that makes a substitute for a value of
    another type."""
    alternatives = split_outside_brackets(hint, " | ")
    if len(alternatives) > 1:
        checks = [_checked(alternative, names)[0] for alternative in alternatives]
        return lambda value: next((item for check in checks if (item := check(value)) is not None), None), _nothing
    outer, _, arguments = hint.partition("[")
    inner = split_outside_brackets(arguments[:-1], ", ")
    if inner[-1] == "Any":  # null is a valid value there
        return _exact(dict if outer == "dict" else list), dict if outer == "dict" else list
    if outer in ("list", "tuple"):
        return partial(_checked_list, _checked(inner[0], names)[0]), list
    if outer == "dict":
        return partial(_checked_dict, _checked(inner[1], names)[0]), dict
    if outer in _PLAIN:
        return _PLAIN[outer]
    named = names[outer]
    return (named.__metadata__[0].check if hasattr(named, "__metadata__") else partial(sound, named)), _nothing


def split_outside_brackets(hint: str, separator: str) -> list[str]:
    """Return the parts of a type as written in the source, without splitting inside brackets."""
    parts: list[str] = []
    depth = 0
    for part in hint.split(separator):
        if depth:
            parts[-1] += separator + part
        else:
            parts.append(part)
        depth += part.count("[") - part.count("]")
    return parts


def _checked_list(check: Check, value: object) -> list[Any] | None:
    if not isinstance(value, list):
        return None
    return [item for item in map(check, value) if item is not None]


def _checked_dict(check: Check, value: object) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        return None
    return {name: item for name, entry in value.items() if (item := check(entry)) is not None}
