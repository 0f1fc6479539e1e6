"""The two published formulas asked about measured records, beside our own prediction of the same records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llmlaunch.calibration.accuracy import OUTCOMES, RULE, Scored
from llmlaunch.calibration.defaults import with_defaults
from llmlaunch.calibration.records import TABLES
from llmlaunch.calibration.references import ANCHORS, Setting
from llmlaunch.calibration.summary import errors

__all__ = ["anchor_summary", "anchored"]

MEGATRON = ("megatron", "megatron-deepspeed")  # what both formulas are about


def anchored(one: Scored) -> dict[str, int | None]:
    """Bytes by the name of each anchor; None where it does not apply: another framework, or a model it does not
    describe."""
    setting = _setting(one)
    found = {name: anchor.formula(setting) if setting else None for name, anchor in ANCHORS.items()}
    return {name: None if value is None else round(value.total_bytes) for name, value in found.items()}


def anchor_summary(group: Sequence[Scored], name: str) -> dict[str, Any]:
    """What `families` says, of one anchor on the records of one family and kind it applies to, with our own MAPE on
    just those (`our_mape`). Its bytes stand for every kind of peak and pipeline rank: neither formula tells them
    apart."""
    known = [(one, value) for one in group if (value := anchored(one)[name]) is not None]
    if not known:
        return {"records": 0}
    if group[0].result.peak_kind in OUTCOMES:
        return {"records": len(known), **_verdicts(known)}
    results = [replace(one.result, predicted_bytes=value) for one, value in known]
    ours = errors(one.result for one, _ in known)
    return {"records": len(known), **errors(results), **({"our_mape": ours["mape"]} if ours else {})}


def _verdicts(known: Sequence[tuple[Scored, int]]) -> dict[str, int]:
    judged = [
        (value, one.record["gpu_memory_bytes"])
        for one, value in known
        if one.record.get("flags_known") is not False and one.record.get("gpu_memory_bytes")
    ]
    safe = sum(value <= int(RULE * card) for value, card in judged)
    above = sum(value > card for value, card in judged)
    return {"called_safe": safe, "called_unsafe": len(judged) - safe, "above_card": above}


def _setting(one: Scored) -> Setting | None:
    case = one.case
    if case is None or TABLES[one.record["backend"]] not in MEGATRON:
        return None
    record, _ = with_defaults(one.record)
    return Setting(
        shape=case.job.shape,
        layout=case.layout,
        sequence_length=case.job.workload.sequence_length,
        num_microbatches=case.num_microbatches,
        fp32_gradients=record["optimizer"]["gradient_dtype"] == "fp32",
        attention_scores_saved=record["implementation"]["attention"] == "unfused",
    )
