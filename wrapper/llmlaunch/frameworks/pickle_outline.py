"""A reader of pickles that show what objects they hold, without making any of them.

`plain_pickle` refuses a file that names code. Files of torch.save name some in every line, so this reader puts an
`Outline` where Python would import and call: the name of the class or function, what it would be given, and the state.
Both read with the same bounded machine.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from llmlaunch.findings import first_bytes
from llmlaunch.rundir.plain_pickle import BYTE, DAMAGE, LENGTH, PLAIN_INSTRUCTIONS, UNSIGNED, Machine

MOST_INSTRUCTIONS = 300_000
"""Limit for one file, about a second of work; the arguments of Megatron-LM take 3,000."""

MOST_PICKLE_BYTES = 4 * 2**20

# A file of torch.save is a zip archive whose first record is the pickle, as it is (torch/serialization.py _save).
_LOCAL_HEADER = struct.Struct("<4s4xH16xHH")


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
    try:
        return _Outliner(content, _INSTRUCTIONS).run(MOST_INSTRUCTIONS)
    except DAMAGE as error:
        raise ValueError(f"is no pickle of torch.save: {type(error).__name__}") from None


class _Outliner(Machine):
    """Reads what torch.save writes beside plain values: bytes, sets, and what would be imported and called."""

    protocols = (2, 3, 4, 5)

    def append(self, several: bool) -> None:
        values = self.since_mark() if several else self.popped(1)
        if isinstance(self.stack[-1], list):
            self.stack[-1].extend(values)

    def set_items(self, several: bool) -> None:
        values = self.since_mark() if several else self.popped(2)
        target = self.stack[-1]
        items = target.items if isinstance(target, Outline) else target
        for key, value in zip(values[::2], values[1::2], strict=True):
            if isinstance(key, (str, int)):
                self.check_key(key)
                items[key] = value

    def describe(self, words: Iterable[object]) -> None:
        self.push(Outline(".".join(map(str, words))))

    def read_name(self) -> None:
        ends = [self._content.index(b"\n", self._place)]
        ends.append(self._content.index(b"\n", ends[0] + 1))
        self.describe(self.take(ends[1] + 1 - self._place).decode().split())

    def call(self) -> None:
        maker, arguments = self.popped(2)
        self.push(Outline(maker.name, arguments))

    def build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Outline):
            self.stack[-1].state = state


_INSTRUCTIONS: dict[int, Callable[[Any], None]] = {
    **PLAIN_INSTRUCTIONS,
    0x8B: lambda machine: machine.push(int.from_bytes(machine.take(machine.number(UNSIGNED)), "little", signed=True)),
    ord("B"): lambda machine: machine.push(machine.take(machine.number(UNSIGNED))),
    ord("C"): lambda machine: machine.push(machine.take(machine.number(BYTE))),
    0x8E: lambda machine: machine.push(machine.take(machine.number(LENGTH))),
    0x96: lambda machine: machine.push(machine.take(machine.number(LENGTH))),
    0x8F: lambda machine: machine.describe(["builtins.set"]),
    0x90: lambda machine: machine.append(several=True),
    ord("c"): _Outliner.read_name,
    0x93: lambda machine: machine.describe(machine.popped(2)),
    ord("Q"): lambda machine: machine.push(Outline("", machine.stack.pop())),
    ord("R"): _Outliner.call,
    0x81: _Outliner.call,
    ord("b"): _Outliner.build,
}


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
