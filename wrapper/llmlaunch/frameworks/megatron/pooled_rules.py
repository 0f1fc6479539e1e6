"""What stands in the way of DeepSeek-V4's layers: what no argument of core 0.19 says, and what cannot be split or
recomputed in Megatron-LM's development branch, which has them."""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import BoolColumn
from llmlaunch.frameworks.base import Requirement, implies
from llmlaunch.frameworks.megatron.model_rules import PARSER, before_hopper
from llmlaunch.layout import RECOMPUTE_SELECTIVE, Rule, Situation

POOLED = "megatron/core/transformer/experimental_attention_variant/csa.py, Megatron-LM d48bd6be"
HYBRID = (
    "megatron/core/transformer/experimental_attention_variant/deepseek_v4_hybrid_attention.py, Megatron-LM d48bd6be"
)


POOLED_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "pooled-keys",
        "model.compressed_attention",
        "core 0.19 has no attention to pooled keys: DeepSeek-V4 trains on Megatron-LM's development branch alone",
        PARSER,
        lambda r: r.model.compressed_attention is not None,
        priced=True,
    ),
    Requirement(
        "one-residual-stream",
        "model.residual_streams",
        "core 0.19 has one residual stream; write 1",
        PARSER,
        lambda r: r.model.residual_streams > 1,
        priced=True,
    ),
    Requirement(
        "no-hashed-experts",
        "model.moe.router.hash_layers",
        "core 0.19 chooses experts by scores alone; write 0",
        PARSER,
        lambda r: r.model.moe is not None and r.model.moe.router.hash_layers > 0,
        priced=True,
    ),
    Requirement(
        "no-activation-limit",
        "model.activation_limit",
        "no argument limits SwiGLU's gate and up; remove it",
        PARSER,
        lambda r: r.model.activation_limit is not None,
        priced=True,
    ),
    Requirement(
        "pooled-keys-device",
        "model.compressed_attention",
        "the kernels of attention to pooled keys are for bf16, and for compute capability 9.0 (Hopper) or more; others "
        "leave scores in memory, which are not priced",
        POOLED,
        lambda r: r.model.compressed_attention is not None and (r.workload.precision != "bf16" or before_hopper(r)),
    ),
    Requirement(
        "pooled-keys-dropout",
        "model.attention_dropout",
        "attention to pooled keys drops nothing out; set attention_dropout to 0",
        POOLED,
        lambda r: r.model.compressed_attention is not None and r.model.attention_dropout > 0,
    ),
)


def _whole(sizes: str) -> Rule:
    flag = f"--{sizes}-{'model-' if sizes == 'tensor' else ''}parallel-size"
    return Rule(
        f"pooled-keys-without-{sizes}",
        f"attention to pooled keys needs {flag} 1: " + REASONS[sizes],
        HYBRID,
        lambda s: implies(s.shape.compressed_attention is not None, np.equal(getattr(s.layouts, sizes), 1)),
    )


REASONS = {
    "tensor": "all heads share one key, and nothing is split",
    "context": "ranks exchange keys of packed sequences alone",
}


def keeps_attention(s: Situation) -> BoolColumn:
    modules = s.techniques.recompute_modules or ("core_attn",)
    condition = s.shape.compressed_attention is not None and "core_attn" in modules
    return implies(condition, np.not_equal(s.layouts.recompute, RECOMPUTE_SELECTIVE))


POOLED_RULES: tuple[Rule, ...] = (
    _whole("tensor"),
    _whole("context"),
    Rule(
        "pooled-keys-kept",
        "attention to pooled keys is no module that selective recompute takes; name others than core_attn in "
        "layout.recompute_modules",
        HYBRID,
        keeps_attention,
        of_techniques=True,
    ),
)
