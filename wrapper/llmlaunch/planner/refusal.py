"""The error for a plan that must not be submitted: what overflows or was not read, and what would fit; and what
arguments whose memory nobody knows do to a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from llmlaunch.calibration.margins import Margin
from llmlaunch.errors import NothingSafe, NoVerdict, UserError
from llmlaunch.frameworks.classed_arguments import LESS_OF_STATES, ClassedArgument, ClassedArguments
from llmlaunch.memory.estimator import Estimate, RankEstimate
from llmlaunch.memory.peak import MODEL_STATES, OUTSIDE_TORCH, RESIDUAL
from llmlaunch.planner.plan import Plan, risk_words
from llmlaunch.rundir.values import counted
from llmlaunch.units import GIB, gib
from llmlaunch.verdicts import SAFE, TIGHT, UNKNOWN, UNSAFE

SPARED_SHARE = 0.5  # of what a step adds


def step_bytes(rank: RankEstimate) -> int:
    """Return the bytes of a rank that a step adds to its model states and to what torch does not hold."""
    outside = sum(rank.terms.get(name, 0) for name in OUTSIDE_TORCH)
    return max(rank.device_bytes - _state_bytes(rank) - outside, 0)


def verdict_with_arguments(
    verdict: str, arguments: ClassedArguments, estimate: Estimate, limit: Margin
) -> tuple[str, str]:
    """Return the verdict on a plan that was judged `verdict` by its bytes, with arguments of the person's own; and the
    reason where it is UNKNOWN, else "". `limit` is that of the recipe, not of a wider search."""
    if arguments.deciding:
        return UNKNOWN, f"what decides the memory was not read: {_named(arguments.deciding)}"
    if verdict == SAFE and arguments.costing and _most_bytes(estimate, arguments) > limit.limit_bytes:
        return TIGHT, ""
    too_much = estimate.worst.device_bytes - limit.most_bytes
    if (
        verdict == UNSAFE
        and arguments.sparing
        and too_much > 0
        and _least_bytes(estimate, arguments) <= limit.most_bytes
    ):
        return UNKNOWN, (
            f"{gib(too_much)} GiB too much without arguments that may need less, and what they do to GPU memory is not "
            f"known: {_named(arguments.sparing)}"
        )
    return verdict, ""


def argument_notes(verdict: str, arguments: ClassedArguments, estimate: Estimate) -> tuple[str, ...]:
    """Return the note on unknown arguments that change nothing about a safe plan."""
    if verdict != SAFE or not arguments.costing:
        return ()
    more = gib(most_more_bytes(estimate, arguments))
    return (
        f"{_named(arguments.costing)}: needs at most {more} GiB more, which fits: as much again as a step adds to "
        "the model states",
    )


def most_more_bytes(estimate: Estimate, arguments: ClassedArguments) -> int:
    """Return the most that unknown arguments may need beyond what the fullest rank was priced with."""
    return max(_most_bytes(estimate, arguments) - estimate.worst.device_bytes, 0)


def _most_bytes(estimate: Estimate, arguments: ClassedArguments) -> int:
    times = max(argument.flag_class.times for argument in arguments.costing)
    return max(rank.device_bytes + int(times * step_bytes(rank)) for rank in estimate.ranks)


def _least_bytes(estimate: Estimate, arguments: ClassedArguments) -> int:
    """Return what the fullest rank needs at least; of narrower model states nobody can say how little is left."""
    narrower = any(argument.flag_class.effect == LESS_OF_STATES for argument in arguments.sparing)
    return max(
        rank.device_bytes - int(SPARED_SHARE * step_bytes(rank)) - (_state_bytes(rank) if narrower else 0)
        for rank in estimate.ranks
    )


def _state_bytes(rank: RankEstimate) -> int:
    return sum(rank.terms.get(name, 0) for name in MODEL_STATES)


def _named(arguments: Sequence[ClassedArgument]) -> str:
    return ", ".join(f"{argument.text} ({argument.flag_class.why})" for argument in arguments)


def refuse(plan: Plan) -> None:
    """Refuse a plan that must not be submitted.

    Raises:
        NoVerdict: what decides the plan's memory was not read.
        NothingSafe: the plan is neither safe nor tight and accepted, or exceeds the recipe's budget; the message says
            what would do.
    """
    if not plan.may_run:
        raise _EXPLAINED[plan.verdict](plan)
    if plan.beyond_budget is not None:
        raise NothingSafe(f"{plan.recipe}: {plan.beyond_budget}")


def explain_unknown(plan: Plan) -> NoVerdict:
    """Return the error for a plan without a verdict: what was not read, and what decides it."""
    if not plan.arguments.deciding:
        remedy = _remedy_text(plan, [argument.flag for argument in plan.arguments.sparing])
    else:
        names = ", ".join(dict.fromkeys(_own_name(argument) for argument in plan.arguments.deciding))
        remedy = (
            f"Where what is priced holds all the same, say so with backend: {{neutral_args: [{names}]}}; else rehearse "
            "the plan (llmlaunch rehearse)"
        )
    return NoVerdict.on(
        plan.recipe, f"{plan.reason}. {remedy}, or measure the job as it is: llmlaunch observe -- COMMAND"
    )


def _own_name(argument: ClassedArgument) -> str:
    """Return what `backend.neutral_args` calls an argument."""
    return argument.flag.removeprefix("backend.ds_config.")


def explain_tight(plan: Plan) -> NothingSafe:
    """Return the error for a tight plan that nobody has accepted: by how much it is, the stated risk, and the word that
    accepts it."""
    if plan.tight_by_arguments:
        layout, reason = plan.layout.describe(), unknown_arguments_text(plan)
        remedy = _remedy_text(plan, [argument.flag for argument in plan.arguments.costing])
        return NothingSafe(
            f"{plan.recipe}: {layout} is tight, not safe: {reason}. {remedy}, or run it all the same with "
            "memory: {accept: tight}"
        )
    return NothingSafe(
        f"{plan.recipe}: no layout is safe. Tight: {tightness(plan)}. To run it all the same, write "
        f"memory: {{accept: tight}} in the recipe, or add memory.accept=tight; the job then falls back on a layout "
        f"with more head-room where there is one. {plan.advice or ''}".rstrip()
    )


def unknown_arguments_text(plan: Plan) -> str:
    """Return the sentence on arguments of the person's own that may need more memory than there is room for."""
    named = ", ".join(f"{argument.flag} ({argument.flag_class.why})" for argument in plan.arguments.costing)
    more = most_more_bytes(plan.estimate, plan.arguments) / GIB
    left = max(plan.limit.limit_bytes - plan.device_bytes, 0) / GIB
    return (
        f"what these arguments do to GPU memory is not known: {named}; together they may need up to {more:.1f} GiB, as "
        f"much again as a step adds, and {left:.1f} GiB are left"
    )


def _remedy_text(plan: Plan, flags: Sequence[str]) -> str:
    """Return what settles what the arguments of these flags do: a recipe key, the person's word, or a rehearsal."""
    arguments = [argument for argument in plan.arguments.unknown if argument.flag in flags]
    by_key = [argument for argument in arguments if argument.flag_class.key]
    names = ", ".join(dict.fromkeys(map(_own_name, arguments)))
    moved = "".join(dict.fromkeys(f"Say {each.flag} in the recipe ({each.flag_class.key}). " for each in by_key))
    return (
        f"{moved}Where they change no memory, say so with backend: {{neutral_args: [{names}]}}; else rehearse the plan "
        "(llmlaunch rehearse)"
    )


def tightness(plan: Plan) -> str:
    """Return the layout of a tight plan, by how much it exceeds its limit, what is left of the card, and the stated
    risk."""
    limit, needs = plan.limit, plan.device_bytes
    rank = plan.estimate.worst.pipeline_rank
    whose = f"pipeline rank {rank} needs" if plan.rehearsed is None else "it was measured to need"
    return (
        f"{plan.layout.describe()}, {whose} {needs / GIB:.1f} GiB, {(needs - limit.limit_bytes) / GIB:.1f} GiB more "
        f"than the limit and {(limit.most_bytes - needs) / GIB:.1f} GiB less than what fits the card; {risk_text(plan)}"
    )


def risk_text(plan: Plan) -> str:
    """Return the stated risk of the plan as a clause."""
    risk = plan.stated_risk
    if risk is None:
        return "its risk of running out of memory is not known: too few runs like it were measured"
    return f"stated {risk_words(risk, 'risk of running out of memory:')}"


def explain_unsafe(plan: Plan) -> NothingSafe:
    """Return the error for a plan that is not safe: the closest layout, what overflows it, and what would fit."""
    rank = plan.estimate.worst
    if plan.estimate.fault is not None:
        return NothingSafe(
            f"{plan.recipe}: the estimate of {plan.layout.describe()} cannot be right: {plan.estimate.fault}. "
            f"This is a bug of llmlaunch, not yours: please report it with the recipe. {plan.advice or ''}".rstrip()
        )
    if plan.rehearsed is not None and not plan.rehearsed.safe and plan.verdict_by_estimate == SAFE:
        return NothingSafe(
            f"{plan.recipe}: no layout is safe. Closest: {plan.layout.describe()}, which the estimate lets pass; but "
            f"{plan.rehearsed.sentence}. {plan.advice or ''}".rstrip()
        )
    if rank.device_bytes <= plan.limit.limit_bytes and plan.host_bytes_beyond:
        return _explain_host(plan)
    term, term_bytes = max(rank.terms.items(), key=lambda item: item[1])
    needs, limit = rank.device_bytes / GIB, plan.limit.limit_bytes / GIB
    return NothingSafe(
        f"{plan.recipe}: no layout is safe. Closest: {plan.layout.describe()}, pipeline rank {rank.pipeline_rank} "
        f"needs {needs:.1f} GiB of {limit:.1f} GiB ({needs - limit:.1f} GiB too much), "
        f"most of it {term} with {term_bytes / GIB:.1f} GiB{_measured(plan)}. {plan.advice or ''}".rstrip()
    )


def correction_text(plan: Plan) -> str:
    """Return the sentence on what measured runs add to the worst rank or take off it."""
    terms, correction = plan.estimate.worst.terms, plan.correction
    support = plan.limit.support
    runs = "" if support is None else f", {counted(support.runs, 'run')}"
    outside = f", {correction.outside_bytes / GIB:+.2f} GiB outside torch" if correction.outside_bytes else ""
    return (
        f"measured residual {terms.get(RESIDUAL, 0) / GIB:+.2f} GiB allocated, {correction.torch_share:+.1%} of "
        f"torch's memory{outside} (calibration {correction.calibration_id}{runs})"
    )


def _measured(plan: Plan) -> str:
    added = plan.correction.torch_share > 0 or plan.correction.outside_bytes > 0
    return f", and {correction_text(plan)}" if added else ""


def _explain_host(plan: Plan) -> NothingSafe:
    assert plan.host_limit is not None
    term, term_bytes = max(plan.estimate.host_terms.items(), key=lambda item: item[1])
    needs, limit = (plan.estimate.host_bytes_per_node or 0) / GIB, plan.host_limit.limit_bytes / GIB
    return NothingSafe(
        f"{plan.recipe}: no layout is safe. Closest: {plan.layout.describe()}, which fits the devices but not the host "
        f"memory: a node needs {needs:.1f} GiB of {limit:.1f} GiB ({needs - limit:.1f} GiB too much; "
        f"{plan.host_limit.reason}), "
        f"most of it {term} with {term_bytes / GIB:.1f} GiB. {plan.advice or ''}".rstrip()
    )


_EXPLAINED: Mapping[str, Callable[[Plan], UserError]] = {
    TIGHT: explain_tight,
    UNSAFE: explain_unsafe,
    UNKNOWN: explain_unknown,
}
