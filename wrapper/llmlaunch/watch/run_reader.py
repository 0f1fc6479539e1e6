"""Reads one run for `status --watch`: its small files, the logs of the nodes that log steps, its monitors' files."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from llmlaunch.frameworks.logs import known_trainers_lines
from llmlaunch.launchers.base import Submission
from llmlaunch.launchers.logs import JobLogs
from llmlaunch.launchers.run_files import latest_attempt, run_name
from llmlaunch.launchers.run_status import RunStatus
from llmlaunch.report.run_text import bad_loss_text
from llmlaunch.rundir.attempt import Attempt
from llmlaunch.rundir.run_file import ProgressRules, read_run_file
from llmlaunch.rundir.step_lines import Step, StepLines
from llmlaunch.rundir.values import count_above_zero, whole_number
from llmlaunch.watch.gauges import MemoryReader
from llmlaunch.watch.model import WatchedRun

_STEPS_KEPT = 120
_STEPS_TIMED = 20
_TAIL_LINES = 400
_SECONDS_A_LOG = 0.05
"""Until a node has logged a step every log is read, and the more logs there are the less often."""


LEAST_FABRIC_GIGABYTES_PER_SECOND = 10.0
"""Per device. A slower network in a cluster's profile is Ethernet, over which sockets are normal."""


@dataclass(frozen=True)
class RunFacts:
    """What watching needs of one layout's `run.json`. `tokens_per_step` and `devices` are the whole job's."""

    step_lines: StepLines
    readable: bool
    """False: nobody knows how this trainer's lines look."""
    promised: bool
    """Step lines will come; else the trainer is a person's own, and perhaps none does."""
    steps: int | None
    tokens_per_step: int | None
    devices: int | None
    peak_kind: str
    has_fabric: bool = False
    """Several nodes are joined by a network that NCCL does not reach by sockets."""

    def step_of(self, line: str) -> Step | None:
        """The step a line reports, with what follows from the shape of the job; None where it reports none."""
        step = self.step_lines.step_of(line.encode(errors="replace"))
        if step is None:
            return None
        seconds, tokens = step.seconds, step.tokens_per_second
        if self.tokens_per_step is not None:
            if tokens is None and seconds:
                tokens = self.tokens_per_step / seconds
            if seconds is None and tokens:
                seconds = self.tokens_per_step / tokens
        return step._replace(steps=step.steps or self.steps, seconds=seconds, tokens_per_second=tokens)

    def is_slow(self, line: str) -> bool:
        """Whether a line says that a checkpoint or an evaluation begins."""
        return self.step_lines.is_slow(line.encode(errors="replace"))


def run_facts(run_dir: Path, layout: str) -> RunFacts:
    """Return the facts of the layout an attempt runs: "" or "." is the planned one, else `fallback/K`."""
    run = read_run_file(run_dir, layout)
    progress, record = run.get("progress") or ProgressRules(), run.get("measurement", {})
    step_lines = StepLines(progress.get("step_patterns"), progress.get("slow_patterns"), lenient=True)
    readable = "progress" not in run or bool(step_lines)
    if not step_lines:
        defaults = known_trainers_lines()
        step_lines = StepLines(defaults.step_patterns, progress.get("slow_patterns"), lenient=True)
    return RunFacts(
        step_lines=step_lines,
        readable=readable,
        promised=progress.get("promised", True),
        steps=progress.get("steps") or None,
        tokens_per_step=progress.get("tokens_per_step") or _product(record, "global_batch_size", "sequence_length"),
        devices=_product(record, "world_size"),
        peak_kind=run.get("peak_kind") or "device",
        has_fabric=(run.get("nodes") or 1) > 1
        and (run.get("fabric_gigabytes_per_second") or 0.0) >= LEAST_FABRIC_GIGABYTES_PER_SECOND,
    )


def _product(record: Any, *names: str) -> int | None:
    product = 1
    for name in names:
        count = count_above_zero(record.get(name))
        if count is None:
            return None
        product *= count
    return product


@dataclass
class _RecentSteps:
    """The last steps that one attempt logged, oldest first, one entry a step."""

    submission: Submission
    attempt: str
    facts: RunFacts
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))
    _nodes: set[str] = field(default_factory=set)
    """The nodes that log steps."""
    _read_at: float = float("-inf")

    def __post_init__(self) -> None:
        self._logs = JobLogs(self.submission, attempts=frozenset({self.attempt}), later=False, tail=_TAIL_LINES)

    def look(self) -> None:
        """Read the new lines of the logs; once some nodes have logged steps, of their logs alone."""
        now = time.monotonic()
        if now - self._read_at < len(self._logs.logs) * _SECONDS_A_LOG and not self._nodes:
            return
        self._read_at = now
        for entry in self._logs.new_entries():
            step = self.facts.step_of(entry.text)
            if step is not None:
                self._nodes.add(entry.node)
                # Another rank may log the same step. A smaller number, after a rollback, is a new entry all the same.
                if not self.steps or self.steps[-1].step is None or step.step != self.steps[-1].step:
                    self.steps.append(step)
        if self._nodes and self._logs.nodes is None:
            self._logs.nodes = frozenset(self._nodes)
            self._logs.logs = {path: log for path, log in self._logs.logs.items() if log.node in self._nodes}


def typical_seconds(steps: Sequence[Step]) -> float | None:
    """Return the median seconds of the last steps, or None if none says its time."""
    times = (step.seconds for step in reversed(steps) if step.seconds is not None)
    return statistics.median(recent) if (recent := list(islice(times, _STEPS_TIMED))) else None


class RunReader:
    """Reads one run again and again. Missing or torn files are no error."""

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self._memory = MemoryReader()
        self._steps: _RecentSteps | None = None
        self._nodes: list[str] = []

    @property
    def files(self) -> int:
        return self._memory.files

    def read(self, look: RunStatus) -> WatchedRun:
        progress = self._read_attempt()
        steps = self._steps.steps if self._steps else ()
        last = steps[-1] if steps else None
        facts = self._steps.facts if self._steps else run_facts(self.submission.run_dir, "")
        cells = look.cells()
        return WatchedRun(
            name=run_name(self.submission.run_dir),
            job=cells[1],
            phase=look.state.phase,
            because=cells[-1],
            ended=look.state.ended,
            step=last.step if last and last.step is not None else whole_number(progress.get("step")),
            steps=(last.steps if last else None) or whole_number(progress.get("steps")) or facts.steps,
            loss=last.loss if last and last.loss is not None else _loss(progress),
            loss_since=whole_number(_not_finite(progress).get("since_step")),
            step_seconds=last.seconds if last and last.seconds else _number(progress.get("step_seconds")),
            typical_step_seconds=typical_seconds(steps),
            tokens_per_second=(last.tokens_per_second if last else None) or _number(progress.get("tokens_per_second")),
            devices=facts.devices,
            step_at=_number(progress.get("at")),
            losses=tuple(step.loss for step in steps if step.loss is not None),
            peak_kind=facts.peak_kind,
            gauges=self._memory.gauges(at_once=look.state.ended),
            remarks=() if look.state.ended else (*_loss_remarks(progress), *self._memory.remarks()),
        )

    def _read_attempt(self) -> Mapping[str, Any]:
        """Read the newest attempt and return its progress.json; what was read of an earlier attempt is forgotten."""
        name = latest_attempt(self.submission)
        if name is None:
            return {}
        files = Attempt(self.submission.run_dir, name)
        if self._steps is None or self._steps.attempt != name or (files.nodes and not self._nodes):
            self._steps = _RecentSteps(self.submission, name, run_facts(self.submission.run_dir, files.layout))
            self._nodes = files.nodes
            self._memory.begin(files)
        self._steps.look()
        return files.progress


def _loss_remarks(progress: Mapping[str, Any]) -> tuple[str, ...]:
    text = bad_loss_text(progress)
    return (f"Loss: {text}",) if text else ()


def _loss(progress: Mapping[str, Any]) -> float | None:
    """Return the last loss in progress.json, which writes NaN and infinity apart."""
    unusual = _not_finite(progress).get("loss")
    return float(unusual) if unusual in ("nan", "inf", "-inf") else _number(progress.get("loss"))


def _not_finite(progress: Mapping[str, Any]) -> Mapping[str, Any]:
    record = progress.get("not_finite")
    return record if isinstance(record, dict) else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and type(value) is not bool else None
