"""The bytes a device may be filled to, and why."""

from __future__ import annotations

from llmlaunch.cluster.profile import Accelerator
from llmlaunch.planner.plan import Limit
from llmlaunch.recipe.types import MemoryPolicy

__all__ = ["memory_limit"]

GIB = 2**30
RULE = 0.80


def memory_limit(accelerator: Accelerator, policy: MemoryPolicy) -> Limit:
    """Fujii et al.'s rule: at most 80 % of the device (454 runs on A100 and H100, arXiv 2411.06465), and never less
    free than a fixed floor, because 20 % of a 40 GB card is too thin. A CPU process has no driver beside it: there the
    share alone decides."""
    share = int(accelerator.memory_bytes * policy.limit)
    floor = policy.floor_bytes if accelerator.kind == "gpu" else 0
    by_floor = accelerator.memory_bytes - floor
    if by_floor < share:
        reason = f"{floor / GIB:.1f} GiB stay free, more than {policy.limit:.0%} of the device would leave"
        return Limit(max(by_floor, 0), accelerator.memory_bytes, accelerator.memory_source, reason)
    rule = "the 80 % rule of Fujii et al." if policy.limit == RULE else "as the recipe says"
    reason = f"{policy.limit:.0%} of device memory, {rule}"
    return Limit(share, accelerator.memory_bytes, accelerator.memory_source, reason)
