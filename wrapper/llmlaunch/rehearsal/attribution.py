"""What was alive at the peak of a traced rank, by the names of the estimate's terms.

A trace says of every storage which line of which framework made it, in which phase and inside which part of the model
(tracing/live_storages.py). The rules below read that as of Megatron core 0.19 and Transformer Engine 2.20; whatever
they do not know, in these or other versions, is in the remainder and in no term.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llmlaunch.memory.estimate import RankEstimate

__all__ = ["FORWARD", "REMAINDER", "terms_at_peak"]

REMAINDER = "other"
FORWARD = (
    "layer_forward"  # what a layer's forward pass makes and lets go of again: no moment of the estimate lies there
)

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
HEAD_MODULES = ("models/common/language_module/", "models/gpt/gpt_model.py GPTModel._postprocess")
HEAD_SITES = ("cross_entropy", "LinearWithGradAccumulationAndAsyncCommunication", "LinearWithFrozenWeight")
# What a forward pass keeps, by the model's code: "models/common/embeddings/rope_utils.py apply_rotary_pos_emb".
MODULES = (
    ("models/common/embeddings/rope_utils.py", "activations"),
    ("models/common/embeddings/language_model_embedding.py", "embedding"),
    *((head, "logits_and_loss") for head in HEAD_MODULES),
    ("transformer/transformer_block.py TransformerBlock.forward", "logits_and_loss"),  # the norm behind the layers
    ("transformer/", "activations"),
)


def terms_at_peak(trace: Mapping[str, Any], predicted: RankEstimate) -> dict[str, int]:
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
    moment = _Moment(str(trace["peak_phase"]), _logits_width(groups))
    for group in groups:
        term = _term(group, moment)
        terms[term if term == FORWARD or term in predicted.terms else REMAINDER] += int(group["bytes"])
    terms[REMAINDER] += int(trace["peak_bytes"]) - sum(terms.values())
    return {term: count for term, count in terms.most_common() if count}


@dataclass(frozen=True)
class _Moment:
    phase: str
    logits_width: int  # of this rank's logits; 0: there are none


def _logits_width(groups: Iterable[Group]) -> int:
    """What the head made is the widest there: the vocabulary, or this rank's part of it."""
    shapes = [group["shape"] for group in groups if str(group.get("module", "")).startswith(HEAD_MODULES)]
    return max((int(shape[-1]) for shape in shapes if len(shape) > 1), default=0)


def _term(group: Group, moment: _Moment) -> str:
    term_of_role = ROLES.get(str(group.get("role", "")))
    if term_of_role is not None:
        return term_of_role
    site = str(group.get("site", ""))
    for text, term in SITES:
        if text in site:
            return term
    of_phase = PHASES.get(str(group["phase"]))
    return REMAINDER if of_phase is None else of_phase(group, moment)


def _of_setup(group: Group, moment: _Moment) -> str:
    return "whole_model" if moment.phase == "setup" else REMAINDER


def _of_forward(group: Group, moment: _Moment) -> str:
    module, site = str(group.get("module", "")), str(group.get("site", ""))
    if module:
        term = next((term for start, term in MODULES if module.startswith(start)), REMAINDER)
        return FORWARD if term == "activations" and group.get("until") == "forward" else term
    if "cross_entropy" in site or "forward_step_calc_loss" in site:
        return "logits_and_loss"
    return "embedding" if site.endswith(" forward_step") else REMAINDER  # token ids, positions, labels and their mask


def _of_recomputation(group: Group, moment: _Moment) -> str:
    return "recomputed_layer"


def _of_backward(group: Group, moment: _Moment) -> str:
    if moment.phase not in ("backward", "recompute"):
        return "pipeline_buffers"
    wide = moment.logits_width and moment.logits_width in group["shape"][-1:]
    of_head = wide or any(text in str(group.get("site", "")) for text in HEAD_SITES)
    return "head_backward" if of_head else "layer_backward"


def _of_step(group: Group, moment: _Moment) -> str:
    if moment.phase != "optimizer step":
        return REMAINDER
    return "gradient_norm" if "clip_grads" in str(group.get("site", "")) else "optimizer_step"


PHASES: dict[str, Callable[[Group, _Moment], str]] = {
    "setup": _of_setup,
    "forward": _of_forward,
    "recompute": _of_recomputation,
    "backward": _of_backward,
    "optimizer step": _of_step,
}
