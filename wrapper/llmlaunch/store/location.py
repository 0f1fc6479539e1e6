"""Where the store is. No database library is imported here, so a command may ask on its way to something else."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmlaunch.errors import UserError
from llmlaunch.user_data import user_data

__all__ = ["LAST", "VARIABLE", "Location", "network_file_system", "store_exists", "where"]

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
        return _sqlite(Path(named).expanduser())
    data = user_data(env)
    if data is None:
        raise UserError(
            f"no place for the store: neither HOME nor XDG_DATA_HOME is an absolute path; set {VARIABLE} "
            "to the path of a file"
        )
    return _sqlite(data / "store.db")


def store_exists(location: Location | None = None) -> bool:
    """Whether there is a store to read. A named database server counts as one."""
    place = location or where()
    return place.path is None or place.path.is_file()


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
