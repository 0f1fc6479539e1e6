"""What was kept on the node reaches the run directory whole, once, and only the right one."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from llmlaunch.node.local_spool import Spool, deliver, deliver_all

PEAKS = "peaks/node1.jsonl"
MEMORY = "attempts/1/memory/0.17.json"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def put(folder: Path, relative: str, text: str) -> Path:
    path = folder / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_lines_arrive_in_order_behind_those_that_are_there(root: Path, run: Path) -> None:
    put(run, PEAKS, "a\n")
    spool = Spool(root, run)
    assert spool.append(PEAKS, b"b\n")
    assert spool.append(PEAKS, b"c\n")
    assert root.stat().st_mode & 0o777 == spool.folder.stat().st_mode & 0o777 == 0o700
    spool.deliver()
    assert (run / PEAKS).read_text() == "a\nb\nc\n"
    assert list(root.iterdir()) == []


def test_nothing_to_deliver(root: Path, run: Path) -> None:
    Spool(root, run).deliver()
    deliver_all(root, run)
    assert list(run.iterdir()) == []


def test_one_who_died_after_writing_before_removing(root: Path, run: Path) -> None:
    spool = Spool(root, run)
    spool.append(PEAKS, b"a\nb\n")
    (spool.folder / PEAKS).rename(spool.folder / "peaks" / "node1.123.taken.jsonl")
    spool.append(PEAKS, b"c\n")
    put(run, PEAKS, "a\nb")  # it died within a line, too
    spool.deliver()
    assert (run / PEAKS).read_text() == "a\nb\nc\n"


def test_a_torn_line_stays_behind_and_one_in_the_run_directory_is_closed(root: Path, run: Path) -> None:
    spool = Spool(root, run)
    spool.append(PEAKS, b'b\n{"v":1,"ev')
    put(run, PEAKS, '{"v":')
    spool.deliver()
    assert (run / PEAKS).read_text() == '{"v":\nb\n'


def test_a_run_directory_that_is_not_there_yet(root: Path, run: Path) -> None:
    spool = Spool(root, run)
    spool.append(PEAKS, b"a\n")
    run.rename(run.with_name("unmounted"))
    spool.deliver()
    assert not run.exists()
    run.write_text("a file")
    deliver_all(root, root)
    run.unlink()
    run.with_name("unmounted").rename(run)
    deliver_all(root, root)
    assert (run / PEAKS).read_text() == "a\n"


def test_what_cannot_be_written_is_kept(root: Path, run: Path) -> None:
    spool = Spool(root, run)
    spool.append(PEAKS, b"a\n")
    put(run, "peaks", "a file where a folder should be")
    with pytest.raises(NotADirectoryError):
        spool.deliver()
    deliver_all(root, root)
    (run / "peaks").unlink()
    spool.append(PEAKS, b"b\n")
    spool.deliver()
    assert (run / PEAKS).read_text() == "a\nb\n"


def test_a_folder_that_names_another_run_is_not_believed(root: Path, run: Path, tmp_path: Path) -> None:
    spool = Spool(root, run)
    spool.append(PEAKS, b"a\n")
    (tmp_path / "victim").mkdir()
    (spool.folder / "run").write_text(str(tmp_path / "victim"))
    deliver(root, spool.folder)
    assert list((tmp_path / "victim").iterdir()) == []


def test_ones_own_folder_is_left_to_oneself(root: Path, run: Path) -> None:
    spool = Spool(root, run)
    spool.append(PEAKS, b"a\n")
    deliver_all(root, spool.folder)
    assert list(run.iterdir()) == []


@pytest.mark.parametrize(("present", "at"), [(None, 2), ('{"at": 1}', 2), ('{"at": 3}', 3), ('{"at": ', 2)])
def test_of_two_of_a_probes_files_the_later_counts(root: Path, run: Path, present: str | None, at: int) -> None:
    spool = Spool(root, run)
    spool.append(MEMORY, b'{"at": 2}')
    if present is not None:
        put(run, MEMORY, present)
    put(spool.folder, "attempts/1/memory/.0.17.json.tmp", "half")
    spool.deliver()
    assert json.loads((run / MEMORY).read_text())["at"] == at
    assert [path.name for path in (run / MEMORY).parent.iterdir()] == ["0.17.json"]


def test_every_line_arrives_once_while_two_deliver_and_one_writes(root: Path, run: Path) -> None:
    spool = Spool(root, run)
    lines = [f"line {number}\n" for number in range(500)]
    done = threading.Event()

    def keep_delivering() -> None:
        while not done.is_set():
            deliver_all(root, root)

    threads = [threading.Thread(target=keep_delivering) for _ in range(2)]
    for thread in threads:
        thread.start()
    appended = [spool.append(PEAKS, line.encode()) for line in lines]
    done.set()
    for thread in threads:
        thread.join()
    spool.deliver()
    assert all(appended)
    assert sorted((run / PEAKS).read_text().splitlines(keepends=True)) == sorted(lines)
