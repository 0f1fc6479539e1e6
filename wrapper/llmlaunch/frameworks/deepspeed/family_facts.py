"""What model families of Transformers keep in memory beyond what Llama keeps, which `deepspeed_facts` returns."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.facts import AttentionFacts, LayerFacts, MemoryFacts
from llmlaunch.families.family import Family
from llmlaunch.families.registry import family_named
from llmlaunch.models.shape import CLAMPED, ModelShape


def shipped_facts(facts: MemoryFacts, shape: ModelShape, sequence_length: int, packed: bool) -> MemoryFacts:
    """Return the facts of the shipped script. Its loss frees the logits; left are the fp32 log-softmax, its gradient
    and the gradient of its input (counted in a profile of the backward pass, torch 2.13)."""
    facts = replace(facts, loss=replace(facts.loss, logit_bytes=12.0))
    return _with_packed_rows(facts, shape) if packed else with_family(facts, shape, sequence_length)


def _with_packed_rows(facts: MemoryFacts, shape: ModelShape) -> MemoryFacts:
    """Return the facts of packed rows, whose attention has a mask of each sequence: one of booleans for each kind of
    attention (masking_utils.py sdpa_mask, transformers 5.23), or of numbers for one that writes scores out
    (eager_mask), and a window is a part of it. With a mask, keys and values are copied to every head."""
    facts = with_family(facts, shape, 0)  # no window is a mask besides
    window, attention = shape.sliding_window, facts.attention
    kinds = 2.0 if window is not None and window.full_every else 1.0
    width = facts.layer.activation_bytes if attention.attention_scores_saved else 1.0
    attention = replace(attention, row_mask_bytes=kinds * width, windows_masked=True, key_values_expanded=True)
    return replace(facts, attention=attention)


def with_family(facts: MemoryFacts, shape: ModelShape, sequence_length: int) -> MemoryFacts:
    """Return the facts of one model family in transformers 5.23; tests/frameworks/test_family_bytes.py counts each.

    Experts are weighed by the router after they are done (MixtralExperts); DeepSeek's and GLM's router compute in fp32.
    A cap on logits keeps what tanh puts out. Phi's queries, keys and values come of one linear. A window shorter than
    the sequence is a mask of s x s booleans, which torch's attention turns into numbers.
    """
    e, family = facts.layer.activation_bytes, family_named(shape.family)
    states, mixture, loss, allocator = facts.states, facts.mixture, facts.loss, facts.allocator
    if shape.moe is not None:
        wide = shape.mla is not None or family.wide_router
        mixture = replace(mixture, expert_output_weighted=True, router_input_bytes=4.0 if wide else 0.0)
    if family.one_projection:
        states = replace(states, projections_apart=False)
    if shape.logit_softcap is not None:
        loss = replace(loss, logit_bytes=loss.logit_bytes + e)
    masked = shape.sliding_window is not None and shape.sliding_window.tokens < sequence_length
    if masked:
        masks = (1.0 + e) * float(sequence_length) ** 2
        allocator = replace(allocator, workspace_bytes=allocator.workspace_bytes + masks)
    return replace(
        facts,
        states=states,
        layer=_layer_of_family(facts.layer, shape, family),
        attention=_attention_of_family(facts.attention, shape, family, masked, e),
        mixture=mixture,
        loss=loss,
        allocator=allocator,
    )


def _layer_of_family(layer: LayerFacts, shape: ModelShape, family: Family) -> LayerFacts:
    """Return what norms and activations of a family keep. Gemma's norm, as GPT-OSS' and OLMo's, keeps what it
    normalized in fp32 before it multiplies (GemmaRMSNorm). GPT-2's is torch's own, which keeps nothing more, and its
    activation is written out (NewGELUActivation): three more results."""
    e = layer.activation_bytes
    if shape.zero_centered_norm or family.wide_norms:
        layer = replace(layer, norm_extra_bytes=layer.norm_extra_bytes + max(4.0 - e, 0.0))
    if family.torch_norms:
        layer = replace(layer, norm_extra_bytes=0.0, norm_backward_bytes=0.0, ungated_activation_bytes=3.0 * e)
    if shape.activation == CLAMPED:
        layer = replace(layer, clamped_activation_bytes=3.0 * e)
    return layer


def _attention_of_family(
    attention: AttentionFacts, shape: ModelShape, family: Family, masked: bool, width: float
) -> AttentionFacts:
    """Return what attention of a family keeps, where windows are `masked`, in a precision of `width` bytes.

    Where a part of each head may be turned, heads lie apart and are brought together before the projection
    (apply_rotary_pos_emb of modeling_glm4_moe.py). A cap on scores has no fused attention (`_supports_sdpa` of Gemma
    2), nor have sinks, whose softmax stays in the precision (eager_attention_forward of modeling_gpt_oss.py). With a
    mask, keys and values are copied to every head (`use_gqa_in_sdpa`, integrations/sdpa_attention.py).
    """
    if shape.rotary_percent != 1.0 or family.one_projection:
        attention = replace(attention, attention_output_copied=True)
    if family.one_projection:
        attention = replace(attention, mixed_projection_kept=True)
    if shape.attention_sinks:
        # the gradient that leaves the softmax, zeros for those of the sinks and the sum of both (traced)
        attention = replace(attention, softmax_bytes=None, score_gradient_bytes=2.0 * width)
    if shape.attention_softcap is not None or shape.attention_sinks:
        attention = replace(attention, attention_scores_saved=True, key_values_expanded=True)
    expanded = attention.key_values_expanded or shape.mla is not None or masked
    return replace(attention, key_values_expanded=expanded, windows_masked=attention.windows_masked or masked)
