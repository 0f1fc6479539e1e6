"""A plan for a person: verdict first, then memory by rank and term, time, and what was refused."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from llmlaunch.calibration.evidence import FUJII_SHARE
from llmlaunch.calibration.margins import Margin
from llmlaunch.memory.estimator import RankEstimate
from llmlaunch.planner.placement import ExpectedPlacement
from llmlaunch.planner.plan import (
    NO_LAYOUT,
    Candidate,
    ExpectedEnd,
    Fallback,
    JobLength,
    Plan,
    fujii_verdict,
)
from llmlaunch.planner.preference import headroom_rule
from llmlaunch.planner.refusal import correction_text, risk_text, unknown_arguments_text
from llmlaunch.recipe.types import Budget, Recipe
from llmlaunch.report.fewer_nodes_text import faster_on_fewer_sentence, fewer_nodes_table
from llmlaunch.report.plan_sentences import headroom_sentence, job_text, neighbour_row, verdict_words
from llmlaunch.report.text import signed_percent, table
from llmlaunch.rundir.values import counted
from llmlaunch.units import duration, gib
from llmlaunch.verdicts import SAFE, TIGHT, UNKNOWN, UNSAFE

if TYPE_CHECKING:
    from llmlaunch.planner.neighbours import Neighbour


def check_text(recipe: Recipe, plan: Plan) -> str:
    """What stands behind the screen of `llmlaunch check`, and below it with `--verbose`."""
    searched = f"{_searched(plan)} (llmlaunch plan shows {'the others' if plan.verdict in (SAFE, UNKNOWN) else 'why'})"
    return "\n".join([*_figures(recipe, plan), "", searched, *_small_print(plan)])


def _searched(plan: Plan) -> str:
    count = plan.searched - sum(plan.refused.values())
    searched, are = f"Searched {counted(plan.searched, 'layout', ',')}", "is" if count == 1 else "are"
    if plan.verdict == UNKNOWN:
        return f"{searched}; which of them are safe is not known"
    if plan.verdict == TIGHT and not plan.tight_by_arguments:
        return f"{searched}; none is safe, and {count:,} {are} tight"
    safe = "safe but for arguments of your own" if plan.tight_by_arguments else "safe"
    return f"{searched}; {f'{count:,} {are} legal and {safe}' if count else 'none is safe'}"


def plan_text(recipe: Recipe, plan: Plan, neighbours: Sequence[Neighbour] = ()) -> str:
    """What `llmlaunch plan` prints: the same, with the runners-up, the neighbours, and every reason for refusal."""
    parts = [
        _figures(recipe, plan),
        _alternatives(plan),
        neighbours_text(plan, neighbours),
        [*_refused_text(plan), *_small_print(plan)],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _figures(recipe: Recipe, plan: Plan) -> list[str]:
    memory_and_time = [*_memory(plan), *_host(plan), "", *_time(plan)]
    faster = [] if plan.faster_on_fewer is None else [f"Faster {faster_on_fewer_sentence(recipe, plan)}"]
    others = [*faster, *fallback_text(recipe, plan), *fewer_nodes_table(recipe, plan)]
    return [*_headline(recipe, plan), "", *memory_and_time, *others]


def _headline(recipe: Recipe, plan: Plan) -> list[str]:
    return [
        f"{recipe.name}: {verdict_words(plan)}{f': {plan.reason};' if plan.reason else ''}  {plan.layout.describe()}",
        f"  {job_text(recipe)}",
        *_techniques(recipe),
        *_arguments(plan),
        *_sizing(plan),
    ]


def _arguments(plan: Plan) -> list[str]:
    """The person's own arguments by class."""
    by_class = (plan.arguments.as_json() or {}).items()
    text = "; ".join(f"{kind}: {', '.join(arguments)}" for kind, arguments in by_class if arguments)
    return wrap(f"your arguments: {text}", 120, initial_indent="  ", subsequent_indent="    ") if text else []


def replan_text(kept: Plan, anew: Plan) -> str:
    """Return what planning anew would change of a locked plan, and what that gains."""
    if (kept.chosen.layout, kept.chosen.techniques) == (anew.chosen.layout, anew.chosen.techniques):
        return "planning anew would choose the same"
    before, after = kept.chosen.step_seconds, anew.chosen.step_seconds
    pace = f"{100 * abs(before / after - 1):.1f} % {'faster' if after < before else 'slower'}"
    return (
        f"planning anew would change {kept.chosen.describe()} to {anew.chosen.describe()}: {after:.3g} s a step in "
        f"place of {before:.3g} ({pace}), {gib(anew.device_bytes)} GiB in place of {gib(kept.device_bytes)}, "
        f"{anew.verdict} in place of {kept.verdict}"
    )


def _sizing(plan: Plan) -> list[str]:
    """How the number of nodes was chosen: the fewest that do, and why one fewer does not."""
    if plan.sizing is None:
        return []
    *fewer, last = plan.sizing.tried
    if last.refused is not None:
        return [f"  nodes: auto: nothing from 1 to {_nodes(last.nodes)} does; shown is the nearest"]
    lines = [f"  nodes: auto: the smallest cluster that does has {_nodes(last.nodes)}"]
    searched = [tried for tried in fewer if tried.refused != NO_LAYOUT]
    shown = [*searched[-1:], *(tried for tried in fewer[-1:] if tried not in searched)]
    return lines + [f"    {_nodes(tried.nodes)}: {tried.reason}" for tried in shown]


def _nodes(count: int) -> str:
    return f"{count} node" + ("s" if count > 1 else "")


def _techniques(recipe: Recipe) -> list[str]:
    """What the recipe trades time for memory with, by the names of `Techniques`."""
    settings = [f"{name} {_plain(value)}" for name, value in recipe.techniques.as_json().items()]
    return [f"  with {', '.join(settings)}"] if settings else []


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {_plain(item)}" for name, item in value.items())
    if isinstance(value, bool):
        return "on" if value else "off"
    return " + ".join(map(str, value)) if isinstance(value, list) else str(value)


def _memory(plan: Plan) -> list[str]:
    """Terms down, pipeline ranks across: what one rank is made of reads from top to bottom."""
    worst, kind, ranks = plan.estimate.worst, plan.estimate.peak_kind, _shown_ranks(plan)
    terms = [name for name in worst.terms if any(r.terms[name] for r in plan.estimate.ranks)]
    rows = [[name.replace("_", " "), *(gib(r.terms[name]) for r in ranks)] for name in terms]
    rows.append([f"{kind} peak", *(gib(r.device_bytes) for r in ranks)])
    free = plan.limit.limit_bytes - worst.device_bytes
    room = f"{gib(free)} to spare" if free >= 0 else f"{gib(-free)} too much"
    return [
        f"Memory, GiB per device; the worst pipeline rank is {worst.pipeline_rank}: {gib(worst.device_bytes)} of "
        f"{gib(plan.limit.limit_bytes)}, {room}",
        table(["pipeline rank", *(str(r.pipeline_rank) for r in ranks)], rows),
        *_limit(plan.limit),
        *_tightness(plan),
        *fujii_line(plan),
        *_measured(plan),
    ]


def _limit(limit: Margin) -> list[str]:
    """What the limit is made of, and how many runs stand behind it: a line, or two."""
    source = limit.memory_source.split(":")[0]
    text = f"limit: {limit.reason}; device memory is {gib(limit.memory_bytes)} GiB by {source}"
    return wrap(text, 120, initial_indent="  ", subsequent_indent="    ")


def _tightness(plan: Plan) -> list[str]:
    """What a size beyond the limit risks, and what is left of the card; of another size the risk alone."""
    if plan.verdict != TIGHT:
        return [] if plan.stated_risk is None else [f"  {risk_text(plan)}"]
    if plan.tight_by_arguments:
        return wrap(f"tight: {unknown_arguments_text(plan)}", 120, initial_indent="  ", subsequent_indent="    ")
    left = gib(plan.limit.most_bytes - plan.device_bytes)
    return [f"  tight: {left} GiB less than the {gib(plan.limit.most_bytes)} that fit the card; {risk_text(plan)}"]


def fujii_line(plan: Plan) -> list[str]:
    """What Fujii et al.'s rule would have said; nothing of a CPU, whose limit is a share of its own."""
    if plan.estimate.peak_kind != "device":
        return []
    needs, memory = plan.device_bytes, plan.limit.memory_bytes
    verdict = fujii_verdict(needs, memory)
    return [f"  Fujii's 80 % rule: {verdict}, {gib(needs)} of {gib(FUJII_SHARE * memory)} GiB"]


def _measured(plan: Plan) -> list[str]:
    """What measured runs say of predictions of this kind, and what of it is in the numbers."""
    support, correction = plan.limit.support, plan.correction
    lines = []
    if support is not None:
        lines.append(f"  {'own runs' if support.runs else 'evidence'}: {support.sentence}{_beyond(plan.limit)}")
    if support is not None and support.runs and support.widened is not None:
        lines.append(f"  new: {support.widened}")
    if correction.torch_share or correction.outside_bytes:
        lines.append(f"  {correction_text(plan)}")
    if plan.rehearsed is not None:
        lines.append(f"  {plan.rehearsed.sentence}")
    return lines


def _beyond(limit: Margin) -> str:
    """That runs exceeded their predictions by more than the limit leaves."""
    most = 0.0 if limit.support is None else limit.support.highest or 0.0
    return "; that is more than the limit leaves free" if most * limit.limit_bytes > limit.memory_bytes else ""


def _host(plan: Plan) -> list[str]:
    """One line, and what it is made of: nobody reads a table for the host unless it overflows."""
    needs, limit = plan.estimate.host_bytes_per_node, plan.host_limit
    if needs is None or limit is None:
        return []
    parts = sorted(plan.estimate.host_terms.items(), key=lambda item: -item[1])
    made_of = ", ".join(f"{name.replace('_', ' ')} {gib(value)}" for name, value in parts if value)
    return [
        "",
        f"Host memory, GiB per node: {gib(needs)} of {gib(limit.limit_bytes)}, {limit.reason}",
        f"  {made_of}",
    ]


def _shown_ranks(plan: Plan) -> list[RankEstimate]:
    ranks = list(plan.estimate.ranks)
    if len(ranks) <= 8:
        return ranks
    keep = {0, 1, len(ranks) - 2, len(ranks) - 1, plan.estimate.worst.pipeline_rank}
    return [r for r in ranks if r.pipeline_rank in keep]


def _time(plan: Plan) -> list[str]:
    seconds = plan.chosen.step_seconds
    mfu = "" if plan.mfu is None else f", MFU {plan.mfu:.0%}"
    shares = sorted(plan.step_terms.items(), key=lambda item: -item[1])
    parts = ", ".join(
        f"{name.replace('_', ' ')} {value / seconds:.0%}" for name, value in shares if value > 0.005 * seconds
    )
    return [
        f"Time: {seconds:.2f} s a step, {plan.chosen.tokens_per_second_per_gpu:,.0f} tokens/s per device{mfu}",
        f"  {parts}",
        *(f"  {line}" for line in _time_evidence(plan)),
        *length_lines(plan),
        *(f"What if {what_if.sentence}" for what_if in plan.what_ifs),
        *([] if plan.changed is None else [plan.changed.sentence(plan.chosen)]),
        *_fuller(plan),
        *_faster(plan),
    ]


def _fuller(plan: Plan) -> list[str]:
    """The layout that gave way to a roomier one, and why."""
    if plan.fuller is None:
        return []
    fuller, reason = plan.fuller.candidate, headroom_rule().reason
    figures = f"{fuller.step_seconds:.2f} s a step, {gib(fuller.device_bytes)} GiB"
    return [f"{headroom_sentence(plan.fuller, fuller.describe())}: {figures}", f"  {reason}"]


def _faster(plan: Plan) -> list[str]:
    """The fastest layout, where the preference chose a plainer one, and the habits it goes against."""
    if plan.faster is None:
        return []
    faster = plan.faster.candidate
    habits = [f"    {habit.name} ({100 * habit.price:.2g} % of a step): {habit.reason}" for habit in plan.faster.habits]
    return [
        f"{plan.faster.gain:.1%} faster without the preference (layout.preference: off): {faster.describe()}, "
        f"{faster.step_seconds:.2f} s a step, {gib(faster.device_bytes)} GiB",
        "  passed over for:",
        *habits,
    ]


def _time_evidence(plan: Plan) -> list[str]:
    """Return what measured runs say of the plan's step time, a sentence each; nothing where they say nothing."""
    correction, measured = plan.time.correction, plan.time.measured
    lines = []
    if not correction.changes_nothing and correction.runs:
        change = signed_percent(plan.time.predicted_seconds / plan.time.uncorrected_seconds - 1.0)
        lines.append(f"step time corrected by {counted(correction.runs, 'run')} on this cluster: {change}")
    if measured is not None:
        over = f"the median of {measured.runs} runs" if measured.runs > 1 else "one run"
        off = signed_percent(measured.step_seconds / plan.time.predicted_seconds - 1.0)
        lines.append(
            f"step time as measured: {over} of this very job in this layout (the last is {measured.run_id}), {off} "
            "to the prediction"
        )
        if not measured.decides:
            lines.append("until two runs of it agree, all layouts are taken to be off by as much, and none is refused")
    elif correction.job_factor * plan.time.shared_factor != 1.0:
        change = signed_percent(correction.job_factor * plan.time.shared_factor - 1.0)
        lines.append(f"step time corrected by runs of this job in other layouts: {change}")
    return lines


def _small_print(plan: Plan) -> list[str]:
    lines = ["Not modelled:", *(f"  {what}" for what in plan.not_modelled)]
    lines += [f"Assumed: {sentence}" for sentence in plan.assumptions]
    return lines


def _alternatives(plan: Plan) -> list[str]:
    def row(place: int, c: Candidate) -> list[str]:
        rate = f"{c.tokens_per_second_per_gpu:,.0f}"
        return [f"{place}. {c.describe()}", gib(c.device_bytes), f"{c.step_seconds:.2f}", rate]

    rows = [row(i + 1, c) for i, c in enumerate((plan.chosen, *plan.alternatives))]
    return [ranked_title(plan), table(["", "GiB worst rank", "s/step", "tokens/s/device"], rows)]


def ranked_title(plan: Plan) -> str:
    """Return the title of the ranked layouts, which says what all of them are."""
    titles = {
        SAFE: "Ranked layouts",
        TIGHT: "Ranked layouts, all of them tight",
        UNSAFE: "Closest layouts, none of them safe",
        UNKNOWN: "Ranked layouts, without what is not known",
    }
    return titles[plan.verdict]


AFTER_CHECKPOINT = {
    "reshard": "before the first checkpoint only: cannot load one",
    "restart": "from step 0, in a checkpoint folder of its own",
    "stop": "before the first checkpoint only",
}


def fallback_text(recipe: Recipe, plan: Plan) -> list[str]:
    """Return one line for each fallback layout, and why there are fewer than requested, if any are."""
    fallbacks = plan.fallbacks
    if fallbacks is None:
        return []
    if not fallbacks.layouts:
        return ["", str(fallbacks.missing)]
    rows = [_row(plan, number, fallback) for number, fallback in enumerate(fallbacks.layouts, 1)]
    notes = ["; ".join(filter(None, _notes(recipe, fallback))) for fallback in fallbacks.layouts]
    title = "If a device runs out of memory, the same job continues with"
    lines = table(["", "GiB worst rank", "s/step", ""], rows, remarks=notes)
    return ["", title, lines, *([fallbacks.missing] if fallbacks.missing else [])]


def _row(plan: Plan, number: int, fallback: Fallback) -> list[str]:
    chosen = fallback.plan.chosen
    slower = chosen.step_seconds / plan.chosen.step_seconds - 1.0
    figures = [gib(chosen.device_bytes), f"{chosen.step_seconds:.2f}", f"{slower:+.1%}"]
    return [f"{number}. {chosen.describe()}", *figures]


def _notes(recipe: Recipe, fallback: Fallback) -> list[str]:
    """Which pins a fallback changes, and what becomes of checkpoints."""
    return [fallback.change or "", _after_checkpoint(recipe, fallback)]


def _after_checkpoint(recipe: Recipe, fallback: Fallback) -> str:
    """What becomes of checkpoints there may be by then."""
    if recipe.training.checkpoint_path is None:
        return ""
    wanted = recipe.on_oom.after_checkpoint
    if any(fallback.loads) and wanted != "stop":
        whose = (f"{place}." if place else "the planned layout" for place, able in enumerate(fallback.loads) if able)
        return "from the last checkpoint" if all(fallback.loads) else f"from a checkpoint of {' or '.join(whose)}"
    return AFTER_CHECKPOINT[wanted]


LEAST_GAIN = 0.0005  # of a step: what is worth naming


def placement_text(expected: ExpectedPlacement) -> str:
    """On the first nodes of the matrix; the job itself chooses among the nodes it gets."""
    among = f"on the first {counted(len(expected.nodes), 'node')} of the measured matrix"
    before = expected.slurm_order_step_seconds
    share = expected.gain_seconds / before
    if share < LEAST_GAIN:
        return f"Placement: no order of the nodes was found to be faster than SLURM's {among}"
    return (
        f"Placement: the best order of the nodes saves about {expected.gain_seconds:.3g} s a step ({share:.1%} of the "
        f"{before:.3g} s in SLURM's order) {among}; the job chooses its order when it starts"
    )


def neighbours_text(plan: Plan, neighbours: Sequence[Neighbour]) -> list[str]:
    """Time and head-room of each neighbour against the plan's layout; of those refused, why."""
    rows = [neighbour_row(plan, neighbour) for neighbour in neighbours]
    if not rows:
        return []
    lines = table(["", "time", "GiB to spare"], [row for row, _ in rows], remarks=[remark for _, remark in rows])
    return ["Neighbours of this layout: one choice changed, data parallelism takes up the rest", lines]


def _refused_text(plan: Plan) -> list[str]:
    """How many layouts were refused for what: the first rule each fails, else memory."""
    head = _searched(plan)
    if not plan.refused:
        return [head]
    ordered = sorted(plan.refused.items(), key=lambda item: -item[1])
    return [
        f"{head}; refused, each for the first reason that applies:",
        *(f"  {count:>9,}  {key}: {plan.refusal_sentences.get(key, '')}" for key, count in ordered),
    ]


def length_lines(plan: Plan) -> list[str]:
    """Return the length of the job if nothing happens, and when it is expected to end with saves and stops."""
    return [_length(plan.length) + _allowed(plan.budget), *_expected(plan)]


def _length(length: JobLength) -> str:
    evaluating = f", {duration(length.evaluation_seconds)} of it evaluation" if length.evaluation_seconds else ""
    return (
        f"Job: {counted(length.steps, 'step', ',')}, {_tokens(length.tokens)} tokens: {duration(length.seconds)}, "
        f"{length.gpu_hours:,.{0 if length.gpu_hours >= 100 else 1}f} GPU-hours{evaluating}"
    )


def _tokens(count: int) -> str:
    for times, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= times:
            return f"{count / times:,.4g}{unit}"
    return f"{count:,}"


def _allowed(budget: Budget) -> str:
    days = [] if budget.days is None else [counted(budget.days, "day", ",.10g")]
    hours = [] if budget.gpu_hours is None else [counted(budget.gpu_hours, "GPU-hour", ",.10g")]
    return f" (budget: {', '.join([*days, *hours])})" if days or hours else ""


def _expected(plan: Plan) -> list[str]:
    """When the job is expected to end, how often it stops and saves, and what that rests on."""
    end = plan.expected
    if end is None:
        return []
    if end.p50_seconds is None or end.stops is None:
        saved = "with these saves" if end.save_interval else "without checkpoints (training.save_interval)"
        return [f"  with stops: may never end {saved}: {_stop_rate(end)}"]
    late = "may never end" if end.p95_seconds is None else f"95 % within {duration(end.p95_seconds)}"
    if end.step_time_spread is None:
        late = "if steps take as long as predicted"
    within = "" if end.within_budget is None else f", {end.within_budget:.0%} within the budget's days"
    lines = [
        f"with stops: 50 % within {duration(end.p50_seconds)}, {late}{within}; goodput {end.goodput:.0%}; "
        "the queue is not counted",
        f"{_stop_count(end.stops)} expected, {_stop_rate(end)}, each {duration(end.resume_seconds)} to come back; "
        f"{_saves(end)}; {_step_times(end)}",
    ]
    return [part for line in lines for part in wrap(line, 120, initial_indent="  ", subsequent_indent="    ")]


def _step_times(end: ExpectedEnd) -> str:
    if end.step_time_spread is None:
        return f"how far step times are off is not known ({end.step_time_source})"
    return f"step times are off by {end.step_time_spread:.0%} ({end.step_time_source})"


def _stop_count(stops: float) -> str:
    return f"{stops:.2g} stops" if stops < 10 else f"{stops:,.0f} stops"


def _stop_rate(end: ExpectedEnd) -> str:
    return f"one in {end.device_hours_between_stops:,.0f} GPU-hours ({end.stops_source})"


def _saves(end: ExpectedEnd) -> str:
    if end.save_interval is None or end.save_seconds is None:
        return "no checkpoints, so each begins at step 0"
    why = f" (save_interval: auto, {end.save_interval_reason})" if end.save_interval_reason else ""
    often = end.non_persistent_interval
    newest = "" if often is None else f", and every {counted(often, 'step', ',')} one of which the newest alone stays"
    return f"a save of {duration(end.save_seconds)} every {counted(end.save_interval, 'step', ',')}{why}{newest}"
