"""A job of Megatron core as the tracer reads it, and what was alive at its peak by the names of the estimate's terms.

A trace says of every storage which line of which framework made it, in which phase and inside which part of the model
(tracing/live_storages.py). The rules below read that as of Megatron core 0.19 and Transformer Engine 2.20; whatever
they do not know, in these or other versions, is in the remainder and in no term.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import NodeVariable, Word, command_words, flag_groups, flag_of
from llmlaunch.frameworks.base import Rendered
from llmlaunch.frameworks.framework import FORWARD, REMAINDER
from llmlaunch.frameworks.megatron.arguments import planned_arguments
from llmlaunch.frameworks.megatron.rank_alone import LEFT_OUT
from llmlaunch.layout import Layout
from llmlaunch.memory.estimator import RankEstimate
from llmlaunch.recipe.types import Recipe

BRIDGE = "megatron-bridge"

# The tokenizer's files lie on the cluster. What of it takes memory is the number of its words, which is said here.
TOKENIZER = frozenset(
    {"--tokenizer-type", "--tokenizer-model", "--vocab-size", "--padded-vocab-size", "--mock-data"}
    | {"--vocab-file", "--merge-file"}
)
DATA = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size")


def megatron_job(recipe: Recipe, rendered: Rendered, layout: Layout, pipeline_rank: int) -> dict[str, Any]:
    """Return the job as tracing/trace_ranks.py reads it, named by its rank. What no rank alone needs is left out, as on
    a GPU: checkpoints, datasets and what follows a training (frameworks/megatron/rank_alone.py).

    Raises UserError for a script of the person's own, whose model the tracer does not build."""
    if recipe.backend.script is not None:
        raise UserError(
            f"{recipe.path}: backend.script: {recipe.backend.script} cannot be traced: the tracer builds Megatron's "
            "own GPT model; rehearse on a GPU (--on gpu), or without backend.script"
        )
    on_bridge = recipe.backend.name == BRIDGE
    words = _words_of_bridge(recipe, layout) if on_bridge else _words(rendered)
    groups = (group for group in flag_groups(words) if flag_of(group) not in LEFT_OUT.keys() | TOKENIZER)
    arguments = [_plain(word) for group in groups for word in group]
    return {
        "name": str(pipeline_rank),
        "world_size": recipe.world_size,
        "pipeline_rank": pipeline_rank,
        "arguments": [*arguments, *DATA, str(recipe.model.vocab_size)],
        "environment": dict(rendered.environment),
        **(_of_bridge(rendered) if on_bridge else {}),
    }


def _words(rendered: Rendered) -> tuple[Word, ...]:
    _, *words = rendered.program  # the first is pretrain_gpt.py, whose work the tracer does
    return tuple(words)


def _words_of_bridge(recipe: Recipe, layout: Layout) -> tuple[Word, ...]:
    """Return the arguments that configure Megatron core as Bridge's settings do
    (tests/frameworks/test_megatron_bridge.py holds the two equal)."""
    return command_words(planned_arguments(recipe, layout))


def _of_bridge(rendered: Rendered) -> dict[str, Any]:
    """Return what only Bridge's settings say: those of its LoRA, with the package that has it, and whether rows are
    packed."""
    settings = json.loads(rendered.files[rendered.settings_file])
    packed, adapters = settings["dataset"].get("enable_offline_packing", False), settings.get("peft")
    return {"adapters": adapters, "packed": packed, **({"package": BRIDGE} if adapters else {})}


def _plain(word: Word) -> str:
    """Nothing of such a word is read: it names a place on a node."""
    return f"${word.name}{word.suffix}" if isinstance(word, NodeVariable) else word


Group = Mapping[str, Any]  # storages alike: bytes together, phase, site, module, role, the phase they were let go of in

ROLES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_states": "optimizer_states",
    "layer_input": "activations",
    "final_norm_input": "logits_and_loss",
}
# Made once and kept, or passing through, whatever the phase: what the site's text holds, and the term.
SITES = (
    ("get_dummy_wgrad", "weight_gradient_stubs"),
    ("cublas_workspace", "workspace"),
    ("GlobalMemoryBuffer.get_tensor", "sequence_gather"),
    ("initialize_ub", "user_buffers"),
    ("get_weight_workspace", "weight_copies"),
    ("pipeline_parallel/p2p_communication.py", "pipeline_buffers"),
)
HEAD_MODULES = (
    *("models/common/language_module/", "models/gpt/gpt_model.py GPTModel._postprocess"),
    "models/hybrid/hybrid_model.py HybridModel.forward",
)
HEAD_SITES = ("cross_entropy", "LinearWithGradAccumulationAndAsyncCommunication", "LinearWithFrozenWeight")
# What a forward pass keeps, by the model's code: "models/common/embeddings/rope_utils.py apply_rotary_pos_emb".
MODULES = (
    ("models/common/embeddings/rope_utils.py", "activations"),
    ("models/common/embeddings/language_model_embedding.py", "embedding"),
    *((head, "logits_and_loss") for head in HEAD_MODULES),
    ("transformer/transformer_block.py TransformerBlock.forward", "logits_and_loss"),  # the norm behind the layers
    ("models/hybrid/hybrid_block.py HybridStack.forward", "logits_and_loss"),
    ("transformer/", "activations"),
    ("ssm/", "activations"),
)


def megatron_terms(trace: Mapping[str, Any], predicted: RankEstimate) -> dict[str, int]:
    """Bytes of `trace["at_peak"]` by the names of the terms of `predicted`, largest first; they sum to
    `trace["peak_bytes"]`. A term that is not named had none; none is where the trace does not say what was alive.

    `activations` are what the forward passes of layers left behind, `layer_forward` what passed through one when the
    peak lay inside of it. `layer_backward` and `head_backward` are what the backward pass made that was there at a peak
    within it; at another peak it waits to be sent to the previous rank (`pipeline_buffers`).
    """
    groups = trace.get("at_peak") or ()
    if not groups:
        return {}
    terms: Counter[str] = Counter()
    width = _logits_width(groups)
    for group in groups:
        term = _term(group, str(trace["peak_phase"]), width)
        terms[term if term == FORWARD or term in predicted.terms else REMAINDER] += int(group["bytes"])
    terms[REMAINDER] += int(trace["peak_bytes"]) - sum(terms.values())
    return {term: count for term, count in terms.most_common() if count}


def _logits_width(groups: Iterable[Group]) -> int:
    """What the head made is the widest there: the vocabulary, or this rank's part of it."""
    shapes = [group["shape"] for group in groups if str(group.get("module", "")).startswith(HEAD_MODULES)]
    return max((int(shape[-1]) for shape in shapes if len(shape) > 1), default=0)


def _term(group: Group, peak_phase: str, logits_width: int) -> str:
    """`logits_width` is that of this rank's logits; 0: there are none."""
    term_of_role = ROLES.get(str(group.get("role", "")))
    if term_of_role is not None:
        return term_of_role
    site, phase = str(group.get("site", "")), group["phase"]
    for text, term in SITES:
        if text in site:
            return term
    if phase == "setup" and peak_phase == "setup":
        return "whole_model"
    if phase == "forward":
        return _of_forward(group, site)
    if phase == "recompute":
        return "recomputed_layer"
    if phase == "backward":
        if peak_phase not in ("backward", "recompute"):
            return "pipeline_buffers"
        wide = logits_width and logits_width in group["shape"][-1:]
        return "head_backward" if wide or any(text in site for text in HEAD_SITES) else "layer_backward"
    if phase == "optimizer step" and peak_phase == "optimizer step":
        return "gradient_norm" if "clip_grads" in site else "optimizer_step"
    return REMAINDER


def _of_forward(group: Group, site: str) -> str:
    module = str(group.get("module", ""))
    if module:
        term = next((term for start, term in MODULES if module.startswith(start)), REMAINDER)
        return FORWARD if term == "activations" and group.get("until") == "forward" else term
    if "cross_entropy" in site or "forward_step_calc_loss" in site:
        return "logits_and_loss"
    return "embedding" if site.endswith(" forward_step") else REMAINDER  # token ids, positions, labels and their mask
