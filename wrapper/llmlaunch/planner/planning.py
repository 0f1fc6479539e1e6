"""From a setting to a plan: search, choose the layout, and collect what a reader of the plan asks for, such as what it
assumes of SLURM's time limit and of the link between device and host."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmlaunch.calibration.support import MeasuredStep, Rehearsal, TimeEvidence
from llmlaunch.cluster.profile import Cluster
from llmlaunch.documents.slurm_options import limit_seconds
from llmlaunch.errors import UserError
from llmlaunch.frameworks.flag_classes import ClassedArguments
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.estimator import NOT_MODELLED, Estimate, estimate
from llmlaunch.memory.job import Job
from llmlaunch.planner.budgets import budget_shares
from llmlaunch.planner.changed_choice import changed_choice
from llmlaunch.planner.doubt import argument_notes, verdict_with_arguments
from llmlaunch.planner.expected_end import expected_end
from llmlaunch.planner.fewer_and_faster import faster_on_fewer
from llmlaunch.planner.headroom import fuller_layout, search_with_headroom
from llmlaunch.planner.plan import (
    Candidate,
    JobLength,
    Limit,
    NodeTrial,
    Plan,
    Sizing,
    as_planned,
)
from llmlaunch.planner.pricing_budget import BudgetSpent, PricingBudget
from llmlaunch.planner.racks import rack_note
from llmlaunch.planner.search import (
    BROKEN_ESTIMATE,
    HOST_MEMORY,
    MEMORY,
    OUTPACED,
    REHEARSED,
    LegalLayouts,
    SearchResult,
    faster_layout,
)
from llmlaunch.planner.setting import Setting, node_of, timed_cluster
from llmlaunch.planner.single_runs import with_pace_of
from llmlaunch.planner.sizing import (
    DEFAULT_MOST_NODES,
    length_text,
    most_exceeded,
    most_nodes,
    smallest_cluster,
    splittable,
    sufficient_budget,
)
from llmlaunch.planner.what_if import swap_note, what_ifs_of, with_solved_share
from llmlaunch.recipe.digest import recipe_digest
from llmlaunch.recipe.types import AUTO_NODES, Recipe
from llmlaunch.techniques.switches import FULL_ITERATION
from llmlaunch.timing.arithmetic import utilisation
from llmlaunch.timing.network import host_link, host_link_bytes_per_second
from llmlaunch.timing.step import StepTime, step_time
from llmlaunch.units import GB, GIB, duration
from llmlaunch.verdicts import SAFE, TIGHT, UNKNOWN, UNSAFE

ALTERNATIVES = 5
BUDGET_CANDIDATES = 150_000  # of the search for nodes that stay within the recipe's budget (`pricing_budget`)


def make_plan(setting: Setting) -> Plan:
    """Return the plan of the fastest safe layout, or of a roomier one that is hardly slower (`headroom.py`); where none
    is safe, of the best tight one; where none is tight either, of the closest unsafe one. The last two come with
    advice.

    Raises:
        UserError: no layout is legal at all; the message names the rule that refuses the most.
    """
    return _searched_plan(setting)[1]


def _searched_plan(setting: Setting) -> tuple[Setting, Plan, LegalLayouts | None]:
    """Return the plan, the setting whose search found it, and the layouts that were searched."""
    setting = with_solved_share(setting)
    result = search_with_headroom(setting)
    if not len(result.points):
        from llmlaunch.planner.no_legal_layout import locked_is_illegal, no_layout  # imported only for a failure

        raise locked_is_illegal(setting) if setting.recipe.locked_by else no_layout(setting)
    if np.any(result.safe):
        return with_pace_of(setting, result), plan_of(setting, result, 0), result.legal
    from llmlaunch.planner.smallest_change import find_advice
    from llmlaunch.planner.tight import search_tight

    searched = search_tight(setting, result) or (setting, result)
    plan = replace(plan_of(*searched, 0), limit=setting.limit)
    searched = with_pace_of(*searched), searched[1]
    if plan.safe:  # by a rehearsal of a layout that only the wider search cuts so
        return setting, plan, result.legal
    if plan.accepted or plan.locked_by or plan.verdict == UNKNOWN:
        return searched[0], plan, result.legal
    advice = find_advice(setting)
    return searched[0], replace(plan, advice=advice.sentence(), change=advice.change), result.legal


def plan_of(setting: Setting, result: SearchResult, place: int) -> Plan:
    """Return the plan of the layout at `place` of the ranking."""
    recipe, limit, host = setting.recipe, setting.limit, setting.host_limit
    safe = bool(np.any(result.safe))
    chosen = result.candidate(recipe, place)
    planned = as_planned(recipe, chosen)
    job = setting.job_of(planned)
    peak_kind = recipe.cluster.accelerator.peak_kind
    detail = estimate(job, chosen.layout, peak_kind=peak_kind, node=node_of(recipe))
    seconds = step_time(job, setting.cluster, LayoutColumns.of([chosen.layout]))
    time = _time_evidence(setting, job, chosen, seconds, result.measured.get(int(result.first[place])))
    time = replace(time, shared_factor=result.pace)
    length = JobLength.of(recipe, chosen.step_seconds)
    rehearsed = result.rehearsed.get(int(result.first[place]))
    arguments = setting.backend.classed_arguments(planned, chosen.layout)
    others = [i for i in range(min(len(result.first), ALTERNATIVES + 2)) if i != place][:ALTERNATIVES]
    verdict, reason = _verdict(setting, safe and detail.fault is None, rehearsed, arguments, detail)
    return Plan(
        recipe=recipe.name,
        verdict=verdict,
        reason=reason,
        chosen=chosen,
        estimate=detail,
        limit=limit,
        host_limit=host,
        step_terms=_step_terms(seconds, time, chosen),
        mfu=utilisation(job, recipe.cluster.accelerator, chosen.step_seconds, recipe.world_size),
        length=length,
        searched=result.searched,
        refused=result.refused,
        refusal_sentences=_refusal_sentences(result, limit, host),
        alternatives=tuple(result.candidate(recipe, i) for i in others),
        not_modelled=NOT_MODELLED,
        assumptions=(
            *recipe.assumptions,
            *_baseline_note(job, peak_kind, setting.baseline_bytes),
            *time_limit_note(recipe, length),
            *host_link_notes(setting, job, chosen.layout),
            *rack_note(recipe.cluster, recipe.nodes, chosen.layout),
            *_graph_note(job),
            *_row_note(job),
            *([] if time.measured else _switches_note(setting, job, chosen.layout)),
            *_script_note(recipe, arguments),
            *argument_notes(verdict, arguments, detail),
        ),
        correction=setting.lessons.correction,
        rehearsed=rehearsed,
        accepts_tight=recipe.memory.accept == TIGHT,
        locked_by=recipe.locked_by,
        arguments=arguments,
        what_ifs=what_ifs_of(setting, planned, chosen.layout, result.pace),
        unrendered=setting.backend.unrendered(recipe),
        faster=faster_layout(result, recipe) if safe and place == 0 and recipe.preference else None,
        fuller=fuller_layout(setting, result) if place == 0 else None,
        time=time,
    )


def _time_evidence(
    setting: Setting, job: Job, chosen: Candidate, seconds: StepTime, measured: MeasuredStep | None
) -> TimeEvidence:
    predicted, plain, correction = float(seconds.total[0]), 0.0, setting.lessons.time
    if correction.changes_nothing:
        plain = predicted
    else:
        columns = LayoutColumns.of([chosen.layout])
        plain = float(step_time(job, timed_cluster(setting.recipe), columns).total[0])
    return TimeEvidence(plain, predicted, correction, measured)


def _step_terms(seconds: StepTime, time: TimeEvidence, chosen: Candidate) -> dict[str, float]:
    """Return the step by what it is spent on; what a measured one differs by is a term of its own."""
    terms = {name: float(column[0]) for name, column in seconds.terms.items()}
    if time.measured is not None or time.shared_factor != 1.0:
        terms["measured_residual"] = chosen.step_seconds - time.predicted_seconds
    return terms


def _verdict(
    setting: Setting, may_run: bool, rehearsed: Rehearsal | None, arguments: ClassedArguments, detail: Estimate
) -> tuple[str, str]:
    """Return the verdict, and the reason where there is none. A rehearsal ran with the person's own arguments, so it
    answers for unknown ones, too."""
    if rehearsed is not None and rehearsed.safe and may_run:
        return SAFE, ""
    verdict = UNSAFE if not may_run else TIGHT if setting.widened else SAFE
    if rehearsed is not None or detail.fault is not None:
        return verdict, ""
    return verdict_with_arguments(verdict, arguments, detail, setting.limit)


def _script_note(recipe: Recipe, arguments: ClassedArguments) -> tuple[str, ...]:
    own = [argument.flag for argument in arguments.of_the_script if argument.flag.startswith("--")]
    if not own:
        return ()
    return (f"what {', '.join(dict.fromkeys(own))} of {recipe.backend.script} does to memory is your word",)


def _refusal_sentences(result: SearchResult, limit: Limit, host: Limit) -> dict[str, str]:
    failed = (rule for rule in result.rules if rule.key in result.refused)
    sentences = {rule.key: f"{rule.sentence} ({rule.where})" for rule in failed}
    if TIGHT in result.refused:
        sentences[TIGHT] = (
            f"the worst pipeline rank needs more than {limit.limit_bytes / GIB:.1f} GiB, but no more than the "
            f"{limit.most_bytes / GIB:.1f} GiB that fit the card if the prediction is not too low"
        )
    if MEMORY in result.refused:
        sentences[MEMORY] = f"the worst pipeline rank needs more than {limit.limit_bytes / GIB:.1f} GiB: {limit.reason}"
    if BROKEN_ESTIMATE in result.refused:
        sentences[BROKEN_ESTIMATE] = (
            "the estimate contradicts itself, so nothing is known of the memory: a bug of llmlaunch, please report it "
            "with the recipe"
        )
    if OUTPACED in result.refused:
        sentences[OUTPACED] = "layouts that take longer than those shown even without recompute, in perfect balance"
    if HOST_MEMORY in result.refused:
        sentences[HOST_MEMORY] = f"a node's processes need more than {host.limit_bytes / GIB:.1f} GiB: {host.reason}"
    if REHEARSED in result.refused:
        refuted = (rehearsal for rehearsal in result.rehearsed.values() if rehearsal.refuses(limit.limit_bytes))
        by_layout = {rehearsal.layout.describe(): rehearsal.sentence for rehearsal in refuted}
        sentences[REHEARSED] = "; ".join(f"{layout}: {sentence}" for layout, sentence in by_layout.items())
    return sentences


def _baseline_note(job: Job, peak_kind: str, baseline_bytes: int | None) -> tuple[str, ...]:
    if peak_kind != "resident":
        return ()
    where = "measured on this machine" if baseline_bytes is not None else "as on another machine; submit measures it"
    return (f"an idle trainer takes {job.facts.allocator.context_bytes / GIB:.2f} GiB, {where}",)


def make_sized_plan(setting: Setting) -> tuple[Setting, Plan]:
    """Return the setting with its number of nodes, widened where the plan is tight, and its plan. For `nodes: auto`
    that is the fewest nodes that are safe and within the budget, or the nearest to it.

    Raises:
        UserError: no layout is legal at all, on any number of nodes.
    """
    recipe, sizing = setting.recipe, None
    if recipe.nodes == AUTO_NODES:
        sizing = smallest_cluster(setting, 1, most_nodes(recipe))
        sized = replace(recipe, nodes=sizing.nodes or _nearest(setting, sizing).nodes)
        setting = setting.with_recipe(replace(sized, digest=recipe_digest(sized)))  # as if that number were written
    setting, plan, legal = _searched_plan(setting)
    expected = expected_end(setting.recipe, plan.chosen, setting.lessons, ran_before=plan.time.measured is not None)
    changed = changed_choice(setting, plan, legal)
    plan = replace(plan, sizing=sizing, budget=recipe.budget, expected=expected, changed=changed)
    plan = replace(plan, faster_on_fewer=faster_on_fewer(setting, plan))
    if not plan.may_run or most_exceeded(recipe.budget, plan.length) is None:
        return setting, plan
    return setting, replace(plan, beyond_budget=_beyond_budget(setting, plan))


def _nearest(setting: Setting, sizing: Sizing) -> NodeTrial:
    """Return the best of counts that all fail: the safe one that exceeds the budget least, else the one whose memory
    is nearest to fitting."""
    recipe = setting.recipe
    safe = [(trial, trial.length) for trial in sizing.tried if trial.length is not None]
    if safe:
        return min(safe, key=lambda pair: max(budget_shares(recipe.budget, pair[1]).values(), default=0.0))[0]
    legal = [trial for trial in sizing.tried if trial.device_bytes is not None]
    if not legal:
        from llmlaunch.planner.no_legal_layout import tightest_rule

        first, last = sizing.tried[0], sizing.tried[-1]
        can_split = splittable(setting, np.array([first.nodes]))[0]
        rule = tightest_rule(setting.with_recipe(replace(recipe, nodes=first.nodes)))[0] if can_split else None
        why = first.reason if rule is None else f"no layout is legal: {rule.sentence} [{rule.key}]"
        raise UserError(
            f"{recipe.path}: nodes: auto: no number of nodes up to {last.nodes} has a legal layout; "
            f"on {first.nodes}, {why}; change the batch or the pins accordingly"
        )
    return min(legal, key=lambda trial: trial.device_bytes or 0)


def _beyond_budget(setting: Setting, plan: Plan) -> str:
    """Return by what the plan exceeds the budget, and the nearest number of nodes or budget that would do."""
    recipe, budget = setting.recipe, setting.recipe.budget
    key = most_exceeded(budget, plan.length)
    allowed = getattr(budget, key or "")
    tightest = (
        f"no safe layout stays within the budget: on nodes: {recipe.nodes} the fastest, {plan.layout.describe()}, "
        f"takes {length_text(plan.length, key)} of budget.{key}: {allowed:,.10g}"
    )
    try:
        with PricingBudget(BUDGET_CANDIDATES).limiting():
            return f"{tightest}. {_sufficient(setting, plan)}"
    except BudgetSpent:
        return f"{tightest}. The search for what would stay within it ended at its own budget of layouts."


def _sufficient(setting: Setting, plan: Plan) -> str:
    """Return the number of nodes, or the budget, with which a plan would not exceed it."""
    recipe, budget = setting.recipe, setting.recipe.budget
    within = plan.sizing or smallest_cluster(setting, 1, most_nodes(recipe))
    most = within.tried[-1].nodes
    if within.nodes is not None:
        return f"The fewest that stay within it: nodes: {within.nodes} ({_last_length_text(within)})."
    more = smallest_cluster(setting, most + 1, DEFAULT_MOST_NODES)
    if more.nodes is not None:
        return f"More would: budget.max_nodes: {more.nodes} ({_last_length_text(more)})."
    nearest = _nearest(setting, Sizing(within.tried + more.tried))
    length = nearest.length or plan.length
    return (
        f"No number of nodes up to {max(most, DEFAULT_MOST_NODES)} does; nodes: {nearest.nodes} would with "
        f"{sufficient_budget(budget, length)}."
    )


def _last_length_text(sizing: Sizing) -> str:
    length = sizing.tried[-1].length
    return length_text(length) if length is not None else ""


def time_limit_note(recipe: Recipe, length: JobLength) -> tuple[str, ...]:
    """Return one sentence where SLURM would end the job before its last step, else nothing. That is no error, because
    a job with checkpoints can be resumed."""
    limit = limit_seconds(recipe.slurm.get("time"))
    if limit is None or length.seconds <= limit:
        return ()
    resumed = "it goes on from its last checkpoint when submitted again"
    if recipe.training.save_interval is None:
        resumed = "it writes no checkpoints to go on from (training.save_interval)"
    return (
        f"SLURM ends the job after {duration(limit)} (slurm.time), before {duration(length.seconds)} are over; "
        f"{resumed}",
    )


def _graph_note(job: Job) -> tuple[str, ...]:
    """Return what stands behind the memory of CUDA graphs; nothing where none is captured."""
    if not job.techniques.cuda_graphs:
        return ()
    whole = " and NVIDIA warns of up to twice the memory" if FULL_ITERATION in job.techniques.cuda_graphs else ""
    return (f"memory of CUDA graphs follows from Transformer Engine's source; no measured run stands behind it{whole}",)


def _row_note(job: Job) -> tuple[str, ...]:
    """Return what is not counted where experts have a fixed number of rows; nothing elsewhere."""
    techniques = job.techniques
    if techniques.expert_rank_capacity_factor is None:
        return ()
    room = f"{techniques.expert_rank_capacity_factor:g} times an equal share of tokens"
    if techniques.paged_stash is not None:
        pages = techniques.paged_stash.device_factor + techniques.paged_stash.host_factor
        room += f", or whose experts save more than {pages:g} times,"
    return (
        f"a step in which a device's experts get more than {room} is run again with as many rows as tokens arrive, in "
        "twice the time; what that takes of memory is not counted",
    )


def _switches_note(setting: Setting, job: Job, layout: Layout) -> tuple[str, ...]:
    """Return one sentence where nobody has published a run of a mixture with these switches together on such a card."""
    if job.shape.moe is None:
        return ()
    from llmlaunch.timing.measured_switches import MEASURED_SWITCHES, exchange_switches

    switches = exchange_switches(setting.cluster, layout, job.techniques)
    if switches.all_off or switches in MEASURED_SWITCHES:
        return ()
    return (
        f"nobody has published a run with these together on such a card: {switches.describe()}. Their step time is a "
        "prediction that no measured run supports; time a few steps before a long run",
    )


def host_link_notes(setting: Setting, job: Job, layout: Layout) -> tuple[str, ...]:
    """Return what the plan assumes of the link between device and host; nothing where no technique uses it."""
    if not (job.techniques.moves_to_host or layout.offload_layers):
        return ()
    notes = [
        f"what waits in host memory travels over {_host_link_text(setting.cluster)}; the step time shows what no "
        "computation hides"
    ]
    if job.techniques.swapped_share:
        notes.append(swap_note(setting, job, layout))
    return tuple(notes)


def _host_link_text(cluster: Cluster) -> str:
    link, shared = host_link(cluster), host_link_bytes_per_second(cluster)
    if cluster.host_copy_bytes_per_second is not None:
        return f"{link.name}, {shared / GB:.1f} GB/s each way with all devices of a node, as measured here"
    divided = f", {cluster.devices_per_uplink} devices to a link" if cluster.devices_per_uplink > 1 else ""
    return (
        f"{link.name}, {link.bytes_per_second / GB:.1f} GB/s each way at best and {shared / GB:.1f} GB/s with all "
        f"devices of a node{divided}"
    )
