"""Ranks of large Megatron jobs to trace, and the Megatron arguments that describe them.

The arguments are written here and not taken from llmlaunch's renderer: what is compared is what a job keeps in memory,
not how it is written down.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from llmlaunch.frameworks.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Layout
from llmlaunch.memory.constants import constant
from llmlaunch.memory.estimator import RankEstimate, estimate
from llmlaunch.memory.job import Job
from llmlaunch.models.sections import Mamba
from llmlaunch.models.shape import (
    SQUARED,
    Indexer,
    LinearAttention,
    MlaShape,
    ModelShape,
    MoeShape,
    RopeScaling,
    Router,
    SlidingWindow,
)
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.techniques.requests import Adapters
from llmlaunch.workload import OptimizerFormats, Workload
from support.changed_facts import changed

Words = tuple[str, ...]

LLAMA3_8B = ModelShape("llama3-8b", 32, 4096, 14336, 32, 8, 128, 128256, 8192)
LLAMA3_70B_CUT = ModelShape("llama3-70b-cut", 16, 8192, 28672, 64, 8, 128, 128256, 8192)
# Fewer layers than the models they are cut from: memory is by layer, and a trace takes time by layer.
LLAMA3_HALF = replace(LLAMA3_8B, name="llama3-8b-half", num_layers=16)
LLAMA3_CUT = replace(LLAMA3_8B, name="llama3-8b-cut", num_layers=8)
SMALL = ModelShape("four-layers", 4, 2048, 8192, 32, 8, 64, 256000, 8192)
GPT_CUT = ModelShape(
    "gpt-cut", 8, 4096, 16384, 32, 32, 128, 51200, 4096,
    tied_embeddings=True, gated_mlp=False, activation="gelu", linear_bias=True, normalization="LayerNorm",
    position_embedding="learned_absolute", attention_dropout=0.1, hidden_dropout=0.1,
)  # fmt: skip
TIED = replace(SMALL, name="four-layers-tied", tied_embeddings=True)
PREDICTION = replace(LLAMA3_8B, name="two-heads", num_layers=4, mtp_num_layers=2)
MIXTRAL = MoeShape(8, 2, 14336, 0, (1,) * 4)
MIXTRAL_CUT = ModelShape("mixtral-cut", 4, 4096, 14336, 32, 8, 128, 32000, 4096, moe=MIXTRAL)
FINE_CUT = replace(MIXTRAL_CUT, moe=MoeShape(32, 8, 1024, 0, (1,) * 4))
DEEPSEEK_ATTENTION = MlaShape(1536, 512, 128, 64, 128)
LATENT_CUT = replace(LLAMA3_CUT, name="latent-cut", num_query_groups=32, mla=DEEPSEEK_ATTENTION, qk_layernorm=True)
DEEPSEEK_CUT = replace(LATENT_CUT, name="deepseek-cut", num_layers=4, moe=MoeShape(64, 8, 2048, 2048, (0, 1, 1, 1)))


# every second layer attends to a window; biases everywhere, sinks, and experts with an activation of their own
GPT_OSS_CUT = ModelShape(
    "gpt-oss-cut", 4, 3072, 3072, 64, 8, 64, 201088, 131072,
    linear_bias=True, activation="clamped_swiglu", attention_sinks=True, moe=MoeShape(64, 4, 3072, 0, (1,) * 4),
    sliding_window=SlidingWindow(128, 2), rope_scaling=RopeScaling("yarn", 32.0, 4096, truncate=False),
)  # fmt: skip


# biases of attention alone, half of each head turned, sigmoid scores, a shared expert beside ordinary attention
GLM_CUT = ModelShape(
    "glm-cut", 4, 4096, 10944, 32, 8, 128, 151552, 131072, qkv_bias=True, qk_layernorm=True, rotary_percent=0.5,
    moe=MoeShape(32, 8, 1408, 1408, (0, 1, 1, 1), router=Router("sigmoid", expert_bias=True)),
)  # fmt: skip


# every query attends to keys that an indexer chooses, in latents
SPARSE_CUT = replace(
    DEEPSEEK_CUT, name="sparse-cut", num_layers=2, num_attention_heads=64, num_query_groups=64,
    moe=MoeShape(64, 8, 2048, 2048, (0, 1)), indexer=Indexer(64, 128, 2048),
)  # fmt: skip
SPARSE = (
    *("--experimental-attention-variant", "dsa", "--dsa-kernel-backend", "cudnn", "--no-dsa-indexer-rotate-activation"),
    *("--dsa-indexer-n-heads", "64", "--dsa-indexer-head-dim", "128", "--dsa-indexer-topk", "2048"),
    *("--dsa-indexer-loss-coeff", "0.001", "--dsa-indexer-use-sparse-loss", "--rope-type", "rope", "--no-rope-fusion"),
)


# three gated delta nets to a layer of gated attention; of two stages the first holds delta nets alone
QWEN_NEXT_CUT = ModelShape(
    "qwen-next-cut", 4, 2048, 5120, 16, 2, 256, 32768, 262144, qk_layernorm=True, rotary_percent=0.25,
    zero_centered_norm=True, attention_gate=True, linear_attention=LinearAttention(4, 32, 128),
    moe=MoeShape(64, 10, 512, 512, (1,) * 4, shared_expert_gate=True),
)  # fmt: skip


# layers of one part each: Mamba-2 mixers, attention without positions, and experts, as in Nemotron 3 Nano
NEMOTRON_CUT = ModelShape(
    "nemotron-cut", 16, 2688, 1856, 32, 2, 128, 32768, 8192,
    gated_mlp=False, activation=SQUARED, position_embedding="none", mamba=Mamba("MEM*EMEMEMEM*EME", 64),
    moe=MoeShape(
        16, 6, 1856, 3712, tuple(int(letter == "E") for letter in "MEM*EMEMEMEM*EME"),
        router=Router("sigmoid", expert_bias=True),
    ),
)  # fmt: skip


def nemotron(pattern: str, mtp_pattern: str | None = None, latent_size: int | None = None) -> ModelShape:
    """A cut with these layers; modules of multi-token prediction share their weights, as in Nemotron 3 Super."""
    moe = NEMOTRON_CUT.moe
    return replace(
        NEMOTRON_CUT,
        num_layers=len(pattern),
        mamba=Mamba(pattern, 64, mtp_pattern=mtp_pattern),
        moe=moe and replace(moe, layer_pattern=tuple(int(each == "E") for each in pattern), latent_size=latent_size),
        mtp_num_layers=2 if mtp_pattern else 0,
        mtp_repeated=mtp_pattern is not None,
    )


NEMOTRON_LATENT = nemotron("MEM*E", "*E", 1024)


BEFORE_LAST = Techniques(mtp_stage="before-last")
ALL_GATHER = Techniques(token_dispatcher="allgather")


@dataclass(frozen=True)
class Case:
    """One pipeline rank of one job. `words` are the Megatron arguments behind `options`."""

    name: str
    shape: ModelShape
    layout: Layout
    rank: int
    microbatches: int | None = None  # None: one more than the pipeline is deep, so that the schedule becomes steady
    length: int = 8192  # of a sequence, tokens
    techniques: Techniques = NO_TECHNIQUES
    options: MegatronOptions = field(default_factory=MegatronOptions)
    words: Words = ()
    packed: bool = False  # several rows in each sequence, as Megatron-Bridge hands them over
    all_microbatches: bool = False  # and not as few as the tracer finds enough

    @property
    def num_microbatches(self) -> int:
        return self.layout.pipeline + 1 if self.microbatches is None else self.microbatches

    @property
    def workload(self) -> Workload:
        sequences = self.num_microbatches * self.layout.micro_batch_size * self.layout.data
        return Workload(self.length, sequences)

    def arguments(self) -> Words:
        """Megatron's arguments."""
        return (
            *_model(self),
            *_mixture(self),
            *_latent(self.shape),
            *_delta_nets(self.shape),
            *_hybrid(self),
            *_layout(self),
            *_training(self),
            *self.words,
        )

    def estimate(self) -> RankEstimate:
        """What llmlaunch says of this rank. A trace routes evenly and sees no workspace inside a kernel library."""
        facts = megatron_facts(self.options)
        seen = facts.allocator.workspace_bytes - constant("workspace_bytes")
        fused = self.techniques.adapters is not None  # those of Megatron-Bridge
        facts = changed(facts, expert_imbalance=1.0, workspace_bytes=seen, adapters_fused=fused)
        job = Job(self.shape, self.workload, facts, techniques=self.techniques)
        return estimate(job, self.layout).ranks[self.rank]


def _words(values: dict[str, object]) -> Words:
    """`--name value`; True is a flag alone, False and None are left out."""
    words: list[str] = []
    for name, value in values.items():
        if value is not None and value is not False:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return tuple(words)


def _model(case: Case) -> Words:
    shape, grouped = case.shape, case.shape.num_query_groups != case.shape.num_attention_heads
    clamped, window = shape.activation == "clamped_swiglu", shape.sliding_window
    return _words(
        {
            "num-layers": shape.num_layers,
            "hidden-size": shape.hidden_size,
            "ffn-hidden-size": shape.ffn_hidden_size,
            "num-attention-heads": shape.num_attention_heads,
            "group-query-attention": grouped,
            "num-query-groups": shape.num_query_groups if grouped else None,
            "kv-channels": None if shape.mla else shape.head_dim,
            "seq-length": case.length,
            "max-position-embeddings": max(shape.max_position_embeddings, case.length),
            "normalization": shape.normalization,
            "position-embedding-type": "yarn" if shape.rope_scaling else shape.position_embedding,
            "swiglu": shape.activation == "silu",
            "add-qkv-bias": shape.qkv_bias,
            "rotary-percent": shape.rotary_percent,
            "quick-geglu": clamped,
            "glu-linear-offset": 1.0 if clamped else None,
            "activation-func-clamp-value": 7.0 if clamped else None,
            "no-bias-dropout-fusion": shape.linear_bias and shape.moe is not None,
            "softmax-type": "learnable" if shape.attention_sinks else None,
            "window-size": f"{window.tokens - 1},0" if window else None,
            "window-attn-skip-freq": window.full_every if window else None,
            "disable-bias-linear": not shape.linear_bias,
            "untie-embeddings-and-output-weights": not shape.tied_embeddings,
            "qk-layernorm": shape.qk_layernorm,
            "apply-layernorm-1p": shape.zero_centered_norm,
            "attention-output-gate": shape.attention_gate,
            "mtp-num-layers": shape.mtp_num_layers or None,
            "attention-dropout": shape.attention_dropout,
            "hidden-dropout": shape.hidden_dropout,
            "tokenizer-type": "NullTokenizer",
            "vocab-size": shape.vocab_size,
        }
    )


def _mixture(case: Case) -> Words:
    moe, layout = case.shape.moe, case.layout
    if moe is None:
        return ()
    return _words(
        {
            "num-experts": moe.num_experts,
            "moe-router-topk": moe.topk,
            "moe-ffn-hidden-size": moe.ffn_hidden_size,
            "moe-shared-expert-intermediate-size": moe.shared_expert_ffn_hidden_size or None,
            "moe-shared-expert-gate": moe.shared_expert_gate,
            "moe-layer-freq": f"[{','.join(map(str, moe.layer_pattern))}]",
            "moe-token-dispatcher-type": case.techniques.token_dispatcher or "alltoall",
            "moe-grouped-gemm": moe.grouped_gemm is not False,
            "moe-router-load-balancing-type": "aux_loss",
            "moe-aux-loss-coeff": 0.01,
            "moe-router-score-function": moe.router.score_function,
            "moe-router-enable-expert-bias": moe.router.expert_bias,
            "expert-model-parallel-size": layout.expert,
            "expert-tensor-parallel-size": layout.expert_tensor,
        }
    )


def _delta_nets(shape: ModelShape) -> Words:
    linear = shape.linear_attention
    if linear is None:
        return ()
    return _words(
        {
            "experimental-attention-variant": "gated_delta_net",
            "linear-attention-freq": linear.full_every,
            "linear-num-key-heads": linear.num_key_heads,
            "linear-num-value-heads": linear.num_value_heads,
        }
    )


def _hybrid(case: Case) -> Words:
    mamba, layout = case.shape.mamba, case.layout
    if mamba is None:
        return ()
    each = len(mamba.pattern) // layout.pipeline
    stages = [mamba.pattern[first : first + each] for first in range(0, len(mamba.pattern), each)]
    modules = [mamba.mtp_pattern] * case.shape.mtp_num_layers if mamba.mtp_pattern else []
    words = _words(
        {
            "hybrid-layer-pattern": "/".join(["|".join(stages), *modules]),
            "mamba-num-heads": mamba.num_heads,
            "squared-relu": True,
            "no-bias-gelu-fusion": True,
            "use-fused-weighted-squared-relu": True,
            "mtp-use-repeated-layer": case.shape.mtp_repeated,
            "moe-latent-size": case.shape.moe and case.shape.moe.latent_size,
            "moe-router-dtype": "fp32",
        }
    )
    return (*words, "--spec", "megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec")


def _latent(shape: ModelShape) -> Words:
    mla = shape.mla
    if mla is None:
        return ()
    return _words(
        {
            "multi-latent-attention": True,
            "q-lora-rank": mla.q_lora_rank,
            "kv-lora-rank": mla.kv_lora_rank,
            "qk-head-dim": mla.qk_head_dim,
            "qk-pos-emb-head-dim": mla.qk_pos_emb_head_dim,
            "v-head-dim": mla.v_head_dim,
        }
    )


def _layout(case: Case) -> Words:
    layout, techniques = case.layout, case.techniques
    full, selective = layout.recompute == RECOMPUTE_FULL, layout.recompute == RECOMPUTE_SELECTIVE
    interleaved = layout.virtual_pipeline > 1 and not layout.uneven
    stages = ["t" * layers for layers in layout.layers_by_stage]
    if techniques.heads_before_loss:
        stages[-2] += "m" * case.shape.mtp_num_layers
    words = _words(
        {
            "tensor-model-parallel-size": layout.tensor,
            "pipeline-model-parallel-size": layout.pipeline,
            "context-parallel-size": layout.context,
            "num-virtual-stages-per-pipeline-rank": layout.virtual_pipeline if interleaved else None,
            "pipeline-model-parallel-layout": f"E{'|'.join(stages)}L" if layout.uneven else None,
            "sequence-parallel": bool(layout.sequence_parallel),
            "use-distributed-optimizer": layout.zero_stage > 0,
            "overlap-grad-reduce": True,
            "overlap-param-gather": layout.zero_stage > 0,
            "recompute-granularity": "full" if full else "selective" if selective else None,
            "recompute-method": techniques.recompute_method if full else None,
            "recompute-num-layers": layout.recompute_layers or 1 if full else None,
        }
    )
    return (*words, *(("--recompute-modules", *techniques.recompute_modules) if techniques.recompute_modules else ()))


def _training(case: Case) -> Words:
    return _words(
        {
            "micro-batch-size": case.layout.micro_batch_size,
            "global-batch-size": case.workload.global_batch_size,
            "train-iters": 10,
            "lr": 1e-4,
            "bf16": True,
            "mock-data": True,
            "attention-backend": "fused",
            "no-create-attention-mask-in-dataloader": True,
        }
    )


WHOLE = Layout(4, 4, data=32, sequence_parallel=1, zero_stage=1)
LARGE = Layout(8, 8, data=8, sequence_parallel=1, zero_stage=1)
CUT = Layout(2, 2, data=16, sequence_parallel=1, zero_stage=1)
FULL = replace(WHOLE, recompute=RECOMPUTE_FULL)
SELECTIVE = replace(WHOLE, recompute=RECOMPUTE_SELECTIVE)
UNEVEN = replace(CUT, layers_by_stage=(3, 5))
UNEVEN_CHUNKS = replace(CUT, virtual_pipeline=2, layers_by_stage=(1, 2, 2, 3))
EMBEDDING_ALONE = replace(UNEVEN_CHUNKS, layers_by_stage=(0, 3, 3, 2))
LOSS_ALONE = replace(UNEVEN_CHUNKS, layers_by_stage=(3, 3, 2, 0))
HEADS_BEFORE = replace(CUT, pipeline=3, layers_by_stage=(2, 2, 0))
HEADS_ALONE = replace(HEADS_BEFORE, virtual_pipeline=2, layers_by_stage=(1, 1, 1, 1, 0, 0))
INTERLEAVED = replace(WHOLE, virtual_pipeline=2)
EXPERTS = replace(CUT, expert=8, expert_tensor=2)
FINE = replace(CUT, expert=4, expert_tensor=2)
MANY_EXPERTS = Layout(1, 2, data=16, expert=8, zero_stage=1)
LATENT_EXPERTS = Layout(2, expert=8, zero_stage=1, sequence_parallel=1)
HYBRID = Layout(2, 2, data=16, expert=8, sequence_parallel=1, zero_stage=1)
HYBRID_ALONE = replace(HYBRID, expert_tensor=1)
ONE_STAGE = Layout(data=8, expert=8, zero_stage=1)
UNFUSED = MegatronOptions(gradient_accumulation_fusion=False)
FUSED_LOSS = ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "native")

CASES = (
    *(Case(f"8B rank {rank}", LLAMA3_HALF, WHOLE, rank) for rank in (0, 1, 3)),
    Case("70B rank 7", LLAMA3_70B_CUT, LARGE, 7),
    *(Case(f"context parallel rank {rank}", LLAMA3_HALF, replace(WHOLE, data=16, context=2), rank) for rank in (0, 3)),
    *(Case(f"full recompute rank {rank}", LLAMA3_8B, FULL, rank) for rank in (0, 3)),
    Case("recompute of attention", LLAMA3_HALF, SELECTIVE, 0, techniques=Techniques(("core_attn",))),
    Case("recompute of the MLP", LLAMA3_HALF, SELECTIVE, 1, techniques=Techniques(("mlp",))),
    *(Case(f"interleaved rank {rank}", LLAMA3_HALF, INTERLEAVED, rank, microbatches=8) for rank in (0, 3)),
    *(Case(f"uneven stages rank {rank}", LLAMA3_CUT, UNEVEN, rank) for rank in (0, 1)),
    *(Case(f"uneven chunks rank {rank}", LLAMA3_CUT, UNEVEN_CHUNKS, rank, microbatches=4) for rank in (0, 1)),
    Case("embedding alone in its chunk", LLAMA3_CUT, EMBEDDING_ALONE, 0, microbatches=4),
    *(Case(f"loss alone rank {rank}", LLAMA3_CUT, LOSS_ALONE, rank, microbatches=4) for rank in (0, 1)),
    Case("a table larger than its layer", SMALL, Layout(1, 4, data=16, zero_stage=1), 0, microbatches=2, length=4096),
    Case("a tied table", TIED, Layout(1, data=16, zero_stage=1, recompute=RECOMPUTE_FULL), 0, length=512),
    Case("prediction heads", PREDICTION, CUT, 1),
    Case("prediction heads on one rank", replace(PREDICTION, vocab_size=8192), Layout(2, data=8, zero_stage=1), 0),
    Case("prediction heads made again", PREDICTION, replace(CUT, recompute=RECOMPUTE_FULL), 1),
    *(
        Case(f"heads before the loss rank {rank}", PREDICTION, HEADS_BEFORE, rank, techniques=BEFORE_LAST)
        for rank in (1, 2)
    ),
    Case("heads alone in their chunk", PREDICTION, HEADS_ALONE, 1, 6, techniques=BEFORE_LAST),
    Case(
        "before the first step",
        replace(LLAMA3_CUT, num_layers=4),
        replace(FULL, tensor=1, pipeline=1, data=64),
        0,
        length=128,
    ),
    Case("one pipeline rank", replace(LLAMA3_CUT, num_layers=4), Layout(data=8, zero_stage=1), 0),
    Case("long sequences", LLAMA3_CUT, replace(CUT, data=4, context=4), 0, length=32768),
    Case("no sequence parallelism", LLAMA3_CUT, replace(CUT, sequence_parallel=0), 0),
    Case("no distributed optimizer", LLAMA3_CUT, replace(CUT, zero_stage=0), 0),
    Case("unfused gradients", LLAMA3_CUT, CUT, 1, options=UNFUSED, words=("--no-gradient-accumulation-fusion",)),
    # Megatron's fused functions are not compiled under fake tensors
    Case("fused loss", LLAMA3_CUT, CUT, 1, options=MegatronOptions(loss="native", compiled=False), words=FUSED_LOSS),
    Case("query and key norms", replace(LLAMA3_CUT, qk_layernorm=True), CUT, 0),
    *(Case(f"GPT rank {rank}", GPT_CUT, CUT, rank, length=4096) for rank in (0, 1)),
    *(Case(f"experts rank {rank}", MIXTRAL_CUT, EXPERTS, rank, length=4096) for rank in (0, 1)),
    Case("many experts over tensor ranks", FINE_CUT, FINE, 0, length=4096, words=("--moe-router-dtype", "fp32")),
    Case("several experts a rank", MIXTRAL_CUT, replace(CUT, expert=4), 0, length=4096),
    Case("experts by all-gather", MIXTRAL_CUT, EXPERTS, 0, length=4096, techniques=ALL_GATHER),
    *(Case(f"sinks and biases rank {rank}", GPT_OSS_CUT, MANY_EXPERTS, rank, length=4096) for rank in (0, 1)),
    Case("a shared expert beside ordinary attention", GLM_CUT, MANY_EXPERTS, 0, length=4096),
    *(Case(f"delta nets rank {rank}", QWEN_NEXT_CUT, HYBRID, rank, length=4096) for rank in (0, 1)),
    Case("state spaces", NEMOTRON_CUT, HYBRID_ALONE, 1, length=4096),
    Case("state spaces and experts in latents", NEMOTRON_LATENT, ONE_STAGE, 0, 2, length=4096),
    Case("state spaces and contexts", nemotron("MEM*E"), replace(ONE_STAGE, context=2), 0, 2),
    Case("latent attention", LATENT_CUT, CUT, 0, length=4096),
    Case("latent attention and experts", DEEPSEEK_CUT, MANY_EXPERTS, 0, length=4096),
    Case("sparse attention", SPARSE_CUT, replace(LATENT_EXPERTS, data=8), 0, 2, length=4096, words=SPARSE),
    Case("uneven experts", DEEPSEEK_CUT, replace(MANY_EXPERTS, layers_by_stage=(1, 3)), 0, length=4096),
    Case(
        "recompute of latent projections and activations",
        DEEPSEEK_CUT,
        replace(MANY_EXPERTS, recompute=RECOMPUTE_SELECTIVE),
        0,
        length=4096,
        techniques=Techniques(("mla_up_proj", "mlp", "moe_act")),
    ),
)

# Six ways of data parallelism: no size of the model is a multiple of lcm(6, 128), so every bucket is padded.
PADDED = Case("buckets padded", LLAMA3_CUT, replace(CUT, data=6), 0)

# Words as the renderer writes them (frameworks/megatron/techniques.py). Offload of activations cannot be traced:
# Transformer Engine leaves fake tensors where they are (transformer_engine/pytorch/cpu_offload.py _check_if_offload,
# 2.20). Of an optimizer that is partly on the host, what is alive depends on when Python collects garbage.
BF16_GRADIENTS, BF16_WORDS = MegatronOptions(gradient_dtype="bf16"), ("--grad-reduce-in-bf16",)
OFFLOADED = (
    *("--optimizer-cpu-offload", "--optimizer-offload-fraction", "1.0"),
    *("--use-precision-aware-optimizer", "--overlap-cpu-optimizer-d2h-h2d"),
)
CHUNKS = ("--mlp-chunks-for-training", "4")
# Two ways of data parallelism and short sequences: what the optimizer keeps, and copies for its step, is most of it.
FEW = Layout(data=2, zero_stage=1)
ALL_STATES = replace(FEW, zero_stage=0)
HALF_MOMENTS = OptimizerFormats(first_moment="bf16", second_moment="bf16")
HALF_OPTIONS = MegatronOptions(gradient_dtype="bf16", optimizer=HALF_MOMENTS)
HALVES = OptimizerFormats("fp16", "fp16", "fp16")
AWARE = "--use-precision-aware-optimizer"
HALF_WORDS = (AWARE, "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")
# two micro-batches at once, layer by layer
OVERLAP = Techniques(overlap_expert_communication=True)
OVERLAP_WORDS = ("--overlap-moe-expert-parallel-comm",)
DELAY = replace(OVERLAP, delay_weight_gradients=True)
DELAY_WORDS = (*OVERLAP_WORDS, "--delay-wgrad-compute")
QWEN3_CUT = ModelShape(
    "qwen3-cut", 8, 2048, 6144, 32, 4, 128, 1024, 40960, qk_layernorm=True, moe=MoeShape(128, 8, 768, 0, (1,) * 8)
)
SPREAD = Layout(data=16, expert=16, zero_stage=1)
SPREAD_CHUNKS = replace(SPREAD, pipeline=2, virtual_pipeline=2)
LORA = Adapters(16)
OF_ATTENTION = Adapters(16, target_modules=("linear_qkv", "linear_proj"))
OF_SECOND_LINEARS = Adapters(16, target_modules=("o_proj", "down_proj"))
# which adapters stand beside: experts over no other ranks, and latents
EIGHT_MIXTURES = replace(MIXTRAL_CUT, name="eight-mixtures", num_layers=8, moe=MoeShape(8, 2, 14336, 0, (1,) * 8))
WHOLE_EXPERTS = replace(EXPERTS, expert_tensor=1)
PREDICTING = replace(
    DEEPSEEK_CUT, num_layers=2, vocab_size=32000, mtp_num_layers=1, moe=MoeShape(64, 8, 2048, 2048, (1, 1))
)
ADAPTED = (
    Case("adapters", LLAMA3_CUT, CUT, 1, length=2048, techniques=Techniques(adapters=LORA)),
    Case("adapters of attention", LLAMA3_CUT, CUT, 1, length=2048, techniques=Techniques(adapters=OF_ATTENTION)),
    Case(
        "adapters of second linears", LLAMA3_CUT, CUT, 1, length=2048, techniques=Techniques(adapters=OF_SECOND_LINEARS)
    ),
    Case("adapters of experts", MIXTRAL_CUT, WHOLE_EXPERTS, 0, length=4096, techniques=Techniques(adapters=LORA)),
    Case(
        "adapters beside experts", EIGHT_MIXTURES, EXPERTS, 0, length=4096, techniques=Techniques(adapters=OF_ATTENTION)
    ),
    Case(
        "adapters beside an MLP computed again",
        LLAMA3_CUT,
        replace(CUT, sequence_parallel=0, recompute=RECOMPUTE_SELECTIVE),
        0,
        length=2048,
        techniques=Techniques(("mlp",), adapters=LORA),
    ),
    Case(
        "adapters of latents that are made again",
        DEEPSEEK_CUT,
        replace(MANY_EXPERTS, recompute=RECOMPUTE_SELECTIVE),
        0,
        2,
        length=4096,
        techniques=Techniques(("mla_up_proj", "mlp", "moe_act"), adapters=LORA),
    ),
    Case(
        "adapters of a prediction head",
        PREDICTING,
        MANY_EXPERTS,
        1,
        2,
        length=4096,
        techniques=Techniques(adapters=LORA),
    ),
)
PACKED = (
    Case("packed rows", LLAMA3_CUT, CUT, 1, packed=True),
    Case("packed rows before latents", DEEPSEEK_CUT, MANY_EXPERTS, 1, 2, length=4096, packed=True),
)
TECHNIQUES = (
    Case("chunked MLP", LLAMA3_CUT, CUT, 0, techniques=Techniques(mlp_chunks=4), words=CHUNKS),
    Case("chunked experts", MIXTRAL_CUT, EXPERTS, 0, length=4096, techniques=Techniques(mlp_chunks=4), words=CHUNKS),
    Case("micro-batches overlapped", QWEN3_CUT, SPREAD, 0, 4, 4096, techniques=OVERLAP, words=OVERLAP_WORDS),
    Case("weight gradients delayed", QWEN3_CUT, SPREAD, 0, 4, 4096, techniques=DELAY, words=DELAY_WORDS),
    Case("chunks overlapped", QWEN3_CUT, SPREAD_CHUNKS, 0, 8, 4096, techniques=OVERLAP, words=OVERLAP_WORDS),
    Case("optimizer on the host", LLAMA3_CUT, CUT, 0, techniques=Techniques(offload_optimizer=1.0), words=OFFLOADED),
    Case("bf16 gradients in full", SMALL, ALL_STATES, 0, length=1024, options=BF16_GRADIENTS, words=BF16_WORDS),
    Case("bf16 gradients", LLAMA3_CUT, CUT, 0, options=BF16_GRADIENTS, words=BF16_WORDS),
    Case(
        "remainders of main parameters",
        LLAMA3_CUT,
        FEW,
        0,
        length=1024,
        options=MegatronOptions(optimizer=OptimizerFormats()),
        words=(AWARE,),
    ),
    Case(
        "bf16 moments and gradients",
        LLAMA3_CUT,
        FEW,
        0,
        length=1024,
        options=HALF_OPTIONS,
        words=(*HALF_WORDS, "--main-grads-dtype", "bf16"),
    ),
    Case(
        "fp16 states",
        LLAMA3_CUT,
        FEW,
        0,
        length=1024,
        options=MegatronOptions(optimizer=HALVES),
        words=(AWARE, "--main-params-dtype", "fp16", "--exp-avg-dtype", "fp16", "--exp-avg-sq-dtype", "fp16"),
    ),
)

# More micro-batches than the tracer runs, of a model so small that running all of them costs little: every schedule,
# and stages that differ, so that what is in flight differs along a period.
TINY = ModelShape("tiny", 6, 256, 512, 4, 4, 64, 1024, 512)
DEEP = Layout(4, 4, data=1, sequence_parallel=1, zero_stage=1)
UNEVEN_DEEP = replace(DEEP, layers_by_stage=(1, 2, 2, 1))
CHUNKS_DEEP = replace(DEEP, virtual_pipeline=2, layers_by_stage=(0, 1, 1, 1, 1, 1, 1, 0))
MANY = 16
MANY_MICROBATCHES = (
    Case("no pipeline", replace(TINY, num_layers=1), Layout(data=2, zero_stage=1), 0, MANY, 512),
    Case("uneven deep stages", TINY, UNEVEN_DEEP, 1, MANY, 512),
    *(Case(f"uneven deep chunks rank {rank}", TINY, CHUNKS_DEEP, rank, MANY, 512) for rank in (1, 3)),
)

# Matrices that no rank may cut: of one bucket and of several, dense and of experts, in one model chunk and in several.
CHUNKS_OF_THREE = Layout(1, 2, data=4, zero_stage=1, virtual_pipeline=3)
BUCKETS = replace(LLAMA3_CUT, num_layers=4, vocab_size=1024)
MUON = MegatronOptions(muon=True, matrices_whole=True)
MUON_WORDS = ("--optimizer", "muon")
WHOLE_MATRICES = (
    Case("Muon", LLAMA3_CUT, CUT, 0, length=1024, options=MUON, words=MUON_WORDS),
    Case("Muon in few shards", LLAMA3_CUT, replace(CUT, data=4), 1, length=1024, options=MUON, words=MUON_WORDS),
    Case("Muon of experts", MIXTRAL_CUT, EXPERTS, 0, length=1024, options=MUON, words=MUON_WORDS),
    Case("Muon in buckets", BUCKETS, Layout(data=2, zero_stage=1), 0, length=512, options=MUON, words=MUON_WORDS),
    Case("Muon of chunks", TINY, CHUNKS_OF_THREE, 0, 4, 512, options=MUON, words=MUON_WORDS),
)
