"""Pickles of PyTorch's flight recorder are read without Python's own reader: a hostile one is a message, never code."""

from __future__ import annotations

import os
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.rundir.plain_pickle import load_plain
from support.soak import examples

DUMPS = Path(__file__).parents[2] / "data" / "flight"
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**100), 2**100) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
)


@pytest.mark.parametrize("path", sorted(DUMPS.glob("[ps]*_*")), ids=lambda path: path.name)
def test_what_pytorch_wrote_is_read_as_python_reads_it(path: Path) -> None:
    content = path.read_bytes()
    assert load_plain(content) == pickle.loads(content)


@examples(40, 2000)
@given(value=PLAIN, protocol=st.sampled_from([2, 3, 4]))
def test_every_plain_value_is_read_back(value: Any, protocol: int) -> None:
    assert load_plain(pickle.dumps(value, protocol)) == value


class Calls:
    def __init__(self, *command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, self.command


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_that_names_code_is_refused_and_runs_nothing(protocol: int, tmp_path: Path) -> None:
    content = pickle.dumps({"entries": [Calls(f"touch {tmp_path}/ran")]}, protocol)
    with pytest.raises(ValueError, match="no plain pickle"):
        load_plain(content)
    assert not list(tmp_path.iterdir())


HEAD = b"\x80\x02"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(HEAD + b".", id="no value"),
        pytest.param(HEAD + b"X" + struct.pack("<I", 2**32 - 1) + b"a.", id="a text longer than the file"),
        pytest.param(HEAD + b"\x8d" + struct.pack("<Q", 2**62) + b".", id="a text of exabytes"),
        pytest.param(HEAD + b"]e.", id="a mark that was never set"),
        pytest.param(HEAD + b"h\x07.", id="a memo that was never written"),
        pytest.param(HEAD + b"}]K\x01s.", id="a list for a key"),
        pytest.param(HEAD + b"K\x01K\x02a.", id="append to a number"),
        pytest.param(HEAD + b"cos\nsystem\n.", id="GLOBAL"),
        pytest.param(HEAD + b"\x8b" + struct.pack("<i", 2**31 - 1) + b".", id="a number of gigabytes"),
        pytest.param(HEAD + b"X\x01\x00\x00\x00\xff.", id="text that is no text"),
        pytest.param(b"\x80\x05}.", id="a protocol that nobody uses here"),
    ],
)
def test_a_damaged_or_hostile_pickle_is_a_message(content: bytes) -> None:
    with pytest.raises(ValueError, match="no plain pickle"):
        load_plain(content)


def test_a_memo_of_a_huge_index_costs_no_memory() -> None:
    tracemalloc.start()
    assert load_plain(HEAD + b"}r" + struct.pack("<I", 2**32 - 1) + b".") == {}
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_lists_in_lists_by_the_ten_thousand_are_no_recursion() -> None:
    value = load_plain(HEAD + b"]" * 50_000 + b"a" * 49_999 + b".")
    assert len(value) == 1
