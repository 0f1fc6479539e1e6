"""A script of the person's own that builds a PipelineModule: `backend.script_kind: pipeline`.

The script makes as many stages as `pipeline.stages` of ds_config.json says, and lets DeepSpeed's PipelineEngine run
them, one forward and one backward pass in turn (deepspeed/runtime/pipe/schedule.py TrainSchedule, 0.19.8).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmlaunch.backends.deepspeed.config import ds_config
from llmlaunch.backends.deepspeed.rules import ANY_RULES, not_split
from llmlaunch.layout import RECOMPUTE_FULL, Layout, Rule, Situation
from llmlaunch.recipe.types import Recipe

__all__ = ["PIPELINE_RULES", "pipeline_config"]

ENGINE = "deepspeed/runtime/pipe/engine.py PipelineEngine.__init__, 0.19.8"


def pipeline_config(recipe: Recipe, layout: Layout) -> dict[str, Any]:
    """With `pipeline`: how many stages the script makes, and whether every layer is recomputed. How it shares out its
    layers is an argument of PipelineModule; stages of equally many decoder layers are planned for."""
    recomputed = 1 if layout.recompute == RECOMPUTE_FULL else 0
    section = {"stages": layout.pipeline, "activation_checkpoint_interval": recomputed}
    return ds_config(recipe, layout) | {"pipeline": section}


def _low_zero(s: Situation) -> NDArray[np.bool_]:
    return np.less(s.layouts.zero_stage, 2)


def _sharded_bf16(s: Situation) -> NDArray[np.bool_]:
    narrow = s.workload.precision == "bf16"
    passes: NDArray[np.bool_] = np.equal(s.layouts.zero_stage, 1) | (not narrow)
    return passes


def _even(s: Situation) -> NDArray[np.bool_]:
    return np.equal(s.shape.num_layers % s.layouts.pipeline, 0)


PIPELINE_RULES: tuple[Rule, ...] = (
    Rule(
        "pipeline-zero",
        "a pipeline runs with ZeRO 0 or 1: gradients and parameters stay whole on a stage",
        ENGINE,
        _low_zero,
        of_words=True,
    ),
    Rule(
        "pipeline-bf16",
        "bf16 with a pipeline needs zero_stage 1: at 0 another optimizer runs, whose memory is not counted",
        "deepspeed/runtime/engine.py _do_optimizer_sanity_check, 0.19.8",
        _sharded_bf16,
        of_words=True,
    ),
    Rule("pipeline-layers", "the layers must be divisible by pipeline", ENGINE, _even),
    not_split("tensor", "tensor", "deepspeed/runtime/pipe/engine.py and AutoTP abort together, 0.19.8"),
    not_split("context", "context", ENGINE),
    *ANY_RULES,
)
