"""The two ends of the way between the job and its nodes: srun's standard input and output. srun itself is never
signalled. Down go single words; up go lines that begin with the node's name.

Lines of more than 1,024 bytes of several nodes mix (seen in SLURM 22.05 to 26.05), and whoever waits for a pipe that
nobody reads waits for ever. So lines are cut, and nothing here blocks.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from typing import TYPE_CHECKING, Any

from ..rundir.step_lines import Step, StepNews

if TYPE_CHECKING:
    from collections.abc import Callable

PREFLIGHT, PREPARE = "preflight", "prepare"  # what a node is started for instead of training
PREFLIGHT_SECONDS = 180.0
BEAT_SECONDS = 2.0  # between two words of a node, which the job misses where it says none
LONGEST_LINE_BYTES = 1000
MOST_WAITING_LINES = 1000
MOST_REST_BYTES = 2**16

SAVE, STACKS, END, KILL, PORT = "save", "stacks", "end", "kill", "port"  # down
ALIVE, ENDED, FAILED, STEPS, STOPPING = "alive", "ended", "failed", "steps", "told"  # up, and PORT


class LineSender:
    """Writes whole lines to a descriptor that may not take them now. What does not fit is kept, the newest lines last,
    and tried again with the next line."""

    def __init__(self, descriptor: int, prefix: str = "") -> None:
        self._descriptor = descriptor
        self._prefix = prefix.encode()
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING_LINES)
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, False)

    def send(self, *words: object) -> None:
        """Send a line. Raises nothing: where nobody is there to hear it, the training matters more."""
        line = self._prefix + " ".join(map(str, words)).encode(errors="replace").replace(b"\n", b" ")
        self._waiting.append(line[: LONGEST_LINE_BYTES - 1] + b"\n")
        with contextlib.suppress(OSError):
            while self._waiting:
                os.write(self._descriptor, self._waiting[0])  # at most PIPE_BUF: written whole or not at all
                self._waiting.popleft()


class LineReader:
    """Makes lines of what comes, each handed to `on_line`."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._rest = b""

    def take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-MOST_REST_BYTES:]
        for line in lines:
            self._on_line(line.decode(errors="replace"))


class StepForwarder:
    """Chooses which step lines of a node go up. Where all ranks report each step, one of them is enough."""

    def __init__(self, sender: LineSender) -> None:
        self._sender = sender
        self._sent: tuple[int, bool] = (-1, False)  # the last step, and whether its loss was known

    def forward(self, news: StepNews) -> None:
        steps = [step for step in news.steps if self._is_new(step)]
        if steps or news.slow:
            for part in range(0, max(1, len(steps)), 8):
                record = [list(step) for step in steps[part : part + 8]]
                self._sender.send(STEPS, json.dumps([record, news.slow and part + 8 >= len(steps)]))

    def _is_new(self, step: Step) -> bool:
        if step.step is None:
            return True
        if step.step == self._sent[0] and (self._sent[1] or step.loss is None):
            return False
        self._sent = (step.step, step.loss is not None)
        return True


def step_news(text: str) -> StepNews:
    """Return what `StepForwarder` has sent. Raises ValueError, TypeError or IndexError for what is none."""
    steps, slow = json.loads(text)
    return StepNews([Step(*_values(values)) for values in steps], bool(slow))


def _values(values: list[Any]) -> list[Any]:
    step, steps, *others = values
    return [*(None if count is None else int(count) for count in (step, steps)), *others]
