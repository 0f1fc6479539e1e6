"""A plan for a person: verdict first, then memory by rank and term, time, and what was refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmlaunch.memory.estimate import RankEstimate
from llmlaunch.planner.plan import NO_LAYOUT, Candidate, JobLength, Limit, Plan
from llmlaunch.planner.unsafe import correction_text
from llmlaunch.recipe.types import Budget, Recipe
from llmlaunch.report.fallback_text import fallback_text
from llmlaunch.report.text import table
from llmlaunch.rundir.messages import counted
from llmlaunch.units import duration, gib

if TYPE_CHECKING:
    from llmlaunch.planner.neighbours import Neighbour

__all__ = ["check_text", "plan_text"]


def check_text(recipe: Recipe, plan: Plan) -> str:
    """What `llmlaunch check` prints."""
    safe = plan.searched - sum(plan.refused.values())
    searched = f"Searched {plan.searched:,} layouts: {safe:,} are legal and safe (llmlaunch plan shows the others)"
    return "\n".join([*_figures(recipe, plan), "", searched, *_small_print(plan)])


def plan_text(
    recipe: Recipe, plan: Plan, found: Sequence[Neighbour] = (), front: Sequence[Candidate] | None = None
) -> str:
    """What `llmlaunch plan` prints: the same, with the runners-up, the neighbours, the Pareto front where it is asked
    for, and every reason for refusal."""
    from llmlaunch.report.choices_text import front_text, neighbours_text, refused_text

    parts = [
        _figures(recipe, plan),
        _alternatives(plan),
        neighbours_text(plan, found),
        [] if front is None else front_text(plan, front),
        [*refused_text(plan), *_small_print(plan)],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _figures(recipe: Recipe, plan: Plan) -> list[str]:
    return [*_headline(recipe, plan), "", *_memory(plan), *_host(plan), "", *_time(plan), *fallback_text(recipe, plan)]


def _headline(recipe: Recipe, plan: Plan) -> list[str]:
    cluster, work = recipe.cluster, recipe.workload
    return [
        f"{recipe.name}: {plan.verdict}{', beyond the budget' if plan.beyond_budget else ''}  {plan.layout.describe()}",
        f"  {recipe.model.name} on {recipe.nodes} x {cluster.devices_per_node} {cluster.accelerator.name}, "
        f"{counted(work.global_batch_size, 'sequence')} of {counted(work.sequence_length, 'token')} a step, "
        f"{recipe.training.numbers.beside(work.precision)}, "
        f"{recipe.backend.name}",
        *_techniques(recipe),
        *_sizing(plan),
    ]


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
    said = [f"{name} {_plain(value)}" for name, value in recipe.techniques.as_json().items()]
    return [f"  with {', '.join(said)}"] if said else []


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
    return [
        f"Memory, GiB per device; the worst pipeline rank is {worst.pipeline_rank}: {gib(worst.device_bytes)} of "
        f"{gib(plan.limit.limit_bytes)}, {gib(free)} to spare",
        table(["pipeline rank", *(str(r.pipeline_rank) for r in ranks)], rows),
        f"  limit: {plan.limit.reason}; device memory is {gib(plan.limit.memory_bytes)} GiB by "
        f"{plan.limit.memory_source.split(':')[0]}",
        *_measured(plan),
    ]


def _measured(plan: Plan) -> list[str]:
    """What measured runs say of predictions of this kind, and what of it is in the numbers."""
    support, correction = plan.limit.support, plan.correction
    lines = [] if support is None else [f"  measured runs: {support.sentence}{_beyond(plan.limit)}"]
    if support is not None and support.runs and support.widened is not None:
        lines.append(f"  new: {support.widened}")
    if correction.torch_share or correction.outside_bytes:
        lines.append(f"  {correction_text(plan)}")
    if plan.rehearsed is not None:
        lines.append(f"  {plan.rehearsed.sentence}")
    return lines


def _beyond(limit: Limit) -> str:
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
        _length(plan.length) + _allowed(plan.budget),
    ]


def _length(length: JobLength) -> str:
    return (
        f"Job: {counted(length.steps, 'step', ',')}, {_tokens(length.tokens)} tokens: {duration(length.seconds)}, "
        f"{length.gpu_hours:,.{0 if length.gpu_hours >= 100 else 1}f} GPU-hours"
    )


def _allowed(budget: Budget) -> str:
    days = [] if budget.days is None else [counted(budget.days, "day", ",.10g")]
    hours = [] if budget.gpu_hours is None else [counted(budget.gpu_hours, "GPU-hour", ",.10g")]
    return f" (budget: {', '.join([*days, *hours])})" if days or hours else ""


def _tokens(count: int) -> str:
    for times, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= times:
            return f"{count / times:,.4g}{unit}"
    return f"{count:,}"


def _small_print(plan: Plan) -> list[str]:
    lines = ["Not modelled:", *(f"  {what}" for what in plan.not_modelled)]
    lines += [f"Assumed: {sentence}" for sentence in plan.assumptions]
    return lines


def _alternatives(plan: Plan) -> list[str]:
    def row(place: int, c: Candidate) -> list[str]:
        rate = f"{c.tokens_per_second_per_gpu:,.0f}"
        return [f"{place}. {c.describe()}", gib(c.device_bytes), f"{c.step_seconds:.2f}", rate]

    rows = [row(i + 1, c) for i, c in enumerate((plan.chosen, *plan.alternatives))]
    title = "Ranked layouts" if plan.safe else "Closest layouts, none of them safe"
    return [title, table(["", "GiB worst rank", "s/step", "tokens/s/device"], rows)]
