"""Results that are kept in the `answers` of the rows that they belong to, however many terms ask for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import wraps
from typing import Any, TypeVar

from llmlaunch.memory.effects import effects_in_use
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.technique import declarations

Result = TypeVar("Result")


def once_for_splits(function: Callable[[Job, RankColumns], Result]) -> Callable[[Job, RankColumns], Result]:
    """Keep a result for rows of the same splits: one that depends neither on what a layout recomputes and offloads nor
    on the techniques that effects name in `decides_moments`."""

    @wraps(function)
    def answer(job: Job, rows: RankColumns) -> Result:
        known = rows.answers.of_splits.get(function)
        if known is None or not (known[0] is job or _of_split(known[0]) == _of_split(job)):
            known = rows.answers.of_splits[function] = (job, function(job, rows))
        result: Result = known[1]
        return result

    return answer


def once_for_rows(function: Callable[[Job, RankColumns], Result]) -> Callable[[Job, RankColumns], Result]:
    """Keep a result for the very job and rows."""

    @wraps(function)
    def answer(job: Job, rows: RankColumns) -> Result:
        known = rows.answers.of_techniques.get(function)
        if known is None or known[0] is not job:
            known = rows.answers.of_techniques[function] = (job, function(job, rows))
        result: Result = known[1]
        return result

    return answer


def _of_split(job: Job) -> Job:
    """Return the same job without what effects say of moments alone."""
    if job.answers.of_split is None:
        sections = (section for effect in effects_in_use(job) for section in effect.decides_moments)
        names = {key for section in sections for key in declarations(section)}
        defaults: dict[str, Any] = {f.name: f.default for f in fields(Techniques) if f.name in names}
        job.answers.of_split = replace(job, techniques=replace(job.techniques, **defaults))
    return job.answers.of_split
