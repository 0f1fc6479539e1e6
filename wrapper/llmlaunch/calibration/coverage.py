"""How often the conformal bound held when each run was bounded by the others alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llmlaunch.calibration.bounds import NEAR
from llmlaunch.calibration.comparable import Run
from llmlaunch.calibration.margins import left_out, no_margin, runs_needed, upper_ratio

__all__ = ["RISKS", "coverage"]

RISKS = (0.1, 0.05, 0.01)


def coverage(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """For every backend family, accelerator and kind of peak: the bound at each of RISKS, and the share of runs that
    stayed within the bound the others gave, over all runs and apart for those a planner would choose: near the limit,
    and the fastest safe layout of its job. Choosing is not random, so these may be covered less.

    A run that died counts as not covered, also where its bound was above the card.
    """
    pools: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        pools.setdefault((run.family, run.accelerator, run.kind), []).append(run)
    return [
        {
            "backend": family,
            "accelerator": accelerator,
            "peak_kind": kind,
            "runs": len(pool),
            "died": sum(run.died for run in pool),
            "risks": [_at(pool, risk) for risk in RISKS],
        }
        for (family, accelerator, kind), pool in pools.items()
    ]


def _at(pool: Sequence[Run], risk: float) -> dict[str, Any]:
    bound = upper_ratio([run.score for run in pool], risk)
    said = None if bound is not None else no_margin(risk, len(pool), sum(run.died for run in pool)).sentence
    row: dict[str, Any] = {"risk": risk, "needed": runs_needed(risk), "upper_ratio": bound, "reason": said}
    if len(pool) - 1 < runs_needed(risk):
        return {**row, "covered": None}
    bounds = left_out([run.score for run in pool], risk)
    held = {
        id(run): not run.died and (limit is None or run.score <= limit) for run, limit in zip(pool, bounds, strict=True)
    }
    fastest = {id(run) for run in _fastest_safe(pool)}
    subsets: dict[str, Callable[[Run], bool]] = {
        "all": lambda run: True,
        "near_limit": lambda run: run.predicted_share is not None and NEAR <= run.predicted_share <= 1.0,
        "fastest_safe": lambda run: id(run) in fastest,
    }
    return {**row, "covered": {name: _share(pool, held, belongs) for name, belongs in subsets.items()}}


def _share(pool: Sequence[Run], held: dict[int, bool], belongs: Callable[[Run], bool]) -> dict[str, Any]:
    part = [held[id(run)] for run in pool if belongs(run)]
    return {"runs": len(part), "share": sum(part) / len(part) if part else None}


def _fastest_safe(pool: Sequence[Run]) -> list[Run]:
    """Of each job with more than one layout, the safe one predicted to be fastest."""
    jobs: dict[str, list[Run]] = {}
    for run in pool:
        if run.tokens_per_second_per_gpu is not None:
            jobs.setdefault(run.job, []).append(run)
    chosen = []
    for layouts in jobs.values():
        safe = [run for run in layouts if run.predicted_share is not None and run.predicted_share <= 1.0]
        if len(layouts) > 1 and safe:
            chosen.append(max(safe, key=lambda run: run.tokens_per_second_per_gpu or 0.0))
    return chosen
