"""Where the store is. No database library is imported here, so a command may ask on its way to something else."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from llmlaunch.errors import UserError
from llmlaunch.rundir.values import shortened
from llmlaunch.user_data import user_data, with_home

T = TypeVar("T")
VARIABLE = "LLMLAUNCH_STORE"
LAST = "last"  # what a person calls the newest of their runs

# Anything else (a password with "@", "/", "?" or "#" left as it is) would be taken apart at the wrong places, and a
# part of the password would show up as the name of a host.
_PLAIN_URL = re.compile(
    r"(?P<scheme>[a-z0-9+]+)://(?:(?P<user>[^:/@?#]*)(?::[^:/@?#]*)?@)?(?P<place>[^@/?#]*(?:/[^@?#]*)?)(?:\?[^@]*)?"
)
_NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "cifs", "smb3", "ceph", "afs", "pvfs2", "panfs"}
    | {"wekafs", "9p", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.juicefs"}
)


@dataclass(frozen=True)
class Location:
    """`url` may hold a password and is left out of `repr`; messages use `shown`. `path` is None unless SQLite."""

    url: str = field(repr=False)
    path: Path | None
    shown: str


def where(environment: Mapping[str, str] | None = None) -> Location:
    """Return the store that this environment names: `LLMLAUNCH_STORE` (a database URL, or the path of a SQLite file),
    else `$XDG_DATA_HOME/llmlaunch/store.db`, else `~/.local/share/llmlaunch/store.db`.

    Raises UserError if the variable cannot be understood or there is no home directory.
    """
    env = os.environ if environment is None else environment
    named = env.get(VARIABLE, "").strip()
    if "://" in named:
        return _from_url(named)
    if named:
        return _sqlite(with_home(named))
    data = user_data(env)
    if data is None:
        raise UserError(
            f"no place for the store: neither HOME nor XDG_DATA_HOME is an absolute path; set {VARIABLE} "
            "to the path of a file"
        )
    return _sqlite(data / "store.db")


def store_exists() -> bool:
    """Whether there is a store to read. A named database server counts as one; without a home directory there is
    none."""
    return existing_store() is not None


def existing_store() -> Location | None:
    """Return where the store is, None where there is none to read. Raises UserError for a variable that cannot be
    understood."""
    if not os.environ.get(VARIABLE, "").strip() and user_data(os.environ) is None:
        return None
    place = where()
    return place if place.path is None or place.path.is_file() else None


class UnusableStore(UserError):
    """The store cannot be opened, read or written: the same reason holds for every question to it."""


class DamagedStore(UnusableStore):
    """What the store holds cannot be read."""


SHORT_WAIT_SECONDS = 3.0  # for another writer, whose transaction takes about a second (collect.MOST_RECORDS)
_REBUILT = "move it away, then `llmlaunch collect DIR...` rebuilds runs and measurements from the run directories"
_FORGET_SECONDS = 60.0
_last_in_use: dict[str, float] = {}


def short_wait_seconds(location: Location) -> float:
    """Return how long another program that has locked the store is waited for: not at all where it was in use a moment
    ago, so that the many questions of one command wait once."""
    last = _last_in_use.get(location.shown)
    return 0.0 if last is not None and time.monotonic() - last < _FORGET_SECONDS else SHORT_WAIT_SECONDS


def in_use(location: Location, reason: object) -> UnusableStore:
    """Return the error of a store that another program has locked, and remember it for `short_wait_seconds`."""
    _last_in_use[location.shown] = time.monotonic()
    return UnusableStore(f"store {location.shown} is in use by another program ({reason}); try again later")


def damaged(location: Location, reason: object) -> DamagedStore:
    """Return the error of a store whose content cannot be read."""
    return DamagedStore(
        f"store {location.shown} is damaged or not a SQLite file ({shortened(str(reason), 200)}); {_REBUILT}"
    )


def of_another_version(location: Location, revision: str, ours: str) -> UnusableStore:
    return UnusableStore(
        f"store {location.shown} was written by another version of llmlaunch (tables {revision}, here {ours}): use "
        f"that version, or {_REBUILT}"
    )


def stored_as(text: object, read: Callable[[dict[str, Any]], T]) -> T:
    """Return what `read` makes of an object that the store holds as JSON. Raises DamagedStore where it cannot."""
    value = stored_json(text)
    try:
        return read(value)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise damaged(where(), f"{type(error).__name__}: {error}") from None


def stored_json(text: object) -> Any:
    """Return an object that the store holds as JSON. Raises DamagedStore for any other text."""
    try:
        value = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError) as error:
        raise damaged(where(), error) from None
    if not isinstance(value, dict):
        raise damaged(where(), "a row holds no JSON object")
    return value


def network_file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str | None:
    """Return the type of the network file system `path` lies on, None for a local one or if the system does not
    tell."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return None
    best, kind = "", None
    real = os.path.realpath(path)
    for line in lines:
        parts = line.split(" ")
        if len(parts) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), parts[1])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # of equals the later mount hides the earlier
            best, kind = point, parts[2]
    return kind if kind in _NETWORK_FILE_SYSTEMS else None


def _from_url(url: str) -> Location:
    scheme, _, rest = url.partition("://")
    family = scheme.split("+")[0]
    if family == "sqlite":
        if not rest.startswith("/") or "?" in rest or len(rest) < 2:
            raise UserError(f"{VARIABLE}: a SQLite URL has the form sqlite:////absolute/path/store.db, without options")
        return _sqlite(Path(rest[1:]))
    if family not in {"postgresql", "postgres"}:
        raise UserError(
            f"{VARIABLE}: {scheme}:// is not a database llmlaunch can use; give sqlite:////path or "
            "postgresql://user@host/database"
        )
    plain = _PLAIN_URL.fullmatch(url)
    if plain is None:
        raise UserError(
            f"{VARIABLE} is not a database URL (postgresql://user:password@host:port/database; in the password write "
            "@ as %40, / as %2F, : as %3A, ? as %3F, # as %23)"
        )
    # Without a driver SQLAlchemy 2.0 takes psycopg2 and 2.1 psycopg; our extra `postgres` installs psycopg.
    driver = scheme if "+" in scheme else "postgresql+psycopg"
    user = f"{plain['user']}@" if plain["user"] else ""
    return Location(f"{driver}://{rest}", None, f"{scheme}://{user}{plain['place']}")


def _sqlite(path: Path) -> Location:
    absolute = path.absolute()
    return Location(f"sqlite:///{absolute}", absolute, str(absolute))
