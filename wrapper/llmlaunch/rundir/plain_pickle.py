"""A reader of pickles that builds nothing but containers, numbers and text.

Python's own would import and call whatever a file names; with that forbidden it still gives a file of a few bytes
gigabytes of memory (a memo index, a length). This one knows no instruction that names code, each instruction costs what
it adds or takes away, and there is a limit to their number. The instructions are those of protocol 2 that PyTorch's C++
writer uses (torch/csrc/jit/serialization/pickler.cpp), and what Python's writer uses for the same values up to
protocol 4.

What is returned may hold one list in many places, or in itself, and be nested as deeply as the file is long: to walk
all of it, or to make it a text, may never end. Whoever reads it takes only what it expects, and counts (see
causes/flight_recorder.py).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from .foreign_values import fits_64_bits

if TYPE_CHECKING:
    from collections.abc import Callable


MOST_INSTRUCTIONS = 5_000_000
"""Limit for one file; PyTorch's flight recorder writes about 60 for each of its 2,000 entries."""

MOST_LARGE_KEYS = 1000

DAMAGE = (IndexError, KeyError, TypeError, AttributeError, struct.error, UnicodeDecodeError, OverflowError)
"""What an instruction raises on a damaged file."""


def load_plain(content: bytes) -> Any:
    """Return the value of a pickle. Raises ValueError for one that is damaged, too long, or holds more than dicts,
    lists, tuples, text, numbers, booleans and None."""
    try:
        return Machine(content, PLAIN_INSTRUCTIONS).run(MOST_INSTRUCTIONS)
    except DAMAGE as error:
        raise ValueError(f"is no plain pickle: {type(error).__name__}") from None


class Machine:
    """The stack, the memo and the place in the file. A subclass may know more protocols and instructions."""

    protocols: tuple[int, ...] = (2, 3, 4)

    def __init__(self, content: bytes, instructions: dict[int, Callable[[Any], None]]) -> None:
        self._instructions = instructions
        self._content = content
        self._place = 0
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._large_keys = 0

    def run(self, most_instructions: int) -> Any:
        for _ in range(most_instructions):
            code = self._content[self._place]
            self._place += 1
            if code == 0x2E:  # STOP
                return self.stack[-1]
            instruction = self._instructions.get(code)
            if instruction is None:
                raise ValueError(f"is no plain pickle: instruction 0x{code:02x} is not allowed")
            instruction(self)
        raise ValueError(f"not read: it has more than {most_instructions:,} instructions")

    def take(self, count: int) -> bytes:
        content = self._content[self._place : self._place + count]
        if len(content) != count:
            raise ValueError("is no plain pickle: it is cut short")
        self._place += count
        return content

    def number(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self._content, self._place)
        self._place += form.size
        return value

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def since_mark(self) -> list[Any]:
        start = self._marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def protocol(self) -> None:
        if self._content[self._place] not in self.protocols:
            raise ValueError("is no plain pickle: its protocol is unknown")
        self._place += 1

    def skip_frame(self) -> None:
        self.take(8)  # its length

    def mark(self) -> None:
        self._marks.append(len(self.stack))

    def text(self, form: struct.Struct) -> None:
        self.push(self.take(self.number(form)).decode("utf-8", "surrogatepass").encode("utf-8", "replace").decode())

    def long(self) -> None:
        self.push(int.from_bytes(self.take(self._content[self._place] + 1)[1:], "little", signed=True))

    def put(self, form: struct.Struct) -> None:
        self._memo[self.number(form)] = self.stack[-1]

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def get(self, form: struct.Struct) -> None:
        self.push(self._memo[self.number(form)])

    def append(self, several: bool) -> None:
        values = self.since_mark() if several else self.popped(1)
        self.container(list).extend(values)

    def set_items(self, several: bool) -> None:
        values = self.since_mark() if several else self.popped(2)
        mapping = self.container(dict)
        for place in range(0, len(values), 2):
            self.check_key(values[place])
            mapping[values[place]] = values[place + 1]

    def check_key(self, key: object) -> None:
        """Raise ValueError for what is no text or whole number, and for too many numbers beyond 64 bits: a dict of
        those that differ by multiples of 2**61 - 1, which all have one hash, takes the square of their number."""
        if isinstance(key, str):
            return
        if not isinstance(key, int):
            raise ValueError("is no plain pickle: a key is neither text nor a number")
        self._large_keys += not fits_64_bits(key)
        if self._large_keys > MOST_LARGE_KEYS:
            raise ValueError(f"not read: it has more than {MOST_LARGE_KEYS:,} keys that do not fit 64 bits")

    def container(self, kind: type) -> Any:
        container = self.stack[-1]
        if type(container) is not kind:
            raise ValueError(f"is no plain pickle: expected a {kind.__name__}")
        return container

    def popped(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("is no plain pickle: it is damaged")
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values


BYTE, _SHORT, _INT, UNSIGNED, LENGTH, _FLOAT = (struct.Struct(form) for form in ("<B", "<H", "<i", "<I", "<Q", ">d"))
PLAIN_INSTRUCTIONS: dict[int, Callable[[Any], None]] = {
    0x80: Machine.protocol,
    0x95: Machine.skip_frame,
    ord("("): Machine.mark,
    ord("N"): lambda machine: machine.push(None),
    0x88: lambda machine: machine.push(True),
    0x89: lambda machine: machine.push(False),
    ord("}"): lambda machine: machine.push({}),
    ord("]"): lambda machine: machine.push([]),
    ord(")"): lambda machine: machine.push(()),
    ord("K"): lambda machine: machine.push(machine.number(BYTE)),
    ord("M"): lambda machine: machine.push(machine.number(_SHORT)),
    ord("J"): lambda machine: machine.push(machine.number(_INT)),
    ord("G"): lambda machine: machine.push(machine.number(_FLOAT)),
    0x8A: Machine.long,
    ord("X"): lambda machine: machine.text(UNSIGNED),
    0x8C: lambda machine: machine.text(BYTE),
    0x8D: lambda machine: machine.text(LENGTH),
    ord("q"): lambda machine: machine.put(BYTE),
    ord("r"): lambda machine: machine.put(UNSIGNED),
    0x94: Machine.memoize,
    ord("h"): lambda machine: machine.get(BYTE),
    ord("j"): lambda machine: machine.get(UNSIGNED),
    ord("a"): lambda machine: machine.append(several=False),
    ord("e"): lambda machine: machine.append(several=True),
    ord("s"): lambda machine: machine.set_items(several=False),
    ord("u"): lambda machine: machine.set_items(several=True),
    0x85: lambda machine: machine.push(tuple(machine.popped(1))),
    0x86: lambda machine: machine.push(tuple(machine.popped(2))),
    0x87: lambda machine: machine.push(tuple(machine.popped(3))),
    ord("t"): lambda machine: machine.push(tuple(machine.since_mark())),
}
