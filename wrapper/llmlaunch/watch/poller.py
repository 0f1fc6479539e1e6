"""What launchers say of runs, asked now and then in the background: a slow scheduler does not hold up who watches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from llmlaunch.errors import UserError
from llmlaunch.launchers.base import Submission
from llmlaunch.launchers.look import look_at

__all__ = ["Asked"]

_SLURM_SECONDS = 12.0
_LOCAL_SECONDS = 2.0


class Asked:
    """`looks` are the last answer, one for each submission. The first is waited for; what is wrong with it raises, what
    is wrong with a later one is `trouble`, and the last answer stands."""

    def __init__(
        self,
        submissions: Sequence[Submission],
        say: Callable[[str], None],
        slurm_seconds: float = _SLURM_SECONDS,
    ) -> None:
        self.trouble = ""
        self.looks = look_at(submissions, say)
        self._seconds = slurm_seconds if any(one.launcher == "slurm" for one in submissions) else _LOCAL_SECONDS
        self._asked_at = time.monotonic()
        self._thread: threading.Thread | None = None

    def ask(self, at_once: bool = False) -> None:
        """Ask again where it is time, and nobody is asking; only runs that have not ended."""
        waiting = [look.submission for look in self.looks if not look.state.ended]
        due = at_once or time.monotonic() - self._asked_at >= self._seconds
        if not waiting or not due or (self._thread is not None and self._thread.is_alive()):
            return
        self._asked_at = time.monotonic()
        self._thread = threading.Thread(target=self._ask, args=(waiting,), daemon=True)
        self._thread.start()

    def _ask(self, waiting: Sequence[Submission]) -> None:
        try:
            fresh = {id(look.submission): look for look in look_at(waiting, self._hear)}
        except (UserError, OSError) as error:
            self.trouble = str(error)
            return
        self.looks = [fresh.get(id(look.submission), look) for look in self.looks]
        self.trouble = ""

    def _hear(self, line: str) -> None:
        """A launcher says what it waits for: until it has answered, that is what is wrong."""
        self.trouble = line
