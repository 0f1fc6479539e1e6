"""A plan as JSON: the stable shape that `check --json`, `plan --json` and a run's `plan.json` share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from llmlaunch.memory.correction import Correction
from llmlaunch.planner.plan import Candidate, Fallbacks, JobLength, Plan, Sizing
from llmlaunch.recipe.types import NO_BUDGET

if TYPE_CHECKING:
    from llmlaunch.planner.neighbours import Neighbour

__all__ = ["candidates_json", "neighbours_json", "plan_json"]


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain values with keys in a fixed order: the same plan gives the same bytes."""
    return {
        "recipe": plan.recipe,
        "verdict": plan.verdict,
        "layout": plan.layout.as_json(),
        **_techniques(plan.chosen),
        "memory": _memory(plan),
        "step_seconds": plan.chosen.step_seconds,
        "step_terms": dict(plan.step_terms),
        "mfu": plan.mfu,
        "job": _length(plan.length),
        "sizing": _sizing(plan.sizing),
        "budget": _budget(plan),
        "tokens_per_second_per_gpu": plan.chosen.tokens_per_second_per_gpu,
        "searched": plan.searched,
        "refused": dict(plan.refused),
        "refusal_sentences": dict(plan.refusal_sentences),
        "alternatives": candidates_json(plan.alternatives),
        "not_modelled": list(plan.not_modelled),
        "assumptions": list(plan.assumptions),
        "advice": plan.advice,
        "changes": None if plan.changes is None else dict(plan.changes),
        "fallbacks": None if plan.fallbacks is None else _fallbacks(plan.fallbacks),
    }


def _fallbacks(fallbacks: Fallbacks) -> list[dict[str, Any]]:
    return [
        _candidate(after.plan.chosen) | {"keeps_checkpoints": after.keeps_checkpoints} for after in fallbacks.layouts
    ]


def _memory(plan: Plan) -> dict[str, Any]:
    estimate, limit, host = plan.estimate, plan.limit, plan.host_limit
    return {
        "peak_kind": estimate.peak_kind,
        "limit_bytes": limit.limit_bytes,
        "memory_bytes": limit.memory_bytes,
        "memory_source": limit.memory_source,
        "margin": limit.reason,
        "risk": limit.risk,
        "runs": limit.runs,
        "evidence": None if limit.support is None else limit.support.as_json(),
        "correction": _correction(plan.correction),
        "worst_pipeline_rank": estimate.worst.pipeline_rank,
        "ranks": [
            {
                "pipeline_rank": rank.pipeline_rank,
                "terms": dict(rank.terms),
                "allocated_bytes": rank.allocated_bytes,
                "reserved_bytes": rank.reserved_bytes,
                "device_bytes": rank.device_bytes,
            }
            for rank in estimate.ranks
        ],
        "host_bytes_per_node": estimate.host_bytes_per_node,
        "host_terms": dict(estimate.host_terms),
        "host_limit_bytes": None if host is None else host.limit_bytes,
        "host_margin": None if host is None else host.reason,
        "rehearsed": None if plan.rehearsed is None else dict(plan.rehearsed.details),
    }


def _correction(correction: Correction) -> dict[str, Any] | None:
    return None if correction.calibration_id is None else asdict(correction)


def _techniques(candidate: Candidate) -> dict[str, Any]:
    return {"techniques": candidate.techniques.as_json(), "gradient_dtype": candidate.gradient_dtype}


def _length(length: JobLength) -> dict[str, Any]:
    return {
        "steps": length.steps,
        "seconds": length.seconds,
        "gpu_hours": length.gpu_hours,
        "tokens": length.tokens,
    }


def _sizing(sizing: Sizing | None) -> dict[str, Any] | None:
    if sizing is None:
        return None
    return {
        "nodes": sizing.nodes,
        "tried": [
            {
                "nodes": tried.nodes,
                "refused": tried.refused,
                "reason": tried.reason,
                "device_bytes": tried.device_bytes,
                "job": None if tried.length is None else _length(tried.length),
            }
            for tried in sizing.tried
        ],
    }


def _budget(plan: Plan) -> dict[str, Any] | None:
    if plan.budget == NO_BUDGET:
        return None
    return {**asdict(plan.budget), "beyond": plan.beyond_budget}


def candidates_json(candidates: Iterable[Candidate]) -> list[dict[str, Any]]:
    """Return layouts in the shape of `alternatives`."""
    return [_candidate(c) for c in candidates]


def neighbours_json(neighbours: Iterable[Neighbour]) -> list[dict[str, Any]]:
    """Return neighbours as plain values. `refused` is a rule's key, "memory", "host_memory" or "rehearsed", null where
    the layout is safe; a layout that a rule refuses has no figures."""
    return [_neighbour(neighbour) for neighbour in neighbours]


def _neighbour(neighbour: Neighbour) -> dict[str, Any]:
    verdict, refusal = neighbour.verdict, neighbour.verdict.refusal
    return {
        "field": neighbour.name,
        "from": neighbour.before,
        "to": neighbour.after,
        "along": dict(neighbour.along),
        "layout": verdict.layout.as_json(),
        "step_seconds": verdict.step_seconds,
        "device_bytes": verdict.device_bytes,
        "refused": None if refusal is None else refusal.key,
        "reason": None if refusal is None else refusal.reason,
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "layout": candidate.layout.as_json(),
        **_techniques(candidate),
        "device_bytes": candidate.device_bytes,
        "worst_pipeline_rank": candidate.worst_pipeline_rank,
        "step_seconds": candidate.step_seconds,
        "tokens_per_second_per_gpu": candidate.tokens_per_second_per_gpu,
    }
