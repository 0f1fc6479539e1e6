"""The store as an open database: made if there is none, refused if it is not ours or of another version; its
transactions, and a database's errors as messages for a person."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Timer
from types import TracebackType
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, inspect, select, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, ProgrammingError

from llmlaunch.store.location import (
    VARIABLE,
    Location,
    UnusableStore,
    damaged,
    in_use,
    network_file_system,
    of_another_version,
    short_wait_seconds,
    where,
)
from llmlaunch.store.tables import metadata, version

REVISION = "0005"  # of the tables, raised with every change of them


def open_store(location: Location | None = None, wait_seconds: float | None = None) -> Store:
    """Open the store at `location` (default: `where()`), made if need be. `wait_seconds` is how long another program
    that has locked it is waited for (default: `short_wait_seconds`).

    Raises UnusableStore: no permission, a damaged file, a database of another program, a store of another version.
    """
    place = location or where()
    warnings: tuple[str, ...] = ()
    if place.path is not None and _create_file(place.path):
        warnings = _network_warnings(place.path)
    store = Store(connect(place, short_wait_seconds(place) if wait_seconds is None else wait_seconds), place, warnings)
    try:
        _make_tables(store)
    except BaseException:
        store.close()
        raise
    return store


def open_to_write() -> Store:
    """Open the store for a command that is of no use without writing it: other writers are waited for longer. Raises
    UnusableStore as `open_store` does."""
    return open_store(wait_seconds=WRITER_SECONDS)


def _create_file(path: Path) -> bool:
    """Make an empty file that only its owner may read, unless there is one, and return whether it was made. SQLite
    gives its journal the same mode."""
    try:
        _make_private_folder(path.parent)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except FileExistsError:
        if path.is_file():
            return False
        raise UnusableStore(f"store {path} is not a file; set {VARIABLE} to the path of a file") from None
    except OSError as error:
        raise UnusableStore(
            f"store {path} cannot be made: {error.strerror}; set {VARIABLE} to a file in a directory you may write"
        ) from None
    os.close(descriptor)
    return True


def _make_private_folder(folder: Path) -> None:
    """`mkdir -p` with mode 0700 for every new folder (Path.mkdir gives its mode to the last one alone)."""
    if folder.is_dir():
        return
    _make_private_folder(folder.parent)
    with suppress(FileExistsError):  # another process was faster; a plain file fails at the next step
        folder.mkdir(mode=0o700)


def _network_warnings(path: Path) -> tuple[str, ...]:
    kind = network_file_system(path)
    if kind is None:
        return ()
    return (
        f"the store {path} lies on a network file system ({kind}), where SQLite's locks may not hold; use it from one "
        f"machine at a time, or set {VARIABLE} to a file on a local disk or to a PostgreSQL database",
    )


def _make_tables(store: Store) -> None:
    with store.read() as connection:
        if _revision(connection) == REVISION:
            return
    with store.write() as connection:
        revision = _revision(connection)  # again: another process may have made them meanwhile
        if revision == REVISION:
            return
        if revision is not None:
            raise of_another_version(store.location, revision, REVISION)
        _refuse_foreign(connection, store.location)
        metadata.create_all(connection, checkfirst=False)
        connection.execute(version.insert().values(version_num=REVISION))


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table(version.name):
        return None
    revision = connection.execute(select(version.c.version_num)).scalar()
    return None if revision is None else str(revision)


def _refuse_foreign(connection: Connection, location: Location) -> None:
    """A SQLite file is wholly ours; a PostgreSQL database may hold other tables beside ours."""
    tables = set(inspect(connection).get_table_names())
    clash = tables if location.path is not None else tables & set(metadata.tables)
    if clash:
        raise UnusableStore(
            f"store {location.shown} holds tables of another program ({', '.join(sorted(clash)[:3])}); "
            f"set {VARIABLE} to a database of its own"
        )


WRITER_SECONDS = 10.0  # of a command that must write, for others: they let each other in about every second
SILENT_SECONDS = 90.0  # for one statement: longer than the wait for another writer, and than any statement takes
_TIMER = "llmlaunch_timer"  # in the connection's own dict
_PAGE_BYTES = 16 * 1024  # a record has 2 to 4 KiB: of a page of 4 KiB a third would be empty
_CACHE_KIB = 64 * 1024
_WRITES = "llmlaunch_writes"
_LOCK_KEY = 0x6C6C6D6C  # "llml": the advisory lock that all writers of one PostgreSQL database share
_PATIENCE = {  # libpq's options, unless the URL has them: a machine that is gone is found in half a minute
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,
}
_OUR_BUGS = (IntegrityError, ProgrammingError, DataError)


class Store:
    """An open store. `warnings` are sentences for a person about its location."""

    def __init__(self, engine: Engine, location: Location, warnings: tuple[str, ...] = ()) -> None:
        self.location = location
        self.warnings = warnings
        self._engine = engine

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Begin a transaction that only reads."""
        with self._transaction(self._engine) as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Begin a transaction that excludes other writers from its start; an exception inside leaves no trace."""
        with self._transaction(self._engine.execution_options(**{_WRITES: True})) as connection:
            yield connection

    @contextmanager
    def _transaction(self, engine: Engine) -> Iterator[Connection]:
        try:
            with engine.begin() as connection:
                yield connection
        except DBAPIError as error:
            if isinstance(error, _OUR_BUGS) and not _of_the_site(error):
                raise
            raise _explained(error, self.location) from None  # the original may quote the URL
        except UnicodeDecodeError as error:  # of a text that the driver reads
            raise damaged(self.location, error) from None

    def close(self) -> None:
        self._engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(location: Location, wait_seconds: float) -> Engine:
    """Return an engine for `location`, not connected yet. Raises UserError for an unusable URL."""
    if location.path is not None:
        engine = create_engine(
            URL.create("sqlite", database=str(location.path)), connect_args={"timeout": wait_seconds}
        )
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    try:
        url = make_url(location.url)
        engine = create_engine(
            url, connect_args={key: value for key, value in _PATIENCE.items() if key not in url.query}
        )
    except ImportError as error:
        raise UnusableStore(
            f"{VARIABLE}: {location.shown} needs the Python package {error.name!r}: pip install 'llmlaunch[postgres]'"
        ) from None
    except (ArgumentError, ValueError):
        raise UnusableStore(
            f"{VARIABLE}: {location.shown} is not a database URL (postgresql://user:password@host:port/database)"
        ) from None
    event.listen(engine, "begin", partial(_begin_postgres, wait_seconds))
    _end_when_silent(engine)
    return engine


def _of_the_site(error: DBAPIError) -> bool:
    """Whether the site caused the error. psycopg calls an unknown connection option and a missing permission
    programming errors, too."""
    return error.statement is None or getattr(error.orig, "sqlstate", None) == "42501"  # insufficient_privilege


def _set_up_sqlite(connection: Any, _record: object) -> None:
    # The driver must not begin transactions by itself: ours begin with the lock they need (see _begin_sqlite).
    connection.isolation_level = None
    cursor = connection.cursor()
    # A rollback journal, not WAL: WAL needs shared memory, which network file systems do not have.
    cursor.execute(f"PRAGMA page_size={_PAGE_BYTES}")  # of a new file; an old one stays as it is
    cursor.execute("PRAGMA journal_mode=DELETE")
    cursor.execute("PRAGMA foreign_keys=ON")
    # The pages of one transaction stay in memory: else they are written, and others shut out, before it is whole.
    cursor.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A deferred transaction that turns into a writer can fail with "locked" without waiting; IMMEDIATE waits.
    writes = connection.get_execution_options().get(_WRITES)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _begin_postgres(wait_seconds: float, connection: Connection) -> None:
    if connection.get_execution_options().get(_WRITES):
        # 0 would be for ever
        connection.execute(text(f"SET LOCAL lock_timeout = '{max(1, round(1000 * wait_seconds))}ms'"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})


def _end_when_silent(engine: Engine) -> None:
    """End a statement, commit or rollback that is not answered for SILENT_SECONDS in an OperationalError: no library
    does. Keepalives find a machine that is gone; a server that hangs keeps its connections open and says nothing."""
    event.listen(engine, "before_cursor_execute", lambda connection, *_: _wait_from_now(connection))
    event.listen(engine, "after_cursor_execute", lambda connection, *_: _answered(connection.info))
    event.listen(engine, "commit", _wait_from_now)
    event.listen(engine, "rollback", _wait_from_now)
    event.listen(engine, "checkin", lambda _, record: _answered(record.info))


def _wait_from_now(connection: Connection) -> None:
    if connection.invalidated:  # the server is gone, and there is nobody to wait for
        return
    _answered(connection.info)
    timer = Timer(SILENT_SECONDS, _hang_up, [connection.connection.driver_connection])
    timer.daemon = True
    connection.info[_TIMER] = timer
    timer.start()


def _answered(info: MutableMapping[Any, Any]) -> None:
    timer = info.pop(_TIMER, None)
    if timer is not None:
        timer.cancel()


def _hang_up(driver_connection: Any) -> None:
    """The waiting thread sees that the connection was closed. Closing it by the library would wait for that thread."""
    with suppress(Exception), socket.socket(fileno=os.dup(driver_connection.fileno())) as ours:
        ours.shutdown(socket.SHUT_RDWR)


def _explained(error: DBAPIError, location: Location) -> UnusableStore:
    """Return the error as a message. The statement and its values stay out: a record may be long."""
    reason = _without_secrets(str(error.orig).strip().partition("\n")[0], location)
    where = f"store {location.shown}"
    low = reason.lower()
    if "locked" in low or "busy" in low or "lock timeout" in low:
        return in_use(location, reason)
    if location.path is None:
        return UnusableStore(f"{where}: {reason}; check {VARIABLE}, and that the server runs and lets this user in")
    if any(word in low for word in ("not a database", "malformed", "encrypted", "could not decode", "disk image")):
        return damaged(location, reason)
    if "locking protocol" in low:
        return UnusableStore(
            f"{where}: its file system cannot lock files ({reason}); set {VARIABLE} to a file on a local disk "
            "or to a PostgreSQL database"
        )
    return UnusableStore(f"{where}: {reason}; check the free space and the permissions of {location.path.parent}")


def _without_secrets(reason: str, location: Location) -> str:
    if location.path is not None:
        return reason
    url = make_url(location.url)
    secrets = [location.url, str(url.password or ""), *(str(v) for k, v in url.query.items() if "pass" in k.lower())]
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        reason = reason.replace(secret, "***")
    return reason


T = TypeVar("T")
PARAMETERS = 500  # SQLite before 3.32 takes 999 in one statement


def batches(values: Iterable[T], most: int = PARAMETERS) -> Iterator[list[T]]:
    """Yield the values in groups that one statement can take."""
    rest = iter(values)
    while some := list(islice(rest, most)):
        yield some
