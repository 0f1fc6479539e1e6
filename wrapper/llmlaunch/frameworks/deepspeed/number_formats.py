"""Number formats on DeepSpeed: what gradients add up in and what the optimizer keeps, as keys of ds_config.json, with
what a ZeRO stage and the place of the states allow of them."""

from __future__ import annotations

import numpy as np

from llmlaunch.frameworks.base import Requirement, implies, of_techniques
from llmlaunch.frameworks.deepspeed.facts import BF16_STATES, FP32_STATES
from llmlaunch.layout import Rule
from llmlaunch.recipe.types import Recipe
from llmlaunch.workload import OptimizerFormats

ENGINE = "deepspeed/runtime/engine.py _do_optimizer_sanity_check, 0.19.8"
CONFIG = "deepspeed/runtime/config.py _do_error_check, 0.19.8"
MASTERS = "deepspeed/runtime/base_optimizer.py _configure_master_weights, 0.19.8"
FACTS = "llmlaunch/frameworks/deepspeed/facts.py ENGINES"
FORMATS, GRADIENTS = "training.optimizer", "training.gradient_dtype"
BF16 = OptimizerFormats("bf16", "bf16", "bf16")
BF16_MASTERS = OptimizerFormats("bf16", "fp32", "fp32")


def adds_up_in_fp32(recipe: Recipe) -> bool:
    """Return whether gradients of bf16 add up in fp32."""
    return recipe.workload.precision == "bf16" and recipe.training.gradient_dtype == "fp32"


def has_bf16_masters(recipe: Recipe) -> bool:
    """Return whether master weights are bf16, with moments of either format."""
    formats = recipe.training.numbers.optimizer
    return formats is not None and formats.main_parameters == BF16_STATES


def optimizer_states(recipe: Recipe) -> str:
    """Return the format of master weights and moments, as facts and records name it; fp32 where only some are bf16."""
    return BF16_STATES if recipe.training.numbers.optimizer == BF16 else FP32_STATES


def _has_formats(recipe: Recipe) -> bool:
    """Return whether DeepSpeed has these formats. Moments stay fp32 beside bf16 master weights only in its own Adam of
    the host, which the shipped script does not bring."""
    formats = recipe.training.numbers.optimizer
    if formats in (None, OptimizerFormats()):
        return True
    own_script = recipe.backend.script is not None
    return recipe.workload.precision == "bf16" and formats in ((BF16, BF16_MASTERS) if own_script else (BF16,))


FORMAT_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "optimizer-formats-of-deepspeed",
        FORMATS,
        "with precision: bf16 the main parameters and both moments can be bf16 (main_parameters: bf16, first_moment: "
        "bf16, second_moment: bf16), or the main parameters alone in a script of your own that steps with "
        "DeepSpeedCPUAdam; write one of these, or remove it",
        MASTERS,
        lambda r: not _has_formats(r),
    ),
    Requirement(
        "gradients-as-computed",
        GRADIENTS,
        "gradients accumulate in the precision of the computation, or in fp32 with precision bf16",
        "deepspeed/runtime/engine.py get_data_types, 0.19.8",
        lambda r: r.training.gradient_dtype not in (None, r.workload.precision) and not adds_up_in_fp32(r),
    ),
)

_WIDE_GRADIENTS: tuple[Rule, ...] = of_techniques(
    Rule(
        "gradients-fp32-zero",
        "gradient_dtype: fp32 needs zero_stage 1, 2 or 3",
        ENGINE,
        lambda s: np.greater(s.layouts.zero_stage, 0),
    ),
    Rule(
        "gradients-fp32-here",
        "gradient_dtype: fp32 is not counted for optimizer states on the host: leave one of the two out",
        FACTS,
        lambda s: implies(s.techniques.offload_optimizer > 0, np.zeros(len(s.layouts), dtype=np.bool_)),
    ),
)
_BF16_MASTERS: tuple[Rule, ...] = of_techniques(
    Rule(
        "bf16-masters-zero",
        "main_parameters: bf16 needs zero_stage 1, 2 or 3",
        CONFIG,
        lambda s: np.greater(s.layouts.zero_stage, 0),
    ),
    Rule(
        "bf16-masters-alone",
        "main_parameters: bf16 needs offload_optimizer above 0 where the moments are fp32",
        MASTERS,
        lambda s: np.full(len(s.layouts), s.numbers.optimizer == BF16 or s.techniques.offload_optimizer > 0),
    ),
)
_BF16_MASTERS_HERE = Rule(
    "bf16-masters-on-device",
    "main_parameters: bf16 on the host needs DeepSpeedCPUAdam, and the shipped script brings torch's AdamW: "
    "offload_optimizer must be 0",
    MASTERS,
    lambda s: np.full(len(s.layouts), s.techniques.offload_optimizer == 0),
    of_techniques=True,
)
_BF16_MASTERS_OF_WIDE_GRADIENTS = Rule(
    "bf16-masters-fp32-gradients",
    "main_parameters: bf16 with gradient_dtype: fp32 needs zero_stage 2 or 3 (the BF16_Optimizer that stage 1 takes "
    "then would silently keep fp32)",
    ENGINE,
    lambda s: np.greater(s.layouts.zero_stage, 1),
    of_techniques=True,
)
FORMAT_RULES = (*_WIDE_GRADIENTS, *_BF16_MASTERS, _BF16_MASTERS_HERE, _BF16_MASTERS_OF_WIDE_GRADIENTS)


def number_rules(recipe: Recipe) -> tuple[Rule, ...]:
    """Return the rules of the formats that the recipe names."""
    wide, narrow = adds_up_in_fp32(recipe), has_bf16_masters(recipe)
    rules = (*(_WIDE_GRADIENTS if wide else ()), *(_BF16_MASTERS if narrow else ()))
    if narrow and recipe.backend.script is None:
        rules += (_BF16_MASTERS_HERE,)
    return (*rules, _BF16_MASTERS_OF_WIDE_GRADIENTS) if narrow and wide else rules
