"""A DeepSpeed job as the tracer reads it, and what was alive at its peak by the names of the estimate's terms.

The rules below read sites and modules as of DeepSpeed 0.19 and Transformers 5; whatever they do not know, in these or
other versions, is in the remainder and in no term.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from llmlaunch.frameworks.argument import NodeVariable
from llmlaunch.frameworks.base import Rendered
from llmlaunch.frameworks.deepspeed.rank_alone import rank_alone
from llmlaunch.frameworks.framework import FORWARD, REMAINDER
from llmlaunch.layout import Layout
from llmlaunch.memory.estimator import RankEstimate
from llmlaunch.recipe.types import Recipe

STEPS = 2

Group = Mapping[str, Any]  # storages alike: bytes together, phase, site, module, role, the phase they were let go of in


def deepspeed_job(recipe: Recipe, rendered: Rendered, layout: Layout, pipeline_rank: int) -> dict[str, Any]:
    """Return the job as tracing/trace_ranks.py reads it with `--framework deepspeed`: the words a rank alone has on a
    GPU, and the JSON files they name.

    Raises:
        UserError: no rank of this job can run alone, with the reason.
    """
    alone = rank_alone(recipe, layout, rendered, pipeline_rank, STEPS)
    texts = (word for argument in alone.arguments for word in argument.words)
    files = {**rendered.files, **alone.files}
    return {
        "name": str(pipeline_rank),
        "world_size": layout.world_size,
        "arguments": [
            *(f"${word.name}{word.suffix}" if isinstance(word, NodeVariable) else word for word in texts),
            *alone.own_words,
        ],
        "files": {name: json.loads(content) for name, content in files.items() if name.endswith(".json")},
        "environment": dict(rendered.environment),
    }


ROLES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "waiting_gradients": "gradient_buffers",
    "optimizer_states": "optimizer_states",
}
# What the site's text holds, and the term, whatever the phase.
SITES = (
    ("DeepSpeedZeroOptimizer_Stage3._setup_for_real_optimizer", "gradient_buffers"),
    ("DeepSpeedZeroOptimizer.setup_buckets", "gradient_buffers"),
    ("copy_grads_in_partition", "gradient_buffers"),
    ("get_flat_partition", "gradient_buffers"),
    ("buffered_allreduce_fallback", "gradient_buffers"),
    ("_all_gather", "parameters"),  # of ZeRO 3: the estimate counts gathered parameters among all
    ("_allgather_params", "parameters"),
)
GATHERED = "deepspeed/utils/nvtx.py"  # ZeRO 3 puts gathered parameters together inside a wrapper of this file
HEAD = "ForCausalLM.forward"


def deepspeed_terms(trace: Mapping[str, Any], predicted: RankEstimate) -> dict[str, int]:
    """Return the bytes of `trace["at_peak"]` by the names of the terms of `predicted`, largest first; they sum to
    `trace["peak_bytes"]`. A term that is not named had none; none is where the trace does not say what was alive."""
    groups = trace.get("at_peak") or ()
    if not groups:
        return {}
    width = max((int(group["shape"][-1]) for group in groups if _of_head(group) and group["shape"]), default=0)
    terms: Counter[str] = Counter()
    for group in groups:
        term = _term(group, str(trace["peak_phase"]), width)
        terms[term if term == FORWARD or term in predicted.terms else REMAINDER] += int(group["bytes"])
    terms[REMAINDER] += int(trace["peak_bytes"]) - sum(terms.values())
    return {term: count for term, count in terms.most_common() if count}


def _of_head(group: Group) -> bool:
    return group["phase"] == "loss" or str(group.get("module", "")).endswith(HEAD)


def _term(group: Group, peak_phase: str, logits_width: int) -> str:
    """`logits_width` is that of this rank's logits; 0: there are none."""
    term_of_role = ROLES.get(str(group.get("role", "")))
    if term_of_role is not None:
        return term_of_role
    site, phase = str(group.get("site", "")), group["phase"]
    for text, term in SITES:
        if text in site:
            return term
    if GATHERED in site and phase != "optimizer step":
        return "parameters"
    if group["dtype"] == "int64":
        return "embedding"
    if phase == "setup" and peak_phase == "setup":
        return "whole_model"
    if _of_head(group):
        return "logits_and_loss"
    if phase == "forward":
        passing = group.get("until") == "forward" and peak_phase == "forward"
        return FORWARD if passing else "activations"
    if phase == "recompute":
        return "recomputed_layer"
    if phase == "backward":
        return _of_backward(group, logits_width)
    return "optimizer_step" if phase == "optimizer step" == peak_phase else REMAINDER


def _of_backward(group: Group, logits_width: int) -> str:
    if not logits_width or logits_width not in group["shape"][-1:]:
        return "layer_backward"
    return "logits_and_loss" if group["dtype"] == "float32" else "head_backward"
