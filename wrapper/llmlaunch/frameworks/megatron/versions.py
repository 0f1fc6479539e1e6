"""What the versions of Megatron core take. What is rendered obeys the version of the recipe: a flag it lacks is left
out where it only helps, and refused by name where the recipe asks for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

from llmlaunch.columns import BoolColumn
from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import Argument
from llmlaunch.frameworks.base import Requirement, implies
from llmlaunch.frameworks.megatron.flags.row import Flag, SinceThen
from llmlaunch.frameworks.megatron.flags.table import column, flags
from llmlaunch.frameworks.megatron.parser import KNOWN_VERSIONS, ParserFlag, core_parser, dest_of, rendered_version
from llmlaunch.layout import Rule, Situation
from llmlaunch.recipe.types import Recipe


def rendered_arguments(recipe: Recipe, planned: Iterable[Argument]) -> tuple[tuple[Argument, ...], tuple[str, ...]]:
    """Return `planned` as the recipe's version takes it, and what a person should know of it.

    Raises:
        UserError: the version lacks a flag, or a value of one, that the recipe asks for.
    """
    version = rendered_version(recipe)
    known = core_parser(version).flags
    accepted, notes = [], []
    for each in planned:
        flag = known.get(each.flag)
        if flag is None and (not each.reason.keys or dest_of(each.flag) in column("only_helps")):
            notes.append(f"{each.flag} is left out: Megatron core {version} does not know it")
            continue
        if flag is None:
            raise UserError(_lacking(recipe, each, version, f"has no {each.flag}"))
        strange = [str(value) for value in each.values if flag.choices and str(value) not in flag.choices]
        if strange:
            raise UserError(_lacking(recipe, each, version, f"has no {each.flag} {strange[0]}"))
        accepted.append(each)
    return tuple(accepted), (*notes, *_strange_extras(recipe, known, version))


def _lacking(recipe: Recipe, each: Argument, version: str, what: str) -> str:
    key = each.reason.keys[0] if each.reason.keys else each.flag
    able = [other for other in KNOWN_VERSIONS if other != version and each.flag in core_parser(other).flags]
    way_out = f"; core {' and '.join(able)} has it (backend.version)" if able and what.endswith(each.flag) else ""
    return f"{recipe.path}: {key}: Megatron core {version} {what}{way_out}; remove the key to render for {version}"


def _strange_extras(recipe: Recipe, known: Mapping[str, ParserFlag], version: str) -> list[str]:
    """Flags of the person's own that this parser does not take. A checkout may have some of its own, so they stay."""
    flags_in_extra_args = (word.split("=", 1)[0] for word in recipe.backend.extra_args if word.startswith("--"))
    return [
        f"backend.extra_args: {flag} is no flag of Megatron core {version}; it stays, in case it is the checkout's own"
        for flag in dict.fromkeys(flags_in_extra_args)
        if flag not in known
    ]


def _heads_overlap_between_stages(s: Situation) -> BoolColumn:
    return implies(s.techniques.overlaps_experts and s.shape.mtp_num_layers == 1, s.layouts.pipeline > 1)


VERSION_RULES: dict[str, tuple[Rule, ...]] = {
    "0.16": (
        Rule(
            "overlapped-heads-need-stages",
            "with a head of multi-token prediction, overlapped expert communication needs "
            "--pipeline-model-parallel-size above 1",
            "megatron/core/transformer/transformer_config.py, core 0.16",
            _heads_overlap_between_stages,
            of_techniques=True,
        ),
    ),
}
"""What one version alone refuses of a layout."""


def rules_of_version(recipe: Recipe) -> tuple[Rule, ...]:
    return VERSION_RULES.get(rendered_version(recipe), ())


def _requirement(row: Flag, since: SinceThen) -> Requirement:
    """Return that a version has the flag of a row where a recipe asks for it."""
    usual = f"{row.name} came after core {KNOWN_VERSIONS[0]}; remove it, or name a newer backend.version"
    return Requirement(
        since.name,
        since.key or row.key,
        since.sentence or usual,
        since.where,
        lambda recipe: since.asked(recipe) and row.name not in core_parser(rendered_version(recipe)).flags,
    )


@cache
def version_requirements(mixtures: bool = True) -> tuple[Requirement, ...]:
    """Return that the version of a recipe has the flags that it asks for, those of mixtures only where they are meant,
    and what else one version alone refuses."""
    rows = flags(mixtures)
    return (*(_requirement(row, row.since) for row in rows if row.since is not None), *OF_EARLIER_VERSIONS)


OF_EARLIER_VERSIONS: tuple[Requirement, ...] = (
    Requirement(
        "delta-nets-since-0.19",
        "model.linear_attention",
        "gated delta nets of core 0.16 keep other tensors, and know no context parallelism; name a newer "
        "backend.version",
        "megatron/core/ssm/gated_delta_net.py, core 0.16",
        lambda r: r.model.linear_attention is not None and rendered_version(r) == "0.16",
    ),
    Requirement(
        "sqrtsoftplus-since-0.19",
        "model.moe.router.score_function",
        "sqrtsoftplus came after core 0.16; write sigmoid, or name a newer backend.version",
        "megatron/core/transformer/transformer_config.py, core 0.16",
        lambda r: (
            r.model.moe is not None
            and r.model.moe.router.score_function == "sqrtsoftplus"
            and rendered_version(r) == "0.16"
        ),
    ),
)
