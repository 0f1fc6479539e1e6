"""A rehearsal as text for a person and as JSON: what was predicted of each rank, what it held, the verdict, and what
to do next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from llmlaunch.frameworks.framework import FORWARD, REMAINDER
from llmlaunch.planner.plan import Plan
from llmlaunch.recipe.frameworks import named_by_packages
from llmlaunch.rehearsal.ranks import CACHE, ON_TRACE, Omission, RehearsedRank, compared, headline
from llmlaunch.rehearsal.verdict import Judgement, NextLayout, RankJudgement
from llmlaunch.report.text import table
from llmlaunch.units import GIB, gib

SHOWN_BYTES = 0.005 * GIB  # less is 0.00


def rehearsal_text(
    plan: Plan, rehearsed: Sequence[RehearsedRank], judgement: Judgement, following: NextLayout | None
) -> str:
    """What `llmlaunch rehearse` prints."""
    judged = {rank.pipeline_rank: rank for rank in judgement.ranks}
    parts = [[f"{plan.recipe}: {judgement.verdict}  {plan.layout.describe()}"]]
    parts += [_rank(result, judged[result.pipeline_rank]) for result in rehearsed]
    parts += [_others(judgement, rehearsed), _verdict(judgement, following, plan), _small_print(rehearsed)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _rank(result: RehearsedRank, rank: RankJudgement) -> list[str]:
    others = [str(number) for number in result.stands_for if number != result.pipeline_rank]
    also = f", as {', '.join(others)} would" if others else ""
    how = (
        f"traced under real {named_by_packages(result.versions).title} code"
        if result.on == ON_TRACE
        else "run on one GPU"
    )
    lines = (line for line in compared(result) if max(line.predicted_bytes, line.rehearsed_bytes or 0) >= SHOWN_BYTES)
    rows = [_row(line.term, line.predicted_bytes, line.rehearsed_bytes) for line in lines]
    rows += [_row("allocated peak", result.predicted_as_run.allocated_bytes, result.allocated_bytes, share=True)]
    rows += _beside(result, rank)
    rows += [_row("device peak", result.predicted.device_bytes, rank.device_bytes, share=True)]
    ended = ["  ran out of memory: the numbers are what it had reached"] if result.ran_out else []
    return [
        f"Pipeline rank {result.pipeline_rank}{also}: {how} in {result.seconds:.0f} s, GiB per device",
        table(["", "predicted", "rehearsed", "difference"], rows),
        *ended,
        f"  limit: {gib(rank.limit_bytes)} GiB, {rank.limit.reason}",
    ]


def _beside(result: RehearsedRank, rank: RankJudgement) -> list[list[str]]:
    """What makes a device peak of an allocated one, each with whose word it is."""
    left_out = {each.technique: rank.parts.get(each.technique, 0) for each in result.omissions}
    predicted = {**result.predicted.terms, "process": headline(result).predicted_bytes, **left_out}
    rows = []
    for name, count in rank.parts.items():
        if name == "allocated" or (name in left_out and not count):
            continue
        mark = "" if name in ("process", CACHE) else " *"
        rows.append(_row(f"{_plain(name)}{mark}", predicted.get(name, 0), count))
    return rows


def _row(name: str, predicted: int, rehearsed: int | None, share: bool = False) -> list[str]:
    if rehearsed is None:
        return [_plain(name), gib(predicted), "-", ""]
    difference = f"{(rehearsed - predicted) / GIB:+.2f}"
    if share and predicted:
        difference = f"{rehearsed / predicted - 1.0:+.2%}"
    return [_plain(name), gib(predicted), gib(rehearsed), difference]


def _plain(name: str) -> str:
    return name.replace("_", " ")


def _others(judgement: Judgement, shown: Collection[RehearsedRank]) -> list[str]:
    """Ranks rehearsed before, and those that keep their estimate, a line each."""
    before = [rank for rank in judgement.ranks if rank.rehearsed is not None and rank.rehearsed not in shown]
    left = [rank for rank in judgement.ranks if rank.rehearsed is None]
    lines = []
    if before:
        ranks = ", ".join(f"{rank.pipeline_rank} ({gib(rank.device_bytes)})" for rank in before)
        lines.append(f"Rehearsed before, GiB per device: pipeline rank{'s' if len(before) > 1 else ''} {ranks}")
    if left:
        most = max(left, key=lambda rank: rank.device_bytes)
        others = f"{len(left)} pipeline ranks keep their" if len(left) > 1 else "1 pipeline rank keeps its"
        at_most = f"{gib(most.device_bytes)} GiB{' at most' if len(left) > 1 else ''} (rank {most.pipeline_rank})"
        lines.append(f"{others} estimate, {at_most}; --rank all runs every one")
    return lines


def _verdict(judgement: Judgement, following: NextLayout | None, plan: Plan) -> list[str]:
    worst = judgement.worst
    lines = [
        f"Verdict: {judgement.verdict}. {gib(worst.device_bytes)} of {gib(worst.limit_bytes)} GiB; "
        f"{'; '.join(judgement.sentences)}"
    ]
    if following is not None:
        chosen = following.plan.chosen
        lines.append(
            f"Next layout: {chosen.describe()}, {gib(chosen.device_bytes)} GiB on its worst rank, "
            f"{chosen.step_seconds:.2f} s a step, {following.why}"
        )
    elif not judgement.safe and plan.advice:
        lines.append(plan.advice)
    return lines


def _unpredicted(rehearsed: Sequence[RehearsedRank]) -> list[str]:
    """What the terms are that no estimate has."""
    shown_terms = {
        line.term for result in rehearsed for line in compared(result) if (line.rehearsed_bytes or 0) >= SHOWN_BYTES
    }
    lines = {
        FORWARD: "what passes through a layer's forward pass, in which this peak lies: the estimate has no such moment",
        REMAINDER: "what could not be told apart",
    }
    return [f"{_plain(name)}: {explanation}" for name, explanation in lines.items() if name in shown_terms]


def _small_print(rehearsed: Sequence[RehearsedRank]) -> list[str]:
    lines = ["* from the estimate: no single rank shows it"]
    if any(result.on == ON_TRACE for result in rehearsed):
        lines.append(
            "A trace counts what is allocated exactly. The allocator's cache is the larger of a replay, which no GPU "
            "has validated yet, and the estimate"
        )
    versions = {name: version for result in rehearsed for name, version in result.versions.items()}
    if versions:
        lines.append("Run: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    lines += _unpredicted(rehearsed)
    lines += dict.fromkeys(_left_out(omission) for result in rehearsed for omission in result.omissions)
    lines += dict.fromkeys(f"Note: {remark}" for result in rehearsed for remark in result.remarks)
    return lines


def _left_out(omission: Omission) -> str:
    instead = "the estimate has no price for it" if omission.terms is None else "its bytes are from the estimate"
    return f"Left out: {omission.technique} of the planned job ({omission.why}); {instead}"


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
        "predicted_verdict": plan.verdict_by_estimate,
        "layout": plan.layout.as_json(),
        "ranks": [
            _rank_json(result)
            | {
                "device_bytes": judged[result.pipeline_rank].device_bytes,
                "device_parts": dict(judged[result.pipeline_rank].parts),
                "limit_bytes": judged[result.pipeline_rank].limit_bytes,
                "margin": judged[result.pipeline_rank].limit.reason,
            }
            for result in rehearsed
        ],
        "worst_pipeline_rank": judgement.worst.pipeline_rank,
        "reasons": list(judgement.sentences),
        "recorded": recorded,
        "next_layout": None if following is None else following.as_json(),
    }


def _rank_json(result: RehearsedRank) -> dict[str, Any]:
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
        "left_out": [
            omission.as_json() | {"added_bytes": result.priced.get(omission.technique)} for omission in result.omissions
        ],
    }
