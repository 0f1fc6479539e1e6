"""The steps a trainer logs, read with the patterns of the run's own `run.json`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmlaunch.backends.logs import parse_progress
from llmlaunch.rundir.files import read_object

__all__ = ["RunFacts", "Step", "run_facts"]

_LONGEST_LINE = 4096


@dataclass(frozen=True)
class Step:
    """One logged step. None: the line does not say. `tokens_per_second` is the whole job's."""

    step: int | None
    steps: int | None = None
    loss: float | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class RunFacts:
    """What watching needs of one layout's `run.json`. `step_patterns` is None where it says nothing of progress: then
    the lines of the known trainers are tried. `tokens_per_step` and `devices` are the whole job's."""

    step_patterns: tuple[re.Pattern[str], ...] | None
    slow_patterns: tuple[re.Pattern[str], ...]
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
        line = line[:_LONGEST_LINE]
        found = _known(line) if self.step_patterns is None else _matched(self.step_patterns, line)
        if found is None:
            return None
        seconds, tokens = found.seconds, found.tokens_per_second
        if self.tokens_per_step is not None:
            if tokens is None and seconds:
                tokens = self.tokens_per_step / seconds
            if seconds is None and tokens:
                seconds = self.tokens_per_step / tokens
        return Step(found.step, found.steps or self.steps, found.loss, seconds, tokens)

    def is_slow(self, line: str) -> bool:
        """Whether a line says that a checkpoint or an evaluation begins."""
        return any(pattern.search(line[:_LONGEST_LINE]) for pattern in self.slow_patterns)


def run_facts(run_dir: Path, layout: str) -> RunFacts:
    """Of the layout an attempt runs: "" or "." is the planned one, else `fallback/K`."""
    run = read_object(run_dir / layout / "run.json") or {}
    progress = run.get("progress")
    words = progress if isinstance(progress, Mapping) else {}
    record = run.get("measurement") if isinstance(run.get("measurement"), Mapping) else {}
    predicted = run.get("predicted_bytes")
    listed = [size for size in predicted if type(size) is int] if isinstance(predicted, list) else []
    patterns = _patterns(words.get("step_patterns"))
    return RunFacts(
        step_patterns=patterns or None,
        slow_patterns=_patterns(words.get("slow_patterns")),
        readable="progress" not in run or bool(patterns),
        promised=words.get("promised") is not False,
        steps=_count(words.get("steps")),
        tokens_per_step=_count(words.get("tokens_per_step"))
        or _product(record, "global_batch_size", "sequence_length"),
        devices=_product(record, "world_size"),
        peak_kind=str(run.get("peak_kind") or "device"),
        predicted_bytes=max(listed, default=None),
    )


def _known(line: str) -> Step | None:
    progress = parse_progress(line)
    if progress is None:
        return None
    return Step(progress.step, progress.steps, progress.loss, progress.seconds_per_step, progress.tokens_per_second)


def _matched(patterns: tuple[re.Pattern[str], ...], line: str) -> Step | None:
    for pattern in patterns:
        match = pattern.search(line)
        if match is not None:
            groups = match.groupdict()
            milliseconds = _number(groups.get("milliseconds"))
            step, steps = _number(groups.get("step")), _number(groups.get("steps"))
            return Step(
                step=None if step is None else int(step),
                steps=None if steps is None else int(steps),
                loss=math.nan if groups.get("nan") else _number(groups.get("loss")),
                seconds=_number(groups.get("seconds")) if milliseconds is None else milliseconds / 1000.0,
                tokens_per_second=_number(groups.get("tokens_per_second")),
            )
    return None


def _patterns(listed: object) -> tuple[re.Pattern[str], ...]:
    """A pattern that is none is left out: a run directory made by hand must not end the looking."""
    found = []
    for text in listed if isinstance(listed, list) else []:
        try:
            found.append(re.compile(str(text)))
        except re.error:
            continue
    return tuple(found)


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


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
