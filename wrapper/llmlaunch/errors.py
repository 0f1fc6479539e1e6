"""What a person did or met, as one message and one exit code; everything else is our own bug.

The command line turns a `UserError` into one line on stderr and its `exit_code`. Any other exception that
reaches the top is a bug of llmlaunch and shows a traceback with a hint to report it.
"""

from __future__ import annotations

import errno


class UserError(Exception):
    """A mistake that the person can fix. The message says what, where, why and how to fix it."""

    exit_code = 2


class NothingSafe(UserError):
    """The recipe is valid, but no layout of it may run on the cluster it names: none is safe, or tight and accepted."""

    exit_code = 3


class NoVerdict(UserError):
    """What decides memory was not read: an optimizer, a ds_config, a trainer or a library. Nothing is wrong with the
    job; the message says what was not read, where it is written, and what measures or decides it.

    `recipe` is the name of the job, and `reason` the message without it; both are empty where several jobs are
    meant."""

    exit_code = 5

    def __init__(self, message: str, recipe: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.recipe, self.reason = recipe, reason

    @classmethod
    def on(cls, recipe: str, reason: str) -> NoVerdict:
        """Return the error that there is no verdict on one job."""
        return cls(f"{recipe}: no verdict: {reason}", recipe, reason)


class SchedulerRefused(UserError):
    """The scheduler did not take the job; the message carries its own words."""

    exit_code = 4


class OutputLost(Exception):
    """The result cannot be written where the person wants it. Not an OSError: click would take it for its own."""

    def __init__(self, failure: OSError) -> None:
        super().__init__(f"the output cannot be written: {failure.strerror or failure}")
        # EPIPE: the reader of a pipe ended. EIO: the terminal was closed. ENXIO: the same of odder files.
        self.reader_gone = failure.errno in (errno.EPIPE, errno.EIO, errno.ENXIO)

    @property
    def exit_code(self) -> int:
        """That of a program which SIGPIPE ended (128 + 13) if nobody reads any more, else 1."""
        return 141 if self.reader_gone else 1
