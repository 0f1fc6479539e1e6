"""The steps of the job as its program hears them: what their nodes say over srun's standard output, and what it tells
them over its standard input. Here are those that try or prepare nodes; the training is in training.py.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from clock import Command

from llmlaunch.node import node_channel
from llmlaunch.node.node_channel import StepForwarder
from llmlaunch.node.preflight import Marker
from llmlaunch.node.preflight_verdict import STAGES
from llmlaunch.rundir import file_names
from llmlaunch.rundir.step_lines import StepLines

if TYPE_CHECKING:
    from training import Job

PORT = 29500
SLOW_FACTOR = 1.5
TRY_SECONDS, PREPARE_SECONDS = 60.0, 30.0


class NodeWords:
    """What one node says to the job."""

    def __init__(self, command: Command, node: str) -> None:
        self._command, self._node = command, node

    def send(self, *words: object) -> None:
        self._command.say(f"{self._node} {' '.join(map(str, words))}\n")


class StepWords:
    """What a node says of the steps that its trainers print, as its own program would."""

    def __init__(self, command: Command, node: str, patterns: Sequence[object]) -> None:
        self._lines = StepLines(*patterns, lenient=True)
        self._forwarder = StepForwarder(NodeWords(command, node))  # type: ignore[arg-type]

    def print(self, lines: Iterable[str]) -> None:
        self._forwarder.forward(self._lines.read([line.encode() for line in lines]))


def say_of_all(command: Command, nodes: Iterable[str], *words: object) -> None:
    """The same of each node, as one message."""
    text = " ".join(map(str, words))
    command.say("".join(f"{node} {text}\n" for node in nodes))


class OtherStep:
    """A step that tries or prepares its nodes. One that is gone says nothing, and the step does not end."""

    def __init__(self, job: Job, command: Command, attempt: str, nodes: Sequence[str]) -> None:
        self._job, self._command, self._nodes = job, command, nodes
        self._folder = file_names.attempt_folder(job.run_directory, attempt)

    def prepare(self) -> None:
        self._job.clock.after(PREPARE_SECONDS, lambda: self._end(0))

    def try_nodes(self) -> None:
        """A healthy node multiplies as fast as its peers; a slow one does not; one that is gone says nothing."""
        self._command.on_line = self._hear
        say_of_all(self._command, self._live(), node_channel.ALIVE)
        if self._nodes[0] not in self._job.down:
            NodeWords(self._command, self._nodes[0]).send(node_channel.PORT, PORT)

    def _hear(self, line: str) -> None:
        if line.startswith(node_channel.PORT):
            self._job.clock.after(TRY_SECONDS, self._say_what_was_seen)
        elif line == node_channel.KILL:
            self._end(1)

    def _say_what_was_seen(self) -> None:
        for node in self._live():
            path = self._folder / file_names.PREFLIGHT / f"{node}.jsonl"
            marker = Marker(path, Namespace(node=node, kind="gpu", devices=self._job.devices))
            for stage in STAGES[1:]:
                for device in range(self._job.devices):
                    seconds = 0.01 * (SLOW_FACTOR if node in self._job.slow and device == 3 else 1.0)
                    marker.update(device, f'{{"stage": "{stage}", "seconds": {seconds}}}')
        self._end(0)

    def _live(self) -> list[str]:
        return [node for node in self._nodes if node not in self._job.down]

    def _end(self, code: int) -> None:
        say_of_all(self._command, self._live(), node_channel.ENDED, code)
        if len(self._live()) == len(self._nodes):
            self._command.answer(code)
