"""The tables of docs/megatron*.md, docs/deepspeed*.md and docs/backends.md, made from the backends' rules and facts;
that of docs/sites.md, made from the accelerators; that of docs/planning.md, made from the planner's habits.

`make docs-tables` writes them into the pages; tests/unit/frameworks/test_backend_docs.py keeps page and code equal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmlaunch.cluster.cards import machines
from llmlaunch.cluster.load import accelerator_table, profile_names
from llmlaunch.families.hub_ids import load_preset, preset_names
from llmlaunch.families.registry import all_families, family_names
from llmlaunch.frameworks.base import MACHINE_REQUIREMENTS, Requirement
from llmlaunch.frameworks.bridge.rules import BRIDGE_REQUIREMENTS, BRIDGE_RULES, PACKED_RULES
from llmlaunch.frameworks.bridge.settings import MEGATRON_DEFAULTS
from llmlaunch.frameworks.classed_arguments import EITHER, FlagGroup, group_of
from llmlaunch.frameworks.deepspeed import number_formats as deepspeed_numbers
from llmlaunch.frameworks.deepspeed import rules as deepspeed_rules
from llmlaunch.frameworks.deepspeed import scripts as deepspeed_scripts
from llmlaunch.frameworks.deepspeed import techniques as deepspeed_techniques
from llmlaunch.frameworks.deepspeed.facts import ENGINES, Engine, Share
from llmlaunch.frameworks.deepspeed.settings import SETTINGS, setting_groups
from llmlaunch.frameworks.deepspeed.trainer_table import ARGUMENTS, shipped_groups, trainer_groups
from llmlaunch.frameworks.megatron import (
    checkpoint_rules,
    cuda_graphs,
    expert_exchange,
    fixed_rows,
    hybrid,
    mixture_rules,
    model_rules,
    muon,
    number_formats,
    pooled_rules,
    sharding_rules,
    versions,
    vision_rules,
)
from llmlaunch.frameworks.megatron import rules as megatron_rules
from llmlaunch.frameworks.megatron import techniques as megatron_techniques
from llmlaunch.frameworks.megatron.extra_arguments import megatron_groups
from llmlaunch.frameworks.megatron.flags.table import column
from llmlaunch.frameworks.megatron.parser import core_parser
from llmlaunch.layout import Rule
from llmlaunch.planner.preference import habits
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.technique import declarations
from llmlaunch.units import GIB
from support.megatron_disagreements import DISAGREEMENTS, layer_of
from support.megatron_flag_keys import flag_key_table
from support.technique_list import TECHNIQUE_LIST

DOCS = Path(__file__).resolve().parents[2] / "docs"
TABLE = re.compile(r"(?:^\|.*\n?)+", re.MULTILINE)
PRECISIONS = {"half": "bf16, fp16", "fp32": "fp32"}

MEGATRON_RULES: tuple[tuple[Rule | Requirement, ...], ...] = (
    (*MACHINE_REQUIREMENTS, *megatron_rules.RULES),
    (
        *(*model_rules.MODEL_REQUIREMENTS, *mixture_rules.MIXTURE_REQUIREMENTS, *pooled_rules.POOLED_REQUIREMENTS),
        *hybrid.HYBRID_REQUIREMENTS,
        *(*vision_rules.VISION_REQUIREMENTS, *vision_rules.VISION_RULES),
        *(*model_rules.MODEL_RULES, *mixture_rules.MIXTURE_RULES, *pooled_rules.POOLED_RULES, *hybrid.HYBRID_RULES),
    ),
    (*number_formats.NUMBER_REQUIREMENTS, *muon.MUON_REQUIREMENTS, *number_formats.NUMBER_RULES),
    (*expert_exchange.EXCHANGE_REQUIREMENTS, *expert_exchange.EXCHANGE_RULES, *megatron_techniques.OVERLAP_RULES),
    (*cuda_graphs.GRAPH_REQUIREMENTS, *cuda_graphs.GRAPH_RULES),
    (*fixed_rows.FIXED_ROW_REQUIREMENTS, *fixed_rows.FIXED_ROW_RULES),
    (*sharding_rules.SHARDING_REQUIREMENTS, *sharding_rules.SHARDING_RULES),
    (*megatron_techniques.REQUIREMENTS, *megatron_techniques.TECHNIQUE_RULES),
    (*versions.version_requirements(), *versions.VERSION_RULES["0.16"]),
)
DEEPSPEED_RULES: tuple[tuple[Rule | Requirement, ...], ...] = (
    (*deepspeed_rules.RULES, *deepspeed_rules.PACKED_RULES),
    deepspeed_scripts.PIPELINE_RULES,
    deepspeed_scripts.HUGGING_FACE_RULES,
    (
        *deepspeed_techniques.REQUIREMENTS,
        *deepspeed_techniques.TECHNIQUE_RULES,
        *deepspeed_numbers.FORMAT_RULES,
    ),
)


def tables() -> list[tuple[str, str]]:
    """Return every generated table with the page of docs/ that shows it; `*` leaves open which page of a series."""
    return [
        *(("megatron*.md", _rules_table(rules, layer_of)) for rules in MEGATRON_RULES),
        *(("deepspeed*.md", _rules_table(rules)) for rules in DEEPSPEED_RULES),
        ("megatron-rules.md", _disagreements_table()),
        ("megatron-bridge.md", _rules_table((*BRIDGE_REQUIREMENTS, *BRIDGE_RULES, *PACKED_RULES))),
        ("megatron-bridge.md", _bridge_defaults_table()),
        ("deepspeed-memory.md", _engines_table()),
        ("backends.md", _techniques_table()),
        ("backends.md", _rules_table(checkpoint_rules.CHECKPOINT_REQUIREMENTS, layer_of)),
        ("sites.md", _accelerators_table()),
        ("planning.md", _habits_table()),
        ("planning.md", _rounding_table()),
        (
            "megatron-command-lines.md",
            _table(["added", "why"], [[f"`{dest}`", why] for dest, why in column("added").items()]),
        ),
        ("megatron-command-lines.md", flag_key_table()),
        ("own-arguments.md", _flags_table("flags of Megatron-LM", megatron_groups(), _megatron_flag)),
        ("own-arguments.md", _flags_table("arguments of Hugging Face", trainer_groups(), "--{}".format)),
        ("own-arguments.md", _flags_table("keys of ds_config.json", setting_groups(), str)),
        (
            "own-arguments.md",
            _flags_table("arguments of the shipped trainer", shipped_groups(), _dashed),
        ),
        ("models.md", _models_table()),
        ("framework-versions.md", _settings_table()),
        ("framework-versions.md", _trainer_table()),
        ("framework-versions.md", _config_keys_table()),
    ]


def _flags_table(head: str, groups: Iterable[FlagGroup], flag_of: Callable[[str], str]) -> str:
    """One row for each group of flags with one class and one reason."""
    rows = []
    for group in groups:
        flags = (f"`{' '.join(filter(None, (flag_of(name), ', '.join(at))))}`" for name, at in group.patterns.items())
        key = f"`{group.flag_class.key}`" if group.flag_class.key else ""
        effect = "" if group.flag_class.effect == EITHER else f" ({group.flag_class.effect})"
        rows.append([group.title, f"{group.flag_class.kind}{effect}", " ".join(flags), group.flag_class.why, key])
    return _table(["subject", "class", head, "why", "recipe key"], rows)


def _settings_table() -> str:
    """One row for each key of ds_config.json."""
    rows = []
    for row in SETTINGS:
        keys = dict.fromkeys([*row.reason.keys, *filter(None, (row.reads,))])
        group = group_of(setting_groups(), row.key, ("",))
        kind = "" if group is None or row.planned else group.flag_class.kind
        versions = _versions(row.since, row.until, "0.3")
        rows.append([f"`{row.key}`", _keys(keys), "yes" if row.is_rendered else "", kind, versions])
    return _table(["key of ds_config.json", "recipe key", "rendered", "class", "DeepSpeed"], rows)


def _trainer_table() -> str:
    """One row for each argument of Hugging Face's Trainer that is written or read."""
    rows = []
    for row in ARGUMENTS:
        keys = dict.fromkeys([*row.keys, row.reads])
        versions = _versions(row.since, row.until, "4.0")
        rows.append([f"`--{row.key}`", _keys(filter(None, keys)), "yes" if row.is_rendered else "", versions])
    return _table(["argument of the Trainer", "recipe key", "rendered", "transformers"], rows)


def _config_keys_table() -> str:
    """One row for each key of config.json that is one field of a shape."""
    families: dict[tuple[str, str], list[str]] = {}
    for family, about in all_families():
        for row in about.keys:
            families.setdefault((row.key, row.field), []).append(family)
    listed = [
        [f"`{key}`", f"`{field}`", "all" if len(names) == len(family_names()) else ", ".join(names)]
        for (key, field), names in families.items()
    ]
    return _table(["key of config.json", "field of the shape", "families"], listed)


def _models_table() -> str:
    """One row for each model family, with the presets of its shapes."""
    presets: dict[str, list[str]] = {}
    for shape in map(load_preset, preset_names()):
        encoder = " (with its vision encoder)" if shape.vision is not None else ""
        presets.setdefault(shape.family, []).append(f"`{shape.name}`{encoder}")
    rows = []
    for name, family in all_families():
        encoder = () if family.vision is None else (f"`{family.vision.model_type}`",)
        rows.append(
            [", ".join((f"`{name}`", *(f"`{same}`" for same in family.same), *encoder)), ", ".join(presets[name])]
        )
    return _table(["family (`model_type`)", "presets"], rows)


def _keys(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def _versions(since: str, until: str | None, first: str) -> str:
    """Say which versions have something; nothing of what all have since the `first`."""
    begins = "" if since == first else f"since {since}"
    return ", ".join(filter(None, (begins, f"gone in {until}" if until else "")))


def _megatron_flag(name: str) -> str:
    """The flags that set a name, the newest version's where both have one; a pattern as it is."""
    if "*" in name:
        return _dashed(name)
    by_version = (core_parser(version).flags.items() for version in reversed(versions.KNOWN_VERSIONS))
    flags = next(names for items in by_version if (names := [flag for flag, parsed in items if parsed.dest == name]))
    return "/".join(sorted(flags))


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _rules_table(rules: Iterable[Rule | Requirement], layer_of: Callable[[str], str] | None = None) -> str:
    """One row for each rule, in the order in which they are applied; `layer_of` names the layer that checks it."""
    rows = []
    for rule in rules:
        layer = [layer_of(rule.where)] if layer_of else []
        rows.append([f"`{rule.key}`", _escaped(rule.sentence), *layer, f"`{_escaped(rule.where)}`"])
    return _table(["rule", "what it says", *(["layer"] if layer_of else []), "checked in"], rows)


def _disagreements_table() -> str:
    rows = [[f"`{each.rule}`", each.sentence, f"`{each.where}`"] for each in DISAGREEMENTS]
    return _table(["rule", "what Megatron does", "there"], rows)


def _bridge_defaults_table() -> str:
    return _table(
        ["setting", "said"], [[f"`{name}`", f"`{json.dumps(value)}`"] for name, value in MEGATRON_DEFAULTS.items()]
    )


def _techniques_table() -> str:
    rows = []
    for entry in TECHNIQUE_LIST:
        rendered = (text or "refused" for text in (entry.megatron, entry.deepspeed))
        rows.append([", ".join(f"`{key}`" for key in entry.keys), entry.source, entry.saves, entry.costs, *rendered])
    return _table(["key", "from", "saves", "costs", "megatron-lm", "deepspeed"], rows)


def _engines_table() -> str:
    """DeepSpeed's optimizer classes: bytes per parameter in each phase of a step."""
    phases = ["lasting", "between micro-batches", "end of backward", "step", "step, not fused"]
    head = ["class", "ZeRO", "precision", *phases, "where", "how known"]
    return _table(head, [_engine_row(engine) for engine in ENGINES])


def _engine_row(engine: Engine) -> list[str]:
    precision = PRECISIONS[engine.precision]
    if engine.accumulation != "same":
        precision = f"bf16, gradients {engine.accumulation}"
    if engine.states != "fp32":
        precision = f"{precision.replace(', fp16', '')}, states {engine.states}"
    if engine.offload:
        precision += ", optimizer offloaded"
    whole, sharded = engine.final
    final = (whole * (2 if engine.flattened else 1), sharded)
    extras = (engine.accumulated, final, engine.step, engine.foreach_step or engine.step)
    phases = (engine.lasting, *((engine.lasting[0] + more[0], engine.lasting[1] + more[1]) for more in extras))
    cells = [engine.name, str(engine.stage), precision, *(_share(share) for share in phases)]
    return [*cells, f"`{engine.where}`", engine.evidence]


def _accelerators_table() -> str:
    """The GPUs of accelerators.json, in its order."""
    head = [
        "accelerator",
        "GiB",
        "bf16 (/ fp16) TFLOP/s",
        "memory GB/s",
        "NVLink or Infinity Fabric GB/s, each way",
        "profile",
    ]
    known, profiles = machines(), profile_names()
    return _table(
        head,
        [
            _accelerator_row(name, row, known[name].name if known[name].name in profiles else None)
            for name, row in accelerator_table().items()
            if row["kind"] == "gpu"
        ],
    )


def _accelerator_row(name: str, row: Mapping[str, Any], profile: str | None) -> list[str]:
    half = [f"{row['flops_per_second'][precision] / 1e12:,.0f}" for precision in ("bf16", "fp16")]
    link = row.get("nvlink_bytes_per_second")
    return [
        *(f"`{name}`", f"{row['memory_bytes'] / GIB:.1f}", " / ".join(dict.fromkeys(half))),
        *(f"{row['memory_bytes_per_second'] / 1e9:,.0f}", f"{link / 1e9:.0f}" if link else "-"),
        f"`{profile}`" if profile else "-",
    ]


def _share(share: Share) -> str:
    whole, sharded = share
    return " + ".join([f"{whole:g}"] * bool(whole) + [f"{sharded:g}/D"] * bool(sharded))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _habits_table() -> str:
    rows = []
    for habit in habits():
        each = f" each ({habit.each.replace('_', ' ')})" if habit.each else ""
        own = ", own" if habit.own_price else ""
        source = f" ({habit.source})" if habit.source else ""
        rows.append([habit.name, f"{100 * habit.price:g}{each}{own}", f"{habit.reason}{source}"])
    return _table(["against", "price, % of a step", "why"], rows)


def _rounding_table() -> str:
    declared = declarations(Techniques)
    rows = [[f"`{name}`", "yes", each.bit_equal] for name, each in declared.items() if each.bit_equal]
    rows += [[f"`{name}`", "no", each.rounding] for name, each in declared.items() if each.rounding]
    return _table(["technique", "bit-equal", "because"], rows)


def write_tables() -> None:
    """Replace each table in its page: the one with the same head that has most first cells of rows in common."""
    for pages, table in tables():
        head = table.splitlines()[0]
        blocks = [
            (path, block.strip("\n"))
            for path in sorted(DOCS.glob(pages))
            for block in TABLE.findall(path.read_text("utf-8"))
            if block.startswith(head)
        ]
        if not blocks:
            raise SystemExit(f"docs/{pages} has no table with the head {head}")
        path, closest = max(blocks, key=lambda block: len(_first_cells(block[1]) & _first_cells(table)))
        path.write_text(path.read_text("utf-8").replace(closest, table), "utf-8")


def _first_cells(table: str) -> set[str]:
    return {line.split("|")[1].strip() for line in table.splitlines()[2:] if line.startswith("|")}


if __name__ == "__main__":
    write_tables()
