"""Collectors that are killed, meet each other, or find no room: the store stays sound, and nothing is in it twice."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from collecting import expected, held, many_runs, said, start

pytestmark = pytest.mark.faults

KILLS = 4  # of one test, which is repeated


def assert_sound(store: Path) -> None:
    with sqlite3.connect(store) as connection:  # rolls back what a killed program left half done
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


def wait_for(what: Callable[[], bool], seconds: float = 240.0) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.002)


def test_a_collector_killed_at_any_moment_leaves_a_sound_store(tmp_path: Path, repeat: int) -> None:
    runs = many_runs(tmp_path / "runs")
    wanted = expected(tmp_path, runs)
    store = tmp_path / "store.db"
    chance = random.Random(repeat)
    for kill in range(KILLS):
        process = start(str(store), "collect", *runs)
        if kill % 2 and process.poll() is None:  # in the midst of a transaction
            wait_for(lambda: Path(f"{store}-journal").exists() or process.poll() is not None)  # noqa: B023
        else:
            time.sleep(chance.uniform(0.2, 1.2))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if not store.exists():
            continue
        assert_sound(store)
        found = held(str(store))
        assert found["records"].items() <= wanted["records"].items()
        assert found["runs"].items() <= wanted["runs"].items()
        per_run = {run_id: [r for r in found["records"].values() if r["run_id"] == run_id] for run_id in found["runs"]}
        assert {len(records) for records in per_run.values()} <= {16}  # a run is there with all of it, or not at all
    said(start(str(store), "collect", *runs), 0)
    assert held(str(store)) == wanted
    assert_sound(store)


@pytest.mark.parametrize("moment", ["written", "commit"])
def test_killed_in_the_midst_of_a_transaction_nothing_of_it_is_there(tmp_path: Path, moment: str) -> None:
    runs = many_runs(tmp_path / "runs", 12)
    store = tmp_path / "store.db"
    process = start(str(store), "collect", *runs, LLMLAUNCH_PAUSE=f"{tmp_path}|{moment}")
    wait_for((tmp_path / "here").exists)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(held(str(store))["runs"]) == 4  # the first transaction
    assert_sound(store)
    said(start(str(store), "collect", *runs), 0)
    assert held(str(store)) == expected(tmp_path, runs)


def test_collectors_at_once_write_every_record_once(tmp_path: Path) -> None:
    runs = many_runs(tmp_path / "runs")
    store = str(tmp_path / "store.db")
    words = [runs, list(reversed(runs)), runs[:20], runs[10:]]  # the same ones, and some of others
    for process in [start(store, "collect", *some) for some in words]:
        said(process, 0)
    assert held(store) == expected(tmp_path, runs)
    for process in [start(store, "collect") for _ in range(2)]:
        assert "collected," not in said(process, 0)[0]
    assert_sound(Path(store))


def test_a_run_that_changes_while_it_is_collected_is_read_again(tmp_path: Path) -> None:
    """The first collector has read a run that still goes on; before it can write, the run ends and another collects."""
    runs = many_runs(tmp_path / "runs", 8)
    over = (runs[7] / "status.json").read_bytes()
    (runs[7] / "status.json").unlink()
    store = str(tmp_path / "store.db")
    slow = start(store, "collect", *runs, LLMLAUNCH_PAUSE=f"{tmp_path}|commit")
    wait_for((tmp_path / "here").exists)  # all are read, the second half is being written
    (runs[7] / "status.json").write_bytes(over)
    fast = start(store, "collect", runs[7])
    time.sleep(1.0)  # it waits for the writer, or comes later: both must do
    (tmp_path / "go").touch()
    said(slow, 0)
    said(fast, 0)
    said(start(store, "collect"), 0)
    assert held(store) == expected(tmp_path, runs)


def test_a_disk_without_room_is_one_message_and_readers_still_answer(tmp_path: Path) -> None:
    runs = many_runs(tmp_path / "runs")
    store = tmp_path / "store.db"
    said(start(str(store), "collect", *runs[:3]), 0)
    before = held(str(store))
    room = store.stat().st_size + 20_000

    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    _, err = said(start(str(store), "collect", *runs, prepare=little_room), 2)
    assert err.startswith(f"error: store {store}: ")
    assert "check the free space" in err
    assert err.count("\n") == 1
    assert_sound(store)
    assert held(str(store))["runs"].items() >= before["runs"].items()
    kept = held(str(store))
    end_again(runs[0])
    out, err = said(start(str(store), "measurements", "export", prepare=no_room), 0)
    assert len(out.splitlines()) == len(kept["records"])
    assert err.startswith("warning: finished runs were not collected: ")
    assert_sound(store)
    said(start(str(store), "collect", *runs), 0)
    assert len(held(str(store))["records"]) == 480


def end_again(run: Path) -> None:
    """Something new to collect."""
    status = (run / "status.json").read_text()
    (run / "status.json").write_text(status.replace('"why": "as told"', '"why": "as told again"'))


def no_room() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # for what is written in place, too


def as_an_ordinary_owner() -> None:
    """Permissions hold for root, too, in a program without this capability."""
    if os.getuid() == 0:
        CAP_DAC_OVERRIDE, PR_CAPBSET_DROP = 1, 24
        assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0) == 0


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_store_that_cannot_be_written_still_answers(tmp_path: Path, what: str) -> None:
    runs = many_runs(tmp_path / "runs", 3)
    store = tmp_path / "place" / "store.db"
    said(start(str(store), "collect", *runs), 0)
    before = held(str(store))
    end_again(runs[0])
    locked = store if what == "file" else store.parent
    locked.chmod(0o400 if what == "file" else 0o500)
    try:
        out, err = said(start(str(store), "runs", prepare=as_an_ordinary_owner), 0)
        assert len(out.splitlines()) == 4
        assert err.startswith(f"warning: finished runs were not collected: store {store}: ")
        assert err.count("\n") == 1
        for words in (["measurements", "list"], ["measurements", "export"], ["nodes"], ["status"]):
            out, err = said(start(str(store), *words, prepare=as_an_ordinary_owner), 0)
            assert words[0] != "measurements" or len(out.splitlines()) in (48, 49)
            assert err.startswith("warning: ") or words == ["status"] or "no node" in err
        _, err = said(start(str(store), "collect", prepare=as_an_ordinary_owner), 2)
        assert "check the free space and the permissions" in err
        assert err.count("\n") == 1
    finally:
        locked.chmod(0o700)
    assert held(str(store)) == before
