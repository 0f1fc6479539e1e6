"""The peaks file: appends whole lines, closes torn ones, and a disk never stops it."""

from __future__ import annotations

from pathlib import Path

from llmlaunch.node.peaks import PeaksFile


def test_lines_are_appended_across_writers(tmp_path: Path) -> None:
    path = tmp_path / "peaks" / "node.jsonl"
    PeaksFile(path).append(b'{"n":1}\n')
    PeaksFile(path).append(b'{"n":2}\n', sync=True)
    assert path.read_text() == '{"n":1}\n{"n":2}\n'


def test_a_torn_line_is_closed_first(tmp_path: Path) -> None:
    path = tmp_path / "node.jsonl"
    path.write_text('{"n":1}\n{"n":')
    PeaksFile(path).append(b'{"n":2}\n')
    assert path.read_text().splitlines() == ['{"n":1}', '{"n":', '{"n":2}']


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "peaks").write_text("a file where the directory should be")
    peaks = PeaksFile(tmp_path / "peaks" / "node.jsonl")
    assert not peaks.append(b"1\n")
    assert not peaks.append(b"2\n", sync=True)
    (tmp_path / "peaks").unlink()
    assert peaks.append(b"3\n")
    assert peaks.path.read_text() == "3\n"
