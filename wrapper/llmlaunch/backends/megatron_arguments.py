"""The command line and environment of Megatron-LM's `pretrain_gpt.py`, core 0.19.

Every flag here stands in the parser of megatron-core 0.19.2; unknown flags are fatal there, abbreviations too.
"""

from __future__ import annotations

from llmlaunch.backends.checkpoints import RESHARDING_FLAG, saved_by_parameter
from llmlaunch.backends.conflicts import merged_environment, refuse_repeats
from llmlaunch.backends.megatron_stages import STAGE_FLAGS, stage_words
from llmlaunch.backends.megatron_techniques import technique_environment, technique_words
from llmlaunch.errors import UserError
from llmlaunch.layout import Layout
from llmlaunch.models.shape import ModelShape
from llmlaunch.recipe.types import Recipe

__all__ = ["arguments", "environment"]

Words = tuple[str, ...]
BLACKWELL = 10.0


def arguments(recipe: Recipe, layout: Layout) -> Words:
    """All words after the script's name.

    Raises:
        UserError: `backend.extra_args` repeats a flag that is planned here, or splits the layers otherwise.
    """
    planned = (
        *_model(recipe.model, recipe.workload.sequence_length),
        *_mixture(recipe.model),
        *_parallel(recipe.model, layout),
        *technique_words(recipe, layout),
        *_training(recipe, layout),
        *_data(recipe),
        *_checkpoint(recipe, layout),
    )
    refuse_repeats(recipe, (*planned, *STAGE_FLAGS))
    return (*planned, *recipe.backend.extra_args)


def _flag(name: str, value: object) -> Words:
    return (f"--{name}", str(value))


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _model(shape: ModelShape, sequence_length: int) -> Words:
    words = [
        *_flag("num-layers", shape.num_layers),
        *_flag("hidden-size", shape.hidden_size),
        *_flag("ffn-hidden-size", shape.ffn_hidden_size),
        *_flag("num-attention-heads", shape.num_attention_heads),
        *_flag("kv-channels", shape.head_dim),
        *_flag("seq-length", sequence_length),
        *_flag("max-position-embeddings", max(shape.max_position_embeddings, sequence_length)),
        *_flag("normalization", shape.normalization),
        *_flag("attention-dropout", _number(shape.attention_dropout)),
        *_flag("hidden-dropout", _number(shape.hidden_dropout)),
        *_flag("position-embedding-type", shape.position_embedding),
    ]
    if shape.position_embedding == "rope":
        words += _flag("rotary-base", _number(shape.rotary_base))
    if shape.num_query_groups != shape.num_attention_heads:
        words += ["--group-query-attention", *_flag("num-query-groups", shape.num_query_groups)]
    if shape.mtp_num_layers:
        words += _flag("mtp-num-layers", shape.mtp_num_layers)
    switches = {
        "--swiglu": shape.gated_mlp,
        "--disable-bias-linear": not shape.linear_bias,
        "--add-qkv-bias": shape.qkv_bias and not shape.linear_bias,
        "--untie-embeddings-and-output-weights": not shape.tied_embeddings,
        "--qk-layernorm": shape.qk_layernorm,
    }
    return (*words, *(flag for flag, on in switches.items() if on))


def _mixture(shape: ModelShape) -> Words:
    if shape.moe is None:
        return ()
    moe = shape.moe
    words = [
        *_flag("num-experts", moe.num_experts),
        *_flag("moe-router-topk", moe.topk),
        *_flag("moe-ffn-hidden-size", moe.ffn_hidden_size),
        *_flag("moe-token-dispatcher-type", moe.token_dispatcher or "alltoall"),
        *_flag("moe-router-load-balancing-type", "aux_loss"),
        *_flag("moe-aux-loss-coeff", "0.01"),
        "--moe-grouped-gemm",
    ]
    if len(set(moe.layer_pattern)) > 1:
        words += _flag("moe-layer-freq", f"[{','.join(str(i) for i in moe.layer_pattern)}]")
    if moe.shared_expert_ffn_hidden_size:
        words += _flag("moe-shared-expert-intermediate-size", moe.shared_expert_ffn_hidden_size)
    if moe.capacity_factor is not None:
        words += _flag("moe-expert-capacity-factor", _number(moe.capacity_factor))
    return tuple(words)


def _parallel(shape: ModelShape, layout: Layout) -> Words:
    words = [
        *_flag("tensor-model-parallel-size", layout.tensor),
        *_flag("pipeline-model-parallel-size", layout.pipeline),
        *_flag("context-parallel-size", layout.context),
    ]
    words += stage_words(layout, shape.mtp_num_layers)
    if layout.sequence_parallel:
        words += ["--sequence-parallel"]
    if shape.moe is not None:
        words += _flag("expert-model-parallel-size", layout.expert)
        # its default is the tensor parallel size, not 1
        words += _flag("expert-tensor-parallel-size", layout.expert_tensor)
    if layout.zero_stage:
        words += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    return tuple(words)


def _training(recipe: Recipe, layout: Layout) -> Words:
    training, work = recipe.training, recipe.workload
    warmup = min(training.steps // 100, 2000)
    words = [
        *_flag("micro-batch-size", layout.micro_batch_size),
        *_flag("global-batch-size", work.global_batch_size),
        *_flag("train-iters", training.steps),
        *_flag("lr", repr(training.learning_rate)),
        *_flag("lr-decay-style", "cosine"),
        *_flag("lr-warmup-iters", warmup),
        *_flag("clip-grad", "1.0"),
        *_flag("weight-decay", "0.1"),
        *_flag("adam-beta2", "0.95"),
        *_flag("seed", training.seed),
        *_flag("eval-iters", 0),
        *_flag("eval-interval", training.steps),  # no default in core 0.19, yet it divides by it (training.py)
        *_flag("log-interval", training.log_interval),
        "--log-throughput",
        "--log-device-memory-used",
    ]
    if work.precision != "fp32":
        words += [f"--{work.precision}"]
    return tuple(words)


def _data(recipe: Recipe) -> Words:
    data = recipe.data
    if data.python_source:
        raise UserError(
            f"{recipe.path}: data.python_source: is for the DeepSpeed trainer; Megatron-LM reads indexed datasets "
            "(data.path) or made-up data (data.mock: true)"
        )
    # fused attention is causal by itself; the loader's masks would take sequence x sequence bytes of every sample
    words = ["--no-create-attention-mask-in-dataloader"]
    if data.mock:
        words += ["--mock-data", *_flag("tokenizer-type", "NullTokenizer")]
        return (*words, *_flag("vocab-size", recipe.model.vocab_size))
    words += [*_flag("data-path", data.path), *_flag("split", "99,1,0")]
    if data.tokenizer is None:
        words += [*_flag("tokenizer-type", "NullTokenizer"), *_flag("vocab-size", recipe.model.vocab_size)]
    else:
        words += [*_flag("tokenizer-type", "HuggingFaceTokenizer"), *_flag("tokenizer-model", data.tokenizer)]
    return tuple(words)


def _checkpoint(recipe: Recipe, layout: Layout) -> Words:
    """Told by SIGTERM (--exit-signal's default), Megatron saves after the step and exits with 0; workers of its data
    loader then ignore that signal, too (training/datasets/data_samplers.py, core 0.16 on). Where --load is empty, it
    begins at step 0. Never --async-save: a save must be over when the process ends."""
    training = recipe.training
    if training.checkpoint_path is None or training.save_interval is None:
        return ()
    place = training.checkpoint_path
    words = [
        *_flag("save", place),
        *_flag("load", place),
        *_flag("save-interval", training.save_interval),
        *_flag("ckpt-format", "torch_dist"),
        "--exit-signal-handler",
    ]
    if layout.zero_stage and saved_by_parameter(recipe, layout) and RESHARDING_FLAG not in recipe.backend.extra_args:
        words.append(RESHARDING_FLAG)
    return tuple(words)


def environment(recipe: Recipe, layout: Layout) -> dict[str, str]:
    """What Megatron-LM needs beside its arguments.

    CUDA_DEVICE_MAX_CONNECTIONS=1 orders collectives before the kernels they overlap with; arguments.py asserts it
    for tensor or context parallelism before Blackwell. Expandable segments keep long runs from dying of
    fragmentation well under the card's size.

    Raises:
        UserError: the recipe's environment sets one of these to something else.
    """
    wanted = {
        "OMP_NUM_THREADS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
    }
    capability = recipe.cluster.accelerator.compute_capability
    blackwell = capability is not None and float(capability) >= BLACKWELL
    split = layout.tensor > 1 or layout.context > 1
    required = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if split and not blackwell else {}
    required |= technique_environment(recipe.techniques)
    return merged_environment(recipe, wanted, required, f"Megatron-LM with this layout ({layout.describe()})")
