"""Opening makes or refuses a store; two programs may do it at once."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy.schema import CreateTable

from llmlaunch.errors import UserError
from llmlaunch.store.database import REVISION, Store, open_store
from llmlaunch.store.location import Location, where
from llmlaunch.store.tables import metadata


def at(path: Path) -> Location:
    return where({"LLMLAUNCH_STORE": str(path)})


def test_a_new_store_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deeper" / "store.db"
    before = os.umask(0)
    try:
        open_store(at(path)).close()
    finally:
        os.umask(before)
    assert [p.stat().st_mode & 0o777 for p in (path, path.parent, path.parent.parent)] == [0o600, 0o700, 0o700]


def test_it_keeps_a_rollback_journal_and_waits_for_others(store: Store) -> None:
    with store.read() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "delete"
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 3_000
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1


def test_a_change_of_the_tables_raises_the_revision() -> None:
    tables = "".join(str(CreateTable(table)) for table in metadata.sorted_tables)
    assert (REVISION, hashlib.sha256(tables.encode()).hexdigest()[:12]) == ("0005", "f33af9faf013")


def test_a_name_with_odd_characters_is_only_a_name(tmp_path: Path) -> None:
    path = tmp_path / "a%b?c#d e.db"
    open_store(at(path)).close()
    assert path.stat().st_size > 0
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_database_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE bookmarks (url TEXT)")
    database.close()
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"another program.*bookmarks"):
        open_store(at(path))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("place", "message"),
    [("file/store.db", "cannot be made"), ("/proc/llmlaunch/store.db", "cannot be made"), (".", "not a file")],
    ids=["below a file", "in /proc", "a folder"],
)
def test_a_place_that_can_hold_no_store_is_one_message(tmp_path: Path, place: str, message: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=rf"{message}.*LLMLAUNCH_STORE"):
        open_store(at(tmp_path / place))


def test_a_server_that_does_not_answer_is_one_message_without_the_password() -> None:
    location = where({"LLMLAUNCH_STORE": "postgresql://ada:hush@127.0.0.1:1/llm"})
    with pytest.raises(UserError, match=r"LLMLAUNCH_STORE|postgres") as caught:
        open_store(location)
    assert "hush" not in str(caught.value)
    with pytest.raises(UserError, match="LLMLAUNCH_STORE"):
        open_store(where({"LLMLAUNCH_STORE": "postgresql://ada:hush@h:port/llm"}))


def test_tables_that_cannot_be_made_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.db"
    half = sqlite3.connect(path)
    half.execute("CREATE TABLE measurements (id TEXT)")
    half.close()
    monkeypatch.setattr("llmlaunch.store.database._refuse_foreign", lambda *_: None)
    with pytest.raises(UserError, match="already exists"):
        open_store(at(path))
    database = sqlite3.connect(path)
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    database.close()
    assert tables == {"measurements"}
