"""A class made by `frozen` does what the standard library's frozen dataclass of the same fields does."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import product
from typing import Any

import pytest

from llmlaunch.frozen import frozen


class Body:
    """The fields and methods of both classes; each decorator gets a class of its own."""

    width: int
    names: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    note: str = field(default="", compare=False, repr=False)
    area: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "area", self.width**2)

    @cached_property
    def double(self) -> int:
        return 2 * self.width


def make(decorator: Any, **methods: Any) -> Any:
    names = {name: value for name, value in vars(Body).items() if name not in ("__dict__", "__weakref__")}
    cls = decorator(type("Plank", (), {**names, "__qualname__": "Plank", **methods}))
    cls.double.__set_name__(cls, "double")
    return cls


Ours, Theirs = make(frozen), make(dataclass(frozen=True))
Plank = Ours  # by which pickle finds it
VALUES: list[tuple[Any, ...]] = [(1,), (2,), (1, ("a",)), (1, (), {"a": 1}), (1, (), {}, "note"), (1, (), {}, "other")]


@frozen
class One:
    value: int


@frozen
class Nothing:
    """Without a field."""


@pytest.mark.parametrize("values", VALUES)
def test_instances_are_shown_copied_and_changed_alike(values: tuple[Any, ...]) -> None:
    ours, theirs = Ours(*values), Theirs(*values)
    assert repr(ours) == repr(theirs)
    assert asdict(ours) == asdict(theirs)
    assert asdict(replace(ours, width=7)) == asdict(replace(theirs, width=7))
    assert copy.deepcopy(ours) == ours
    assert pickle.loads(pickle.dumps(One(3))) == One(3)
    assert ours.double == theirs.double


def test_equality_goes_by_the_same_fields() -> None:
    for one, other in product(VALUES, VALUES):
        assert (Ours(*one) == Ours(*other)) is (Theirs(*one) == Theirs(*other))
        assert Ours(*one) != Theirs(*one)


def test_the_hash_is_that_of_the_compared_fields() -> None:
    assert hash(One(3)) == hash(dataclass(frozen=True)(make_one())(3))
    assert len({One(3), One(3), One(4), Nothing(), Nothing()}) == 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(Ours(1))


def make_one() -> type:
    return type("One", (), {"__annotations__": {"value": int}})


def test_nothing_can_be_set_or_deleted() -> None:
    for instance in (Ours(1), Theirs(1)):
        with pytest.raises(FrozenInstanceError, match="cannot assign to field 'width'"):
            instance.width = 2
        with pytest.raises(FrozenInstanceError, match="cannot delete field 'width'"):
            del instance.width
        with pytest.raises(FrozenInstanceError):
            instance.unknown = 2


def test_arguments_are_taken_and_refused_alike() -> None:
    assert list(inspect.signature(Ours).parameters) == list(inspect.signature(Theirs).parameters)
    for cls in (Ours, Theirs):
        for arguments in ({}, {"width": 1, "area": 2}, {"width": 1, "unknown": 2}):
            with pytest.raises(TypeError):
                cls(**arguments)
    assert Ours(1).extra is not Ours(1).extra
    assert [item.name for item in fields(Ours)] == [item.name for item in fields(Theirs)]


def test_methods_of_the_class_itself_stay() -> None:
    own = {"__repr__": lambda self: "mine", "__eq__": lambda self, other: True, "__hash__": lambda self: 5}
    for decorator in (frozen, dataclass(frozen=True)):
        instance = make(decorator, **own)(1)
        assert (repr(instance), instance == 3, hash(instance)) == ("mine", True, 5)
