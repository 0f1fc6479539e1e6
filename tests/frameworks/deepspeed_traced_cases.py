"""Ranks of DeepSpeed jobs to trace: small models, as `llmlaunch rehearse` hands them to the tracer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from llmlaunch.assets import asset
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.frameworks.deepspeed.trace import deepspeed_job
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.memory.constants import constant
from llmlaunch.memory.estimator import RankEstimate, estimate
from llmlaunch.memory.job import Job
from llmlaunch.planner.setting import setting_of
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe
from support.changed_facts import changed

RANKS = 8
HIDDEN, LAYERS = 1024, 2
SIZES = (
    f"num_layers: {LAYERS}, hidden_size: {HIDDEN}, ffn_hidden_size: 2816, num_attention_heads: 8, "
    "num_query_groups: 4, max_position_embeddings: 1000000"
)
SHAPE = f"family: llama, {SIZES}"
LLAMA = f"model={{{SHAPE}, vocab_size: 32000}}"
TIED = f"model={{{SHAPE}, vocab_size: 32000, tied_embeddings: true}}"
FEW_WORDS = f"model={{{SHAPE}, vocab_size: 2048}}"  # layers weigh more than the loss
WIDE = (
    "model={family: llama, num_layers: 2, hidden_size: 4096, ffn_hidden_size: 14336, num_attention_heads: 32, "
    "num_query_groups: 8, max_position_embeddings: 8192, vocab_size: 32000}"
)
# whose attention is wide enough to be the peak beside an MLP in pieces, and unfused norms
WIDE_ATTENTION = (
    "model={family: llama, num_layers: 2, hidden_size: 512, ffn_hidden_size: 1024, num_attention_heads: 16, "
    "num_query_groups: 4, head_dim: 128, max_position_embeddings: 1000000, vocab_size: 2048}"
)
GPT2 = (
    "model={family: gpt2, num_layers: 2, hidden_size: 1024, ffn_hidden_size: 4096, num_attention_heads: 8, "
    "num_query_groups: 8, vocab_size: 32000, max_position_embeddings: 2048, tied_embeddings: true, gated_mlp: false, "
    "linear_bias: true, normalization: LayerNorm, position_embedding: learned_absolute}"
)
LFM2 = (
    f"model={{family: lfm2, {SIZES}, vocab_size: 2048, tied_embeddings: true, qk_layernorm: true, "
    "short_convolution: {attention_layers: [1]}}"
)
GRANITE = (
    "model={family: granite, num_layers: 2, hidden_size: 4096, ffn_hidden_size: 8192, num_attention_heads: 32, "
    "num_query_groups: 8, max_position_embeddings: 8192, vocab_size: 2048, attention_scale: 16384.0, "
    "multipliers: {embedding: 12.0, logits: 0.0625, residual: 0.22}}"
)


@dataclass(frozen=True)
class Case:
    """Rank 0 of one job. `words` are overrides of the recipe."""

    name: str
    layout: Layout
    words: tuple[str, ...] = ()
    model: str = LLAMA
    length: int = 2048  # of a sequence, tokens
    microbatches: int = 2

    @property
    def recipe(self) -> Recipe:
        batch = self.microbatches * self.layout.data * self.layout.micro_batch_size
        sizes = (f"training.sequence_length={self.length}", f"training.global_batch_size={batch}", "nodes=1")
        return load_recipe(asset("recipes", "llama2-7b-deepspeed.yaml"), (self.model, *sizes, *self.words))

    def as_job(self) -> dict[str, Any]:
        recipe = self.recipe
        rendered = DeepSpeed().render(recipe, self.layout)
        return deepspeed_job(recipe, rendered, self.layout, 0) | {"name": self.name}

    def estimate(self, change: Callable[[Job], Job] = lambda job: job) -> RankEstimate:
        """What llmlaunch says of this rank. A trace sees no workspace inside a kernel library."""
        job = setting_of(self.recipe, DeepSpeed()).job_of(self.recipe)
        unseen = job.facts.allocator.workspace_bytes - constant("workspace_bytes")
        return estimate(change(replace(job, facts=changed(job.facts, workspace_bytes=unseen))), self.layout).ranks[0]


def split(stage: int, **sizes: Any) -> Layout:
    return Layout(data=RANKS // sizes.get("context", 1) // sizes.get("tensor", 1), zero_stage=stage, **sizes)


PIECES = "layout={loss: tiled, mlp_chunks: 8}"
BF16_STATES = "training.optimizer={main_parameters: bf16, first_moment: bf16, second_moment: bf16}"


def two_layers(base: str) -> str:
    return f"model={{base: {base}, num_layers: 2, vocab_size: 2048}}"


CASES = (
    Case("ZeRO 0", split(0)),
    Case("ZeRO 1", split(1)),
    Case("ZeRO 2", split(2)),
    Case("ZeRO 3", split(3)),
    Case("ZeRO 2, one micro-batch of a few tokens", split(2), model=WIDE, length=256, microbatches=1),
    Case("ZeRO 1, gradients in fp32", split(1), ("training.gradient_dtype=fp32",)),
    *(Case(f"ZeRO {stage}, states in bf16", split(stage), (BF16_STATES,)) for stage in (1, 2, 3)),
    Case("ZeRO 3, states in bf16, gradients in fp32", split(3), (BF16_STATES, "training.gradient_dtype=fp32")),
    Case("ZeRO 2, optimizer on the host", split(2), ("layout={offload_optimizer: 1.0}",)),
    Case("ZeRO 3, all on the host", split(3), ("layout={offload_optimizer: 1.0, offload_parameters: true}",)),
    Case("ZeRO 2, LoRA", split(2), ("training.adapters={rank: 16}",)),
    Case("ZeRO 3, LoRA-FA", split(3), ("training.adapters={rank: 16, frozen_down: true}",)),
    Case("AutoTP", split(1, tensor=2)),
    Case("Ulysses", split(3, context=4), length=8192),
    Case("activations", split(2), model=FEW_WORDS, length=8192, microbatches=1),
    Case(
        "checkpoints on the host",
        split(2, recompute=RECOMPUTE_FULL),
        ("layout={recompute: full, offload_checkpoints: true}",),
        length=8192,
        microbatches=1,
    ),
    Case("a long sequence", split(2, recompute=RECOMPUTE_FULL), (PIECES,), length=32768),
    *(
        Case(f"a tied head in pieces, ZeRO {stage}", split(stage, recompute=RECOMPUTE_FULL), (PIECES,), TIED, 32768)
        for stage in (1, 2, 3)
    ),
    Case(
        "a long sequence over ranks",
        split(3, context=4, recompute=RECOMPUTE_FULL),
        (PIECES,),
        FEW_WORDS,
        131072,
        microbatches=1,
    ),
    Case("GPT-2", split(2), model=GPT2),
    Case("multipliers", split(2, recompute=RECOMPUTE_FULL), model=GRANITE, length=8192, microbatches=1),
    Case("multiplied logits in pieces", split(2, recompute=RECOMPUTE_FULL), (PIECES,), GRANITE, 8192, 1),
    Case("convolutions", split(2), model=LFM2, length=8192, microbatches=1),
    Case("convolutions beside an MLP in pieces", split(2), ("layout={mlp_chunks: 8}",), LFM2, 8192, 1),
    Case(
        "attention beside an MLP in pieces",
        split(3, recompute=RECOMPUTE_FULL),
        ("layout={loss: tiled, loss_tiles: 64, mlp_chunks: 64}",),
        WIDE_ATTENTION,
        16384,
        microbatches=1,
    ),
    Case(
        "heads repeated over ranks",
        split(3, context=8, recompute=RECOMPUTE_FULL),
        ("layout={loss: tiled, loss_tiles: 64, mlp_chunks: 64}",),
        WIDE_ATTENTION,
        131072,
        microbatches=1,
    ),
    Case("capped scores", split(2, recompute=RECOMPUTE_FULL), model=two_layers("gemma2-9b"), length=8192),
    Case("scores beside sinks", split(2, recompute=RECOMPUTE_FULL), model=two_layers("gpt-oss-20b"), length=8192),
)
