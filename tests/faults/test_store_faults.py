"""Collectors that are killed, meet each other, find no room or lose their server: the store stays sound, nothing is in
it twice or half, a person gets one message, and the next collector completes it."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import psycopg
import pytest

from llmlaunch.store.collect import collect
from llmlaunch.store.database import open_store
from llmlaunch.store.location import where
from llmlaunch.store.measurements import contents
from llmlaunch.store.runs import list_runs
from support.forked_commands import Command, as_an_ordinary_owner, limit_files, pause_at, small_transactions
from support.node_rig import until
from support.postgres_server import PostgresServer
from support.soak import in_soak
from support.store_run_dirs import GIB, RunDir

pytestmark = pytest.mark.faults

RANKS = 16
WRITER_LOCK = 0x6C6C6D6C  # of PostgreSQL: one writer at a time


def start(
    store: str | Path,
    *words: str | Path,
    prepare: Callable[[], None] | None = None,
    pause: tuple[Path, str] | None = None,
    **variables: str,
) -> Command:
    """`llmlaunch WORDS` beside this process."""
    environment = {**os.environ, "LLMLAUNCH_STORE": str(store), **variables}
    prepared = [small_transactions, *([partial(pause_at, *pause)] if pause else []), *([prepare] if prepare else [])]
    return Command(tuple(map(str, words)), Path.cwd(), environment, *prepared)


def ended(process: Command, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of a program that must end with `code`, and never with a traceback."""
    exit_code, out, err = process.communicate()
    assert "Traceback" not in err, err
    assert "hush" not in out + err
    assert exit_code == code, err
    return out, err


def run(store: str | Path, *words: str | Path, code: int = 0, **more: Any) -> tuple[str, str]:
    return ended(start(store, *words, **more), code)


def refused(process: Command) -> str:
    """The one message of a program that could not do its work."""
    _, err = ended(process, 2)
    assert err.count("\n") == 1
    return err


def paused(store: str | Path, folder: Path, moment: str, *runs: Path, **variables: str) -> Command:
    """A collector in the midst of its second transaction."""
    process = start(store, "collect", *runs, pause=(folder, moment), **variables)
    until(lambda: (folder / "here").exists() or process.poll() is not None, "the moment")
    assert process.poll() is None, process.communicate()
    return process


def killed(process: Command) -> None:
    process.kill()
    process.communicate()


def many_runs(folder: Path, count: int = 12) -> list[Path]:
    runs = []
    for number in range(count):
        run_dir = RunDir(folder / f"run{number}", nodes=RANKS // 8, devices=8, run_id=f"many-{number:03d}")
        run_dir.ranks(resident_peak_bytes=GIB + number)
        run_dir.status()
        runs.append(run_dir.path)
    return runs


def held(store: str | Path) -> dict[str, Any]:
    """Everything a person gets out of a store: its runs, and its records by id."""
    with open_store(where({"LLMLAUNCH_STORE": str(store)})) as opened:
        records = [json.loads(text) for text in contents(opened)]
        runs = {run.run_id: (run.state, run.measured_bytes, run.exit_code) for run in list_runs(opened)}
    assert len({record["id"] for record in records}) == len(records)
    return {"runs": runs, "records": {record["id"]: record for record in records}}


def expected(folder: Path, runs: Sequence[Path]) -> dict[str, Any]:
    """The same of a store that nothing happened to."""
    place = folder / "undisturbed.db"
    with open_store(where({"LLMLAUNCH_STORE": str(place)})) as opened:
        assert {outcome.did for outcome in collect(opened, runs)} == {"collected"}
    return held(place)


def assert_sound(store: Path) -> None:
    with sqlite3.connect(store) as connection:  # rolls back what a killed program left half done
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


def assert_only_the_first_transaction(store: str | Path) -> None:
    """It is there whole, and nothing of the second."""
    content = held(store)
    assert (len(content["runs"]), len(content["records"])) == (4, 4 * RANKS)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
def url(server: PostgresServer) -> str:
    """Of a new database."""
    name = f"store{time.monotonic_ns()}"
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return server.url_of(name)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that is empty yet."""
    return request.getfixturevalue("url") if request.param == "postgres" else str(tmp_path / "store.db")


def test_a_collector_killed_at_any_moment_leaves_a_sound_store(tmp_path: Path, repeat: int) -> None:
    runs = many_runs(tmp_path / "runs", 30)
    wanted = expected(tmp_path, runs)
    store = tmp_path / "store.db"
    process = start(store, "collect", *runs)
    time.sleep(random.Random(repeat).uniform(0.1, 0.6))
    killed(process)
    if store.exists():
        assert_sound(store)
        content = held(store)
        assert content["records"].items() <= wanted["records"].items()
        assert content["runs"].items() <= wanted["runs"].items()
        of_run = {name: [r for r in content["records"].values() if r["run_id"] == name] for name in content["runs"]}
        assert {len(records) for records in of_run.values()} <= {RANKS}  # a run is there with all of it, or not at all
    run(store, "collect", *runs)
    assert held(store) == wanted
    assert_sound(store)


@pytest.mark.parametrize("moment", ["written", "commit"])
def test_killed_in_the_midst_of_a_transaction_nothing_of_it_is_there(
    store: str, tmp_path: Path, moment: str, repeat: int
) -> None:
    runs = many_runs(tmp_path / "runs")
    killed(paused(store, tmp_path, moment, *runs))
    assert_only_the_first_transaction(store)
    run(store, "collect", *runs)  # a server's lock went with the connection
    assert held(store) == expected(tmp_path, runs)


def test_collectors_at_once_write_every_record_once(store: str, tmp_path: Path, repeat: int) -> None:
    runs = many_runs(tmp_path / "runs")
    words = [runs, list(reversed(runs)), runs[:8], runs[4:]]  # the same ones, and some of others
    for process in [start(store, "collect", *some) for some in words]:
        ended(process)
    assert held(store) == expected(tmp_path, runs)
    for process in [start(store, "collect") for _ in range(2)]:
        assert "collected," not in ended(process)[0]
    if not store.startswith("postgresql"):
        assert_sound(Path(store))


def test_a_run_that_changes_while_it_is_collected_is_read_again(tmp_path: Path, repeat: int) -> None:
    """The first collector has read a run that still goes on; before it can write, the run ends and another collects."""
    runs = many_runs(tmp_path / "runs", 8)
    over = (runs[7] / "status.json").read_bytes()
    (runs[7] / "status.json").unlink()
    store = tmp_path / "store.db"
    slow = paused(store, tmp_path, "commit", *runs)  # all are read, the second half is being written
    (runs[7] / "status.json").write_bytes(over)
    fast = start(store, "collect", runs[7])
    time.sleep(1.0)  # it waits for the writer, or comes later: both must do
    (tmp_path / "go").touch()
    ended(slow)
    ended(fast)
    run(store, "collect")
    assert held(store) == expected(tmp_path, runs)


def test_a_disk_without_room_is_one_message_and_readers_still_answer(tmp_path: Path) -> None:
    runs = many_runs(tmp_path / "runs")
    store = tmp_path / "store.db"
    run(store, "collect", *runs[:3])
    before = held(store)
    room = store.stat().st_size + 20_000
    err = refused(start(store, "collect", *runs, prepare=partial(limit_files, room)))
    assert err.startswith(f"error: store {store}: ")
    assert "check the free space" in err
    assert_sound(store)
    kept = held(store)
    assert kept["runs"].items() >= before["runs"].items()
    end_again(runs[0])
    out, err = run(
        store, "measurements", "export", prepare=partial(limit_files, 100)
    )  # for what is written in place, too
    assert len(out.splitlines()) == len(kept["records"])
    assert err.startswith("warning: finished runs were not collected: ")
    assert_sound(store)
    run(store, "collect", *runs)
    assert len(held(store)["records"]) == len(runs) * RANKS


def end_again(run_dir: Path) -> None:
    """Something new to collect."""
    status = (run_dir / "status.json").read_text()
    (run_dir / "status.json").write_text(status.replace('"why": "as told"', '"why": "as told again"'))


@pytest.mark.parametrize("what", ["folder", *in_soak("file")])
def test_a_store_that_cannot_be_written_still_answers(tmp_path: Path, what: str) -> None:
    runs = many_runs(tmp_path / "runs", 3)
    store = tmp_path / "place" / "store.db"
    run(store, "collect", *runs)
    before = held(store)
    end_again(runs[0])
    locked = store if what == "file" else store.parent
    locked.chmod(0o400 if what == "file" else 0o500)
    try:
        out, err = run(store, "runs", prepare=as_an_ordinary_owner)
        assert len(out.splitlines()) == 4
        assert err.startswith(f"warning: finished runs were not collected: store {store}: ")
        assert err.count("\n") == 1
        for words in (["measurements", "list"], ["measurements", "export"], ["nodes"], ["status"]):
            out, err = run(store, *words, prepare=as_an_ordinary_owner)
            assert words[0] != "measurements" or len(out.splitlines()) in (48, 49)
            assert err.startswith("warning: ") or words == ["status"] or "no node" in err
        refusal = refused(start(store, "collect", prepare=as_an_ordinary_owner))
        assert "check the free space and the permissions" in refusal
    finally:
        locked.chmod(0o700)
    assert held(store) == before


@pytest.mark.postgres
@pytest.mark.parametrize("mode", ["immediate", *in_soak("fast")])
@pytest.mark.parametrize("moment", ["written", *in_soak("commit")])
def test_a_server_that_stops_in_mid_write_and_is_completed_afterwards(
    server: PostgresServer, url: str, tmp_path: Path, mode: str, moment: str
) -> None:
    runs = many_runs(tmp_path / "runs")
    writer = paused(url, tmp_path, moment, *runs)
    server.stop(mode)
    (tmp_path / "go").touch()
    out, err = ended(writer, 2)
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: store postgresql://ada@/store")
    assert "check LLMLAUNCH_STORE, and that the server runs" in err
    refused(start(url, "runs"))  # while it is down
    server.start()
    assert_only_the_first_transaction(url)
    run(url, "collect", *runs)
    assert held(url) == expected(tmp_path, runs)


@pytest.mark.postgres
def test_a_server_that_hangs_is_given_up(url: str, tmp_path: Path) -> None:
    """The process behind the connection is stopped: the connection stays open, and nothing comes."""
    runs = many_runs(tmp_path / "runs", 12)
    writer = paused(url, tmp_path, "written", *runs, SILENT_SECONDS="2")
    with psycopg.connect(url) as other:
        asked = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted"
        (pid,) = other.execute(asked).fetchone() or (None,)
    assert pid
    os.kill(pid, signal.SIGSTOP)
    try:
        (tmp_path / "go").touch()
        assert refused(writer).startswith("error: store postgresql://ada@/store")
    finally:
        os.kill(pid, signal.SIGCONT)
    run(url, "collect", *runs)
    assert held(url) == expected(tmp_path, runs)


@pytest.mark.postgres
def test_another_writer_is_waited_for_and_then_named(url: str, tmp_path: Path) -> None:
    runs = many_runs(tmp_path / "runs", 2)
    run(url, "collect", runs[0])
    with psycopg.connect(url) as other:
        other.execute("SELECT pg_advisory_xact_lock(%s)", [WRITER_LOCK])
        busy = refused(start(url, "collect", runs[1], WRITER_SECONDS="1"))
        assert "is in use by another program" in busy
    run(url, "collect", runs[1])


@pytest.mark.postgres
def test_a_machine_that_takes_a_connection_and_says_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        taken: list[socket.socket] = []
        Thread(target=lambda: taken.append(silent.accept()[0]), daemon=True).start()
        url = f"postgresql://ada:hush@127.0.0.1:{silent.getsockname()[1]}/llm?connect_timeout=2"
        assert refused(start(url, "runs")).startswith("error: store postgresql://ada@127.0.0.1:")
