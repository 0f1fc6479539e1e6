"""The screens of `llmlaunch check` and `plan`: whether a plan fits, how long it takes, why it is this layout, and which
come near it. What stands behind them is `report.plan_text`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from llmlaunch.frozen import frozen
from llmlaunch.layout import RECOMPUTE_NAMES, Layout
from llmlaunch.memory.estimator import RankEstimate
from llmlaunch.memory.peak import CACHE, MODEL_STATES, OUTSIDE_TORCH, RESIDUAL
from llmlaunch.planner.plan import Candidate, ExpectedEnd, Plan
from llmlaunch.recipe.types import Recipe
from llmlaunch.report.plan_sentences import headroom_sentence, job_text, neighbour_row, verdict_words
from llmlaunch.report.terminal import Surface, filled
from llmlaunch.report.text import table, with_coloured_verdict
from llmlaunch.rundir.values import counted, printable
from llmlaunch.units import duration, gib
from llmlaunch.verdicts import SAFE, TIGHT, UNKNOWN

if TYPE_CHECKING:
    from llmlaunch.planner.neighbours import Neighbour


MOST_RANKED = 4  # layouts, and reasons for refusal
MOST_NEARBY = 5
MOST_PINS = 3  # by name
MAY_RUN = (SAFE, TIGHT)
SAME = 1e-3  # share of a step time that no screen shows
LABEL = 8  # columns of the names in front of the rows


def check_screen(recipe: Recipe, plan: Plan, surface: Surface, remarks: Sequence[tuple[str, str]] = ()) -> str:
    """Return the screen. `remarks` are further rows, each a name of at most seven characters and a sentence."""
    rows = [("Layout", layout_words(plan.chosen)), ("", _reason(recipe, plan))]
    rows += [*_changed(plan), *_conditional(recipe, plan)]
    rows += _fewer_nodes(recipe, plan)
    if plan.verdict in MAY_RUN:  # nobody can run the others: what they take is of no use
        rows = [
            ("Time", _time(plan)),
            ("End", _end(plan)),
            ("Cost", _cost(plan)),
            *rows,
            *(remarks if plan.good else []),
        ]
    lines = [
        *_headline(plan, surface),
        *filled(printable(job_text(recipe)), surface.width, "  ", "  "),
        *memory_bars(plan, surface),
        *(line for name, text in rows for line in _row(name, text, surface)),
    ]
    return "\n".join(lines)


def plan_screen(recipe: Recipe, plan: Plan, neighbours: Sequence[Neighbour], surface: Surface) -> str:
    """Return the screen of `llmlaunch plan`: the layout, those ranked behind it, what changing one choice would cost,
    and what most of the others were refused for."""
    lines = [
        *_headline(plan, surface),
        *filled(printable(job_text(recipe)), surface.width, "  ", "  "),
        *_row("Layout", layout_words(plan.chosen), surface),
        *_row("", _reason(recipe, plan), surface),
        *(line for name, text in _changed(plan) for line in _row(name, text, surface)),
        *_ranked(plan, surface),
        *(_nearby(plan, neighbours, surface) if plan.verdict in MAY_RUN else []),
        *_row("Refused", _refused(plan), surface),
    ]
    return "\n".join(lines)


def _ranked(plan: Plan, surface: Surface) -> list[str]:
    candidates = (plan.chosen, *plan.alternatives)[:MOST_RANKED]
    rows = [
        [f"{place}.", f"{candidate.step_seconds:.2f}", gib(candidate.device_bytes)]
        for place, candidate in enumerate(candidates, start=1)
    ]
    title = {SAFE: "Ranked", UNKNOWN: "Ranked, without what is not known"}.get(
        plan.verdict, "Ranked, none of them safe"
    )
    remarks = [candidate.describe() for candidate in candidates]
    return [title, table(["", "s/step", "GiB"], rows, remarks=remarks, columns=surface.width)]


def _nearby(plan: Plan, neighbours: Sequence[Neighbour], surface: Surface) -> list[str]:
    """Return the changes of one choice that take least time, safe or not; a change that breaks a rule is not shown."""
    priced = [each for each in neighbours if each.verdict.step_seconds is not None]
    fastest = sorted(priced, key=lambda each: each.verdict.step_seconds or 0.0)[:MOST_NEARBY]
    rows = [neighbour_row(plan, each)[0] for each in fastest]
    if not rows:
        return []
    return [
        "One choice changed; less than 0 to spare is refused",
        table(["", "time", "GiB to spare"], rows, columns=surface.width),
    ]


def _refused(plan: Plan) -> str:
    """Return the most frequent reasons for refusal, a few words each."""
    ordered = sorted(plan.refused.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{count:,} {key.replace('_', ' ')}" for key, count in ordered[:MOST_RANKED])
    more = f" and {counted(len(ordered) - MOST_RANKED, 'other reason')}" if len(ordered) > MOST_RANKED else ""
    return f"of {plan.searched:,}: {shown}{more}" if shown else ""


def _headline(plan: Plan, surface: Surface) -> list[str]:
    """Return the verdict, and by how much it is that."""
    limit = plan.limit.limit_bytes
    beyond = plan.host_bytes_beyond
    places: tuple[str, ...]
    if beyond and plan.device_bytes <= limit and plan.host_limit is not None:
        needs = (plan.estimate.host_bytes_per_node or 0, plan.host_limit.limit_bytes)
        places = ("on host memory of a node",)
    else:
        needs = (plan.device_bytes, limit)
        device = plan.estimate.peak_kind == "device"
        places = ("on the fullest device", "a device") if device else ("on the largest process",)
    if plan.verdict == UNKNOWN:
        return _no_verdict(plan, surface, f"{gib(needs[0])} of {gib(needs[1])} GiB {places[0]}")
    free = needs[1] - needs[0]
    room = f"{gib(free)} to spare" if free >= 0 else f"{gib(-free)} too much"
    room += "; what arguments of your own take is not known" if plan.tight_by_arguments else ""
    figures = f"{plan.recipe}: {verdict_words(plan)}, {gib(needs[0])} of {gib(needs[1])} GiB"
    texts = [filled(printable(f"{figures} {place}, {room}"), surface.width, "", "  ") for place in places]
    first, *others = min(texts, key=len)  # the long words where they take no further line
    return [with_coloured_verdict(first, plan.verdict_with_budget, surface), *others]


def _no_verdict(plan: Plan, surface: Surface, needs: str) -> list[str]:
    """Return why there is no verdict, and what is needed without what was not read."""
    first, *others = filled(printable(f"{plan.recipe}: {verdict_words(plan)}: {plan.reason}"), surface.width, "", "  ")
    shown = with_coloured_verdict(first, plan.verdict_with_budget, surface)
    return [shown, *others, *filled(f"priced without it: {needs}", surface.width, "  ", "  ")]


def _row(name: str, text: str, surface: Surface) -> list[str]:
    return filled(printable(text), surface.width, f"{name:<{LABEL}}", " " * LABEL) if text else []


def _time(plan: Plan) -> str:
    whose = "GPU" if plan.estimate.peak_kind == "device" else "process"
    rate = f"{plan.chosen.tokens_per_second_per_gpu:,.0f} tokens/s a {whose}"
    mfu = [] if plan.mfu is None or whose != "GPU" else [f"MFU {plan.mfu:.0%}"]
    measured = plan.time.measured
    exact = measured is not None and abs(plan.chosen.step_seconds / measured.step_seconds - 1) < SAME
    source = [f"as measured in {counted(measured.runs, 'run')}"] if measured is not None and exact else []
    return ", ".join([f"{plan.chosen.step_seconds:,.2f} s a step", rate, *mfu, *source])


def _end(plan: Plan) -> str:
    """Return how long the job is expected to take; of a plan that is no whole job's, its bare length."""
    end, steps = plan.expected, counted(plan.length.steps, "step", ",")
    if end is None or end.p50_seconds is None or end.step_time_spread is not None:
        return f"{_expected(end, plan)} for {steps}"
    return (
        f"in {duration(end.p50_seconds)} for {steps}, if steps take as long as predicted: {end.step_time_source} "
        "stands behind that"
    )


def _expected(end: ExpectedEnd | None, plan: Plan) -> str:
    if end is None:
        return f"in {duration(plan.length.seconds)}"
    if end.p50_seconds is None:
        return "perhaps never, with the stops to expect and as seldom as it saves,"
    late = "perhaps never" if end.p95_seconds is None else f"within {duration(end.p95_seconds)}"
    return f"in {duration(end.p50_seconds)}, 95 % sure {late}"


def _cost(plan: Plan) -> str:
    """Return the GPU-hours; nothing of processors, which nobody counts like that."""
    if plan.estimate.peak_kind != "device":
        return ""
    hours = plan.length.gpu_hours
    budget = plan.budget.gpu_hours
    allowed = "" if budget is None else f" of {budget:,.10g} allowed"
    return f"{hours:,.{0 if hours >= 100 else 1}f} GPU-hours{allowed}"


def layout_words(chosen: Candidate) -> str:
    """Return a layout with its techniques for a person: `TP8 PP2 DP4, micro-batch 2, ZeRO 1, sequence parallel`."""
    return ", ".join([" ".join(_size_words(chosen.layout)), *_other_words(chosen)])


def _difference(candidate: Candidate, chosen: Candidate) -> str:
    """Return in what a layout differs from the chosen one: `PP2 VPP20 DP32`, `the same without recompute mlp`."""
    sizes, others = _size_words(candidate.layout), _other_words(candidate)
    chosen_words = [*_size_words(chosen.layout), *_other_words(chosen)]
    own = [" ".join(word for word in sizes if word not in chosen_words)]
    own += [word for word in others if word not in chosen_words]
    kinds = {_kind(word) for word in (*sizes, *others)}
    lacks = [word for word in chosen_words if _kind(word) not in kinds]
    differs = ", ".join(filter(None, own)) or "the same"
    return f"{differs} without {', '.join(lacks)}" if lacks else differs


def _kind(word: str) -> str:
    """Return what a word of a layout is about, whatever its value: `VPP` of `VPP20`, `recompute` of `recompute mlp`."""
    return word.rstrip("0123456789").partition(" ")[0].partition("=")[0]


def _size_words(layout: Layout) -> list[str]:
    sizes = [f"TP{layout.tensor}", f"PP{layout.pipeline}"]
    sizes += [f"VPP{layout.virtual_pipeline}"] if layout.virtual_pipeline > 1 else []
    sizes += [f"DP{layout.data}", f"CP{layout.context}"]
    sizes += [f"EP{layout.expert}"] if layout.expert > 1 else []
    sizes += [f"ETP{layout.expert_tensor}"] if layout.expert_tensor > 1 else []
    return sizes


def _other_words(chosen: Candidate) -> list[str]:
    layout = chosen.layout
    parts = [f"micro-batch {layout.micro_batch_size}", f"ZeRO {layout.zero_stage}"]
    parts += ["sequence parallel"] if layout.sequence_parallel else []
    return [*parts, *_technique_words(chosen)]


def _technique_words(chosen: Candidate) -> list[str]:
    layout, kind = chosen.layout, chosen.recompute_kind
    words = []
    if layout.recompute:
        layers = f" of {counted(layout.recompute_layers, 'layer')}" if layout.recompute_layers else ""
        words.append(f"recompute {kind or RECOMPUTE_NAMES[layout.recompute]}{layers}")
    words += [f"offload {counted(layout.offload_layers, 'layer')}"] if layout.offload_layers else []
    words += [f"layers {layout.layer_runs()}"] if layout.uneven else []
    return [*words, *chosen.technique_labels()]


def _reason(recipe: Recipe, plan: Plan) -> str:
    """Return in one sentence why it is this layout."""
    if plan.locked_by:
        return f"kept by {plan.locked_by}"
    searched, pins = f"{counted(plan.searched, 'layout', ',')} searched", _pins(recipe)
    if plan.verdict != SAFE and not plan.tight_by_arguments:
        if plan.verdict == UNKNOWN:
            return f"of {searched}{pins}, the nearest to what is not known"
        nearest = "the fastest tight one" if plan.verdict == TIGHT else "the nearest"
        return f"{nearest} of {searched}{pins}; none is safe"
    if plan.searched == 1:
        return f"the one layout there is{pins}"
    if plan.fuller is not None:
        return f"{headroom_sentence(plan.fuller, _difference(plan.fuller.candidate, plan.chosen))}; of {searched}{pins}"
    if plan.faster is None:
        return f"the fastest safe one of {searched}{pins}"
    habits = " and ".join(habit.name for habit in plan.faster.habits)
    return f"of {searched}{pins}, the simplest close to the fastest, which gains {plan.faster.gain:.1%} with {habits}"


def _changed(plan: Plan) -> list[tuple[str, str]]:
    """Return that a measured run changed the layout, and from which; no row where none did."""
    return [] if plan.changed is None else [("", plan.changed.sentence(plan.chosen))]


def _pins(recipe: Recipe) -> str:
    if not recipe.pins:
        return ""
    named = ", ".join(recipe.pins) if len(recipe.pins) <= MOST_PINS else f"{len(recipe.pins)} sizes"
    return f" with {named} given"


def _fewer_nodes(recipe: Recipe, plan: Plan) -> list[tuple[str, str]]:
    """Return a row for each number of nodes with which the job goes on where nodes are lost."""
    if plan.fewer_nodes is None:
        return []
    from llmlaunch.report.fewer_nodes_text import fewer_nodes_sentences

    sentences = fewer_nodes_sentences(recipe, plan)
    return [("" if number else "Fewer", sentence) for number, sentence in enumerate(sentences)]


def _conditional(recipe: Recipe, plan: Plan) -> list[tuple[str, str]]:
    """Return the rows of what the recipe asks for beside a layout, and of what was measured of it."""
    rows = []
    if plan.faster_on_fewer is not None:
        from llmlaunch.report.fewer_nodes_text import faster_on_fewer_sentence

        rows.append(("Faster", faster_on_fewer_sentence(recipe, plan)))
    if plan.rehearsed is not None:
        rows.append(("Tried", plan.rehearsed.sentence))
    if plan.sizing is not None and plan.sizing.nodes is not None:
        rows.append(("Nodes", f"{plan.sizing.nodes} are the fewest that do (nodes: auto)"))
    if plan.fallbacks is not None:
        layouts = plan.fallbacks.layouts
        text = f"if memory runs out: {layouts[0].plan.chosen.describe()}" if layouts else str(plan.fallbacks.missing)
        rows.append(("Then", text))
    rows += [("What if", what_if.sentence) for what_if in plan.what_ifs]
    return rows + [("Checked", f"but not rendered: {sentence}") for sentence in plan.unrendered]


def no_verdict_screen(name: str, reason: str, surface: Surface, assumed: Sequence[tuple[str, Plan]] = ()) -> str:
    """Return the reason, and below it the memory of the job under each assumption, with the verdict it would have."""
    first, *others = filled(printable(f"{name}: {UNKNOWN}: {reason}"), surface.width, "", "  ")
    lines = [with_coloured_verdict(first, UNKNOWN, surface), *others]
    if assumed:
        rows = [[words, gib(plan.device_bytes), gib(plan.limit.limit_bytes), plan.verdict] for words, plan in assumed]
        lines += ["", table(["it would be with", "GiB", "of", "verdict"], rows, columns=surface.width)]
    return "\n".join(lines)


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
