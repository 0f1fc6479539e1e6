"""A rehearsal as JSON: the stable shape that `llmlaunch rehearse --json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmlaunch.planner.plan import Plan
from llmlaunch.rehearsal.next_layout import NextLayout
from llmlaunch.rehearsal.ranks import RehearsedRank, compared, headline
from llmlaunch.rehearsal.verdict import SAFE, UNSAFE, Judgement

__all__ = ["rehearsal_json"]


def rehearsal_json(
    plan: Plan,
    rehearsed: Sequence[RehearsedRank],
    judgement: Judgement,
    following: NextLayout | None,
    recorded: str | None,
) -> dict[str, Any]:
    """Plain values, keys in a fixed order. `recorded` is the store that holds the measurements now, None where none
    does."""
    judged = {rank.pipeline_rank: rank for rank in judgement.ranks}
    return {
        "recipe": plan.recipe,
        "verdict": judgement.verdict,
        "predicted_verdict": SAFE if plan.safe_by_estimate else UNSAFE,
        "layout": plan.layout.as_json(),
        "ranks": [
            _rank(result)
            | {
                "device_bytes": judged[result.pipeline_rank].device_bytes,
                "device_parts": dict(judged[result.pipeline_rank].parts),
                "limit_bytes": judged[result.pipeline_rank].limit_bytes,
                "margin": judged[result.pipeline_rank].limit_reason,
            }
            for result in rehearsed
        ],
        "worst_pipeline_rank": judgement.worst.pipeline_rank,
        "reasons": list(judgement.sentences),
        "recorded": recorded,
        "next_layout": None if following is None else following.as_json(),
    }


def _rank(result: RehearsedRank) -> dict[str, Any]:
    peak = headline(result)
    return {
        "pipeline_rank": result.pipeline_rank,
        "stands_for": list(result.stands_for),
        "on": result.on,
        "peak_kind": peak.kind,
        "predicted_bytes": peak.predicted_bytes,
        "rehearsed_bytes": peak.rehearsed_bytes,
        "difference": peak.difference,
        "ran_out": result.ran_out,
        "terms": {
            line.term: {"predicted_bytes": line.predicted_bytes, "rehearsed_bytes": line.rehearsed_bytes}
            for line in compared(result)
        },
        "allocated_bytes": result.allocated_bytes,
        "reserved_bytes": result.reserved_bytes,
        "process_bytes": result.process_bytes,
        "versions": dict(result.versions),
        "seconds": result.seconds,
        "tracer_resident_bytes": result.tracer_bytes,
        "remarks": list(result.remarks),
    }
