"""Every rule and requirement of both backends refuses what it is there for, and nothing where nobody asks for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from llmlaunch.errors import UserError
from llmlaunch.frameworks.base import MACHINE_REQUIREMENTS
from llmlaunch.frameworks.bridge.rules import BRIDGE_RULES, PACKED_RULES
from llmlaunch.frameworks.deepspeed import techniques as deepspeed_techniques
from llmlaunch.frameworks.deepspeed.rules import PACKED_RULES as DEEPSPEED_PACKED_RULES
from llmlaunch.frameworks.deepspeed.rules import RULES as DEEPSPEED_RULES
from llmlaunch.frameworks.deepspeed.scripts import HUGGING_FACE_RULES, PIPELINE_RULES
from llmlaunch.frameworks.framework import backend_for
from llmlaunch.frameworks.megatron.cuda_graphs import GRAPH_RULES
from llmlaunch.frameworks.megatron.mixture_rules import MIXTURE_REQUIREMENTS
from llmlaunch.frameworks.megatron.model_rules import MODEL_REQUIREMENTS
from llmlaunch.frameworks.megatron.pooled_rules import POOLED_REQUIREMENTS
from llmlaunch.frameworks.megatron.rules import requirements_for, rules_for
from llmlaunch.frameworks.megatron.versions import version_requirements
from llmlaunch.frameworks.megatron.vision_rules import VISION_REQUIREMENTS
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Layout
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.setting import setting_of
from support.backend_output import refused_by
from support.recipes import recipe_of

DENSE, BIG, MIXTURE, DEEPSPEED = "llama3-8b", "llama3-70b", "mixtral-8x7b", "llama2-7b-deepspeed"
SAVING = ("training.save_interval=100", "training.checkpoint_path=/ckpt")
HOPPER, BLACKWELL, AMPERE = "cluster=h100-80gb-x8", "cluster=b200-x8", "cluster=a100-80gb-x8"
TENSORWISE, MXFP8, DELAYED_FP8 = "training.fp8=tensorwise", "training.fp8=mxfp8", "training.fp8=delayed"
PARAMETERS, FORMATS = "training.fp8_parameters=true", "training.optimizer={}"
OWN, EVALUATION = "backend={name: deepspeed, script: train.py}", "training.evaluation={interval: 10, iterations: 2}"
MODULES, DELAYED = "layout={offload_modules: [core_attn]}", "layout={delay_weight_gradients: true}"
PART, WHOLE = "layout={offload_optimizer: 0.5}", "layout={offload_optimizer: 1.0}"
SHARDED_WHOLE = "layout={zero_stage: 3, offload_optimizer: 1.0}"
HIDDEN = "layout.overlap_expert_communication=true"

ROWS = "token_dispatcher: flex, flex_backend: hybridep, expert_rank_capacity_factor: 1.5"
FIXED, PAGED = (BLACKWELL, MXFP8, f"layout={{{ROWS}}}"), (BLACKWELL, MXFP8, f"layout={{{ROWS}, paged_stash: {{}}}}")
ACTIVATION, MOVED = "recompute: selective, recompute_modules: [moe_act]", "offload_modules: [moe_act]"

GPUS = Layout(4, 1, data=8, sequence_parallel=1, zero_stage=1)
EXPERTS = Layout(2, 1, data=32, expert=8, sequence_parallel=1, zero_stage=1)
STAGES = Layout(8, 4, data=16, sequence_parallel=1, zero_stage=1)
REPLICATED = Layout(16, 1, data=32, sequence_parallel=1)  # 8 query groups on 16 ranks
PAIRS = replace(GPUS, micro_batch_size=2)
RING = Layout(1, 4, context=8, data=16, zero_stage=1)  # 64 heads, 8 query groups
CHUNKS = replace(STAGES, virtual_pipeline=5)
MANY_EXPERTS = ("nodes=32", "model.moe.num_experts=256", "layout.token_dispatcher=flex")
EVERYWHERE = Layout(data=256, zero_stage=1)
EXCHANGING = Layout(1, 1, data=64, expert=8, zero_stage=1)
WORLD = Layout(data=1024, expert=8, zero_stage=1)
FULL, SELECTIVE = replace(GPUS, recompute=RECOMPUTE_FULL), replace(GPUS, recompute=RECOMPUTE_SELECTIVE)
FSDP, ZERO_3 = Layout(data=32, zero_stage=3), Layout(data=16, zero_stage=3)
ONE_STAGE, TWO_STAGES = replace(GPUS, offload_layers=2), replace(GPUS, pipeline=2, data=4)
EXPERT_STAGES = replace(EXPERTS, pipeline=2, data=16)
ZERO_2, TWO_PLAIN = replace(ZERO_3, zero_stage=2), Layout(pipeline=2, data=16, zero_stage=1)
PIPELINE_1 = Layout(pipeline=2, data=8, zero_stage=1)


def own_script(kind: str, *overrides: str) -> tuple[str, ...]:
    return (f"backend={{name: deepspeed, script: /home/me/train.py, script_kind: {kind}}}", *overrides)


def llama(heads: int, groups: int, **more: object) -> str:
    written = "".join(f", {key}: {value}" for key, value in more.items())
    return f"model={{base: llama2-7b, num_attention_heads: {heads}, num_query_groups: {groups}{written}}}"


TWELVE_HEADS = llama(12, 3, head_dim=128, family="mistral")
WINDOWED = "model={base: llama2-7b, sliding_window: {tokens: 1024}}"
NARROW_VIEW, BIASED = (
    f"model={{base: llama3-8b, {part}}}" for part in ("sliding_window: {tokens: 512}", "linear_bias: true")
)
SPARSE, POOLED = "model=deepseek-v3.2", "model=deepseek-v4-flash"
POOLED_INLINE = (
    "model={base: deepseek-v4-flash, num_layers: 1, compressed_attention: {ratios: [4], q_lora_rank: 64, "
    "output_groups: 8, output_rank: 64, index_heads: 4, index_head_dim: 64, index_topk: 64}}"
)
WHOLE_GEMMA = (
    "model={base: gemma4-31b, sliding_window: {tokens: 8192, full_every: 6, rotary_base: 10000.0, full_head_dim: 512, "
    "full_query_groups: 4, full_rotary_percent: 0.25}}"
)
ONE_EXPERT = "model={base: llama4-scout, moe: {router: {weighted_inputs: true}}}"
SINKS = "model={base: llama3-8b, attention_sinks: true}"
DELTA_NETS = "model={base: llama3-8b, linear_attention: {num_key_heads: 2, num_value_heads: 4}}"
STATE_SPACES = "model={base: nemotron-3-nano, position_embedding: none, mtp_repeated: false}"
IMAGES, SIX_HEADS = "model=qwen3-vl-8b", "model={base: qwen3-vl-8b, vision: {num_attention_heads: 6}}"
TWENTY_STATES = "model={base: nemotron-3-nano, mamba: {num_heads: 20, groups: 4}}"
BRIDGE = "backend=megatron-bridge"
LORA = (BRIDGE, "training.adapters={rank: 4}", "training.start_from=/models/weights")
PACKED = (
    BRIDGE,
    "data={path: /rows, format: chat, tokenizer: /t, packed: true}",
    "training.start_from=/models/weights",
    "training.learning_rate=1.0e-5",
)
QUANTIZED = "training.adapters={rank: 2, target_modules: [linear_qkv], base: nf4}"
WEIGHTS = "training.start_from=/models/weights"
PACKED_ROWS = "data={path: /rows, format: chat, tokenizer: /t, packed: true}"
PREDICTING = "model={base: llama3-8b, mtp_num_layers: 1}"
LATENTS = (
    "model={base: llama3-8b, num_query_groups: 32, mla: {kv_lora_rank: 512, qk_head_dim: 128, qk_pos_emb_head_dim: 64, "
    "v_head_dim: 128}}"
)
LATENT_EXPERTS = "model={base: nemotron-3-super, qk_layernorm: false}"
RECOMPUTED_MLP = "layout={recompute: selective, recompute_modules: [mlp]}"
PIPELINE = own_script("pipeline", "model={base: llama2-7b, num_layers: 28}")

BEFORE_LAST = ("model={base: llama3-8b, mtp_num_layers: 1}", "layout.mtp_stage=before-last")
HEADS_BEFORE = Layout(pipeline=4, data=8, zero_stage=1, layers_by_stage=(11, 11, 10, 0))

# All keys that refuse the first layout, none of which refuses the second.
RULED: list[tuple[str, str, Sequence[str], Layout, Layout]] = [
    ("ffn heads query-columns query-groups", BIG, (), Layout(3, 1, data=1), REPLICATED),
    ("expert-world layers virtual-layers", BIG, (), Layout(1, 3, data=1), STAGES),
    ("virtual-needs-pipeline", BIG, (), Layout(virtual_pipeline=2), CHUNKS),
    ("virtual-layers", BIG, (), Layout(1, 4, virtual_pipeline=3), CHUNKS),
    ("batch", BIG, (), Layout(data=3), STAGES),
    ("interleaved-microbatches", BIG, (), Layout(1, 8, virtual_pipeline=2, data=256), CHUNKS),
    ("loss-is-alone", DENSE, BEFORE_LAST, replace(HEADS_BEFORE, layers_by_stage=(11, 11, 9, 1)), HEADS_BEFORE),
    ("loss-is-alone", DENSE, BEFORE_LAST, replace(HEADS_BEFORE, layers_by_stage=()), HEADS_BEFORE),
    ("loss-is-alone", DENSE, BEFORE_LAST, Layout(pipeline=2, data=16, layers_by_stage=(32, 0)), HEADS_BEFORE),
    ("context-length", BIG, (), Layout(context=3), replace(STAGES, context=2, data=8)),
    ("sequence-needs-tensor", BIG, (), Layout(sequence_parallel=1), STAGES),
    ("sequence-length", BIG, (), Layout(8, 1, context=4096, sequence_parallel=1), STAGES),
    ("experts", BIG, (), Layout(expert=2), STAGES),
    ("experts", MIXTURE, (), Layout(expert=16), EXPERTS),
    ("expert-ffn expert-world", MIXTURE, (), Layout(expert_tensor=3), EXPERTS),
    ("expert-world", MIXTURE, (), Layout(1, 16, expert=8, data=4), replace(EXPERTS, pipeline=4, data=8)),
    ("sinks-without-context", DENSE, (SINKS,), Layout(context=2, data=16), GPUS),
    ("sparse-attention-without-context", "deepseek-v3", (SPARSE,), replace(WORLD, context=2, data=512), WORLD),
    ("pooled-keys-without-context", "deepseek-v3", (POOLED,), replace(WORLD, context=2, data=512), WORLD),
    (
        "pooled-keys-without-tensor",
        "deepseek-v3",
        (POOLED,),
        replace(WORLD, tensor=2, data=512, sequence_parallel=1),
        WORLD,
    ),
    ("delta-heads", DENSE, (DELTA_NETS,), Layout(2, context=2, data=8), replace(GPUS, tensor=2, data=16)),
    ("mamba-heads", MIXTURE, (TWENTY_STATES,), replace(EXPERTS, tensor=4, context=2, data=8), EXPERTS),
    ("mamba-groups", MIXTURE, (STATE_SPACES,), Layout(16, data=4, sequence_parallel=1), EXPERTS),
    ("hybrid-without-layer-offload", MIXTURE, (STATE_SPACES,), replace(EXCHANGING, offload_layers=1), EXCHANGING),
    ("adapter-rank-divides", DENSE, LORA, replace(GPUS, tensor=8, data=4), replace(GPUS, tensor=4, data=8)),
    ("adapted-experts-whole", MIXTURE, LORA, replace(EXPERTS, expert=4, expert_tensor=2), EXPERTS),
    ("latents-need-sequence", DENSE, (LATENTS,), Layout(2, data=16, zero_stage=1), GPUS),
    ("adapted-latents-whole", "deepseek-v3", LORA, replace(WORLD, tensor=2, data=512, sequence_parallel=1), WORLD),
    ("packed-rows-one-by-one", DENSE, PACKED, replace(GPUS, micro_batch_size=2), GPUS),
    ("packed-predictions-whole", DENSE, (*PACKED, PREDICTING), Layout(context=2, data=16), GPUS),
    ("hybrid-in-one-chunk", MIXTURE, (STATE_SPACES, BRIDGE), replace(TWO_PLAIN, virtual_pipeline=13), TWO_PLAIN),
    ("vision-in-one-chunk", DENSE, (IMAGES,), replace(TWO_PLAIN, virtual_pipeline=2), TWO_PLAIN),
    ("vision-split", DENSE, (SIX_HEADS,), GPUS, replace(GPUS, tensor=2, data=16)),
    (
        "vision-first-layers",
        DENSE,
        (IMAGES,),
        replace(TWO_PLAIN, layers_by_stage=(2, 34)),
        replace(TWO_PLAIN, layers_by_stage=(3, 33)),
    ),
    ("window-without-context", DENSE, (NARROW_VIEW,), Layout(context=2, data=16), GPUS),
    ("mixture-needs-sequence", MIXTURE, (), Layout(2, 1, data=32), EXPERTS),
    ("sharded-one-stage", DENSE, ("layout.zero_stage=3",), Layout(pipeline=2, data=16, zero_stage=3), TWO_PLAIN),
    ("pipeline", DEEPSPEED, (), Layout(pipeline=2, data=8), ZERO_3),
    ("virtual-pipeline", DEEPSPEED, (), Layout(virtual_pipeline=2, data=16), ZERO_3),
    ("expert", DEEPSPEED, (), Layout(expert=2, data=16), ZERO_3),
    ("expert-tensor", DEEPSPEED, (), Layout(expert_tensor=2, data=16), ZERO_3),
    ("sequence-parallel", DEEPSPEED, (), Layout(sequence_parallel=1, data=16), ZERO_3),
    ("batch", DEEPSPEED, (), Layout(data=16, micro_batch_size=32), ZERO_3),
    ("no-selective-recompute", DEEPSPEED, (), Layout(data=16, recompute=RECOMPUTE_SELECTIVE), ZERO_3),
    ("vision-unsplit", DEEPSPEED, (IMAGES,), Layout(tensor=2, data=8), ZERO_3),
    ("tensor-or-context", DEEPSPEED, (), Layout(tensor=2, context=2, data=4), Layout(tensor=8, data=2)),
    ("tensor-plan", DEEPSPEED, ("model=mixtral-8x7b",), Layout(tensor=2, data=8), ZERO_3),
    ("tensor-query-groups", DEEPSPEED, (llama(32, 4),), Layout(tensor=8, data=2), ZERO_3),
    ("tensor-plan", DEEPSPEED, ("model=gemma4-31b",), Layout(tensor=2, data=8), ZERO_3),
    ("convolutions-unsplit", DEEPSPEED, ("model=lfm2-1.2b",), Layout(tensor=2, data=8), ZERO_3),
    ("context-latents", DEEPSPEED, (WHOLE_GEMMA,), Layout(context=2, data=8), ZERO_3),
    ("convolutions-unsplit", DEEPSPEED, ("model=lfm2-1.2b",), Layout(context=2, data=8), ZERO_3),
    ("convolutions-unsplit", DEEPSPEED, ("model=falcon-h1-7b",), Layout(context=2, data=8), ZERO_3),
    ("tensor-ffn", DEEPSPEED, ("model={base: llama2-7b, ffn_hidden_size: 11012}",), Layout(tensor=8, data=2), ZERO_3),
    ("context-heads", DEEPSPEED, (llama(8, 8, head_dim=128),), Layout(context=16), Layout(context=8, data=2)),
    ("context-query-groups", DEEPSPEED, (TWELVE_HEADS,), Layout(context=4, data=4), ZERO_3),
    ("context-sequence", DEEPSPEED, ("training.sequence_length=4001",), Layout(context=16), ZERO_3),
    ("context-masks", DEEPSPEED, (WINDOWED,), Layout(context=2, data=8), ZERO_3),
    ("packed-rows-whole", DEEPSPEED, (PACKED_ROWS,), Layout(context=2, data=8), ZERO_3),
    ("quantized-base-whole", DEEPSPEED, (QUANTIZED, WEIGHTS), ZERO_3, replace(ZERO_3, zero_stage=2)),
    ("pipeline", DEEPSPEED, own_script("own"), PIPELINE_1, ZERO_3),
    ("pipeline", DEEPSPEED, own_script("hugging-face"), PIPELINE_1, Layout(tensor=2, data=8)),
    ("trainer-context", DEEPSPEED, own_script("hugging-face"), Layout(context=2, data=8), Layout(tensor=2, data=8)),
    ("pipeline-bf16 pipeline-zero", DEEPSPEED, PIPELINE, replace(PIPELINE_1, zero_stage=2), PIPELINE_1),
    ("pipeline-bf16", DEEPSPEED, PIPELINE, replace(PIPELINE_1, zero_stage=0), PIPELINE_1),
    ("pipeline-layers", DEEPSPEED, PIPELINE, Layout(pipeline=16, zero_stage=1), PIPELINE_1),
    ("tensor", DEEPSPEED, PIPELINE, replace(PIPELINE_1, tensor=2, data=4), PIPELINE_1),
    ("context", DEEPSPEED, PIPELINE, replace(PIPELINE_1, context=2, data=4), PIPELINE_1),
    ("virtual-pipeline", DEEPSPEED, PIPELINE, replace(PIPELINE_1, virtual_pipeline=2), PIPELINE_1),
]
# The same; what the last override asks for is refused, and without it nothing is.
ASKED: list[tuple[str, str, Sequence[str], Layout, Layout]] = [
    ("offload-layers-one-stage", DENSE, (), replace(TWO_STAGES, offload_layers=2), TWO_STAGES),
    ("offload-layers-no-recompute", DENSE, (), replace(FULL, offload_layers=2), FULL),
    ("offload-layers-some-stay", DENSE, (), replace(GPUS, offload_layers=32), replace(GPUS, offload_layers=31)),
    ("offload-layers-no-modules", DENSE, (MODULES,), ONE_STAGE, GPUS),
    ("offload-modules-no-full", DENSE, (MODULES,), FULL, SELECTIVE),
    ("instances-distributed", DENSE, ("layout.optimizer_instances=2",), replace(GPUS, zero_stage=0), GPUS),
    ("instances-divide", MIXTURE, ("layout.optimizer_instances=16",), EXPERTS, replace(EXPERTS, expert=4)),
    ("offload-optimizer-distributed", DENSE, (PART,), replace(GPUS, zero_stage=0), GPUS),
    ("delayed-gradients-experts", MIXTURE, (DELAYED,), replace(EXPERTS, expert=1), EXPERTS),
    ("delayed-gradients-no-full", MIXTURE, (DELAYED,), replace(EXPERTS, recompute=RECOMPUTE_FULL), EXPERTS),
    ("delayed-gradients-interleaved", MIXTURE, (DELAYED,), EXPERT_STAGES, replace(EXPERT_STAGES, virtual_pipeline=2)),
    ("recomputed-mlp-unbiased", DENSE, (BIASED, RECOMPUTED_MLP), SELECTIVE, FULL),
    ("fixed-rows-whole-experts", MIXTURE, FIXED, replace(EXPERTS, expert_tensor=2), EXPERTS),
    (
        "fixed-rows-keep-activation",
        MIXTURE,
        (*FIXED[:2], f"layout={{{ROWS}, {ACTIVATION}}}"),
        replace(EXPERTS, recompute=RECOMPUTE_SELECTIVE),
        EXPERTS,
    ),
    ("stash-no-offloaded-layers", MIXTURE, PAGED, replace(EXPERTS, offload_layers=1), EXPERTS),
    ("stash-of-kept-experts", MIXTURE, PAGED, replace(EXPERTS, recompute=RECOMPUTE_FULL), EXPERTS),
    ("deepep-needs-others", MIXTURE, ("layout.token_dispatcher=flex",), replace(EXPERTS, expert=1), EXPERTS),
    ("deepep-ranks", MIXTURE, MANY_EXPERTS, replace(EVERYWHERE, expert=256), replace(EVERYWHERE, expert=128)),
    ("all-to-all-heads", BIG, ("layout.context_comm=a2a",), replace(RING, tensor=2, data=8, sequence_parallel=1), RING),
    ("hidden-tensor-sequence", BIG, ("layout.tp_comm_overlap=true",), replace(STAGES, sequence_parallel=0), STAGES),
    ("hidden-exchange-experts", MIXTURE, (HIDDEN,), replace(EXCHANGING, expert=1), EXCHANGING),
    ("hidden-exchange-no-full", MIXTURE, (HIDDEN,), replace(EXCHANGING, recompute=RECOMPUTE_FULL), EXCHANGING),
    ("hidden-exchange-interleaved", MIXTURE, (HIDDEN,), replace(EXCHANGING, pipeline=4, data=16), EXCHANGING),
    ("sharded-optimizer-stays", DENSE, (SHARDED_WHOLE,), FSDP, replace(FSDP, zero_stage=1)),
    ("fp8-parameters-distributed", BIG, (HOPPER, TENSORWISE, PARAMETERS), replace(STAGES, zero_stage=0), STAGES),
    ("optimizer-formats-distributed", BIG, (HOPPER, FORMATS), replace(STAGES, zero_stage=0), STAGES),
    ("narrow-sizes", BIG, (HOPPER, "model.ffn_hidden_size=28736", TENSORWISE), replace(REPLICATED, zero_stage=1), GPUS),
    ("narrow-sizes", BIG, (BLACKWELL, "model.ffn_hidden_size=28800", MXFP8), STAGES, GPUS),
    ("narrow-rows", BIG, (HOPPER, "training.sequence_length=8196", TENSORWISE), GPUS, PAIRS),
    ("narrow-rows", BIG, (BLACKWELL, "training.sequence_length=8208", MXFP8), GPUS, PAIRS),
    ("tensor-adapters", DEEPSPEED, ("training.adapters={rank: 8}",), Layout(tensor=2, data=8), ZERO_3),
    ("tensor-tiles", DEEPSPEED, ("layout={loss: tiled}",), Layout(tensor=2, data=8), ZERO_3),
    ("tensor-tiles", DEEPSPEED, ("layout={mlp_chunks: 4}",), Layout(tensor=2, data=8), ZERO_3),
    ("offload-optimizer-zero", DEEPSPEED, (WHOLE,), replace(ZERO_3, zero_stage=0), replace(ZERO_3, zero_stage=1)),
    ("offload-part-zero-3", DEEPSPEED, (OWN, PART), ZERO_2, ZERO_3),
    ("offload-parameters-zero-3", DEEPSPEED, ("layout={offload_parameters: true}",), ZERO_2, ZERO_3),
]


@pytest.mark.parametrize(("keys", "name", "overrides", "refused", "legal"), [*RULED, *ASKED])
def test_a_rule_refuses_what_it_is_there_for(
    keys: str, name: str, overrides: Sequence[str], refused: Layout, legal: Layout
) -> None:
    recipe = recipe_of(name, *overrides)
    assert refused_by(recipe, refused) == set(keys.split())
    assert refused_by(recipe, legal) == set()


@pytest.mark.parametrize(("key", "name", "overrides", "refused", "_"), [case for case in ASKED if case[2]])
def test_a_technique_nobody_asked_for_refuses_no_layout(
    key: str, name: str, overrides: Sequence[str], refused: Layout, _: Layout
) -> None:
    asking = recipe_of(name, *overrides)
    rules = [rule for rule in backend_for(asking).rules(asking) if rule.key == key]
    assert rules
    assert refused_by(recipe_of(name, *overrides[:-1]), refused, rules) == set()


# Rules whose cases need more than an override: in this folder, and in tests/frameworks.
RULED_ELSEWHERE = (
    *("shared-expert", "stages-named", "stages-hold-all", "stages-hold-some", "context-precision", "fp16-needs-gpu"),
    *("biased-experts", "pooled-keys-kept", "overlapped-expert-kept", "sparse-attention-heads"),
    *("delayed-gradients-prediction", "offload-optimizer-half"),
    *("fixed-rows-on-device", "stash-in-place-of-offload"),
    *(rule.key for rule in GRAPH_RULES),  # test_cuda_graphs.py
    *("optimizer-formats-on-device", "fp8-parameters-on-device", "delayed-keeps-norms"),
)


@pytest.mark.parametrize(
    ("beside", "layout", "keys"),
    [
        (f"{ROWS}, {MOVED}", EXPERTS, {"fixed-rows-on-device"}),
        (f"{ROWS}, paged_stash: {{}}, {MOVED}", EXPERTS, {"stash-in-place-of-offload"}),
        (f"{ROWS}, paged_stash: {{}}, offload_modules: [core_attn]", EXPERTS, set()),
        (
            f"{ROWS}, paged_stash: {{}}, recompute: selective, recompute_modules: [moe]",
            replace(EXPERTS, recompute=RECOMPUTE_SELECTIVE),
            {"stash-of-kept-experts"},
        ),
        (f"{ROWS}, recompute: full", replace(EXPERTS, recompute=RECOMPUTE_FULL), set()),
    ],
)
def test_what_a_kernel_of_all_experts_holds_stays_in_it(beside: str, layout: Layout, keys: set[str]) -> None:
    assert refused_by(recipe_of(MIXTURE, BLACKWELL, MXFP8, f"layout={{{beside}}}"), layout) == keys


def test_every_rule_has_its_case() -> None:
    rules = (*rules_for(), *DEEPSPEED_RULES, *PIPELINE_RULES, *HUGGING_FACE_RULES)
    packed = (*PACKED_RULES, *DEEPSPEED_PACKED_RULES)
    keys = {rule.key for rule in (*rules, *BRIDGE_RULES, *packed, *deepspeed_techniques.TECHNIQUE_RULES)}
    cases = {key for case in (*RULED, *ASKED) for key in case[0].split()}
    assert cases | set(RULED_ELSEWHERE) == keys
    assert not cases & set(RULED_ELSEWHERE)


MLP_TWICE = "layout={recompute: selective, recompute_modules: [mlp], mlp_chunks: 2}"
MOE_TWICE = "layout={recompute: selective, recompute_modules: [moe], offload_modules: [moe_act]}"
DELAYED_MOE = "layout={delay_weight_gradients: true, recompute: selective, recompute_modules: [moe]}"
HIDDEN_MOE = "layout={overlap_expert_communication: true, recompute: selective, recompute_modules: [moe]}"
TO_THE_HOST = "layout={recompute: full, offload_checkpoints: true}"
ALLGATHER, EXPERT_MODEL, PINNED = "layout.token_dispatcher=allgather", "model=mixtral-8x7b", "layout.zero_stage=3"
FP32, WIDE_FP16 = "training.precision=fp32", ("training.precision=fp16", "training.gradient_dtype=fp32")
ASYNC = ("training.async_save=true", "training.checkpoint_path=/ckpt", "training.save_interval=10")
NEWEST = "training.non_persistent_save_interval=10"
MUON, BF16_MAIN = "training.optimizer=muon", "training.optimizer={main_parameters: bf16}"
DEEPEP = "layout={token_dispatcher: flex, expert_rank_capacity_factor: 1.5}"
FORMAT, FP32_MAIN = "training.checkpoint_format", "training.optimizer.main_parameters=fp32"

# Key of a requirement, a recipe, and what breaks it.
REFUSED: list[tuple[str, str, Sequence[str]]] = [
    ("fixed-rows-by-hybridep", MIXTURE, [BLACKWELL, MXFP8, DEEPEP]),
    ("fixed-rows-of-fused-experts", MIXTURE, [*FIXED, "model=gpt-oss-20b"]),
    ("fixed-rows-in-mxfp8", MIXTURE, [BLACKWELL, FIXED[2]]),
    ("fixed-rows-widths", MIXTURE, [*FIXED, "model={base: mixtral-8x7b, moe: {ffn_hidden_size: 14368}}"]),
    ("fixed-rows-alone", MIXTURE, [*FIXED, "model={base: mixtral-8x7b, moe: {capacity_factor: 1.5}}"]),
    ("fixed-rows-begin-anew", MIXTURE, [*FIXED, "training.start_from=/w"]),
    ("stash-of-fixed-rows", MIXTURE, ["layout={paged_stash: {}}"]),
    (
        "stash-holds-equal-shares",
        MIXTURE,
        [*FIXED[:2], f"layout={{{ROWS}, paged_stash: {{device_factor: 0.5, host_factor: 0.25}}}}"],
    ),
    ("async-format", DENSE, [*ASYNC, "training.checkpoint_format=torch", "layout.zero_stage=0"]),
    ("async-on-a-gpu", DENSE, ["cluster=cpu-x2", *ASYNC]),
    ("async-whole-segments", DENSE, [*ASYNC, "environment={PYTORCH_CUDA_ALLOC_CONF: 'expandable_segments:True'}"]),
    ("no-async-save", DEEPSPEED, ASYNC),
    ("non-persistent-format", DENSE, [*SAVING, NEWEST, "training.checkpoint_format=torch", "layout.zero_stage=0"]),
    ("non-persistent-format", DENSE, [*SAVING, NEWEST, PINNED]),
    ("no-non-persistent-saves", DEEPSPEED, [*SAVING, NEWEST]),
    ("muon-in-bf16", DENSE, [MUON, "training.precision=fp16"]),
    ("muon-priced", DENSE, [MUON, "model={base: llama3-8b, mtp_num_layers: 1}"]),
    ("muon-on-the-device", DENSE, [MUON, PART]),
    ("muon-expert-biases", DENSE, [MUON, "model=gpt-oss-20b"]),
    ("muon-one-instance", DENSE, [MUON, "layout={optimizer_instances: 2}"]),
    ("muon-not-sharded", DENSE, [MUON, PINNED]),
    ("muon-since-0.19", DENSE, [MUON, "backend={name: megatron-lm, version: '0.16'}"]),
    ("no-adapters", DENSE, ["training.adapters={rank: 4}"]),
    ("no-frozen-layers", DENSE, ["training.trained_layers=4"]),
    ("no-parameter-offload", DENSE, ["layout={offload_parameters: true}"]),
    ("no-checkpoint-offload", DENSE, [TO_THE_HOST]),
    ("no-te-loss", DENSE, ["layout={loss: te}"]),
    ("no-tiled-loss", DENSE, ["layout={loss: tiled}"]),
    ("recomputed-mlp-is-whole", DENSE, [MLP_TWICE]),
    ("graphs-one-kind", DENSE, ["layout.cuda_graphs=[layer, attn]"]),
    ("graphs-of-a-device", DENSE, ["cluster=cpu-x2", "layout.cuda_graphs=[attn]"]),
    ("graphs-whole-mixture", MIXTURE, ["layout.cuda_graphs=[full_iteration]"]),
    ("graphs-mixture-parts", DENSE, ["layout.cuda_graphs=[moe_router]"]),
    ("graphs-dense-mlp", MIXTURE, ["layout.cuda_graphs=[mlp]"]),
    ("graphs-preprocess-router", MIXTURE, ["layout.cuda_graphs=[moe_preprocess]"]),
    ("graphs-without-recurrence", DENSE, [DELTA_NETS, "layout.cuda_graphs=[attn]"]),
    ("graphs-without-recurrence", MIXTURE, [STATE_SPACES, "layout.cuda_graphs=[attn]"]),
    ("hybrid-positions", MIXTURE, [STATE_SPACES.replace("none", "rope, rope_scaling: {kind: linear, factor: 2}")]),
    ("mixers-as-built", MIXTURE, ["model={base: nemotron-3-nano, mamba: {gated_norm: false}}"]),
    ("mixers-as-built", MIXTURE, ["model={base: nemotron-3-nano, mamba: {chunk: 256}}"]),
    ("mixers-as-built", DENSE, ["model={base: llama3-8b, mamba: {pattern: HHHH}, num_layers: 4}"]),
    ("hybrid-begins-otherwise", MIXTURE, ["model={base: nemotron-3-nano, num_layers: 2, mamba: {pattern: -M}}"]),
    ("heads-with-the-loss", MIXTURE, ["model={base: nemotron-3-super, mtp_num_layers: 1}", BEFORE_LAST[1]]),
    ("plain-beside-heads", DENSE, [BEFORE_LAST[0], "layout={mtp_stage: before-last, zero_stage: 2}"]),
    ("hybrid-attention-norms", MIXTURE, [LATENT_EXPERTS.replace("false", "true")]),
    ("hybrid-exchange-in-turn", MIXTURE, [STATE_SPACES, HIDDEN]),
    ("latent-experts-in-turn", MIXTURE, [LATENT_EXPERTS, "layout={overlap_shared_expert: true}"]),
    ("graphs-without-sharding", DENSE, [PINNED, "layout.cuda_graphs=[attn]"]),
    ("projection-needs-attention", DENSE, ["layout={offload_modules: [attn_proj]}"]),
    ("recomputed-experts-stay", MIXTURE, [MOE_TWICE]),
    ("some-layers-stay", DENSE, ["layout={offload_layers: 32}"]),
    ("delayed-gradients-need-half", MIXTURE, [FP32, DELAYED]),
    ("delayed-gradients-need-alltoall", MIXTURE, [DELAYED, ALLGATHER]),
    ("delayed-gradients-keep-experts", MIXTURE, [DELAYED_MOE]),
    ("hidden-exchange-needs-alltoall", DENSE, [HIDDEN]),
    ("hidden-exchange-needs-alltoall", MIXTURE, [HIDDEN, ALLGATHER]),
    ("hidden-exchange-keeps-experts", MIXTURE, [HIDDEN_MOE]),
    ("hidden-exchange-needs-half", MIXTURE, [HIDDEN, FP32]),
    ("sharding-by-itself", DENSE, ["layout.zero_stage=[1, 3]"]),
    ("sharded-starts-anew", DENSE, [PINNED, "training.start_from=/llama", *SAVING]),
    ("sharded-checkpoints-of-halves", DENSE, [PINNED, FP32, *SAVING]),
    ("no-torch-dcp", BIG, [*SAVING, f"{FORMAT}=torch_dcp"]),
    ("format-of-sharded", BIG, [*SAVING, f"{FORMAT}=fsdp_dtensor"]),
    ("old-format-whole-optimizer", BIG, [*SAVING, f"{FORMAT}=torch"]),
    ("old-format-whole-optimizer", BIG, [*SAVING, f"{FORMAT}=torch", "layout.zero_stage=[0, 1]"]),
    ("sharded-format", BIG, [*SAVING, f"{FORMAT}=torch_dist", PINNED]),
    ("fp8-device", BIG, [AMPERE, DELAYED_FP8]),
    ("fp8-device", BIG, [HOPPER, MXFP8]),
    ("fp4-device", BIG, [HOPPER, "training.fp4=nvfp4"]),
    ("main-parameters-of-megatron", BIG, [BF16_MAIN]),
    ("optimizer-formats-of-deepspeed", DEEPSPEED, [BF16_MAIN]),
    ("optimizer-formats-of-deepspeed", DEEPSPEED, ["training.optimizer={first_moment: bf16, second_moment: bf16}"]),
    ("optimizer-formats-of-deepspeed", DEEPSPEED, ["training.optimizer={main_parameters: fp16}", OWN]),
    ("optimizer-formats-of-deepspeed", DEEPSPEED, [BF16_MAIN, OWN, "training.precision=fp16"]),
    (
        "fp8-parameters-and-remainders",
        BIG,
        [HOPPER, DELAYED_FP8, PARAMETERS, FP32_MAIN],
    ),
    ("vision-priced", DENSE, ["model={base: qwen3-vl-8b, mtp_num_layers: 1, vision: {frozen: true}}"]),
    (
        "vision-without-adapters",
        DEEPSPEED,
        ["model={base: qwen3-vl-8b, vision: {frozen: true}}", "training.adapters={rank: 2}"],
    ),
    ("delta-nets", DEEPSPEED, ["model={base: qwen3-next-80b-a3b, linear_attention: {full_every: 4}}"]),
    ("pooled-keys-on-deepspeed", DEEPSPEED, [POOLED_INLINE]),
    ("mixers-without-adapters", DEEPSPEED, ["model=nemotron-3-nano", "training.adapters={rank: 2}"]),
    ("mamba-mixers", DEEPSPEED, ["training.start_from=/w", "model={base: nemotron-3-nano, mamba: {groups: 4}}"]),
    ("every-layer-recomputed", DEEPSPEED, ["layout={recompute: full, recompute_method: block}"]),
    ("one-layer-groups", DEEPSPEED, ["layout={recompute: full, recompute_layers: 2}"]),
    ("no-module-offload", DEEPSPEED, [MODULES]),
    ("no-layer-offload", DEEPSPEED, ["layout={offload_layers: 2}"]),
    ("checkpoints-leave-a-gpu", "quickstart", [TO_THE_HOST]),
    ("whole-optimizer-offload", DEEPSPEED, [PART]),
    ("whole-or-tiled-loss", DEEPSPEED, ["layout={loss: native}"]),
    ("counted-loss", DEEPSPEED, [OWN, "layout={loss: native}"]),
    ("dense-tiles", DEEPSPEED, [EXPERT_MODEL, "layout={loss: tiled}"]),
    ("dense-chunks", DEEPSPEED, [EXPERT_MODEL, "layout={mlp_chunks: 2}"]),
    ("dense-adapters", DEEPSPEED, [EXPERT_MODEL, "training.adapters={rank: 2}"]),
    ("adapters-of-one-kind", DEEPSPEED, ["model=gemma4-31b", "training.adapters={rank: 2}"]),
    ("whole-fused-layers", DEEPSPEED, ["model=phi-4", "training.adapters={rank: 2, target_modules: [q_proj]}"]),
    (
        "no-indexer",
        DEEPSPEED,
        ["training.start_from=/w", "model={base: deepseek-v3.2, indexer: {heads: 64, head_dim: 128, topk: 1024}}"],
    ),
    (
        "every-expert-sees-all",
        DEEPSPEED,
        [ONE_EXPERT],
    ),
    ("evaluation-of-a-script", DEEPSPEED, [OWN, EVALUATION]),
    ("evaluation-writes-logits", DEEPSPEED, [*own_script("hugging-face", "layout={loss: fused_linear}"), EVALUATION]),
    (
        "validation-of-a-script",
        DEEPSPEED,
        [*own_script("hugging-face"), EVALUATION, "data={path: /text, validation: /other}"],
    ),
    ("packed-rows-without-states", DEEPSPEED, ["model=falcon-h1-0.5b", PACKED_ROWS]),
    ("packed-rows-without-states", DEEPSPEED, ["model=lfm2-1.2b", PACKED_ROWS]),
    ("packed-rows-without-sinks", DEEPSPEED, ["model=gpt-oss-20b", PACKED_ROWS]),
    ("quantized-weights-are-loaded", DEEPSPEED, [QUANTIZED]),
    ("quantized-linear-layers", DEEPSPEED, [EXPERT_MODEL, QUANTIZED, WEIGHTS]),
    (
        "rows-of-a-script",
        DEEPSPEED,
        [*own_script("hugging-face"), "data={path: /rows, format: chat, tokenizer: /t}"],
    ),
    ("no-delayed-gradients", DEEPSPEED, [DELAYED]),
    ("no-hidden-exchange", DEEPSPEED, [HIDDEN]),
    ("no-hidden-tensor", DEEPSPEED, ["layout={tp_comm_overlap: true}"]),
    ("no-graphs", DEEPSPEED, ["layout.cuda_graphs=[attn]"]),
    ("one-optimizer", DEEPSPEED, ["layout={optimizer_instances: 2}"]),
    ("no-ring", DEEPSPEED, ["layout={context_comm: p2p}"]),
    ("no-fixed-rows", DEEPSPEED, [EXPERT_MODEL, "layout={expert_rank_capacity_factor: 1.5}"]),
    ("no-dispatcher", DEEPSPEED, [EXPERT_MODEL, ALLGATHER]),
    ("gradients-as-computed", DEEPSPEED, WIDE_FP16),
    ("gradients-as-computed", DEEPSPEED, [OWN, *WIDE_FP16]),
]
REQUIREMENTS = {each.key: each for each in (*requirements_for(), *deepspeed_techniques.REQUIREMENTS)}


@pytest.mark.parametrize(("key", "name", "overrides"), REFUSED)
def test_what_a_backend_cannot_do_is_refused_by_the_recipes_key_before_anything_is_searched(
    key: str, name: str, overrides: Sequence[str]
) -> None:
    """The pages of docs/ show each sentence (test_backend_docs.py)."""
    recipe, broken = recipe_of(name, *overrides), REQUIREMENTS[key]
    backend = backend_for(recipe)
    message = re.escape(f"{recipe.path}: {broken.recipe_key}: {broken.sentence} ({broken.where})")
    assert set(broken.recipe_key.split(".")) <= set(re.findall(r"\w+", " ".join(overrides)))
    with pytest.raises(UserError, match=f"^{message}$"):
        make_plan(setting_of(recipe, backend))
    with pytest.raises(UserError, match=f"^{message}$"):
        backend.render(recipe, GPUS if backend.name == "megatron-lm" else ZERO_3)


OF_MODELS = (
    *MACHINE_REQUIREMENTS,
    *MODEL_REQUIREMENTS,
    *POOLED_REQUIREMENTS,
    *(each for each in VISION_REQUIREMENTS if each.priced),
    *MIXTURE_REQUIREMENTS,
    *version_requirements(),
)  # in tests of those modules


@pytest.mark.parametrize(
    ("name", "overrides", "layout"),
    [(DENSE, (IMAGES,), GPUS), (DENSE, (IMAGES, BRIDGE), GPUS), (DEEPSPEED, (IMAGES,), ZERO_3)],
)
def test_a_vision_encoder_is_priced_and_no_script_of_ours_trains_it(
    name: str, overrides: Sequence[str], layout: Layout
) -> None:
    recipe = recipe_of(name, *overrides)
    backend = backend_for(recipe)
    (sentence,) = backend.unrendered(recipe)
    assert sentence.startswith("model.vision: ")
    assert not refused_by(recipe, layout)
    with pytest.raises(UserError, match=re.escape(sentence)):
        backend.render(recipe, layout)


def test_a_script_of_ones_own_may_train_a_vision_encoder() -> None:
    recipe = recipe_of(DEEPSPEED, IMAGES, *own_script("hugging-face"))
    assert not backend_for(recipe).unrendered(recipe)
    assert backend_for(recipe).render(recipe, ZERO_3).files


PRICED = {"no-images-in-the-script"}


def test_every_requirement_has_its_case() -> None:
    keys = REQUIREMENTS.keys() - {requirement.key for requirement in OF_MODELS}
    assert {key for key, *_ in REFUSED} | {"hidden-exchange-alone", "hidden-exchange-prediction"} == keys - PRICED
