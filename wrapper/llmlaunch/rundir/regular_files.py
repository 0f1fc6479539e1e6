"""Opens files that anybody may have put somewhere: regular files alone, within bounds, without waiting. Opening a FIFO
waits for a writer, and /dev/zero has no end."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

MOST_BYTES = 32 * 2**20
"""Limit for a file read whole. status.json is the largest: some 600 bytes for each rank, 10 MiB for 16,000 of them."""


def open_regular(path: Path, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading bytes. A symbolic link is refused unless `follow`.

    Raises:
        OSError: the file is missing, unreadable, a link, or anything but a regular file.
    """
    # O_NONBLOCK: opening a FIFO returns at once. O_NOCTTY: a terminal does not become this process's own.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except ValueError as error:  # a NUL byte or a lone surrogate in the path
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    try:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(kind):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(kind):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, most_bytes: int = MOST_BYTES, follow: bool = False) -> bytes:
    """The content of a regular file. Raises OSError as `open_regular` does, and for more than `most_bytes`."""
    with open_regular(path, follow) as file:
        if os.fstat(file.fileno()).st_size <= most_bytes:
            content = file.read(most_bytes + 1) or b""  # it may have grown since
            if len(content) <= most_bytes:
                return content
    raise OSError(errno.EFBIG, "Larger than the %g MiB allowed here" % (most_bytes / 2**20), str(path))
