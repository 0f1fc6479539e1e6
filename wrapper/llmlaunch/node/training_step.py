"""The step of an attempt, as the job sees it: an srun that starts `node.pyz node` on each node, or that program itself
without SLURM; what its nodes have said, and how it comes to its end.

srun itself is never signalled: a TERM to it is a KILL to its tasks. What the nodes are to do goes down its standard
input. A node that says nothing for a while is asked by a step that does nothing: 30 ms where the node is there.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import time
from typing import IO, TYPE_CHECKING, NamedTuple

from . import node_channel
from .allocation import ASK
from .files import say
from .node_channel import BEAT_SECONDS, LineReader, LineSender, step_news
from .slurm_steps import step_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..rundir.step_lines import StepNews
    from .event_loop import EventLoop

MISSED_BEATS = 3
START_SECONDS = 600.0  # until a node's first word: containers start slowly
ANSWER_SECONDS = 5.0  # of a node that is asked; one that is gone fails after 11 s
MOST_ASKED = 32
OTHERS_SECONDS = 5.0  # from one node's failure to the TERM of the others: they may say why themselves
KILL_SECONDS = 5.0  # from that TERM to their KILL
LEFT_SECONDS = 1.0  # until an srun that was killed is gone
LINGER_SECONDS = 10.0  # from the last node's end to the step's: a container may take longer to be removed


class StepEnd(NamedTuple):
    """`code` is that of the first rank that failed, else the step's own. `done` are the nodes that ended well, `silent`
    those of which no end was heard, `lost` those of them that were seen to be gone. `was_told`: the nodes were told to
    stop by somebody else."""

    code: int
    done: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    was_told: bool = False


class NodeStep:
    """One step. `hear` takes what the trainers report of their steps. Other programs than the training's (`trains` is
    False) have nothing to save, and say nothing while they work."""

    def __init__(
        self,
        loop: EventLoop,
        nodes: Sequence[str],
        hear: Callable[[StepNews], None] | None = None,
        trains: bool = True,
    ) -> None:
        self._loop, self._hear, self._trains = loop, hear, trains
        self._nodes = tuple(nodes)
        self._process: subprocess.Popen[bytes] | None = None
        self._sender: LineSender | None = None
        self._reader = LineReader(self._on_line)
        self._patient_from = dict.fromkeys(nodes, time.monotonic() + START_SECONDS)
        self._heard_at: dict[str, float] = {}  # a word or an answer
        self._codes: dict[str, int] = {}
        self._first_code = 0
        self._lost: list[str] = []
        self._asked: dict[str, subprocess.Popen[bytes]] = {}
        self._asks_slurm = False
        self._others_end_at = math.inf
        self._is_ending = self._was_left = self._was_told = False
        self.is_stopping = False
        self.is_job_ending = False  # SLURM ends the job, and starts no task on any node: no silent node is lost by that
        self.on_stop: Callable[[], None] = self.save
        self.on_told: Callable[[str], None] | None = None  # its nodes were told to stop, not the job
        self.on_lost: Callable[[], None] | None = None
        self._late_end_seconds: float | None = None
        self._beat_at = time.monotonic()

    def start(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        error: IO[bytes] | None,
        late_end_seconds: float | None = None,
    ) -> None:
        """Start the step. `error` takes what it says itself; its nodes' logs are srun's to open. Raises OSError."""
        self._late_end_seconds = late_end_seconds
        self._asks_slurm = self._trains and words[0] == "srun"
        # A session of its own: Ctrl-C at a terminal reaches the job's program alone, which then says "save" once.
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=error,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._sender = process, LineSender(process.stdin.fileno())
        self._loop.read(process.stdout.fileno(), self._reader.take)
        self._loop.every(BEAT_SECONDS / 2.0, self._beat)
        if self.is_stopping:
            self._send(node_channel.SAVE)

    @property
    def lost(self) -> tuple[str, ...]:
        return tuple(self._lost)

    @property
    def is_over(self) -> bool:
        return self._was_left or self._process is None or self._process.poll() is not None

    def finish(self) -> StepEnd:
        """Take the last words of a step that is over."""
        process = self._process
        if process is not None:
            assert process.stdin is not None
            assert process.stdout is not None
            self._loop.drain(process.stdout.fileno())
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()
            if self._was_left:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LEFT_SECONDS)
        for asked in self._asked.values():
            asked.kill()
            asked.wait()
        self._asked.clear()
        own = 0 if process is None or self._was_left else process.returncode or 0
        code = self._first_code or (own if own >= 0 else 128 - own)
        silent = tuple(node for node in self._nodes if node not in self._codes)
        if self._was_left and silent:
            code = code or 1
        done = tuple(node for node, end in self._codes.items() if end == 0)
        return StepEnd(code, done, silent, self.lost, self._was_told)

    # --- what may be asked of it ---

    def stop(self) -> None:
        self.on_stop()

    def save(self) -> None:
        self.is_stopping = True
        if self._trains:
            self._send(node_channel.SAVE)
        else:
            self.end(0.0)

    def ask_for_stacks(self) -> None:
        self._send(node_channel.STACKS)

    def end(self, term_seconds: float) -> None:
        """End the trainers: TERM, and KILL after so many seconds; at once without any."""
        self._is_ending = True
        if term_seconds > 0.0:
            self._send(node_channel.END)
        self._loop.after(term_seconds, self._kill)

    def _kill(self) -> None:
        if not self.is_over:
            self._send(node_channel.KILL)
            self._loop.after(KILL_SECONDS, self._leave)

    def _leave(self) -> None:
        """The step does not end, as one with a node that is gone: srun is left."""
        if self.is_over or self._process is None:
            return
        silent = [node for node in self._nodes if node not in self._codes]
        said = f"; no end was heard of {', '.join(silent)}" if silent else ""
        say(f"the training step does not end; it is left{said}")
        self._was_left = True
        self._process.kill()

    def _send(self, *words: object) -> None:
        if self._sender is not None and not self.is_over:
            self._sender.send(*words)

    # --- what its nodes say ---

    def _on_line(self, line: str) -> None:
        """One that makes no sense, as where two were mixed, costs none of the others."""
        node, _, text = line.partition(" ")
        if node not in self._patient_from:
            say(f"of the step: {line[:400]}")
            return
        self._hear_of(node)
        word, _, rest = text.partition(" ")
        try:
            self._take(node, word, rest)
        except Exception as error:
            say(f"of the step: {line[:400]} ({type(error).__name__}: {error})")

    def _take(self, node: str, word: str, rest: str) -> None:
        if word == node_channel.STEPS and self._hear is not None:
            self._hear(step_news(rest))
        elif word == node_channel.PORT:
            self._send(node_channel.PORT, int(rest))
        elif word == node_channel.STOPPING:
            if not self.is_stopping and self.on_told is not None:
                self.on_told(rest)
            self._was_told = self.is_stopping = True
        elif word == node_channel.FAILED:
            self._first_code = self._first_code or int(rest)
            self._end_others(OTHERS_SECONDS)
        elif word == node_channel.ENDED:
            self._codes[node] = int(rest)
            self._first_code = self._first_code or int(rest)
            self._on_end_of_a_node(int(rest))

    def _on_end_of_a_node(self, code: int) -> None:
        if all(node in self._codes or node in self._lost for node in self._nodes):
            self._loop.after(0.0 if self._lost else LINGER_SECONDS, self._leave)
        elif code:
            self._end_others(OTHERS_SECONDS)
        elif self._late_end_seconds is not None and not self.is_stopping:
            # Some write more of a checkpoint than others.
            self._end_others(self._late_end_seconds)

    def _end_others(self, seconds: float) -> None:
        """The other nodes would wait for one that has failed for ever. The earliest time counts: one may fail while
        those are waited for that write more of a checkpoint."""
        end_at = time.monotonic() + seconds
        if not self._is_ending and end_at < self._others_end_at:
            self._others_end_at = end_at
            self._loop.after(seconds, lambda: None if self._is_ending else self.end(KILL_SECONDS))

    # --- nodes that say nothing ---

    def _beat(self) -> None:
        now, before, patience = time.monotonic(), self._beat_at, MISSED_BEATS * BEAT_SECONDS
        self._beat_at = now
        if self.is_over or not self._asks_slurm or self._is_ended_by_slurm:
            return
        if now - before > patience:  # this program stood still itself
            for node in self._nodes:
                self._patient_from[node] = max(self._patient_from[node], now)
        self._hear_answers()
        silent = [
            node
            for node in self._nodes
            if node not in self._codes and node not in self._lost and now - self._patient_from[node] > patience
        ]
        for node in silent[: MOST_ASKED - len(self._asked)]:
            if node not in self._asked:
                self._ask(node)

    @property
    def _is_ended_by_slurm(self) -> bool:
        return self.is_job_ending or self._was_told

    def _ask(self, node: str) -> None:
        with contextlib.suppress(OSError):
            self._asked[node] = subprocess.Popen(
                [*ASK, f"--nodelist={node}", "true"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=step_environment(os.environ),
            )
            asked = self._asked[node]
            self._loop.after(ANSWER_SECONDS, lambda: self._give_up_on(node, asked))

    def _hear_answers(self) -> None:
        for node, asked in list(self._asked.items()):
            code = asked.poll()
            if code is not None:
                del self._asked[node]
                if code:
                    self._lose(node)
                else:  # it is there; its program may be busy
                    self._hear_of(node)

    def _hear_of(self, node: str) -> None:
        self._heard_at[node] = self._patient_from[node] = time.monotonic()

    def _give_up_on(self, node: str, asked: subprocess.Popen[bytes]) -> None:
        if self._asked.get(node) is asked:
            del self._asked[node]
            asked.kill()
            asked.wait()
            self._lose(node)

    def _lose(self, node: str) -> None:
        """Count the node as lost, where another one of the step is there: where none is, it is not the nodes."""
        if self._is_ended_by_slurm:
            return
        beats = MISSED_BEATS * BEAT_SECONDS
        now = time.monotonic()
        others = {*self._nodes}.difference(self._lost, [node])
        # two beats: all that fell silent at the same time have missed more when the first one is asked
        heard = [other for other in others if now - self._heard_at.get(other, -math.inf) < 2.0 * BEAT_SECONDS]
        if not heard and not others.intersection(self._codes):
            self._patient_from[node] = now
            return
        if not self._lost:
            silence = f"{node} was silent for {beats:.0f} s and no longer starts tasks"
            say(f"{silence}; ending the step on the others")
        self._lost.append(node)
        self._first_code = self._first_code or 1
        if self.on_lost is not None:
            self.on_lost()
        self.end(KILL_SECONDS)
        if all(other in self._codes or other in self._lost for other in self._nodes):
            self._leave()


def open_log(path: str) -> IO[bytes]:
    """Open a log to append to. Raises OSError."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666), "wb", buffering=0)
