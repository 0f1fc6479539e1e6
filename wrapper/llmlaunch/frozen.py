"""Frozen dataclasses that are quick to define.

The standard library's `dataclass(frozen=True)` compiles six methods for every class, half a millisecond or more each
time Python starts; of what `llmlaunch check` imports of its own that was more than half. Here only `__init__` is
compiled, when the first instance is made, and the other methods are shared. What the classes do is the same
(tests/unit/documents/test_frozen.py). It is for modules that every command imports; elsewhere
`dataclass(frozen=True)` is as good.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from functools import cache
from operator import attrgetter
from reprlib import recursive_repr
from typing import Any, NoReturn, TypeVar

from typing_extensions import dataclass_transform

Class = TypeVar("Class")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[Class]) -> type[Class]:
    """Make a frozen dataclass of `cls`, equal to what `dataclasses.dataclass(frozen=True)` makes of it.

    Fields of keyword arguments alone, `InitVar` and `field(hash=...)` are not provided for.
    """
    own = cls.__dict__
    hashed = own.get("__hash__") is not None
    cls.__doc__ = cls.__doc__ or cls.__name__  # else the standard library writes the signature, which takes longer
    dataclass(init=False, repr=False, eq=False)(cls)
    methods: dict[str, Any] = {"__init__": _LateInitializer(cls), "__setattr__": _set, "__delattr__": _delete}
    methods |= {name: method for name, method in (("__repr__", _shown), ("__eq__", _equal)) if name not in own}
    if not hashed:
        methods["__hash__"] = _hashed
    for name, method in methods.items():
        setattr(cls, name, method)
    return cls


class _LateInitializer:
    """Stands in the place of `__init__` until that is asked for: many classes never have an instance of their own."""

    def __init__(self, cls: type) -> None:
        self._class = cls

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., None]:
        initializer: Any = _initializer(self._class)
        setattr(self._class, "__init__", initializer)  # noqa: B010
        bound: Callable[..., None] = initializer.__get__(instance, owner)
        return bound


def _initializer(cls: type) -> Callable[..., None]:
    """Compile `__init__`, which takes the fields in order and then calls `__post_init__` if the class has one."""
    arguments, body = [], [" _values = self.__dict__"]
    names: dict[str, Any] = {"_MISSING": MISSING}
    for item in fields(cls):
        name = item.name
        value = name if item.init else f"_default_{name}"
        if item.default_factory is not MISSING:
            names[f"_factory_{name}"] = item.default_factory
            factory = f"_factory_{name}()"
            value = f"{factory} if {name} is _MISSING else {name}" if item.init else factory
            default = "=_MISSING"
        elif item.default is not MISSING:
            names[f"_default_{name}"] = item.default
            default = f"=_default_{name}"
        else:
            default = ""
        if item.init:
            arguments.append(f"{name}{default}")
        body.append(f" _values[{name!r}] = {value}")
    if hasattr(cls, "__post_init__"):
        body.append(" self.__post_init__()")
    text = f"def __init__({', '.join(['self', *arguments])}):\n" + "\n".join(body)
    exec(text, names)
    initializer: Callable[..., None] = names["__init__"]
    initializer.__qualname__ = f"{cls.__qualname__}.__init__"
    initializer.__annotations__ = {item.name: item.type for item in fields(cls) if item.init} | {"return": None}
    return initializer


@cache
def _compared(cls: type) -> Callable[[Any], Any]:
    """Return a function from an instance to a tuple of the values that equality and the hash go by."""
    return _values([item for item in fields(cls) if item.compare])


def _values(items: list[Field[Any]]) -> Callable[[Any], Any]:
    names = [item.name for item in items]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda instance: tuple(getattr(instance, name) for name in names)


def _equal(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    values = _compared(self.__class__)
    return values(self) == values(other)


def _hashed(self: Any) -> int:
    return hash(_compared(self.__class__)(self))


@recursive_repr()
def _shown(self: Any) -> str:
    shown = (f"{item.name}={getattr(self, item.name)!r}" for item in fields(self) if item.repr)
    return f"{self.__class__.__qualname__}({', '.join(shown)})"


def _set(self: Any, name: str, value: object) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _delete(self: Any, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")
