"""Errors by family and kind of peak, and verdicts on runs known only to have fitted or died."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from llmlaunch.calibration.accuracy import OUTCOMES, Result, Scored

__all__ = ["errors", "families", "grouped"]

LARGE_BYTES = 8 * 2**30
STEADY_SPREAD = 0.05  # (largest - smallest) / peak of a record's repeats


def grouped(found: Iterable[Scored]) -> dict[str, list[Scored]]:
    """By "family/kind", in the order they come: small CI models would drown the rest in one average."""
    groups: dict[str, list[Scored]] = {}
    for one in found:
        groups.setdefault(f"{one.result.family}/{one.result.peak_kind}", []).append(one)
    return groups


def families(found: Iterable[Scored]) -> dict[str, dict[str, Any]]:
    """The summary of every family and kind of peak."""
    return {name: _summary(group) for name, group in grouped(found).items()}


def _summary(group: Sequence[Scored]) -> dict[str, Any]:
    priced = [one for one in group if one.result.supported]
    reasons: dict[str, int] = {}
    for one in group:
        if one.result.reason:
            reasons[one.result.reason] = reasons.get(one.result.reason, 0) + 1
    summary: dict[str, Any] = {"records": len(group), "supported": len(priced), "unsupported": reasons}
    if group[0].result.peak_kind in OUTCOMES:
        return {**summary, **_outcomes(priced)}
    return {**summary, **errors([one.result for one in priced]), "groups": _subgroups(priced)}


def errors(results: Iterable[Result]) -> dict[str, Any]:
    """MAPE, median and 95th percentile of the absolute relative error, bias, and the worst with its record; nothing
    where nothing was measured and priced. Negative: predicted too low."""
    kept = [r for r in results if r.predicted_bytes and r.measured_bytes]
    relative = np.array([(r.predicted_bytes or 0) / (r.measured_bytes or 1) - 1.0 for r in kept])
    if not kept:
        return {}
    size = np.abs(relative)
    worst = int(size.argmax())
    return {
        "mape": float(size.mean()),
        "median": float(np.median(size)),
        "bias": float(relative.mean()),
        "p95": float(np.quantile(size, 0.95)),
        "worst": float(relative[worst]),
        "worst_id": kept[worst].id,
    }


def _subgroups(priced: Sequence[Scored]) -> dict[str, dict[str, Any]]:
    """Halves of a family that may err differently; one that holds all or nothing of it is left out."""
    halves: dict[str, Callable[[Scored], bool]] = {
        "dense": lambda one: not one.record["model"].get("moe"),
        "moe": lambda one: bool(one.record["model"].get("moe")),
        "below_8_gib": lambda one: (one.result.measured_bytes or 0) < LARGE_BYTES,
        "from_8_gib": lambda one: (one.result.measured_bytes or 0) >= LARGE_BYTES,
        "repeats_agree": lambda one: _spread(one.record) <= STEADY_SPREAD,
        "repeats_differ": lambda one: _spread(one.record) > STEADY_SPREAD,
    }
    groups = {}
    for name, belongs in halves.items():
        part = [one.result for one in priced if belongs(one)]
        if 0 < len(part) < len(priced):
            groups[name] = {"records": len(part), **errors(part)}
    return groups


def _spread(record: Mapping[str, Any]) -> float:
    """How far the repeats of one record lie apart, as a share of its peak; 0 where it was measured once."""
    repeats, peak = record.get("repeats"), record["peak_bytes"]
    if not repeats or not peak:
        return 0.0
    return float((repeats["max_bytes"] - repeats["min_bytes"]) / peak)


def _outcomes(priced: Sequence[Scored]) -> dict[str, int]:
    """Verdicts. A row whose recompute and optimizer flags nobody knows is never counted as a refusal: it is counted
    apart and not judged."""
    judged = [one for one in priced if one.record.get("flags_known") is not False]
    verdicts = [one.result.verdict for one in judged]
    counts = {
        "called_safe": verdicts.count("safe"),
        "called_unsafe": verdicts.count("unsafe"),
        "flags_unknown": len(priced) - len(judged),
    }
    if priced and priced[0].result.peak_kind == "fits":
        counts["above_card"] = sum(map(_above_card, judged))
    return counts


def _above_card(one: Scored) -> bool:
    """Predicted to need more than the whole card, and yet it ran: no margin explains that."""
    card = one.record.get("gpu_memory_bytes")
    return bool(card and one.worst and one.worst.device_bytes > card)
