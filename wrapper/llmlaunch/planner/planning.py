"""From a setting to a plan: search, choose the layout, and collect what a reader of the plan asks for, such as what it
assumes of SLURM's time limit and of the link between device and host."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmlaunch.calibration.lessons import NO_LESSONS, MeasuredStep, Rehearsal, TimeEvidence
from llmlaunch.calibration.margins import Margin
from llmlaunch.cluster.profile import Cluster
from llmlaunch.documents.slurm_options import limit_seconds
from llmlaunch.frameworks.classed_arguments import ClassedArguments
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.estimator import NOT_MODELLED, Estimate, estimate
from llmlaunch.memory.job import NO_CORRECTION, Job
from llmlaunch.planner.expected_end import expected_end
from llmlaunch.planner.headroom import fuller_layout, search_with_headroom, with_pace_of
from llmlaunch.planner.plan import (
    Candidate,
    ChangedChoice,
    FasterOnFewer,
    JobLength,
    Plan,
    WhatIf,
    as_planned,
    most_exceeded,
)
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
from llmlaunch.planner.setting import Setting, node_of, rack_note, setting_of, timed_cluster
from llmlaunch.recipe.digest import recipe_digest
from llmlaunch.recipe.types import AUTO_NODES, Recipe
from llmlaunch.techniques.switches import FULL_ITERATION
from llmlaunch.techniques.what_ifs import SOLVED_SHARE
from llmlaunch.timing.arithmetic import utilisation
from llmlaunch.timing.network import host_link, host_link_bytes_per_second
from llmlaunch.timing.step import StepTime, step_time
from llmlaunch.units import GB, GIB, duration
from llmlaunch.verdicts import SAFE, TIGHT, UNKNOWN, UNSAFE

ALTERNATIVES = 5
NETWORK_TERMS = ("tensor_parallel", "context_parallel", "expert_parallel", "pipeline_transfer", "data_parallel")


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
    if setting.recipe.techniques.swapped_share == SOLVED_SHARE:
        from llmlaunch.planner.what_if import with_solved_share

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
    return searched[0], replace(plan, advice=advice.sentence, change=advice.change), result.legal


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
            *_argument_notes(verdict, arguments, detail),
        ),
        correction=setting.lessons.correction,
        rehearsed=rehearsed,
        accepts_tight=recipe.memory.accept == TIGHT,
        locked_by=recipe.locked_by,
        arguments=arguments,
        what_ifs=_what_ifs(setting, planned, chosen.layout, result.pace),
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
    if rehearsed is not None or detail.fault is not None or not arguments.unknown:
        return verdict, ""
    from llmlaunch.planner.refusal import verdict_with_arguments  # only for arguments that nobody knows

    return verdict_with_arguments(verdict, arguments, detail, setting.limit)


def _argument_notes(verdict: str, arguments: ClassedArguments, detail: Estimate) -> tuple[str, ...]:
    if not arguments.costing:
        return ()
    from llmlaunch.planner.refusal import argument_notes

    return argument_notes(verdict, arguments, detail)


def _what_ifs(setting: Setting, planned: Recipe, layout: Layout, pace: float) -> tuple[WhatIf, ...]:
    if not planned.techniques.what_ifs:
        return ()
    from llmlaunch.planner.what_if import what_ifs_of

    return what_ifs_of(setting, planned, layout, pace)


def _script_note(recipe: Recipe, arguments: ClassedArguments) -> tuple[str, ...]:
    own = [argument.flag for argument in arguments.of_the_script if argument.flag.startswith("--")]
    if not own:
        return ()
    return (f"what {', '.join(dict.fromkeys(own))} of {recipe.backend.script} does to memory is your word",)


def _refusal_sentences(result: SearchResult, limit: Margin, host: Margin) -> dict[str, str]:
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
        from llmlaunch.planner.sizing import most_nodes, smallest_cluster

        sizing = smallest_cluster(setting, 1, most_nodes(recipe))
        nodes = sizing.nodes
        if nodes is None:
            from llmlaunch.planner.beyond_budget import nearest_count

            nodes = nearest_count(setting, sizing).nodes
        sized = replace(recipe, nodes=nodes)
        setting = setting.with_recipe(replace(sized, digest=recipe_digest(sized)))  # as if that number were written
    setting, plan, legal = _searched_plan(setting)
    expected = expected_end(setting.recipe, plan.chosen, setting.lessons, ran_before=plan.time.measured is not None)
    changed = _changed_choice(setting, plan, legal)
    plan = replace(plan, sizing=sizing, budget=recipe.budget, expected=expected, changed=changed)
    plan = replace(plan, faster_on_fewer=_faster_on_fewer(setting, plan))
    if not plan.may_run or most_exceeded(recipe.budget, plan.length) is None:
        return setting, plan
    from llmlaunch.planner.beyond_budget import beyond_budget

    return setting, replace(plan, beyond_budget=beyond_budget(setting, plan))


def _faster_on_fewer(setting: Setting, plan: Plan) -> FasterOnFewer | None:
    """Return fewer nodes on which a step is shorter. Half of the devices compute for twice as long, so nothing is
    priced where the step does not wait for the network for as long as it computes."""
    seconds, filling = plan.chosen.step_seconds, plan.step_terms.get("pipeline_bubble", 0.0)
    waiting = sum(plan.step_terms.get(term, 0.0) for term in NETWORK_TERMS)
    if plan.sizing is not None or not plan.safe or filling + 2.0 * (seconds - waiting - filling) >= seconds:
        return None
    from llmlaunch.planner.fewer_and_faster import faster_on_fewer

    return faster_on_fewer(setting, plan, waiting / seconds)


def _changed_choice(setting: Setting, plan: Plan, legal: LegalLayouts | None) -> ChangedChoice | None:
    """Return the layout that would be planned without any measured run or rehearsal of this site, where these may have
    led to another one; None where the plan is kept by a lock."""
    without = setting_of(setting.recipe, setting.backend, setting.baseline_bytes, NO_LESSONS)
    if setting.recipe.locked_by or not _matters(setting, without):
        return None
    from llmlaunch.planner.changed_choice import changed_choice

    return changed_choice(setting, without, plan, legal)


def _matters(setting: Setting, without: Setting) -> bool:
    """Whether anything measured may lead to another layout."""
    lessons = setting.lessons
    return (
        bool(lessons.rehearsals)
        or any(step.decides for step in lessons.measured_steps)
        or not lessons.time.changes_nothing
        or lessons.correction != NO_CORRECTION
        or setting.limit.limit_bytes != without.limit.limit_bytes
    )


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
        from llmlaunch.planner.what_if import swap_note

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
