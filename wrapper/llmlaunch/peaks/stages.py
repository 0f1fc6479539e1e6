"""Which pipeline rank a global rank belongs to. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["pipeline_rank_of"]


def pipeline_rank_of(run: Mapping[str, Any], rank: int) -> int | None:
    """`run` is run.json. Pipeline is the outermost rank order; None where the numbers do not fit together. A rank that
    runs alone is of the stage it was started for, whatever number it has there."""
    rehearsal = run.get("rehearsal")
    if isinstance(rehearsal, dict) and type(rehearsal.get("pipeline_rank")) is int:
        return int(rehearsal["pipeline_rank"])
    template = run.get("measurement")
    pipeline = _count(run, "pipeline")
    world = _count(template, "world_size") if isinstance(template, dict) else 0
    world = world or _count(run, "nodes") * _count(run, "devices_per_node")
    if not pipeline or not world or world % pipeline or rank >= world:
        return None
    return rank // (world // pipeline)


def _count(record: Mapping[str, Any], key: str) -> int:
    value = record.get(key)
    return value if type(value) is int and value > 0 else 0
