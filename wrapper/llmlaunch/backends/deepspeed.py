"""DeepSpeed as a backend: ZeRO stages over data parallelism, our training script or the person's own."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from llmlaunch.backends.base import NodeVariable, Rendered, Space
from llmlaunch.backends.deepspeed_rules import RULES
from llmlaunch.backends.fact_tables import REDUCE_BUCKET_ELEMENTS, deepspeed_facts
from llmlaunch.errors import UserError
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_NONE, Layout, Rule
from llmlaunch.memory.constants import constant
from llmlaunch.memory.facts import MemoryFacts
from llmlaunch.models.parameters import count_parameters
from llmlaunch.models.shape import ModelShape
from llmlaunch.recipe.types import Recipe

__all__ = ["DeepSpeed"]

CONFIG, MODEL, TRAINER = "ds_config.json", "trainer/model.json", "trainer/train.py"
RUN_DIRECTORY = "LLMLAUNCH_RUN_DIR"
# What the engine is told about the batch, precision and ZeRO is the plan; a person's script may not undo it.
PLANNED_FLAGS = ("--deepspeed", "--deepspeed_config", "--deepspeed-config")


class DeepSpeed:
    """DeepSpeed 0.19 with a Hugging Face model, split by data alone."""

    name = "deepspeed"

    def rules(self, recipe: Recipe) -> tuple[Rule, ...]:
        return RULES

    def space(self, recipe: Recipe) -> Space:
        one = (1,)
        return Space(
            tensor=one,
            pipeline=one,
            virtual_pipeline=one,
            context=one,
            expert=one,
            expert_tensor=one,
            zero_stage=(0, 1, 2, 3),
            recompute=(RECOMPUTE_NONE, RECOMPUTE_FULL),
        )

    def facts(self, recipe: Recipe) -> MemoryFacts:
        """On a CPU the peak is resident memory: the idle trainer stands where a GPU has its context, and nothing
        is held by drivers or communicators."""
        facts = deepspeed_facts(recipe.workload.precision)
        facts = replace(facts, bucket_bytes=bucket_elements(recipe.model) * facts.activation_bytes)
        if recipe.cluster.accelerator.kind != "cpu":
            return facts
        return replace(
            facts,
            workspace_bytes=0.0,
            communicator_bytes=0.0,
            cache_share=constant("resident_cache_share"),
            context_bytes=constant("resident_baseline_bytes"),
        )

    def render(self, recipe: Recipe, layout: Layout) -> Rendered:
        """Raises UserError where the person's script arguments contradict the plan."""
        config = {CONFIG: _json(ds_config(recipe, layout))}
        words = ("--deepspeed", "--deepspeed_config", NodeVariable(RUN_DIRECTORY, f"/{CONFIG}"))
        if recipe.backend.script is not None:
            _refuse_planned(recipe)
            program = (recipe.backend.script, *recipe.backend.script_args, *recipe.backend.extra_args, *words)
            return Rendered(program, environment(recipe), config, measurement=measurement(recipe))
        trainer = files("llmlaunch.trainers").joinpath("deepspeed_llama.py").read_bytes()
        program = (NodeVariable(RUN_DIRECTORY, f"/{TRAINER}"), *trainer_words(recipe, layout), *words)
        model = _json(hugging_face_config(recipe.model, recipe.workload.sequence_length))
        written = {**config, MODEL: model, TRAINER: trainer}
        return Rendered(program, environment(recipe), written, measurement=measurement(recipe))


def bucket_elements(shape: ModelShape) -> int:
    """DeepSpeed allocates its whole reduce bucket at the first backward; one larger than the model is only waste."""
    return int(min(REDUCE_BUCKET_ELEMENTS, max(count_parameters(shape).total, 1_000_000)))


def ds_config(recipe: Recipe, layout: Layout) -> dict[str, Any]:
    """Nothing left to "auto" or to a default that changes memory; no key DeepSpeed 0.19 does not know."""
    work, bucket = recipe.workload, bucket_elements(recipe.model)
    zero: dict[str, Any] = {"stage": layout.zero_stage}
    if layout.zero_stage:
        zero |= {"reduce_bucket_size": bucket, "overlap_comm": layout.zero_stage == 3, "contiguous_gradients": True}
        zero |= (
            {"allgather_bucket_size": bucket}
            if layout.zero_stage < 3
            else {"stage3_prefetch_bucket_size": bucket // 10}
        )
    config: dict[str, Any] = {
        "train_batch_size": work.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.num_microbatches(work.global_batch_size),
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000_000,  # our script prints its own progress
        "zero_allow_untested_optimizer": True,  # torch's AdamW: nothing is compiled on the nodes
        "zero_optimization": zero,
    }
    if work.precision in ("bf16", "fp16"):
        config[work.precision] = {"enabled": True}
    return config


def trainer_words(recipe: Recipe, layout: Layout) -> tuple[str | NodeVariable, ...]:
    """Arguments of our own training script."""
    training, data = recipe.training, recipe.data
    source = "mock" if data.mock else "python-source" if data.python_source else str(data.path)
    words: list[str | NodeVariable] = ["--model", NodeVariable(RUN_DIRECTORY, f"/{MODEL}"), "--data", source]
    if data.tokenizer is not None:
        words += ["--tokenizer", data.tokenizer]
    words += ["--steps", str(training.steps), "--sequence-length", str(recipe.workload.sequence_length)]
    words += ["--learning-rate", repr(training.learning_rate), "--warmup-steps", str(min(training.steps // 20, 2000))]
    words += ["--seed", str(training.seed), "--log-interval", str(training.log_interval)]
    if layout.recompute == RECOMPUTE_FULL:
        words += ["--gradient-checkpointing"]
    if training.checkpoint_path is not None and training.save_interval is not None:
        words += ["--save", training.checkpoint_path, "--save-interval", str(training.save_interval)]
    return (*words, *recipe.backend.extra_args)


def hugging_face_config(shape: ModelShape, sequence_length: int) -> dict[str, Any]:
    """The `config.json` of this shape, Llama or Mixtral. Raises UserError for shapes neither family has."""
    unlike = {
        "LayerNorm": shape.normalization != "RMSNorm",
        "ungated MLP": not shape.gated_mlp,
        "learned positions": shape.position_embedding != "rope",
        "query/key norms": shape.qk_layernorm,
        "latent attention": shape.mla is not None,
        "multi-token prediction": shape.mtp_num_layers > 0,
        "mixture in some layers only": shape.moe is not None and set(shape.moe.layer_pattern) != {1},
        "shared experts": shape.moe is not None and shape.moe.shared_expert_ffn_hidden_size > 0,
    }
    wrong = [what for what, present in unlike.items() if present]
    if wrong:
        raise UserError(
            f"model {shape.name}: llmlaunch's DeepSpeed script trains Llama and Mixtral shapes, and this one has "
            f"{', '.join(wrong)}; give a script of your own (backend: {{name: deepspeed, script: ...}}) or take megatron-lm"
        )
    config: dict[str, Any] = {
        "model_type": "mixtral" if shape.moe else "llama",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.moe.ffn_hidden_size if shape.moe else shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": max(shape.max_position_embeddings, sequence_length),
        "rope_theta": shape.rotary_base,
        "tie_word_embeddings": shape.tied_embeddings,
        "attention_dropout": shape.attention_dropout,
    }
    if shape.moe:
        config |= {"num_local_experts": shape.moe.num_experts, "num_experts_per_tok": shape.moe.topk}
        config |= {"output_router_logits": True}
    else:
        config |= {"attention_bias": shape.linear_bias or shape.qkv_bias, "mlp_bias": shape.linear_bias}
    return config


def environment(recipe: Recipe) -> dict[str, str]:
    """One thread a process unless the person says otherwise; on a CPU, DeepSpeed's CPU accelerator, and memory that
    goes back to the kernel when freed, so that resident memory means what it says."""
    wanted = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if recipe.cluster.accelerator.kind == "cpu":
        wanted |= {"DS_ACCELERATOR": "cpu", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}
    else:
        wanted |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return {**wanted, **{k: v for k, v in recipe.environment.items() if k in wanted}}


def measurement(recipe: Recipe) -> dict[str, dict[str, object]]:
    return {
        "optimizer": {"gradient_dtype": recipe.workload.precision},
        "implementation": {"attention": "auto", "gated_activation_fused": False, "gradient_accumulation_fusion": False},
    }


def _refuse_planned(recipe: Recipe) -> None:
    for word in (*recipe.backend.script_args, *recipe.backend.extra_args):
        if word.split("=", 1)[0] in PLANNED_FLAGS:
            raise UserError(
                f"{recipe.path}: backend.script_args: {word} is added by llmlaunch, with the planned {CONFIG}; remove it"
            )


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def trainer_path() -> Path:
    """Our training script, where llmlaunch is installed."""
    return Path(str(files("llmlaunch.trainers").joinpath("deepspeed_llama.py")))
