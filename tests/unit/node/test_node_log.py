"""The log of a node: every line with its rank, and no disk that holds up a trainer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmlaunch.node.node_log import LONGEST_LINE_BYTES, MOST_WAITING_BYTES, NodeLog, RankLines
from support.node_rig import until


class Lines(NodeLog):
    """What is put, in one piece."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.text = b""

    def put(self, lines: bytes) -> None:
        self.text += lines


def taken(*pieces: bytes, rank: int = 3) -> bytes:
    """What becomes of the pieces in which a rank's output arrives."""
    log = Lines()
    lines = RankLines(rank, log, lambda lines: None)
    for piece in pieces:
        lines.take(piece)
    lines.flush()
    return log.text


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([b"one\ntwo\n"], b"[rank3]: one\n[rank3]: two\n"),
        ([b"on", b"e\ntw", b"o\n"], b"[rank3]: one\n[rank3]: two\n"),
        ([b"10%\r20%\r", b"100%\r\ndone\n"], b"[rank3]: 10%\r[rank3]: 20%\r[rank3]: 100%\r\n[rank3]: done\n"),
        ([b"100%\r", b"\ndone\n"], b"[rank3]: 100%\r\n[rank3]: done\n"),
        ([b"\n  \nindented:\n  x\n"], b"\n  \n[rank3]: indented:\n[rank3]:   x\n"),
        ([b"no end"], b"[rank3]: no end\n"),
        ([b"\xff\x00\n"], b"[rank3]: \xff\x00\n"),
        ([], b""),
    ],
)
def test_each_line_has_its_rank_once_however_it_arrives(pieces: list[bytes], text: bytes) -> None:
    assert taken(*pieces) == text


def test_a_line_in_which_torch_names_the_rank_already_is_not_named_twice() -> None:
    """Python's exceptions with a blank behind the name, what C++ logs without one (torch 2.13)."""
    text = b"[rank3]: Traceback (most recent call last):\n[rank3]:[W1130 ProcessGroupNCCL.cpp:1538] timeout\n"
    assert taken(text) == text
    assert taken(text, rank=33) == text.replace(b"[rank3]:", b"[rank33]: [rank3]:")


def test_who_listens_hears_the_lines_as_they_were_printed() -> None:
    heard: list[bytes] = []
    lines = RankLines(3, Lines(), heard.extend)
    lines.take(b"step 1/")
    lines.take(b"9\nstep 2/9\r")
    assert heard == [b"step 1/9\n", b"step 2/9\r"]


def test_a_line_without_an_end_is_written_once_nothing_comes_for_a_while() -> None:
    log = Lines()
    lines = RankLines(0, log, lambda lines: None)
    lines.take(b"loading ...")
    lines.flush_if_quiet()
    assert log.text == b""  # it may go on
    lines.flush_if_quiet()
    lines.take(b" loaded\n")
    assert log.text == b"[rank0]: loading ...\n[rank0]:  loaded\n"


def test_a_line_of_any_length_takes_little_memory() -> None:
    pieces = [b"x" * 2**14] * 40
    text = taken(*pieces)
    assert text.replace(b"[rank3]: ", b"").replace(b"\n", b"") == b"".join(pieces)
    assert max(map(len, text.split(b"\n"))) <= LONGEST_LINE_BYTES + 2**14 + len(b"[rank3]: ")


def test_lines_are_written_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        log = NodeLog(file.fileno())
        log.put(b"before it starts\n")
        log.start()
        for number in range(1000):
            log.put(b"%d\n" % number)
        assert log.flush(60)
    assert path.read_bytes() == b"before it starts\n" + b"".join(b"%d\n" % number for number in range(1000))
    assert (log.waiting_bytes, log.dropped_bytes) == (0, 0)


def test_what_a_full_disk_does_not_take_is_counted() -> None:
    with Path("/dev/full").open("wb") as full:
        log = NodeLog(full.fileno())
        log.start()
        for _ in range(100):
            log.put(b"lost\n")
        assert log.flush(60)
    assert (log.waiting_bytes, log.dropped_bytes) == (0, 500)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_a_disk_that_hangs_holds_nobody_up_for_long(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that nobody reads stands for it."""
    monkeypatch.setattr("llmlaunch.node.node_log.STALLED_SECONDS", 0.2)
    read, write = pipe
    log = NodeLog(write)
    log.start()
    piece = b"x" * (2**18 - 1) + b"\n"
    put = 0
    while not log.dropped_bytes:
        log.put(piece)
        put += len(piece)
    before = time.monotonic()
    for _ in range(100):
        log.put(piece)
    assert time.monotonic() - before < 10  # not 0.2 s for each
    assert log.dropped_bytes == 101 * len(piece)
    assert MOST_WAITING_BYTES - len(piece) < log.waiting_bytes <= MOST_WAITING_BYTES
    assert not log.flush(0.1)
    kept = put - len(piece)
    got = 0
    while got < kept:  # when it answers again, what it had been given arrives
        got += len(os.read(read, 2**20))
    until(lambda: not log.waiting_bytes, "the end of what waits")
    log.put(b"as before\n")
    assert os.read(read, 100) == b"as before\n"


def test_a_slow_disk_is_waited_for(pipe: tuple[int, int]) -> None:
    """As ranks that write into a file wait for it themselves: nothing is lost of a disk that goes on."""
    read, write = pipe
    got: list[int] = []

    def slowly() -> None:
        while sum(got) < 2 * MOST_WAITING_BYTES:
            got.append(len(os.read(read, 2**20)))
            time.sleep(0.001)

    reader = threading.Thread(target=slowly)
    reader.start()
    log = NodeLog(write)
    log.start()
    for _ in range(2 * MOST_WAITING_BYTES // 2**18):
        log.put(b"x" * 2**18)
    reader.join()
    assert log.dropped_bytes == 0
