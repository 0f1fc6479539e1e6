"""The versions of Megatron core that llmlaunch knows, as data: every flag of each one's own parser.

`parsers/<version>.json` is written by tests/frameworks/traced/dump_parser.py, and says where it was read. What is
rendered obeys the version of the recipe: a flag it lacks is left out where it only helps, and refused by name where
the recipe asks for it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmlaunch.columns import BoolColumn
from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import Argument
from llmlaunch.frameworks.base import Requirement, implies
from llmlaunch.frameworks.megatron.sharding import asks_for_sharding
from llmlaunch.layout import Rule, Situation
from llmlaunch.recipe.types import Recipe

__all__ = [
    "KNOWN_VERSIONS",
    "NEWEST",
    "VERSION_REQUIREMENTS",
    "VERSION_RULES",
    "core_parser",
    "known_version",
    "rendered_arguments",
    "rendered_version",
    "rules_of_version",
]

KNOWN_VERSIONS = ("0.16", "0.19")
NEWEST = KNOWN_VERSIONS[-1]

_PARSERS = Path(__file__).with_name("parsers")
_VERSION = re.compile(r"(?:core_)?[rv]?(\d+\.\d+)(?!\d).*")

# Whatever asks for them, a training without them is the same, only slower.
ONLY_HELPS = frozenset(
    {
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--overlap-cpu-optimizer-d2h-h2d",
    }
)


@dataclass(frozen=True)
class Flag:
    """`values` is how many words follow the flag: a number, or "?", "*", "+" as argparse has them. `choices` are all
    that it takes; empty = anything. `default` None = none. `sets` is what a flag without words puts into `dest`, `type`
    the name of what makes a value of a word."""

    dest: str
    values: int | str
    choices: tuple[str, ...] = ()
    default: str | None = None
    sets: str | None = None
    type: str | None = None


@dataclass(frozen=True)
class CoreParser:
    """The parser of one version: `version` as the framework calls itself, `source` where it was read."""

    version: str
    source: str
    flags: Mapping[str, Flag]


@functools.cache
def core_parser(known_version: str) -> CoreParser:
    """One of KNOWN_VERSIONS."""
    stored = json.loads((_PARSERS / f"{known_version}.json").read_text(encoding="utf-8"))
    flags = {
        name: Flag(**(flag | {"choices": tuple(flag.get("choices", ()))})) for name, flag in stored["flags"].items()
    }
    return CoreParser(stored["version"], stored["source"], flags)


def known_version(version: str | None) -> str | None:
    """The one of KNOWN_VERSIONS that `version` ("0.16.1", "core_v0.19.0") is; None for any other."""
    match = _VERSION.fullmatch(version or "")
    return match[1] if match and match[1] in KNOWN_VERSIONS else None


def rendered_version(recipe: Recipe) -> str:
    """Whose flags are rendered: those of the recipe's version where it is known, else of the newest."""
    return known_version(recipe.backend.runs_version) or NEWEST


def rendered_arguments(recipe: Recipe, planned: Iterable[Argument]) -> tuple[tuple[Argument, ...], tuple[str, ...]]:
    """Return `planned` as the recipe's version takes it, and what a person should know of it.

    Raises:
        UserError: the version lacks a flag, or a value of one, that the recipe asks for.
    """
    version = rendered_version(recipe)
    flags = core_parser(version).flags
    accepted, notes = [], []
    for each in planned:
        flag = flags.get(each.flag)
        if flag is None and (not each.reason.keys or each.flag in ONLY_HELPS):
            notes.append(f"{each.flag} is left out: Megatron core {version} does not know it")
            continue
        if flag is None:
            raise UserError(_lacking(recipe, each, version, f"has no {each.flag}"))
        strange = [str(value) for value in each.values if flag.choices and str(value) not in flag.choices]
        if strange:
            raise UserError(_lacking(recipe, each, version, f"has no {each.flag} {strange[0]}"))
        accepted.append(each)
    return tuple(accepted), (*notes, *_strange_extras(recipe, flags, version))


def _lacking(recipe: Recipe, each: Argument, version: str, what: str) -> str:
    key = each.reason.keys[0] if each.reason.keys else each.flag
    able = [other for other in KNOWN_VERSIONS if other != version and each.flag in core_parser(other).flags]
    way_out = f"; core {' and '.join(able)} has it (backend.version)" if able and what.endswith(each.flag) else ""
    return f"{recipe.path}: {key}: Megatron core {version} {what}{way_out}; remove the key to render for {version}"


def _strange_extras(recipe: Recipe, flags: Mapping[str, Flag], version: str) -> list[str]:
    """Flags of the person's own that this parser does not take. A checkout may have some of its own, so they stay."""
    flags_in_extra_args = (word.split("=", 1)[0] for word in recipe.backend.extra_args if word.startswith("--"))
    return [
        f"backend.extra_args: {flag} is no flag of Megatron core {version}; it stays, in case it is the checkout's own"
        for flag in dict.fromkeys(flags_in_extra_args)
        if flag not in flags
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


def _lacks(recipe: Recipe, flag: str) -> bool:
    return flag not in core_parser(rendered_version(recipe)).flags


VERSION_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "chunks-since-0.19",
        "layout.mlp_chunks",
        "--mlp-chunks-for-training came after core 0.16; remove it, or name a newer backend.version",
        "megatron/training/arguments.py, core 0.16",
        lambda r: r.techniques.mlp_chunks > 1 and _lacks(r, "--mlp-chunks-for-training"),
    ),
    Requirement(
        "offload-fraction-since-0.19",
        "layout.offload_fraction",
        "--activation-offload-fraction came after core 0.16; remove it, or name a newer backend.version",
        "megatron/training/arguments.py, core 0.16",
        lambda r: r.techniques.offload_fraction < 1.0 and _lacks(r, "--activation-offload-fraction"),
    ),
    Requirement(
        "fixed-rows-since-0.19",
        "layout.expert_rank_capacity_factor",
        "--moe-expert-rank-capacity-factor came after core 0.16; remove it, or name a newer backend.version",
        "megatron/core/transformer/transformer_config.py, core 0.16",
        lambda r: (
            r.techniques.expert_rank_capacity_factor is not None and _lacks(r, "--moe-expert-rank-capacity-factor")
        ),
    ),
    Requirement(
        "sharding-since-0.19",
        "layout.zero_stage",
        "2 and 3 are Megatron-FSDP, whose gradients core 0.16 cannot be told the format of "
        "(--megatron-fsdp-main-grads-dtype); pin 0 or 1, or name a newer backend.version",
        "megatron/training/arguments.py, core 0.16",
        lambda r: asks_for_sharding(r) and _lacks(r, "--megatron-fsdp-main-grads-dtype"),
    ),
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
    Requirement(
        "hybrid-since-0.19",
        "model.mamba",
        "layers of one part each are another class in core 0.16, and written otherwise; name a newer backend.version",
        "megatron/core/models/mamba/mamba_model.py, core 0.16",
        lambda r: r.model.mamba is not None and _lacks(r, "--hybrid-layer-pattern"),
    ),
    Requirement(
        "repeated-prediction-since-0.19",
        "model.mtp_repeated",
        "--mtp-use-repeated-layer came after core 0.16; write false, or name a newer backend.version",
        "megatron/core/transformer/multi_token_prediction.py, core 0.16",
        lambda r: r.model.mtp_repeated and _lacks(r, "--mtp-use-repeated-layer"),
    ),
    Requirement(
        "yarn-since-0.19",
        "model.rope_scaling",
        "core 0.16 stretches positions by yarn with latent attention alone; name a newer backend.version",
        "megatron/training/arguments.py, core 0.16",
        lambda r: (
            r.model.mla is None
            and r.model.rope_scaling is not None
            and r.model.rope_scaling.kind == "yarn"
            and _lacks(r, "--yarn-original-max-position-embeddings")
        ),
    ),
)
