"""What transformers' modules of some families keep beside the common ones, under the shipped script."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.backends.facts.elements import ELEMENT_BYTES
from llmlaunch.backends.facts.megatron_deepspeed import megatron_deepspeed_facts
from llmlaunch.memory.facts import MemoryFacts
from llmlaunch.models.shape import ModelShape

__all__ = ["SHIPPED_TRAINER", "bucket_bytes", "script_facts", "shipped_facts", "with_family"]

SHIPPED_TRAINER = "llmlaunch"  # as records of measured runs call it


def bucket_bytes(elements: float, precision: str) -> float:
    """Three buckets: gradients being collected, gradients being reduced, parameters being gathered (counted in CPU
    runs for each stage; zero/stage_1_and_2.py and stage3.py, 0.19.8)."""
    return float(3 * elements * ELEMENT_BYTES[precision])


def script_facts(facts: MemoryFacts, kind: str, precision: str, gradient_dtype: str | None) -> MemoryFacts:
    """Return what a kind of script of one's own changes. A stage of a pipeline holds, beside what its layers keep, the
    tensor it received and the one it sends (deepspeed/runtime/pipe/engine.py _exec_recv_activations and
    _exec_send_activations, 0.19.8). Megatron-DeepSpeed is priced as the fork and the DeepSpeed of 2022, whose runs are
    measured; what changed since is not known."""
    if kind == "megatron-deepspeed":
        return megatron_deepspeed_facts(precision, gradient_dtype)
    return replace(facts, pipeline_buffers=2) if kind == "pipeline" else facts


def shipped_facts(facts: MemoryFacts, shape: ModelShape, sequence_length: int) -> MemoryFacts:
    """Our loss lets go of the logits; left are the fp32 log-softmax, its gradient and that of its input (counted in a
    profile of the backward pass, torch 2.13)."""
    return with_family(replace(facts, logit_bytes=12.0), shape, sequence_length)


def with_family(facts: MemoryFacts, shape: ModelShape, sequence_length: int) -> MemoryFacts:
    """Of transformers 5.23, each counted in tests/frameworks/test_family_bytes.py.

    Gemma's norm keeps what it normalized in fp32 before it multiplies (GemmaRMSNorm). GPT-2's is torch's own, which
    keeps nothing more, and its activation is written out (NewGELUActivation): three more results. Experts are weighed
    by the router after they are done (MixtralExperts), and DeepSeek's router computes in fp32. A cap on scores has no
    fused attention (`_supports_sdpa` of Gemma 2), and one on logits keeps what tanh puts out. A window shorter than the
    sequence is a mask of s x s booleans, which torch's attention turns into numbers, and with a mask keys and values
    are copied to every head (`use_gqa_in_sdpa`, integrations/sdpa_attention.py).
    """
    e = facts.activation_bytes
    if shape.moe is not None:
        facts = replace(facts, expert_output_weighted=True, router_input_bytes=0.0 if shape.mla is None else 4.0)
    if shape.mla is not None:
        facts = replace(facts, key_values_expanded=True)
    if shape.zero_centered_norm:
        facts = replace(facts, norm_extra_bytes=facts.norm_extra_bytes + max(4.0 - e, 0.0))
    if shape.family == "gpt2":
        facts = replace(facts, norm_extra_bytes=0.0, ungated_activation_bytes=3.0 * e)
    if shape.attention_softcap is not None:
        facts = replace(facts, attention_scores_saved=True, key_values_expanded=True)
    if shape.logit_softcap is not None:
        facts = replace(facts, logit_bytes=facts.logit_bytes + e)
    window = shape.sliding_window
    if window is None or window.tokens >= sequence_length:
        return facts
    masks = (1.0 + e) * float(sequence_length) ** 2
    return replace(facts, key_values_expanded=True, workspace_bytes=facts.workspace_bytes + masks)
