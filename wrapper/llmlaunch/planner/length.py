"""How long a whole job takes, and whether the time asked of SLURM lasts."""

from __future__ import annotations

import re

from llmlaunch.planner.plan import JobLength
from llmlaunch.recipe.types import Recipe
from llmlaunch.units import DAY, HOUR, MINUTE, duration

__all__ = ["job_length", "time_limit_said"]

# what sbatch takes as --time (man sbatch, SLURM 23.11): minutes, or fields counted from the hours where there are days
_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?")
_PLAIN = re.compile(r"(?:(\d+):)??(\d+)(?::(\d+))?")


def job_length(recipe: Recipe, step_seconds: float) -> JobLength:
    """All steps of the recipe at `step_seconds` each: computing alone, no queue, no checkpoint, no restart."""
    steps = recipe.training.steps
    seconds = steps * step_seconds
    return JobLength(
        steps=steps,
        tokens=steps * recipe.workload.tokens_per_step,
        seconds=seconds,
        gpu_hours=seconds * recipe.world_size / HOUR,
    )


def time_limit_said(recipe: Recipe, length: JobLength) -> tuple[str, ...]:
    """One sentence where SLURM would end the job before its last step; that is no mistake where it can be resumed."""
    asked = recipe.slurm.get("time")
    limit = _limit_seconds(str(asked).strip()) if asked is not None and not isinstance(asked, bool) else None
    if limit is None or length.seconds <= limit:
        return ()
    resumed = "it goes on from its last checkpoint when submitted again"
    if recipe.training.save_interval is None:
        resumed = "it writes no checkpoints to go on from (training.save_interval)"
    taken = duration(length.seconds)
    return (f"SLURM ends the job after {duration(limit)} (slurm.time), before {taken} are over; {resumed}",)


def _limit_seconds(text: str) -> int | None:
    """None: no limit (0 and words such as UNLIMITED), or nothing sbatch would take, which it says itself."""
    days = _DAYS.fullmatch(text)
    if days:
        found = [int(part or 0) for part in days.groups()]
        return found[0] * DAY + found[1] * HOUR + found[2] * MINUTE + found[3]
    plain = _PLAIN.fullmatch(text)
    if plain is None:
        return None
    hours, minutes, seconds = (int(part or 0) for part in plain.groups())
    return (hours * HOUR + minutes * MINUTE + seconds) or None
