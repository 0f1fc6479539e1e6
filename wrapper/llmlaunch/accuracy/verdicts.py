"""Verdicts of the default margin on runs known only to have fitted or died, by class of jobs: deaths called safe, fits
not called safe, and what Fujii's rule says of the same runs. No run is judged by its own family."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from llmlaunch.accuracy.scoring import ScoredRecord, card_memory_bytes
from llmlaunch.accuracy.summary import judged
from llmlaunch.calibration.evidence import FUJII_SHARE
from llmlaunch.calibration.margins import DEFAULT_RISK
from llmlaunch.verdicts import SAFE, TIGHT, UNSAFE

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
