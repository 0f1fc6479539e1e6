"""Keys of documents that people write, each defined once: by a field of the dataclass that the program works with.

A section is a frozen dataclass whose fields, as far as `key` defines them, are keys of a mapping in a recipe or a
cluster profile. Its type hint, limits, default and description validate the document (`documents/validate.py`) and
become the JSON Schema (docs/schemas/recipe.schema.json) and the tables of docs/recipe.md. Fields without `key` are
filled in by the program and cannot be written.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import pydantic
from pydantic import AfterValidator, ConfigDict, Discriminator, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema, core_schema
from typing_extensions import NotRequired, Required, TypedDict, dataclass_transform, is_typeddict

from llmlaunch.frozen import frozen
from llmlaunch.rundir.values import shortened

_typed_dict: Any = TypedDict  # mypy knows only names and keys that are literals
_annotated: Any = Annotated
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

Section = TypeVar("Section")
WrittenKeys = frozenset[tuple[Any, "WrittenKeys"]] | None


@frozen
class _Key:
    """The arguments of `key`, kept with the field."""

    description: str
    key_name: str | None
    place: str | None
    required: bool
    written: Any
    words: Mapping[Any, Any]
    limits: Mapping[str, Any]


def key(
    description: str,
    *,
    default: Any = MISSING,
    key_name: str | None = None,
    place: str | None = None,
    required: bool = False,
    written: Any = None,
    words: Mapping[Any, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    **limits: Any,
) -> Any:
    """Define a field of a section that is a key of the document.

    `key_name` is the key where it is not the name of the field. `place` names the mapping the key stands in where
    a section's keys stand in several. A `required` key must be written although the field has a default. `written` is
    the type of the written value where it differs from the field's, or a function that returns this type. `words` maps
    each plain word that may stand in the place of a mapping to the value it stands for. `metadata` is kept with the
    field. `limits` are pydantic's: ge, gt, le, lt, min_length, max_length, pattern.
    """
    about = _Key(description, key_name, place, required, written, words or {}, limits)
    with_key = {**(metadata or {}), "key": about}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=with_key)
    return field(default=default, metadata=with_key)


@dataclass_transform(frozen_default=True, field_specifiers=(key, field))
def section(cls: type[Section]) -> type[Section]:
    """Make a frozen dataclass of `cls` that pydantic validates from a mapping of its keys.

    Constructing a section in code checks nothing. A static method `check_keys`, where there is one, gets the mapping of
    what was written and raises ValueError where its keys contradict each other.
    """
    schema: Any = classmethod(_section_schema)
    frozen_class: Any = frozen(cls)
    frozen_class.__get_pydantic_core_schema__ = schema
    return cls


def _section_schema(cls: Any, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    def construct(value: Any, validate: Callable[[Any], Any]) -> Any:
        if isinstance(value, cls):
            return value
        return cls(**{name: item for name, item in validate(value).items() if item is not None})

    return core_schema.no_info_wrap_validator_function(construct, handler.generate_schema(form_of(cls)))


@cache
def form_of(cls: Any) -> Any:
    """Return the type of the mapping in which a section is written. Validating it returns a dict of what was given."""
    return form(cls.__name__, keys_of(cls), description=cls.__doc__, check=getattr(cls, "check_keys", None))


def form(
    name: str,
    keys: Mapping[str, Any],
    *,
    description: str | None = None,
    check: Callable[[Mapping[str, Any]], None] | None = None,
    schema_extra: dict[str, Any] | None = None,
) -> Any:
    """Return the type of a mapping with these keys (`keys_of`) and no others, and `schema_extra` in its JSON Schema."""
    mapping = _typed_dict(name, dict(keys))
    mapping.__pydantic_config__ = _STRICT | ConfigDict(json_schema_extra=schema_extra)
    mapping.__doc__ = description
    return mapping if check is None else Annotated[mapping, AfterValidator(_returning_argument(check))]


def keys_in(value: Any) -> WrittenKeys:
    """Return the keys of a mapping, each with those of the mapping below it; None for what is no mapping."""
    if not isinstance(value, dict):
        return None
    return frozenset((name, keys_in(item)) for name, item in value.items())


@cache
def narrowed(mapping: Any, written: WrittenKeys) -> Any:
    """Return the type of a mapping (`form`) without the keys that are neither in `written` nor required.

    It judges a mapping of these keys as `mapping` does, and pydantic builds its validator in a fraction of the time: a
    recipe uses few of the keys it may have.
    """
    if get_origin(mapping) is Annotated:
        arguments = (narrowed(mapping.__origin__, written), *mapping.__metadata__)
        return _annotated[arguments]
    if not is_typeddict(mapping):
        return mapping
    below = dict(written or ())
    keys = {
        name: _narrowed_key(hint, below.get(name))
        for name, hint in mapping.__annotations__.items()
        if name in below or name in mapping.__required_keys__
    }
    narrow = form(mapping.__name__, keys, description=mapping.__doc__)
    narrow.__pydantic_config__ = mapping.__pydantic_config__
    return narrow


def _narrowed_key(hint: Any, written: WrittenKeys) -> Any:
    for marker in (Required, NotRequired):
        if get_origin(hint) is marker:
            return marker[narrowed(get_args(hint)[0], written)]
    return narrowed(hint, written)


def _returning_argument(check: Callable[[Mapping[str, Any]], None]) -> Callable[[Any], Any]:
    def checked(values: Any) -> Any:
        check(values)
        return values

    return checked


def keys_of(
    cls: type[Any],
    *,
    place: str | None = None,
    over_base: bool = False,
    nullable: bool = False,
    written: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the keys of a section that stand in `place`, each with its annotated type.

    Over a base, which has the rest, no key is required. If `nullable`, null may stand for every value and means that
    the key is absent. `written` replaces the types of some keys.
    """
    selected = [(item, about) for item, about in _key_fields(cls) if about.place == place]
    hints = _hints(cls, [item.name for item, _ in selected])
    keys = {}
    for item, about in selected:
        has_default = item.default is not MISSING or item.default_factory is not MISSING
        null = nullable or (over_base and not has_default)
        hint = _annotation(item, about, hints[item.name], (written or {}).get(item.name), null)
        optional = over_base or (has_default and not about.required)
        keys[about.key_name or item.name] = NotRequired[hint] if optional else Required[hint]
    return keys


def key_names(cls: type[Any], place: str | None = None) -> tuple[str, ...]:
    """Return the names of the fields of a section that are keys in `place`."""
    return tuple(item.name for item, about in _key_fields(cls) if about.place == place)


def _key_fields(cls: type[Any]) -> list[tuple[Field[Any], _Key]]:
    return [(item, item.metadata["key"]) for item in fields(cls) if "key" in item.metadata]


def _hints(cls: type[Any], names: list[str]) -> dict[str, Any]:
    """Evaluate the type hints of some fields, each where it was written; those of the others may name types that are
    imported for mypy only."""
    hints: dict[str, Any] = {}
    for base in cls.__mro__:
        written = {name: hint for name, hint in inspect.get_annotations(base).items() if name in names}
        some = type(base.__name__, (), {"__annotations__": written})
        some.__module__ = base.__module__
        hints = get_type_hints(some, include_extras=True) | hints
    return hints


def _annotation(item: Field[Any], about: _Key, hint: Any, replaced: Any, nullable: bool) -> Any:
    replaced = about.written if replaced is None else replaced
    stated: Any = replaced() if inspect.isfunction(replaced) else replaced
    plain, optional = _without_none(hint if stated is None else stated)
    nullable = nullable or optional
    limits: dict[str, Any] = dict(about.limits)
    if get_origin(plain) is tuple:  # YAML has lists only
        plain = Annotated[
            types.GenericAlias(list, get_args(plain)[:1]), pydantic.Field(**limits), AfterValidator(_as_tuple)
        ]
    elif limits:
        plain = Annotated[plain, pydantic.Field(**limits)]
    if about.words:
        plain = Annotated[plain, _WordOrMapping(about.words)]
    # Where null may stand for a value, what is absent has a meaning of its own, and the description tells it.
    shown = None if nullable else _shown_default(item, about)
    extra: dict[str, Any] = {} if shown is None else {"json_schema_extra": {"default": shown}}
    return Annotated[plain | None if nullable else plain, pydantic.Field(description=about.description, **extra)]


# pydantic asks for the signatures of its validators, and those of C code are parsed from text, which is slow
def _as_tuple(items: list[Any]) -> tuple[Any, ...]:
    return tuple(items)


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) not in (Union, types.UnionType) or type(None) not in get_args(hint):
        return hint, False
    members = [member for member in get_args(hint) if member is not type(None)]
    return Union[tuple(members)], True  # noqa: UP007


def _shown_default(item: Field[Any], about: _Key) -> Any:
    """Return the default as it would be written; None where there is none, or an empty one."""
    default = {} if item.default_factory is dict else item.default
    if default is MISSING or default is None:
        return None
    word = next((word for word, value in about.words.items() if value == default), None)
    if word is not None:
        return word
    if isinstance(default, tuple):
        return list(default) or None
    return default if isinstance(default, (bool, int, float, str)) else None


class _WordOrMapping:
    """Annotates a mapping in whose place a plain word may stand; `words` holds the value of each word."""

    def __init__(self, words: Mapping[Any, Any]) -> None:
        self.words = words

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        flags = all(isinstance(word, bool) for word in self.words)
        word = core_schema.bool_schema(strict=True) if flags else core_schema.literal_schema(list(self.words))
        branches = {
            "(word)": core_schema.no_info_after_validator_function(self._value, word),
            "(mapping)": handler(source),
        }
        return core_schema.tagged_union_schema(branches, discriminator=_branch)

    def _value(self, word: Any) -> Any:
        return self.words[word]


def name_or_mapping(name: Any, mapping: Any) -> Any:
    """Return the type of a key that holds a name, or a mapping or list that describes what has none."""
    return Annotated[
        Union[Annotated[name, Tag("(word)")], Annotated[mapping, Tag("(mapping)")]],  # noqa: UP007
        Discriminator(_branch),
    ]


def _branch(value: object) -> Literal["(word)", "(mapping)"]:
    return "(mapping)" if isinstance(value, (dict, list)) else "(word)"


def mapping_in(annotation: Any) -> Any:
    """Return the form of the mapping that a key of this type may hold; None where its keys are not known."""
    if is_typeddict(annotation):
        return annotation
    if isinstance(annotation, type) and is_dataclass(annotation):
        return mapping_in(form_of(annotation))
    return next((inner for inner in map(mapping_in, get_args(annotation)) if inner is not None), None)


@cache
def dotted_keys(annotation: Any) -> tuple[str, ...]:
    """Return the keys of the mapping that a key of this type may hold, and of those below it, dotted: a key stands
    before those below it."""
    mapping = mapping_in(annotation)
    if mapping is None:
        return ()
    keys: list[str] = []
    for name, hint in mapping.__annotations__.items():
        keys += [name, *(f"{name}.{below}" for below in dotted_keys(get_args(hint)[0]))]
    return tuple(keys)


def dotted(path: Iterable[str | int]) -> str:
    """Return `("backend", "extra_args", 0)` as `backend.extra_args[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{_clean(part)}"
    return text.lstrip(".")


def _clean(key: str) -> str:
    shown = key if key.isprintable() and key else ascii(key)
    return shortened(shown)
