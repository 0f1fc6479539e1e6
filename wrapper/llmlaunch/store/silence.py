"""End the connection to a server that has stopped answering: no library does, and a command would wait for ever.

Keepalives find a machine that is gone. A server that hangs keeps its connections open, and says nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping
from threading import Timer
from typing import Any

from sqlalchemy import Connection, Engine, event

__all__ = ["SILENT_SECONDS", "end_when_silent"]

SILENT_SECONDS = 90.0  # for one statement: longer than the wait for another writer, and than any statement takes

_TIMER = "llmlaunch_timer"  # in the connection's own dict


def end_when_silent(engine: Engine) -> None:
    """A statement, commit or rollback that is not answered for SILENT_SECONDS ends in an OperationalError."""
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
    with contextlib.suppress(Exception), socket.socket(fileno=os.dup(driver_connection.fileno())) as ours:
        ours.shutdown(socket.SHUT_RDWR)
