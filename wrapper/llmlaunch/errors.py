"""What a person did or met, as one message and one exit code; everything else is our own bug.

The command line turns a `UserError` into one line on stderr and its `exit_code`. Any other exception that
reaches the top is a bug of llmlaunch and shows a traceback with a hint to report it.
"""

from __future__ import annotations

__all__ = ["NothingSafe", "SchedulerRefused", "UserError"]


class UserError(Exception):
    """A mistake the person can mend. The message says what, where, why and how to mend it."""

    exit_code = 2


class NothingSafe(UserError):
    """The recipe is valid, but no layout of it is safe on the cluster it names."""

    exit_code = 3


class SchedulerRefused(UserError):
    """The scheduler did not take the job; the message carries its own words."""

    exit_code = 4
