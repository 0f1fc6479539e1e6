"""Errors of memory and of step time by family and kind of peak and by size of peak, and verdicts on runs known only to
have fitted or died."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from llmlaunch.accuracy.scoring import OUTCOMES, ScoredRecord, card_memory_bytes
from llmlaunch.calibration.cases import Case
from llmlaunch.calibration.evidence import FUJII_SHARE
from llmlaunch.calibration.margins import DEFAULT_RISK
from llmlaunch.calibration.records import Record, reason_of_no_whole_peak
from llmlaunch.units import GIB
from llmlaunch.verdicts import JUDGED, SAFE, TIGHT, UNSAFE

# Sizes of measured peaks, from the first number of GiB up to the second; the errors of the large ones count most.
SIZES = {"above_40_gib": (40.0, math.inf), "from_8_to_40_gib": (8.0, 40.0), "below_8_gib": (0.0, 8.0)}
SMALL_BYTES = 8 * GIB  # of a peak below it a constant of the driver is a tenth
MOST_UNDERESTIMATES = 10


def grouped(scores: Iterable[ScoredRecord]) -> dict[str, list[ScoredRecord]]:
    """Return the scores by "family/kind", in input order. Families stay apart: small CI models would drown the rest in
    one average."""
    groups: dict[str, list[ScoredRecord]] = {}
    for scored in scores:
        groups.setdefault(f"{scored.record['family']}/{scored.record['peak_kind']}", []).append(scored)
    return groups


def families(scores: Iterable[ScoredRecord]) -> dict[str, dict[str, Any]]:
    """Return the summary of every family and kind of peak."""
    return {name: _summary(group) for name, group in grouped(scores).items()}


def _summary(group: Sequence[ScoredRecord]) -> dict[str, Any]:
    priced = [scored for scored in group if scored.supported]
    reasons: dict[str, int] = {}
    for scored in group:
        if scored.reason:
            reasons[scored.reason] = reasons.get(scored.reason, 0) + 1
    summary: dict[str, Any] = {"records": len(group), "supported": len(priced), "unsupported": reasons}
    if aside := Counter(reason for scored in priced if (reason := _reason_not_compared(scored))):
        summary["not_compared"] = dict(aside)
    if group[0].record["peak_kind"] in OUTCOMES:
        return {**summary, **_outcomes(priced)}
    return {**summary, **errors(priced)}


def errors(scores: Iterable[ScoredRecord]) -> dict[str, Any]:
    """Return MAPE, median and 95th percentile of the absolute relative error, bias, and the worst error with its
    record; nothing if nothing was measured and priced. Negative: predicted too low."""
    known = _compared(scores)
    relative = np.array([(scored.predicted_bytes or 0) / (scored.measured_bytes or 1) - 1.0 for scored in known])
    if not known:
        return {}
    size = np.abs(relative)
    worst = int(size.argmax())
    return {
        "mape": float(size.mean()),
        "median": float(np.median(size)),
        "bias": float(relative.mean()),
        "p95": float(np.quantile(size, 0.95)),
        "worst": float(relative[worst]),
        "worst_id": known[worst].record["id"],
    }


def _compared(scores: Iterable[ScoredRecord]) -> list[ScoredRecord]:
    return [s for s in scores if s.predicted_bytes and s.measured_bytes and _reason_not_compared(s) is None]


def _reason_not_compared(scored: ScoredRecord) -> str | None:
    """Return why the measured peak is not what the prediction is of, or None if it is: a run that failed or ended
    before its second step had not reached its peak, and what other programs held of the card is none of its own."""
    record = scored.record
    if record["peak_kind"] in OUTCOMES:
        return None
    return reason_of_no_whole_peak(record)


def by_size(scores: Iterable[ScoredRecord]) -> list[dict[str, Any]]:
    """Return the errors by backend, kind and size of peak, the large peaks first. Backends that share a table of facts
    are one."""
    groups: dict[tuple[str, str, str], list[ScoredRecord]] = {}
    for scored in _compared(scores):
        if scored.job is not None:
            key = (_size_of(scored), scored.job.backend, scored.record["peak_kind"])
            groups.setdefault(key, []).append(scored)
    return [
        {"size": size, "backend": backend, "peak_kind": kind, "records": len(group), **errors(group)}
        for (size, backend, kind), group in sorted(groups.items(), key=_size_first)
    ]


def _size_first(item: tuple[tuple[str, str, str], Any]) -> tuple[int, str, str]:
    size, backend, kind = item[0]
    return [*SIZES].index(size), backend, kind


def _size_of(scored: ScoredRecord) -> str:
    gib = (scored.measured_bytes or 0) / GIB
    return next(name for name, (least, most) in SIZES.items() if least <= gib < most)


def underestimates(scores: Iterable[ScoredRecord]) -> list[dict[str, Any]]:
    """Return the records of 8 GiB and more whose predictions are furthest too low, the worst first."""
    large = [scored for scored in _compared(scores) if (scored.measured_bytes or 0) >= SMALL_BYTES]
    rows = [
        {
            **{name: scored.record[name] for name in ("id", "family", "peak_kind", "backend")},
            "measured_bytes": scored.measured_bytes,
            "predicted_bytes": scored.predicted_bytes,
            "error": (scored.predicted_bytes or 0) / (scored.measured_bytes or 1) - 1.0,
        }
        for scored in large
    ]
    return sorted((row for row in rows if row["error"] < 0), key=lambda row: row["error"])[:MOST_UNDERESTIMATES]


def judged(scored: ScoredRecord) -> bool:
    """Whether the verdict counts. A row without its recompute and optimizer flags never counts as a refusal."""
    return scored.record.get("flags_known") is not False


def _outcomes(priced: Sequence[ScoredRecord]) -> dict[str, int]:
    counted = [scored for scored in priced if judged(scored)]
    verdicts = [scored.verdict for scored in counted]
    counts = {
        **{f"called_{verdict}": verdicts.count(verdict) for verdict in JUDGED},
        "flags_unknown": len(priced) - len(counted),
    }
    if priced and priced[0].record["peak_kind"] == "fits":
        counts["above_card"] = sum(map(_above_card, counted))
    return counts


def _above_card(scored: ScoredRecord) -> bool:
    """Whether a run that fitted is predicted to need more than the whole card, which no margin explains."""
    card = scored.record.get("gpu_memory_bytes")
    return bool(card and scored.worst and scored.worst.device_bytes > card)


def full_square_flops(case: Case) -> float:
    """Return a step's operations as Megatron-LM 0.9 counts them: three times the forward products, attention as if it
    were not causal, the padded vocabulary (megatron/training/training.py `num_floating_point_operations`)."""
    shape, work = case.job.shape, case.job.workload
    h, s = shape.hidden_size, work.sequence_length
    gates = 3.0 if shape.gated_mlp else 2.0
    attention = 2.0 * h * (shape.query_width + shape.key_value_width) + 2.0 * s * shape.query_width
    layer = attention + gates * h * shape.ffn_hidden_size
    return 6.0 * work.tokens_per_step * (shape.num_layers * layer + h * shape.vocab_size)


# What the published TFLOP/s of a family count. Where a family also tells tokens a second, those are used.
FORMULAS: Mapping[str, Callable[[Case], float]] = {
    "fujii-grid-A100-40GB": full_square_flops,
    "fujii-grid-H100-94GB": full_square_flops,
}


def measured_step_seconds(record: Record, case: Case) -> float | None:
    """Return the measured seconds of a step: as recorded, from tokens a second, or from TFLOP/s by its family's
    formula. None if the record has none of these, or its batch is not known."""
    if record.get("step_seconds"):
        return float(record["step_seconds"])
    if not case.batch_known:
        return None
    devices = case.layout.world_size
    if record.get("tokens_per_second_per_gpu"):
        return float(case.job.workload.tokens_per_step / devices / record["tokens_per_second_per_gpu"])
    formula = FORMULAS.get(record["family"])
    if formula is None or not record.get("tflops_per_gpu"):
        return None
    return float(formula(case) / devices / (record["tflops_per_gpu"] * 1e12))


def throughput(group: Iterable[ScoredRecord]) -> dict[str, Any]:
    """Return the errors of one family's step times and the rank correlation of predicted with measured speed per
    device; nothing if none of it is measured and timed. Negative: predicted too fast."""
    timed = [
        (scored, scored.case, seconds)
        for scored in group
        if scored.case is not None
        and scored.predicted_step_seconds
        and (seconds := measured_step_seconds(scored.record, scored.case)) is not None
    ]
    if not timed:
        return {}
    predicted = np.array([scored.predicted_step_seconds for scored, _, _ in timed], dtype=np.float64)
    measured = np.array([seconds for _, _, seconds in timed])
    relative = predicted / measured - 1.0
    worst = int(np.abs(relative).argmax())
    tokens = np.array([case.job.workload.tokens_per_step / case.layout.world_size for _, case, _ in timed])
    return {
        "records": len(timed),
        "mape": float(np.abs(relative).mean()),
        "bias": float(relative.mean()),
        "p95": float(np.quantile(np.abs(relative), 0.95)),
        "worst": float(relative[worst]),
        "worst_id": timed[worst][0].record["id"],
        "rank_correlation": rank_correlation(tokens / predicted, tokens / measured),
    }


def rank_correlation(values: Sequence[float] | np.ndarray, others: Sequence[float] | np.ndarray) -> float | None:
    """Return Spearman's rank correlation, equal values sharing their rank. None with fewer than three pairs, or if one
    side does not vary."""
    first, second = _ranks(np.asarray(values, dtype=np.float64)), _ranks(np.asarray(others, dtype=np.float64))
    if len(first) < 3 or not first.std() or not second.std():
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(count) - (count - 1) / 2.0)[place])


DEVICE_OUTCOMES = ("oom", "fits")
CONFIDENCE = 0.95
FIRST_STEPS = 1  # a run that died before its second step


def verdicts(scores: Iterable[ScoredRecord]) -> list[dict[str, Any]]:
    """Return one entry for each class of jobs and family, in input order, of the runs whose flags are known."""
    groups: dict[tuple[str, str], list[ScoredRecord]] = {}
    for scored in scores:
        record = scored.record
        if record["peak_kind"] in DEVICE_OUTCOMES and scored.job and scored.verdict is not None and judged(scored):
            groups.setdefault((scored.job.name, record["family"]), []).append(scored)
    return [
        {"class": name, "family": family, "stated_risk": DEFAULT_RISK, **_counts(group)}
        for (name, family), group in groups.items()
    ]


def _counts(group: Sequence[ScoredRecord]) -> dict[str, Any]:
    died = [scored for scored in group if scored.record["peak_kind"] == "oom"]
    fitted = [scored for scored in group if scored.record["peak_kind"] == "fits"]
    safe = [scored for scored in died if scored.verdict == SAFE]
    return {
        "deaths": len(died),
        "deaths_called_safe": len(safe),
        "deaths_called_safe_at_most": upper_share(len(safe), len(died)),
        "deaths_at_first_step_called_safe": sum(_steps(scored) in range(FIRST_STEPS + 1) for scored in safe),
        "deaths_later_called_safe": sum(_steps(scored) > FIRST_STEPS for scored in safe),
        "deaths_called_safe_ids": [scored.record["id"] for scored in safe],
        "fits": len(fitted),
        "fits_called_tight": sum(scored.verdict == TIGHT for scored in fitted),
        "fits_called_unsafe": sum(scored.verdict == UNSAFE for scored in fitted),
        "fujii_deaths_called_safe": sum(map(_safe_by_fujii, died)),
        "fujii_fits_not_called_safe": sum(not _safe_by_fujii(scored) for scored in fitted),
    }


def _steps(scored: ScoredRecord) -> int:
    """Return the steps that a run made before it died, -1 where its record does not say."""
    observed = scored.record.get("observed")
    steps = observed.get("steps_run") if isinstance(observed, dict) else None
    return steps if isinstance(steps, int) else -1


def _safe_by_fujii(scored: ScoredRecord) -> bool:
    card = card_memory_bytes(scored.record)
    return bool(card and scored.worst and scored.worst.device_bytes <= FUJII_SHARE * card)


def upper_share(events: int, trials: int, confidence: float = CONFIDENCE) -> float | None:
    """Return the one-sided upper confidence bound of a share of which `events` of `trials` were seen (Clopper and
    Pearson 1934); None without trials."""
    if not trials:
        return None
    low, high = events / trials, 1.0
    while events < trials and high - low > 1e-9:
        middle = (low + high) / 2.0
        seldom = sum(
            math.comb(trials, count) * middle**count * (1.0 - middle) ** (trials - count) for count in range(events + 1)
        )
        low, high = (middle, high) if seldom > 1.0 - confidence else (low, middle)
    return high
