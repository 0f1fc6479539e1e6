"""What happens when a job ends early, hangs or runs out of memory."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmlaunch.documents.keys import key, section

__all__ = ["NO_RESTART", "OnOom", "Restart", "WatchdogPolicy"]

NO_RESTART = "none"  # the word; a recipe that says nothing has the defaults of `Restart` where checkpoints are written

Seconds = Annotated[float, Field(gt=0, le=7 * 86_400)]


@section
class Restart:
    """How a job that ended early comes back by itself, from its last checkpoint."""

    times: int = key("Automatic restarts of one run at most", default=20, ge=0, le=10_000)
    fruitless: int = key(
        "Attempts in a row that got no further than the one before, and it is given up", default=2, ge=1, le=100
    )
    backoff_seconds: float = key(
        "Wait before a restart after a failure, doubled each fruitless time", default=60.0, ge=0, le=86_400
    )
    save_seconds: Seconds | None = key(
        "How long writing a checkpoint may take; absent = derived from its size", default=None
    )
    by: str | None = key(
        "requeue: the same job again; chain: follow-up jobs are submitted together with the first, for sites that "
        "forbid requeue; absent = as the cluster profile says, else requeue",
        default=None,
        written=Literal["requeue", "chain"] | None,
    )


@section
class OnOom:
    """Other layouts to try in the same allocation after a device ran out of memory; 0 = none, the job ends."""

    layouts: int = key("How many layouts, each with more head-room than the one before", default=2, ge=1, le=8)
    after_checkpoint: str = key(
        "With checkpoints written: reshard: go on from the last where the next layout can load it, else stop; restart: "
        "where it cannot, begin again in a folder of its own; stop: no other layout is tried",
        default="reshard",
        written=Literal["reshard", "restart", "stop"],
    )


@section
class WatchdogPolicy:
    """When a job that makes no step counts as hung."""

    floor_seconds: Seconds = key("At least so long without a new step; else ten times the median step", default=600.0)
    first_step_seconds: Seconds = key("So long may it take until the first step", default=3600.0)
