"""The stacks that the ranks of a node wrote, read back from a file that anybody may have filled."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.rundir import stack_files
from llmlaunch.rundir.stack_files import HEADING, ranks_stacks, ranks_that_wrote


def write(attempt: Path, node: str, content: bytes) -> None:
    (attempt / "stacks").mkdir(exist_ok=True)
    (attempt / "stacks" / f"{node}.txt").write_bytes(content)


def test_the_parts_of_a_rank_are_joined_and_its_end_is_kept(tmp_path: Path) -> None:
    write(tmp_path, "n1", b"\n=== rank 0 ===\nfirst\n\n=== rank 1 ===\nother\n\n=== rank 0 ===\nsecond\n")
    write(tmp_path, "7", b"of an earlier llmlaunch\n")
    assert ranks_stacks(tmp_path) == {0: "first\n\nsecond\n", 1: "other\n\n", 7: "of an earlier llmlaunch\n"}
    assert ranks_that_wrote(tmp_path) == {0, 1, 7}


@pytest.mark.parametrize("length", [1, 3000, 70_000])
def test_of_a_rank_that_wrote_often_the_last_64_kib_are_kept(length: int, tmp_path: Path) -> None:
    parts = [b"%b\n%b\n" % (HEADING % 3, b"%06d" % n + b"x" * length) for n in range(200_000 // length)]
    write(tmp_path, "n1", b"".join(parts))
    whole = b"".join(part.split(b"\n", 1)[1] for part in parts)
    assert ranks_stacks(tmp_path) == {3: whole[-64 * 1024 :].decode()}


def test_a_heading_in_every_line_is_read_in_one_go(tmp_path: Path) -> None:
    """Each part was once added to a text of 64 KiB, so that a file of 4 MiB moved 10 GB."""
    write(tmp_path, "n1", b"=== rank 3 ===\nx\n" * 200_000)
    assert ranks_stacks(tmp_path) == {3: "x\n" * 32 * 1024}


def test_a_file_whose_beginning_is_not_read_accuses_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_files, "MOST_BYTES_OF_A_NODE", 100)
    write(tmp_path, "n1", b"=== rank 0 ===\n" + b"x" * 200 + b"\n=== rank 1 ===\n")
    assert ranks_that_wrote(tmp_path) is None


def test_no_folder_is_no_answer(tmp_path: Path) -> None:
    assert (ranks_stacks(tmp_path), ranks_that_wrote(tmp_path)) == ({}, set())
