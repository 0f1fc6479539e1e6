"""The error for a plan that is not safe: what overflows the closest layout, and what would fit."""

from __future__ import annotations

from llmlaunch.errors import NothingSafe
from llmlaunch.memory.terms import RESIDUAL
from llmlaunch.planner.plan import Plan
from llmlaunch.rundir.values import counted
from llmlaunch.units import GIB

__all__ = ["correction_text", "explain_unsafe", "refuse"]


def refuse(plan: Plan) -> None:
    """Refuse a plan that must not be submitted.

    Raises:
        NothingSafe: the plan is not safe or exceeds the recipe's budget; the message says what would do.
    """
    if not plan.safe:
        raise explain_unsafe(plan)
    if plan.beyond_budget is not None:
        raise NothingSafe(f"{plan.recipe}: {plan.beyond_budget}")


def explain_unsafe(plan: Plan) -> NothingSafe:
    """Return the error for a plan that is not safe: the closest layout, what overflows it, and what would fit."""
    rank = plan.estimate.worst
    if plan.estimate.fault is not None:
        return NothingSafe(
            f"{plan.recipe}: the estimate of {plan.layout.describe()} cannot be right: {plan.estimate.fault}. "
            f"This is a bug of llmlaunch, not yours: please report it with the recipe. {plan.advice or ''}".rstrip()
        )
    if plan.rehearsed is not None and not plan.rehearsed.safe and plan.safe_by_estimate:
        return NothingSafe(
            f"{plan.recipe}: no layout is safe. Closest: {plan.layout.describe()}, which the estimate lets pass; but "
            f"{plan.rehearsed.sentence}. {plan.advice or ''}".rstrip()
        )
    if rank.device_bytes <= plan.limit.limit_bytes and plan.host_bytes_beyond:
        return _explain_host(plan)
    term, term_bytes = max(rank.terms.items(), key=lambda item: item[1])
    needs, limit = rank.device_bytes / GIB, plan.limit.limit_bytes / GIB
    return NothingSafe(
        f"{plan.recipe}: no layout is safe. Closest: {plan.layout.describe()}, pipeline rank {rank.pipeline_rank} "
        f"needs {needs:.1f} GiB of {limit:.1f} GiB ({needs - limit:.1f} GiB too much), "
        f"most of it {term} with {term_bytes / GIB:.1f} GiB{_measured(plan)}. {plan.advice or ''}".rstrip()
    )


def correction_text(plan: Plan) -> str:
    """Return the sentence on what measured runs add to the worst rank or take off it."""
    terms, correction = plan.estimate.worst.terms, plan.correction
    support = plan.limit.support
    runs = "" if support is None else f", {counted(support.runs, 'run')}"
    outside = f", {correction.outside_bytes / GIB:+.2f} GiB outside torch" if correction.outside_bytes else ""
    return (
        f"measured residual {terms.get(RESIDUAL, 0) / GIB:+.2f} GiB allocated, {correction.torch_share:+.1%} of "
        f"torch's memory{outside} (calibration {correction.calibration_id}{runs})"
    )


def _measured(plan: Plan) -> str:
    added = plan.correction.torch_share > 0 or plan.correction.outside_bytes > 0
    return f", and {correction_text(plan)}" if added else ""


def _explain_host(plan: Plan) -> NothingSafe:
    assert plan.host_limit is not None
    term, term_bytes = max(plan.estimate.host_terms.items(), key=lambda item: item[1])
    needs, limit = (plan.estimate.host_bytes_per_node or 0) / GIB, plan.host_limit.limit_bytes / GIB
    return NothingSafe(
        f"{plan.recipe}: no layout is safe. Closest: {plan.layout.describe()}, which fits the devices but not the host "
        f"memory: a node needs {needs:.1f} GiB of {limit:.1f} GiB ({needs - limit:.1f} GiB too much; "
        f"{plan.host_limit.reason}), "
        f"most of it {term} with {term_bytes / GIB:.1f} GiB. {plan.advice or ''}".rstrip()
    )
