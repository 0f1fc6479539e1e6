"""Predicted memory of the pipeline ranks as bars, with the limit and the end of the card drawn into them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click

from llmlaunch.frozen import frozen
from llmlaunch.memory.estimator import RankEstimate
from llmlaunch.memory.peak import CACHE, MODEL_STATES, OUTSIDE_TORCH, RESIDUAL
from llmlaunch.planner.plan import Plan
from llmlaunch.report.terminal import Surface
from llmlaunch.units import gib

MOST_ROWS = 5
WIDEST = 100  # columns: a longer bar tells no more
USUAL = 80
OTHER_TERMS = frozenset((CACHE, RESIDUAL, *OUTSIDE_TORCH))


@frozen
class BarGlyphs:
    """The characters of a bar."""

    states: str
    transient: str
    other: str
    limit: str
    card: str


BLOCKS = BarGlyphs("█", "▓", "░", "│", "▏")
LETTERS = BarGlyphs("#", "=", "-", "|", "]")
COLOURS = {"states": "cyan", "transient": "magenta"}  # both readable on white and on black; the others stay plain


@frozen
class AlikeRanks:
    """Pipeline ranks whose bars look alike. `rank` is the fullest of them."""

    ranks: tuple[int, ...]
    rank: RankEstimate
    alike: bool = True

    def label(self) -> str:
        """Return `rank 0`, `ranks 1-6`, or `11 others` of ranks that differ."""
        if not self.alike:
            return f"{len(self.ranks)} others"
        return f"rank{'s' if len(self.ranks) > 1 else ''} {_spans(self.ranks)}"


def memory_bars(plan: Plan, surface: Surface) -> list[str]:
    """Return a legend and a bar for each group of alike pipeline ranks, the fullest first; the last bar stands for all
    ranks that have none of their own, and is that of the fullest of them."""
    glyphs = BLOCKS if surface.blocks else LETTERS
    groups = _groups(plan.estimate.ranks)
    labels = [group.label() for group in groups]
    sizes = [f"{'' if group.alike else '<= '}{gib(group.rank.device_bytes)}" for group in groups]
    beside = 2 + max(map(len, labels)) + 1 + 2 + max(map(len, sizes))
    cells = max(min(surface.width or USUAL, WIDEST) - beside, 8)
    label_width, size_width = max(map(len, labels)), max(map(len, sizes))
    lines = [_legend(plan, glyphs, surface)]
    for group, label, size in zip(groups, labels, sizes, strict=True):
        bar = _bar(plan, group.rank, cells, glyphs, surface)
        lines.append(f"  {label:<{label_width}} {bar} {size:>{size_width}}")
    return lines


def _legend(plan: Plan, glyphs: BarGlyphs, surface: Surface) -> str:
    whose = "device" if plan.estimate.peak_kind == "device" else "process"
    shades = [(glyphs.states, "states"), (glyphs.transient, "transient"), (glyphs.other, "other")]
    shown = "  ".join(f"{_coloured(glyph, name, surface)} {name}" for glyph, name in shades)
    limit, card = gib(plan.limit.limit_bytes), gib(plan.limit.memory_bytes)
    return f"Memory  GiB a {whose}: {shown}  {glyphs.limit} limit {limit}  {glyphs.card} all {card}"


def _groups(ranks: Sequence[RankEstimate]) -> list[AlikeRanks]:
    alike: dict[tuple[str, ...], list[RankEstimate]] = {}
    for rank in ranks:
        alike.setdefault(tuple(map(gib, (*_shares(rank), rank.device_bytes))), []).append(rank)
    groups = [AlikeRanks(tuple(r.pipeline_rank for r in members), members[0]) for members in alike.values()]
    groups.sort(key=lambda group: (-group.rank.device_bytes, group.ranks))
    if len(groups) <= MOST_ROWS:
        return groups
    shown, rest = groups[: MOST_ROWS - 1], groups[MOST_ROWS - 1 :]
    return [
        *shown,
        AlikeRanks(tuple(sorted(rank for group in rest for rank in group.ranks)), rest[0].rank, alike=False),
    ]


def _spans(ranks: Sequence[int]) -> str:
    """Return `0-2,5`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)


def _shares(rank: RankEstimate) -> tuple[int, int, int]:
    """Return the bytes of model states, of what comes and goes within a step, and of everything else."""
    states = _sum(rank, MODEL_STATES)
    other = _sum(rank, OTHER_TERMS)
    return states, rank.device_bytes - states - other, other


def _sum(rank: RankEstimate, names: Iterable[str]) -> int:
    return sum(rank.terms.get(name, 0) for name in names)


def _bar(plan: Plan, rank: RankEstimate, cells: int, glyphs: BarGlyphs, surface: Surface) -> str:
    """Return the bar in so many cells and the mark of the card's end. A bar crosses the mark of the limit exactly where
    the rank needs more than the limit."""
    limit, card = plan.limit.limit_bytes, plan.limit.memory_bytes
    whole = max(card, plan.estimate.worst.device_bytes, 1)
    states, transient, _ = _shares(rank)
    at_limit = min(int(limit / whole * cells), cells - 1)
    needed = round(rank.device_bytes / whole * cells)
    needed = max(needed, min(at_limit + 2, cells)) if rank.device_bytes > limit else min(needed, at_limit)
    ends = {"states": round(states / whole * cells), "transient": round((states + transient) / whole * cells)}
    kinds = [next((kind for kind, end in ends.items() if i < end), "other") for i in range(needed)]
    row = [_coloured(getattr(glyphs, kind), kind, surface) for kind in kinds] + [" "] * (cells - needed)
    row[at_limit] = _coloured(glyphs.limit, "limit", surface)
    at_card = round(card / whole * cells)
    if at_card < cells:
        row[at_card] = glyphs.card
        return "".join([*row, " "])
    return "".join([*row, glyphs.card])


def _coloured(glyph: str, kind: str, surface: Surface) -> str:
    colour = COLOURS.get(kind)
    return click.style(glyph, fg=colour) if surface.colours and colour else glyph
