"""The steps a trainer logs, read with the patterns of the run's own `run.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmlaunch.backends.logs import known_trainers_lines
from llmlaunch.rundir import file_names
from llmlaunch.rundir.files import read_object
from llmlaunch.rundir.step_lines import Step, StepLines

__all__ = ["RunFacts", "run_facts"]


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
    predicted_bytes: int | None
    """The worst rank's."""

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
    run = read_object(run_dir / layout / file_names.RUN) or {}
    progress = run.get("progress")
    words = progress if isinstance(progress, Mapping) else {}
    record = run.get("measurement") if isinstance(run.get("measurement"), Mapping) else {}
    predicted = run.get("predicted_bytes")
    listed = [size for size in predicted if type(size) is int] if isinstance(predicted, list) else []
    step_lines = StepLines(words.get("step_patterns"), words.get("slow_patterns"), lenient=True)
    readable = "progress" not in run or bool(step_lines)
    if not step_lines:
        known = known_trainers_lines()
        step_lines = StepLines(known.step_patterns, words.get("slow_patterns"), lenient=True)
    return RunFacts(
        step_lines=step_lines,
        readable=readable,
        promised=words.get("promised") is not False,
        steps=_count(words.get("steps")),
        tokens_per_step=_count(words.get("tokens_per_step"))
        or _product(record, "global_batch_size", "sequence_length"),
        devices=_product(record, "world_size"),
        peak_kind=str(run.get("peak_kind") or "device"),
        predicted_bytes=max(listed, default=None),
    )


def _product(record: Any, *names: str) -> int | None:
    product = 1
    for name in names:
        count = _count(record.get(name))
        if count is None:
            return None
        product *= count
    return product


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None
