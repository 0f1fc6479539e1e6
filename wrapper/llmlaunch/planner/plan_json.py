"""A plan as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from llmlaunch.planner.plan import Plan, fujii_verdict
from llmlaunch.recipe.types import NO_BUDGET
from llmlaunch.verdicts import UNKNOWN


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan in the stable shape of `check --json`, `plan --json` and a run's `plan.json`. Keys are in a fixed
    order: the same plan gives the same bytes."""
    fallbacks = () if plan.fallbacks is None else plan.fallbacks.layouts
    after = [
        after.plan.chosen.as_json() | {"keeps_checkpoints": after.keeps_checkpoints, "change": after.change}
        for after in fallbacks
    ]
    return {
        "recipe": plan.recipe,
        "verdict": plan.verdict,
        **({"reason": plan.reason} if plan.verdict == UNKNOWN else {}),
        "layout": plan.layout.as_json(),
        **plan.chosen.techniques_json(),
        "memory": _memory_json(plan),
        "step_seconds": plan.chosen.step_seconds,
        "step_terms": dict(plan.step_terms),
        "step_evidence": plan.time.as_json(),
        "mfu": plan.mfu,
        "job": asdict(plan.length) | {"expected": None if plan.expected is None else asdict(plan.expected)},
        "sizing": None if plan.sizing is None else plan.sizing.as_json(),
        "budget": None if plan.budget == NO_BUDGET else {**asdict(plan.budget), "beyond": plan.beyond_budget},
        "tokens_per_second_per_gpu": plan.chosen.tokens_per_second_per_gpu,
        "searched": plan.searched,
        "refused": dict(plan.refused),
        "refusal_sentences": dict(plan.refusal_sentences),
        "alternatives": [candidate.as_json() for candidate in plan.alternatives],
        "what_ifs": [each.as_json() for each in plan.what_ifs],
        "unrendered": list(plan.unrendered),
        "faster_without_preference": None if plan.faster is None else plan.faster.as_json(),
        "faster_on_fewer_nodes": None if plan.faster_on_fewer is None else plan.faster_on_fewer.as_json(),
        "gave_way_for_headroom": None if plan.fuller is None else plan.fuller.as_json(),
        "changed_by_runs": None if plan.changed is None else plan.changed.as_json(plan.chosen),
        "not_modelled": list(plan.not_modelled),
        "assumptions": list(plan.assumptions),
        "advice": plan.advice,
        "changes": None if plan.changes is None else dict(plan.changes),
        "fallbacks": None if plan.fallbacks is None else after,
        "accepted": plan.accepted,
        "locked_by": plan.locked_by or None,
        "arguments": plan.arguments.as_json(),
    }


def _memory_json(plan: Plan) -> dict[str, Any]:
    estimate, limit, host = plan.estimate, plan.limit, plan.host_limit
    return {
        "peak_kind": estimate.peak_kind,
        "limit_bytes": limit.limit_bytes,
        "fits_bytes": limit.most_bytes,
        "stated_risk": plan.stated_risk,
        "fujii_verdict": fujii_verdict(plan.device_bytes, limit.memory_bytes),
        "memory_bytes": limit.memory_bytes,
        "memory_source": limit.memory_source,
        "margin": limit.reason,
        "risk": limit.risk,
        "runs": limit.runs,
        "evidence": None if limit.support is None else limit.support.as_json(),
        "correction": None if plan.correction.calibration_id is None else asdict(plan.correction),
        "worst_pipeline_rank": estimate.worst.pipeline_rank,
        "ranks": [asdict(rank) for rank in estimate.ranks],
        "host_bytes_per_node": estimate.host_bytes_per_node,
        "host_terms": dict(estimate.host_terms),
        "host_limit_bytes": None if host is None else host.limit_bytes,
        "host_margin": None if host is None else host.reason,
        "rehearsed": None if plan.rehearsed is None else dict(plan.rehearsed.details),
    }
