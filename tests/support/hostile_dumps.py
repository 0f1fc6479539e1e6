"""Files that call themselves dumps of PyTorch's flight recorder and are made to exhaust whoever reads them. The pickles
are put together instruction by instruction (protocol 2), since Python's own writer makes none of that kind."""

from __future__ import annotations

import struct

HEAD, STOP = b"\x80\x02", b"."
EMPTY_DICT, EMPTY_LIST, MARK, APPENDS, SET_ITEMS = b"}", b"]", b"(", b"e", b"u"


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def put(index: int) -> bytes:
    return b"q" + bytes([index])


def get(index: int) -> bytes:
    return b"h" + bytes([index])


def shared_lists(levels: int, ways: int = 10, leaf: bytes = b"K\x01") -> bytes:
    """The instructions of a list that refers `ways` times to one that refers as often to the next below it: a few bytes
    for each level, and `ways ** levels` values for whoever walks it."""
    made = EMPTY_LIST + put(0) + MARK + leaf * ways + APPENDS
    for level in range(1, levels):
        made = made + EMPTY_LIST + put(level) + MARK + get(level - 1) * ways + APPENDS
    # all but the last lie below it on the stack; they are put into one list, of which a reader sees the last
    return MARK + made + b"t"


def nested(depth: int) -> bytes:
    """A list within a list, `depth` times."""
    return EMPTY_LIST * depth + b"a" * (depth - 1)


def dump_with(entry: dict[str, bytes], config: bytes = EMPTY_DICT, entries: int = 1) -> bytes:
    """A dump whose entries have these instructions for values, the same values for all of them. The rest of an entry
    is what PyTorch writes of an all_reduce that is not done."""
    sound = {
        "record_id": b"K\x00",
        "process_group": text("0") + text("default_pg") + b"\x86",
        "profiling_name": text("nccl:all_reduce"),
        "collective_seq_id": b"K\x01",
        "is_p2p": b"\x89",
        "input_sizes": EMPTY_LIST + EMPTY_LIST + b"K\x04aa",
        "state": text("scheduled"),
    }
    items = b"".join(text(name) + value for name, value in {**sound, **entry}.items())
    one = EMPTY_DICT + put(200) + MARK + items + SET_ITEMS
    listed = EMPTY_LIST + MARK + one + get(200) * (entries - 1) + APPENDS
    return HEAD + EMPTY_DICT + MARK + text("pg_config") + config + text("entries") + listed + SET_ITEMS + STOP
