"""Predicted against measured step times of records that tell a speed, by family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from llmlaunch.calibration.accuracy import Scored
from llmlaunch.calibration.records import Case

__all__ = ["FORMULAS", "measured_step_seconds", "rank_correlation", "throughput"]

Record = Mapping[str, Any]


def full_square_flops(case: Case) -> float:
    """A step's operations as Megatron-LM 0.9 counts them: three times the forward products, attention as if it were not
    causal, the padded vocabulary (megatron/training/training.py `num_floating_point_operations`)."""
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
    """Seconds of a step as measured: told, from tokens a second, or from TFLOP/s by its family's formula. None where
    the record tells none of these, or its batch is not known."""
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


def throughput(group: Iterable[Scored]) -> dict[str, Any]:
    """Errors of step times and the rank correlation of predicted with measured speed per device, of one family; nothing
    where none of it is measured and timed. Negative: predicted too fast."""
    found = [(one, seconds) for one in group if (seconds := _measured(one)) is not None]
    if not found:
        return {}
    predicted = np.array([one.result.predicted_step_seconds for one, _ in found], dtype=np.float64)
    measured = np.array([seconds for _, seconds in found])
    relative = predicted / measured - 1.0
    worst = int(np.abs(relative).argmax())
    work = np.array([_tokens_per_device(one.case) for one, _ in found])
    return {
        "records": len(found),
        "mape": float(np.abs(relative).mean()),
        "bias": float(relative.mean()),
        "p95": float(np.quantile(np.abs(relative), 0.95)),
        "worst": float(relative[worst]),
        "worst_id": found[worst][0].result.id,
        "rank_correlation": rank_correlation(work / predicted, work / measured),
    }


def _measured(one: Scored) -> float | None:
    if one.case is None or not one.result.predicted_step_seconds:
        return None
    return measured_step_seconds(one.record, one.case)


def _tokens_per_device(case: Case | None) -> float:
    assert case is not None
    return case.job.workload.tokens_per_step / case.layout.world_size


def rank_correlation(one: Sequence[float] | np.ndarray, other: Sequence[float] | np.ndarray) -> float | None:
    """Spearman's: the correlation of ranks, equal values sharing theirs. None with fewer than three pairs, or where one
    side does not vary."""
    first, second = _ranks(np.asarray(one, dtype=np.float64)), _ranks(np.asarray(other, dtype=np.float64))
    if len(first) < 3 or not first.std() or not second.std():
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(count) - (count - 1) / 2.0)[place])
