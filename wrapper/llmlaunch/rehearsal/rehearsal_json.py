"""A rehearsal as JSON: the stable shape that `llmlaunch rehearse --json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmlaunch.planner.plan import Plan
from llmlaunch.rehearsal.next_layout import NextLayout
from llmlaunch.rehearsal.ranks import RehearsedRank, compared, headline
from llmlaunch.rehearsal.verdict import SAFE, UNSAFE, Judged

__all__ = ["rehearsal_json"]


def rehearsal_json(
    plan: Plan, rehearsed: Sequence[RehearsedRank], found: Judged, following: NextLayout | None, recorded: str | None
) -> dict[str, Any]:
    """Plain values, keys in a fixed order. `recorded` is the store that holds the measurements now, None where none
    does."""
    judged = {rank.pipeline_rank: rank for rank in found.ranks}
    return {
        "recipe": plan.recipe,
        "verdict": found.verdict,
        "predicted_verdict": SAFE if plan.safe_by_estimate else UNSAFE,
        "layout": plan.layout.as_json(),
        "ranks": [
            _rank(one)
            | {
                "device_bytes": judged[one.pipeline_rank].device_bytes,
                "device_parts": dict(judged[one.pipeline_rank].parts),
                "limit_bytes": judged[one.pipeline_rank].limit_bytes,
                "margin": judged[one.pipeline_rank].limit_reason,
            }
            for one in rehearsed
        ],
        "worst_pipeline_rank": found.worst.pipeline_rank,
        "reasons": list(found.sentences),
        "recorded": recorded,
        "next_layout": None if following is None else following.as_json(),
    }


def _rank(one: RehearsedRank) -> dict[str, Any]:
    peak = headline(one)
    return {
        "pipeline_rank": one.pipeline_rank,
        "stands_for": list(one.stands_for),
        "on": one.on,
        "peak_kind": peak.kind,
        "predicted_bytes": peak.predicted_bytes,
        "rehearsed_bytes": peak.rehearsed_bytes,
        "difference": peak.difference,
        "ran_out": one.ran_out,
        "terms": {
            line.term: {"predicted_bytes": line.predicted_bytes, "rehearsed_bytes": line.rehearsed_bytes}
            for line in compared(one)
        },
        "allocated_bytes": one.allocated_bytes,
        "reserved_bytes": one.reserved_bytes,
        "process_bytes": one.process_bytes,
        "versions": dict(one.versions),
        "seconds": one.seconds,
        "tracer_resident_bytes": one.tracer_bytes,
        "remarks": list(one.remarks),
    }
