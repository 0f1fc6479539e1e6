"""What `llmlaunch plan` shows beside the chosen layout: its neighbours, the Pareto front, and what was refused."""

from __future__ import annotations

from collections.abc import Sequence

from llmlaunch.planner.neighbours import Neighbour
from llmlaunch.planner.plan import Candidate, Plan
from llmlaunch.report.text import table
from llmlaunch.units import GIB, gib

__all__ = ["front_text", "neighbours_text", "refused_text"]

SHOWN_STEP_BYTES = GIB  # the front as text shows a layout where it frees at least so much more


def neighbours_text(plan: Plan, found: Sequence[Neighbour]) -> list[str]:
    """Time and head-room of each neighbour against the plan's layout; of those refused, why."""
    rows = [_row(plan, one) for one in found]
    if not rows:
        return []
    head = ["", "time", "GiB to spare"]
    lines = table(head, [row for row, _ in rows]).split("\n")
    remarks = ["", *(remark for _, remark in rows)]
    width = max(map(len, lines))
    said = [f"{line.ljust(width)}  {remark}".rstrip() for line, remark in zip(lines, remarks, strict=True)]
    return ["Neighbours of this layout: one choice changed, data parallelism takes up the rest", *said]


def _row(plan: Plan, one: Neighbour) -> tuple[list[str], str]:
    judged = one.verdict
    change = f"{one.name.replace('_', ' ')} {_plain(one.before)} -> {_plain(one.after)}"
    for name, value in one.along.items():
        change += f", {name.replace('_', ' ')} {_plain(value)}"
    remark = "" if judged.refusal is None else f"refused: {judged.refusal.reason}"
    if judged.step_seconds is None or judged.device_bytes is None:
        return [change, "", ""], remark
    time = 100 * (judged.step_seconds / plan.chosen.step_seconds - 1)
    return [change, f"{time:+.1f} %", gib(plan.limit.limit_bytes - judged.device_bytes)], remark


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "default" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def front_text(plan: Plan, front: Sequence[Candidate]) -> list[str]:
    """The Pareto front, thinned for a person: a layout is shown where it frees a GiB more than the last one shown, and
    the one that frees the most of all."""
    shown: list[Candidate] = []
    for one in front:
        if not shown or shown[-1].device_bytes - one.device_bytes >= SHOWN_STEP_BYTES or one is front[-1]:
            shown.append(one)
    if not shown:
        return ["Pareto front: empty, no layout is safe"]
    rows = [
        [
            one.describe(),
            f"{one.step_seconds:.2f}",
            f"{100 * (one.step_seconds / front[0].step_seconds - 1):+.1f} %",
            gib(plan.limit.limit_bytes - one.device_bytes),
        ]
        for one in shown
    ]
    return [
        f"Pareto front of step time against head-room: {len(front)} safe layouts that none beats in both"
        + (f", {len(shown)} shown (each at least 1 GiB apart; --json has all)" if len(shown) < len(front) else ""),
        table(["", "s/step", "time", "GiB to spare"], rows),
    ]


def refused_text(plan: Plan) -> list[str]:
    """How many layouts were refused for what: the first rule each fails, else memory."""
    safe = plan.searched - sum(plan.refused.values())
    head = f"Searched {plan.searched:,} layouts: {safe:,} are legal and safe"
    if not plan.refused:
        return [head]
    ordered = sorted(plan.refused.items(), key=lambda item: -item[1])
    return [
        f"{head}; refused, each for the first reason that applies:",
        *(f"  {count:>9,}  {key}: {plan.refusal_sentences.get(key, '')}" for key, count in ordered),
    ]
