"""A reader of pickles that show what objects they hold, without making any of them.

`plain_pickle` refuses a file that names code. Files of torch.save name some in every line, so this reader puts an
`Outline` where Python would import and call: the name of the class or function, what it would be given, and the state.
The file is split into instructions by `pickletools.genops`, which runs none of them.
"""

from __future__ import annotations

import pickletools
import struct
from pathlib import Path
from typing import Any

from llmlaunch.findings import first_bytes

MOST_INSTRUCTIONS = 300_000
"""Limit for one file, about a second of work; the arguments of Megatron-LM take 3,000."""

MOST_PICKLE_BYTES = 4 * 2**20

# A file of torch.save is a zip archive whose first record is the pickle, as it is (torch/serialization.py _save).
_LOCAL_HEADER = struct.Struct("<4s4xH16xHH")

_MARK = object()
_VALUES = frozenset(
    (
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"),
        *("BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    )
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Outline:
    """An object that a pickle describes: `name` is "module.name" of what would make it, `arguments` what that would be
    called with, `state` what would be put into it, and `items` its keys and values where it is a mapping."""

    __slots__ = ("arguments", "items", "name", "state")

    def __init__(self, name: str, arguments: Any = ()) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None
        self.items: dict[Any, Any] = {}


def read_outline(content: bytes) -> Any:
    """Return the value of the pickle that `content` begins with, objects as their `Outline`.

    Keys of a mapping that are neither text nor a number are left out with their values. Values may be shared, so
    whoever walks through them needs a bound of its own.

    Raises:
        ValueError: the pickle is damaged, cut short, too long, or has an instruction that torch.save never writes.
    """
    machine = _Machine()
    try:
        for count, (instruction, argument, _) in enumerate(pickletools.genops(content)):
            if instruction.name == "STOP":
                return machine.stack.pop()
            if count == MOST_INSTRUCTIONS:
                raise ValueError("is too long for an outline")
            machine.do(instruction.name, argument)
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"is no pickle of torch.save: {type(error).__name__}") from None
    raise ValueError("is no pickle of torch.save: it has no end")


class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def do(self, name: str, argument: Any) -> None:
        """Carry out one instruction. Raises ValueError for an unknown one."""
        if name in _VALUES:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self._memo[argument])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self.stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self.stack[-1]
        elif name in _TUPLES:
            self.stack.append(tuple(self._popped(_TUPLES[name])))
        elif not (self._fill(name) or self._describe(name, argument)):
            raise ValueError(f"is no pickle of torch.save: it has the instruction {name}")

    def _fill(self, name: str) -> bool:
        """Carry out an instruction of containers; return whether it is such."""
        if name == "MARK":
            self.stack.append(_MARK)
        elif name == "TUPLE":
            self.stack.append(tuple(self._since_mark()))
        elif name == "EMPTY_LIST":
            self.stack.append([])
        elif name == "EMPTY_DICT":
            self.stack.append({})
        elif name == "EMPTY_SET":
            self.stack.append(Outline("builtins.set"))
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            values = self._popped(1) if name == "APPEND" else self._since_mark()
            if isinstance(self.stack[-1], list):
                self.stack[-1].extend(values)
        elif name in ("SETITEM", "SETITEMS"):
            self._set(self._popped(2) if name == "SETITEM" else self._since_mark())
        elif name not in ("PROTO", "FRAME"):
            return False
        return True

    def _describe(self, name: str, argument: Any) -> bool:
        """Put an outline where an instruction would import or call; return whether it is such."""
        if name == "GLOBAL":
            self.stack.append(Outline(str(argument).replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            self.stack.append(Outline(".".join(map(str, self._popped(2)))))
        elif name == "BINPERSID":
            self.stack.append(Outline("", self.stack.pop()))
        elif name in ("REDUCE", "NEWOBJ"):
            maker, arguments = self._popped(2)
            self.stack.append(Outline(maker.name, arguments))
        elif name == "BUILD":
            state = self.stack.pop()
            if isinstance(self.stack[-1], Outline):
                self.stack[-1].state = state
        else:
            return False
        return True

    def _set(self, values: list[Any]) -> None:
        target = self.stack[-1]
        items = target.items if isinstance(target, Outline) else target
        for key, value in zip(values[::2], values[1::2], strict=True):
            if isinstance(key, (str, int)):
                items[key] = value

    def _popped(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def _since_mark(self) -> list[Any]:
        values: list[Any] = []
        while (value := self.stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]


def first_pickle(path: Path, offset: int = 0) -> Any:
    """Return the outline of what torch.save wrote into a file, from `offset` on; None where that cannot be read."""
    header = first_bytes(path, 512, offset)
    if header is None or len(header) < _LOCAL_HEADER.size:
        return None
    signature, method, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(header)
    name = header[_LOCAL_HEADER.size : _LOCAL_HEADER.size + name_bytes]
    if signature != b"PK\x03\x04" or method != 0 or not name.endswith(b"/data.pkl"):
        return None
    content = first_bytes(path, MOST_PICKLE_BYTES, offset + _LOCAL_HEADER.size + name_bytes + extra_bytes)
    try:
        return read_outline(content or b"")
    except ValueError:
        return None
