"""The bytes a device may be filled to, and why."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.calibration.margins import Margin, no_margin
from llmlaunch.cluster.profile import Accelerator
from llmlaunch.planner.plan import Limit
from llmlaunch.recipe.types import MemoryPolicy
from llmlaunch.units import GIB

__all__ = ["memory_limit"]

RULE = 0.80


def memory_limit(accelerator: Accelerator, policy: MemoryPolicy, margin: Margin | None = None) -> Limit:
    """By the recipe's risk where measured runs bound it (`margin`), else by the rule; the reason says which."""
    by_rule = _by_rule(accelerator, policy)
    if policy.risk is None:
        return by_rule
    found = margin or no_margin(policy.risk, 0)
    if found.upper_ratio is None:
        decides = "the 80 % rule decides" if _is_the_rule(by_rule, policy) else by_rule.reason
        return replace(by_rule, reason=f"{found.sentence}: {decides}", risk=policy.risk, runs=found.runs)
    # predictions that were too high never let a plan past the card: no run up there is among the comparable ones
    held = accelerator.memory_bytes / max(found.upper_ratio, 1.0) - _floor(accelerator, policy)
    if found.widened is not None and by_rule.limit_bytes < held:
        said = f"{found.sentence}: {by_rule.reason}"
        return replace(by_rule, reason=said, risk=policy.risk, runs=found.runs)
    free = f", and {_floor(accelerator, policy) / GIB:.1f} GiB stay free" if _floor(accelerator, policy) else ""
    return replace(
        by_rule, limit_bytes=max(int(held), 0), reason=found.sentence + free, risk=policy.risk, runs=found.runs
    )


def _by_rule(accelerator: Accelerator, policy: MemoryPolicy) -> Limit:
    """Fujii et al.'s rule: at most 80 % of the device (454 runs on A100 and H100, arXiv 2411.06465), and never less
    free than a fixed floor, because 20 % of a 40 GB card is too thin. A CPU process has no driver beside it: there the
    share alone decides."""
    share = int(accelerator.memory_bytes * policy.limit)
    floor = _floor(accelerator, policy)
    by_floor = accelerator.memory_bytes - floor
    if by_floor < share:
        reason = f"{floor / GIB:.1f} GiB stay free, more than {policy.limit:.0%} of the device would leave"
        return Limit(max(by_floor, 0), accelerator.memory_bytes, accelerator.memory_source, reason)
    rule = "the 80 % rule of Fujii et al." if policy.limit == RULE else "as the recipe says"
    reason = f"{policy.limit:.0%} of device memory, {rule}"
    return Limit(share, accelerator.memory_bytes, accelerator.memory_source, reason)


def _is_the_rule(limit: Limit, policy: MemoryPolicy) -> bool:
    return policy.limit == RULE and limit.limit_bytes == int(limit.memory_bytes * RULE)


def _floor(accelerator: Accelerator, policy: MemoryPolicy) -> int:
    return policy.floor_bytes if accelerator.kind == "gpu" else 0
