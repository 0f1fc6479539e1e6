"""What ATorch's pipeline of a Hugging Face model keeps in memory beyond DeepSpeed's."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.facts import MemoryFacts

__all__ = ["atorch_pipeline_facts"]


def atorch_pipeline_facts(facts: MemoryFacts) -> MemoryFacts:
    """Return the facts of ATorch's pipeline of a Hugging Face model, which no recipe can choose (dlrover 11bf2fb,
    atorch/examples/llama2/ds_3d_llama2.py). Embedding and head are split over tensor ranks. Of each logit the engine
    keeps the 16-bit output; the loss makes an fp32 copy and another that becomes the softmax and then its own gradient
    (atorch/modules/distributed_modules/cross_entropy.py), which is narrowed for the head."""
    return replace(
        facts,
        pipeline_buffers=2,
        embedding_whole=False,
        logits_gathered=False,
        logit_bytes=facts.activation_bytes + 8.0,
        logit_gradient_bytes=2.0 * facts.activation_bytes + 4.0,
    )
