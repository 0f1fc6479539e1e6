"""Results that are kept beside the rows that they belong to."""

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


def once_for_rows(function: Callable[[Job, RankColumns], Result]) -> Callable[[Job, RankColumns], Result]:
    """Cache a result for the same split, however many terms ask for it: a result that depends neither on what a layout
    recomputes and offloads nor on the techniques that effects name in `decides_moments`. The rows carry the answers, so
    they are gone with them; nobody may write into a column."""

    @wraps(function)
    def answer(job: Job, rows: RankColumns) -> Result:
        answers: dict[Any, tuple[Job, Any]] = vars(rows).setdefault("answers", {})
        cached = answers.get(function)
        if cached is None or not (cached[0] is job or _of_split(cached[0]) == _of_split(job)):
            cached = answers[function] = (job, function(job, rows))
        result: Result = cached[1]
        return result

    return answer


def _of_split(job: Job) -> Job:
    """Return the same job without what effects say of moments alone. The job carries the answer."""
    known: Job | None = vars(job).get("of_split")
    if known is None:
        sections = (section for effect in effects_in_use(job) for section in effect.decides_moments)
        names = {key for section in sections for key in declarations(section)}
        defaults: dict[str, Any] = {f.name: f.default for f in fields(Techniques) if f.name in names}
        known = vars(job)["of_split"] = replace(job, techniques=replace(job.techniques, **defaults))
    return known
