"""Models whose layers have one part each, in a Megatron-LM namespace.

All layers are one value, with "|" between the stages they lie in and "/" before each module of multi-token prediction
(megatron/training/arguments.py validate_args, core 0.19).
"""

from __future__ import annotations

from typing import Any

from llmlaunch.errors import UserError
from llmlaunch.frameworks.megatron.flags.row import PATTERN
from llmlaunch.frameworks.megatron.hybrid import SPECIFICATION
from llmlaunch.models.sections import PARTS

STAGE, MODULE = "|", "/"
EARLIER_SPECIFICATION = ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]
EXPANSION = 2  # of MambaMixer, where nothing says how many heads there are


def one_pattern(space: dict[str, Any]) -> tuple[str, ...]:
    """Put one spelling of the pattern into a namespace, without the stages, and return the layers of each stage; none
    where the model has no such pattern, and one stage where the pattern names none."""
    earlier, module = space.pop("hybrid_override_pattern", None), space.pop("mtp_hybrid_override_pattern", None)
    whole = space.get(PATTERN) or earlier
    if not whole:
        return ()
    space.pop("is_hybrid_model", None)
    main, *modules = str(whole).split(MODULE)
    if module and not modules:
        modules = [str(module)] * (space.get("mtp_num_layers") or 0)
    stages = tuple(main.split(STAGE))
    layers = "".join(stages)
    space |= {PATTERN: MODULE.join((layers, *modules)), "num_layers": len(layers)}
    if modules:
        space["mtp_num_layers"] = len(modules)
    if space.get("spec") == EARLIER_SPECIFICATION:
        space["spec"] = list(SPECIFICATION)
    if space.get("mamba_num_heads") is None and space.get("hidden_size") and space.get("mamba_head_dim"):
        space["mamba_num_heads"] = EXPANSION * space["hidden_size"] // space["mamba_head_dim"]
    return stages


def refuse_other_parts(space: dict[str, Any], place: str) -> None:
    """Raise UserError where a letter stands for a part that no recipe describes, or modules differ."""
    layers, *modules = str(space[PATTERN]).split(MODULE)
    unknown = sorted(set(layers + "".join(modules)) - set(PARTS))
    if unknown or not layers or len(set(modules)) > 1:
        known = ", ".join(PARTS)
        why = "modules of multi-token prediction that differ" if not unknown and layers else f"letters beside {known}"
        raise UserError(f"{place}: --hybrid-layer-pattern: has {why}; recipes describe layers of {known} alone")
