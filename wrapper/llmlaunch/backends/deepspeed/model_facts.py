"""What transformers' modules of some families keep beside the common ones, under the shipped script."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.memory.facts import MemoryFacts
from llmlaunch.models.shape import ModelShape

__all__ = ["with_family"]


def with_family(facts: MemoryFacts, shape: ModelShape, sequence_length: int) -> MemoryFacts:
    """A cap on scores has no fused attention (`_supports_sdpa` of modeling_gemma2.py), and one on logits keeps what
    tanh puts out. A window shorter than the sequence is a mask of s x s booleans, which torch's attention turns into
    numbers, and with a mask keys and values are copied to every head (`use_gqa_in_sdpa`,
    integrations/sdpa_attention.py; transformers 5.23)."""
    if shape.attention_softcap is not None:
        facts = replace(facts, attention_scores_saved=True, key_values_expanded=True)
    if shape.logit_softcap is not None:
        facts = replace(facts, logit_bytes=facts.logit_bytes + facts.activation_bytes)
    window = shape.sliding_window
    if window is None or window.tokens >= sequence_length:
        return facts
    masks = (1.0 + facts.activation_bytes) * float(sequence_length) ** 2
    return replace(facts, key_values_expanded=True, workspace_bytes=facts.workspace_bytes + masks)
