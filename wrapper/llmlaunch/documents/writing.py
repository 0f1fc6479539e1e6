"""Files and folders that a person names: written whole or not at all, and through no link.

Somebody else may have put a link where a file is to be written, in /tmp for example: what follows it writes wherever
they want, with this person's rights.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from llmlaunch.errors import UserError


def new_place(path: Path) -> Path:
    """Return `path` as an absolute path without links, to create a file or folder at.

    Links on the way to it are followed as the kernel does with `protected_symlinks`. Raises UserError where `path` is a
    link itself, where a link on the way was left by somebody else in a folder that everybody may write to, and where
    the way cannot be read.
    """
    absolute = Path.cwd() / path
    try:
        if absolute.is_symlink():
            raise UserError(
                f"{path}: is a link to {absolute.readlink()}, and llmlaunch writes through no link; name that place "
                "itself, or another one"
            )
        stranger = next(filter(_is_strangers_link, absolute.parents), None)
        if stranger is not None:
            raise UserError(
                f"{path}: {stranger} is a link that another user left in {stranger.parent}, where everybody may write; "
                "name another place"
            )
        return absolute.resolve()
    except (OSError, RuntimeError) as error:  # a circle of links is a RuntimeError before Python 3.13
        raise UserError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from None


def _is_strangers_link(place: Path) -> bool:
    if not place.is_symlink():
        return False
    folder = place.parent.stat()
    shared = folder.st_mode & stat.S_ISVTX and folder.st_mode & (stat.S_IWOTH | stat.S_IWGRP)
    return bool(shared) and place.lstat().st_uid not in (os.geteuid(), folder.st_uid, 0)


def write_whole(path: Path, text: str) -> None:
    """Write `text` in place of what `path` held, as `replacing` does. Raises UserError."""
    with replacing(path) as file:
        file.write(text)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[TextIO]:
    """A file to write in place of `path`: a reader sees the old file or the whole new one, and after a failure the old.

    A new file gets `mode` less the umask, one that was there keeps its permissions. Raises UserError where it cannot be
    written and where `path` is a link.
    """
    place = new_place(path)
    part = place.with_name(f".{place.name}.{os.getpid()}.{os.urandom(4).hex()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        if place.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        with os.fdopen(os.open(part, flags, mode), "w", encoding="utf-8", newline="\n") as file:
            if place.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(place.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(place)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def text_bytes(text: str) -> bytes:
    """Encode text as UTF-8; bytes of a file that were not UTF-8 go back as they were."""
    return text.encode("utf-8", "surrogateescape")


def json_bytes(value: Mapping[str, object]) -> bytes:
    """Encode a value as indented JSON that ends with a newline: the same bytes for the same value."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()
