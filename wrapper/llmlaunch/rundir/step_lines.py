"""The lines in which trainers report their steps, read with the regular expressions of run.json's "progress"."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

from .foreign_values import MOST_WHOLE

if TYPE_CHECKING:
    from collections.abc import Iterable
    from re import Match, Pattern


LONGEST_LINE = 4096  # bytes; the rest of a longer line is not looked at: a step line of Megatron-LM has 400


class Step(NamedTuple):
    """One line about one step. None: the line does not say. `tokens_per_second` is the whole job's."""

    step: int | None
    steps: int | None = None
    loss: float | None = None  # NaN and infinity, too
    tokens_per_second: float | None = None
    seconds: float | None = None  # of one step


class StepNews(NamedTuple):
    """What some lines of one log reported. `slow`: a checkpoint or an evaluation was begun, and no step line came after
    that."""

    steps: list[Step]
    slow: bool


class StepLines:
    """Parser of a log's lines. Named groups of a step pattern are `step`, `steps`, `loss`, `tokens_per_second`,
    `seconds`, `milliseconds` and `nan`, which says in other words that the loss is NaN; any may lack.

    Raises re.error for a pattern that is none; with `lenient` such a pattern is left out.
    """

    def __init__(self, step_patterns: object, slow_patterns: object = (), lenient: bool = False) -> None:
        self._steps = _compiled(step_patterns, lenient)
        self._slow = _compiled(slow_patterns, lenient)

    def __bool__(self) -> bool:
        return bool(self._steps)

    def step_of(self, line: bytes) -> Step | None:
        """Return the step that a line reports, None where it reports none."""
        match = _first_match(self._steps, line[:LONGEST_LINE])
        return None if match is None else _step(match)

    def is_slow(self, line: bytes) -> bool:
        """Return whether a line says that a checkpoint or an evaluation begins."""
        return _first_match(self._slow, line[:LONGEST_LINE]) is not None

    def read(self, lines: Iterable[bytes]) -> StepNews:
        steps: list[Step] = []
        slow = False
        for line in lines:
            step = self.step_of(line)
            if step is not None:
                steps.append(step)
                slow = False
            elif self.is_slow(line):
                slow = True
        return StepNews(steps, slow)


def _compiled(patterns: object, lenient: bool) -> list[Pattern[bytes]]:
    compiled = []
    for pattern in patterns if isinstance(patterns, (list, tuple)) else ():
        try:
            compiled.append(re.compile(str(pattern).encode()))
        except (re.error, UnicodeEncodeError):
            if not lenient:
                raise
    return compiled


def _first_match(patterns: list[Pattern[bytes]], line: bytes) -> Match[bytes] | None:
    for pattern in patterns:
        match = pattern.search(line)
        if match is not None:
            return match
    return None


def _step(match: Match[bytes]) -> Step:
    groups = match.groupdict()
    step, steps = _count(groups.get("step")), _count(groups.get("steps"))
    milliseconds = _finite(groups.get("milliseconds"))
    return Step(
        step=step,
        steps=steps,
        loss=math.nan if groups.get("nan") else _number(groups.get("loss")),
        tokens_per_second=_finite(groups.get("tokens_per_second")),
        seconds=_finite(groups.get("seconds")) if milliseconds is None else milliseconds / 1000.0,
    )


def _count(text: bytes | None) -> int | None:
    """Return a number of steps; None for one that 64 bits do not hold."""
    number = _finite(text)
    return None if number is None or abs(number) >= MOST_WHOLE else int(number)


def _finite(text: bytes | None) -> float | None:
    """None for what is no number, and for one JSON cannot hold."""
    number = _number(text)
    return number if number is not None and math.isfinite(number) else None


def _number(text: bytes | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
