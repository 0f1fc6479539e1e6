"""What happens when a job ends early, hangs or runs out of memory, as a recipe says it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from llmlaunch.documents.validate import StrictModel
from llmlaunch.recipe.types import OnOom, Restart, Watchdog

__all__ = ["OnOomKey", "RestartKey", "WatchdogKey", "on_oom", "restart", "watchdog"]

DEFAULT_FALLBACKS = 2

Seconds = Annotated[float, Field(gt=0, le=7 * 86_400)]


class RestartFile(StrictModel):
    """How a job that ended early comes back by itself."""

    times: Annotated[int, Field(ge=0, le=10_000)] = Field(
        Restart.times, description="Automatic restarts of one run at most"
    )
    fruitless: Annotated[int, Field(ge=1, le=100)] = Field(
        Restart.fruitless, description="Attempts in a row that got no further than the one before, and it is given up"
    )
    backoff_seconds: Annotated[float, Field(ge=0, le=86_400)] = Field(
        Restart.backoff_seconds, description="Wait before a restart after a failure, doubled each fruitless time"
    )
    save_seconds: Seconds | None = Field(
        None, description="How long writing a checkpoint may take; absent = derived from its size"
    )
    by: Literal["requeue", "chain"] | None = Field(
        None,
        description="requeue: the same job again; chain: follow-up jobs are submitted together with the first, for "
        "sites that forbid requeue; absent = as the cluster profile says, else requeue",
    )


class FallbackFile(StrictModel):
    """Other layouts to try in the same allocation."""

    layouts: Annotated[int, Field(ge=1, le=8)] = Field(
        DEFAULT_FALLBACKS, description="How many layouts, each with more head-room than the one before"
    )
    after_checkpoint: Literal["reshard", "restart", "stop"] = Field(
        "reshard",
        description="With checkpoints written: reshard: go on from the last where the next layout can load it, else "
        "stop; restart: where it cannot, begin again in a folder of its own; stop: no other layout is tried",
    )


class WatchdogFile(StrictModel):
    """When a job that makes no step counts as hung."""

    floor_seconds: Seconds = Field(
        Watchdog.floor_seconds, description="At least so long without a new step; else ten times the median step"
    )
    first_step_seconds: Seconds = Field(
        Watchdog.first_step_seconds, description="So long may it take until the first step"
    )


def _branch(value: object) -> str:
    return "(mapping)" if isinstance(value, dict) else "(word)"


RestartKey = Annotated[
    Annotated[Literal["none"], Tag("(word)")] | Annotated[RestartFile, Tag("(mapping)")], Discriminator(_branch)
]
OnOomKey = Annotated[
    Annotated[Literal["stop", "fallback"], Tag("(word)")] | Annotated[FallbackFile, Tag("(mapping)")],
    Discriminator(_branch),
]
WatchdogKey = Annotated[
    Annotated[bool, Tag("(word)")] | Annotated[WatchdogFile, Tag("(mapping)")], Discriminator(_branch)
]


def restart(file: RestartFile | str | None, checkpoints: bool) -> Restart | None:
    """Absent: with checkpoints the defaults, without nothing to come back to."""
    if file is None:
        return Restart() if checkpoints else None
    if isinstance(file, str):
        return None
    save = None if file.save_seconds is None else float(file.save_seconds)
    return Restart(file.times, file.fruitless, float(file.backoff_seconds), save, file.by)


def on_oom(file: FallbackFile | str) -> OnOom:
    if isinstance(file, str):
        return OnOom(DEFAULT_FALLBACKS if file == "fallback" else 0)
    return OnOom(file.layouts, file.after_checkpoint)


def watchdog(file: WatchdogFile | bool) -> Watchdog | None:
    if isinstance(file, bool):
        return Watchdog() if file else None
    return Watchdog(float(file.floor_seconds), float(file.first_step_seconds))
