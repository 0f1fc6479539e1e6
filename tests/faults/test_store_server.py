"""A real PostgreSQL server that ends, crashes or hangs under a collector: one message, nothing half, then all of it."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import psycopg
import pytest
from collecting import expected, held, many_runs, said, start

from support.postgres_server import PostgresServer

pytestmark = [pytest.mark.faults, pytest.mark.postgres]


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    made = PostgresServer()
    try:
        made.start()
        yield made
    finally:
        made.remove()


@pytest.fixture
def url(server: PostgresServer) -> str:
    """Of a new database."""
    name = f"store{time.monotonic_ns()}"
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return server.url_of(name)


def wait_for(path: Path) -> None:
    until = time.monotonic() + 240
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.parametrize("mode", ["immediate", "fast"])
@pytest.mark.parametrize("moment", ["written", "commit"])
def test_stopped_in_mid_write_and_completed_afterwards(
    server: PostgresServer, url: str, tmp_path: Path, mode: str, moment: str
) -> None:
    runs = many_runs(tmp_path / "runs", 12)
    writer = start(url, "collect", *runs, LLMLAUNCH_PAUSE=f"{tmp_path}|{moment}")
    wait_for(tmp_path / "here")
    server.stop(mode)
    (tmp_path / "go").touch()
    out, err = said(writer, 2)
    assert out == ""
    assert err.startswith("error: store postgresql://ada@/store")
    assert "check LLMLAUNCH_STORE, and that the server runs" in err
    assert err.count("\n") == 1
    assert said(start(url, "runs"), 2)[1].count("\n") == 1  # while it is down
    server.start()
    found = held(url)
    assert len(found["runs"]) == 4  # the first transaction, whole
    assert len(found["records"]) == 4 * 16
    said(start(url, "collect", *runs), 0)
    assert held(url) == expected(tmp_path, runs)


def test_collectors_at_once_write_every_record_once(url: str, tmp_path: Path) -> None:
    runs = many_runs(tmp_path / "runs", 20)
    words = [runs, list(reversed(runs)), runs[:12], runs[8:]]
    for process in [start(url, "collect", *some) for some in words]:
        said(process, 0)
    assert held(url) == expected(tmp_path, runs)


def test_a_collector_killed_in_mid_write_leaves_nothing_half(url: str, tmp_path: Path) -> None:
    runs = many_runs(tmp_path / "runs", 12)
    writer = start(url, "collect", *runs, LLMLAUNCH_PAUSE=f"{tmp_path}|written")
    wait_for(tmp_path / "here")
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert len(held(url)["runs"]) == 4
    said(start(url, "collect", *runs), 0)  # the lock went with the connection
    assert held(url) == expected(tmp_path, runs)


def test_a_server_that_hangs_is_given_up(url: str, tmp_path: Path) -> None:
    """The process behind the connection is stopped: the connection stays open, and nothing comes."""
    runs = many_runs(tmp_path / "runs", 12)
    writer = start(url, "collect", *runs, LLMLAUNCH_PAUSE=f"{tmp_path}|written", SILENT_SECONDS="2")
    wait_for(tmp_path / "here")
    with psycopg.connect(url) as other:
        asked = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted"
        (pid,) = other.execute(asked).fetchone() or (None,)
    assert pid
    os.kill(pid, signal.SIGSTOP)
    try:
        (tmp_path / "go").touch()
        _, err = said(writer, 2)
        assert err.startswith("error: store postgresql://ada@/store")
        assert err.count("\n") == 1
    finally:
        os.kill(pid, signal.SIGCONT)
    said(start(url, "collect", *runs), 0)
    assert held(url) == expected(tmp_path, runs)


def test_another_writer_is_waited_for_and_then_named(url: str, tmp_path: Path) -> None:
    runs = many_runs(tmp_path / "runs", 2)
    said(start(url, "collect", runs[0]), 0)
    with psycopg.connect(url) as other:
        other.execute("SELECT pg_advisory_xact_lock(%s)", [0x6C6C6D6C])
        _, err = said(start(url, "collect", runs[1], BUSY_SECONDS="1"), 2)
        assert "is in use by another program since 1 seconds" in err
        assert err.count("\n") == 1
    said(start(url, "collect", runs[1]), 0)


def test_a_machine_that_takes_a_connection_and_says_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        taken: list[socket.socket] = []
        Thread(target=lambda: taken.append(silent.accept()[0]), daemon=True).start()
        url = f"postgresql://ada:hush@127.0.0.1:{silent.getsockname()[1]}/llm?connect_timeout=2"
        _, err = said(start(url, "runs"), 2)
    assert err.startswith("error: store postgresql://ada@127.0.0.1:")
    assert err.count("\n") == 1
