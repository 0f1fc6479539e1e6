"""What ATorch's pipeline of a Hugging Face model keeps in memory beyond DeepSpeed's."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.facts import MemoryFacts


def atorch_pipeline_facts(facts: MemoryFacts) -> MemoryFacts:
    """Return the facts of ATorch's pipeline of a Hugging Face model, which no recipe can choose (dlrover 11bf2fb,
    atorch/examples/llama2/ds_3d_llama2.py). Embedding and head are split over tensor ranks. Of each logit the engine
    keeps the 16-bit output; the loss makes an fp32 copy and another that becomes the softmax and then its own gradient
    (atorch/modules/distributed_modules/cross_entropy.py), which is narrowed for the head."""
    width = facts.layer.activation_bytes
    return replace(
        facts,
        states=replace(facts.states, embedding_whole=False),
        loss=replace(
            facts.loss,
            logits_gathered=False,
            logit_bytes=width + 8.0,
            logit_gradient_bytes=2.0 * width + 4.0,
        ),
        exchange=replace(facts.exchange, pipeline_buffers=2),
    )
