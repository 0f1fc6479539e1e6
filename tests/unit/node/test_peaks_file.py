"""The peaks file: appends whole lines, closes torn ones, and a disk never stops it."""

from __future__ import annotations

import json
from pathlib import Path

from llmlaunch.node.peaks import PeaksFile


def test_lines_are_appended_across_writers(tmp_path: Path) -> None:
    path = tmp_path / "peaks" / "node.jsonl"
    PeaksFile(path).append({"n": 1})
    PeaksFile(path).append({"n": 2}, sync=True)
    assert path.read_text() == '{"n":1}\n{"n":2}\n'


def test_a_torn_line_is_closed_first(tmp_path: Path) -> None:
    path = tmp_path / "node.jsonl"
    path.write_text('{"n":1}\n{"n":')
    PeaksFile(path).append({"n": 2})
    assert path.read_text().splitlines() == ['{"n":1}', '{"n":', '{"n":2}']


def test_what_cannot_be_written_is_dropped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "peaks").write_text("a file where the directory should be")
    peaks = PeaksFile(tmp_path / "peaks" / "node.jsonl")
    peaks.append({"n": 1})
    peaks.append({"n": 2}, sync=True)
    assert peaks.dropped == 2
    (tmp_path / "peaks").unlink()
    peaks.append({"n": 3})
    assert [json.loads(line) for line in peaks.path.read_text().splitlines()] == [{"n": 3}]
