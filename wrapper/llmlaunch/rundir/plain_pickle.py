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

_PROTOCOLS = (2, 3, 4)


def load_plain(content: bytes) -> Any:
    """Return the value of a pickle. Raises ValueError for one that is damaged, too long, or holds more than dicts,
    lists, tuples, text, numbers, booleans and None."""
    try:
        return _Machine(content).run()
    except (IndexError, KeyError, TypeError, struct.error, UnicodeDecodeError, OverflowError) as error:
        raise ValueError(f"is no plain pickle: {type(error).__name__}") from None


class _Machine:
    """The stack, the memo and the place in the file."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._place = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._large_keys = 0

    def run(self) -> Any:
        for _ in range(MOST_INSTRUCTIONS):
            code = self._content[self._place]
            self._place += 1
            if code == 0x2E:  # STOP
                return self._stack[-1]
            instruction = _INSTRUCTIONS.get(code)
            if instruction is None:
                raise ValueError(f"is no plain pickle: instruction 0x{code:02x} is not allowed")
            instruction(self)
        raise ValueError(f"not read: it has more than {MOST_INSTRUCTIONS:,} instructions")

    def _take(self, count: int) -> bytes:
        content = self._content[self._place : self._place + count]
        if len(content) != count:
            raise ValueError("is no plain pickle: it is cut short")
        self._place += count
        return content

    def _number(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self._content, self._place)
        self._place += form.size
        return value

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _since_mark(self) -> list[Any]:
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def protocol(self) -> None:
        if self._content[self._place] not in _PROTOCOLS:
            raise ValueError("is no plain pickle: its protocol is unknown")
        self._place += 1

    def skip_frame(self) -> None:
        self._take(8)  # its length

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def text(self, form: struct.Struct) -> None:
        self._push(self._take(self._number(form)).decode("utf-8", "surrogatepass").encode("utf-8", "replace").decode())

    def long(self) -> None:
        self._push(int.from_bytes(self._take(self._content[self._place] + 1)[1:], "little", signed=True))

    def put(self, form: struct.Struct) -> None:
        self._memo[self._number(form)] = self._stack[-1]

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def get(self, form: struct.Struct) -> None:
        self._push(self._memo[self._number(form)])

    def append(self, several: bool) -> None:
        values = self._since_mark() if several else [self._stack.pop()]
        self._container(list).extend(values)

    def set_items(self, several: bool) -> None:
        values = self._since_mark() if several else [self._stack.pop() for _ in range(2)][::-1]
        mapping = self._container(dict)
        for place in range(0, len(values), 2):
            self._check_key(values[place])
            mapping[values[place]] = values[place + 1]

    def _check_key(self, key: object) -> None:
        """Raise ValueError for what is no text or whole number, and for too many numbers beyond 64 bits: a dict of
        those that differ by multiples of 2**61 - 1, which all have one hash, takes the square of their number."""
        if isinstance(key, str):
            return
        if not isinstance(key, int):
            raise ValueError("is no plain pickle: a key is neither text nor a number")
        self._large_keys += not fits_64_bits(key)
        if self._large_keys > MOST_LARGE_KEYS:
            raise ValueError(f"not read: it has more than {MOST_LARGE_KEYS:,} keys that do not fit 64 bits")

    def _container(self, kind: type) -> Any:
        container = self._stack[-1]
        if type(container) is not kind:
            raise ValueError(f"is no plain pickle: expected a {kind.__name__}")
        return container

    def tuple_of(self, count: int) -> None:
        if len(self._stack) < count:
            raise ValueError("is no plain pickle: it is damaged")
        values = tuple(self._stack[len(self._stack) - count :])
        del self._stack[len(self._stack) - count :]
        self._push(values)


_BYTE, _SHORT, _INT, _UNSIGNED, _LENGTH, _FLOAT = (struct.Struct(form) for form in ("<B", "<H", "<i", "<I", "<Q", ">d"))
_INSTRUCTIONS: dict[int, Callable[[_Machine], None]] = {
    0x80: _Machine.protocol,
    0x95: _Machine.skip_frame,
    ord("("): _Machine.mark,
    ord("N"): lambda machine: machine._push(None),
    0x88: lambda machine: machine._push(True),
    0x89: lambda machine: machine._push(False),
    ord("}"): lambda machine: machine._push({}),
    ord("]"): lambda machine: machine._push([]),
    ord(")"): lambda machine: machine._push(()),
    ord("K"): lambda machine: machine._push(machine._number(_BYTE)),
    ord("M"): lambda machine: machine._push(machine._number(_SHORT)),
    ord("J"): lambda machine: machine._push(machine._number(_INT)),
    ord("G"): lambda machine: machine._push(machine._number(_FLOAT)),
    0x8A: _Machine.long,
    ord("X"): lambda machine: machine.text(_UNSIGNED),
    0x8C: lambda machine: machine.text(_BYTE),
    0x8D: lambda machine: machine.text(_LENGTH),
    ord("q"): lambda machine: machine.put(_BYTE),
    ord("r"): lambda machine: machine.put(_UNSIGNED),
    0x94: _Machine.memoize,
    ord("h"): lambda machine: machine.get(_BYTE),
    ord("j"): lambda machine: machine.get(_UNSIGNED),
    ord("a"): lambda machine: machine.append(several=False),
    ord("e"): lambda machine: machine.append(several=True),
    ord("s"): lambda machine: machine.set_items(several=False),
    ord("u"): lambda machine: machine.set_items(several=True),
    0x85: lambda machine: machine.tuple_of(1),
    0x86: lambda machine: machine.tuple_of(2),
    0x87: lambda machine: machine.tuple_of(3),
    ord("t"): lambda machine: machine._push(tuple(machine._since_mark())),
}
