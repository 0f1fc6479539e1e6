"""Open the store: make it where there is none, bring an older one up to date, refuse what is not ours."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from sqlalchemy import Connection, inspect, text

from llmlaunch.errors import UserError
from llmlaunch.store.database import Store, connect
from llmlaunch.store.location import VARIABLE, Location, network_file_system, where
from llmlaunch.store.tables import metadata

__all__ = ["REVISION", "VERSION_TABLE", "open_store"]

REVISION = "0003"  # the newest script in migrations/versions
VERSION_TABLE = "llmlaunch_version"


def open_store(location: Location | None = None) -> Store:
    """The store at `location` (default: `where()`), made or migrated if need be.

    Raises UserError: no permission, a damaged file, a database of another program, a store newer than this program.
    """
    place = location or where()
    warnings: tuple[str, ...] = ()
    if place.path is not None and _create_file(place.path):
        warnings = _doubts(place.path)
    store = Store(connect(place), place, warnings)
    try:
        _bring_up_to_date(store)
    except BaseException:
        store.close()
        raise
    return store


def _create_file(path: Path) -> bool:
    """Make an empty file only its owner may read, unless there is one; SQLite gives its journal the same mode.
    True if it was made."""
    try:
        _make_private_folder(path.parent)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except FileExistsError:
        if path.is_file():
            return False
        raise UserError(f"store {path} is not a file; set {VARIABLE} to the path of a file") from None
    except OSError as error:
        raise UserError(
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


def _doubts(path: Path) -> tuple[str, ...]:
    kind = network_file_system(path)
    if kind is None:
        return ()
    return (
        f"the store {path} lies on a network file system ({kind}), where SQLite's locks may not hold; use it from one "
        f"machine at a time, or set {VARIABLE} to a file on a local disk or to a PostgreSQL database",
    )


def _bring_up_to_date(store: Store) -> None:
    with store.read() as connection:
        if _revision(connection) == REVISION:
            return
    with store.write() as connection:
        revision = _revision(connection)  # again: another process may have migrated it meanwhile
        if revision == REVISION:
            return
        if revision is None:
            _refuse_foreign(connection, store.location)
        _migrate(connection, store.location, revision)


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
    return None if found is None else str(found)


def _refuse_foreign(connection: Connection, location: Location) -> None:
    """A SQLite file is wholly ours; a PostgreSQL database may hold other tables beside ours."""
    tables = set(inspect(connection).get_table_names()) - {VERSION_TABLE}
    clash = tables if location.path is not None else tables & set(metadata.tables)
    if clash:
        raise UserError(
            f"store {location.shown} holds tables of another program ({', '.join(sorted(clash)[:3])}); "
            f"set {VARIABLE} to a database of its own"
        )


def _migrate(connection: Connection, location: Location, revision: str | None) -> None:
    from alembic import command  # late: only a new or an old store needs it
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config(attributes={"connection": connection, "version_table": VERSION_TABLE})
    folder = str(Path(__file__).with_name("migrations"))
    config.set_main_option("script_location", folder.replace("%", "%%"))  # ConfigParser reads % as its own
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if revision is not None and revision not in known:
        raise UserError(
            f"store {location.shown} was written by a newer llmlaunch (schema {revision}, this one knows up to "
            f"{REVISION}): upgrade llmlaunch, or set {VARIABLE} to another store"
        )
    command.upgrade(config, REVISION)
