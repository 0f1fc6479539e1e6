"""What Megatron-Bridge's performance presets set, told by their own functions (megatron/bridge/perf_recipes, 0.6).

A preset reads its model from Hugging Face's hub. Here the model is a small one, for nothing of its shape is asked: what
is told are the fields of CHOSEN whose value is not that of Bridge's classes, and those of ALWAYS.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

CHOSEN = {
    "model": (
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
        *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
        *("recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers"),
        *("fine_grained_activation_offloading", "offload_modules", "cpu_offloading", "cpu_offloading_num_layers"),
        *("cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "cuda_graph_impl", "tp_comm_overlap"),
        *("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "moe_token_dispatcher_type"),
        *("moe_flex_dispatcher_backend", "moe_shared_expert_overlap", "fp8", "fp8_recipe", "fp8_param", "fp4"),
    ),
    "ddp": ("grad_reduce_in_fp32", "overlap_grad_reduce", "overlap_param_gather", "average_in_collective"),
    "optimizer": ("use_precision_aware_optimizer", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
    "train": ("micro_batch_size", "global_batch_size"),
}
ALWAYS = ("grad_reduce_in_fp32",)  # where Bridge's classes and Megatron-LM's arguments have other defaults
FAMILIES = ("llama", "qwen", "deepseek", "gpt_oss", "kimi")
MODELS = "llama3_8b|llama3_70b|llama31_405b|qwen3_30b_a3b|qwen3_235b_a22b|deepseek_v3|gpt_oss_20b|gpt_oss_120b|kimi_k2"
NAME = re.compile(rf"(?:{MODELS})_pretrain_\d+gpu_(?:h100|b200|b300|gb200|gb300)_(?:bf16|fp8cs|fp8mx|nvfp4)_config")


def install(site: Path) -> None:
    """Leave out packages that import every preset there is, diffusion among them, and the hub."""
    here = site / "megatron" / "bridge"
    folders = [here / part for part in ("recipes", "perf_recipes")]
    folders += [folder for part in folders for folder in part.iterdir() if folder.is_dir() and folder.name != "utils"]
    for folder in folders:
        name = ".".join(folder.relative_to(site).parts)
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(folder)]
    auto_bridge = importlib.import_module("megatron.bridge.models.conversion.auto_bridge")
    auto_bridge.AutoBridge = _SmallModel


class _SmallModel:
    """In place of AutoBridge, which would fetch a configuration."""

    @classmethod
    def from_hf_pretrained(cls, *_: Any, **__: Any) -> _SmallModel:
        return cls()

    def to_megatron_provider(self, **_: Any) -> Any:
        return small_provider()


def small_provider() -> Any:
    from megatron.bridge.models.mla_provider import MLAModelProvider

    return MLAModelProvider(num_layers=64, hidden_size=64, num_attention_heads=8, num_moe_experts=256)


def presets(site: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each preset's name and what it sets."""
    from megatron.bridge.training import config

    blank = {
        "model": small_provider(),
        "ddp": config.DistributedDataParallelConfig(),
        "optimizer": config.OptimizerConfig(),
        "train": config.TrainingConfig(),
    }
    for family in FAMILIES:
        for path in sorted((site / "megatron" / "bridge" / "perf_recipes" / family).glob("*/*.py")):
            if path.name != "__init__.py":
                module = importlib.import_module(".".join(path.relative_to(site).with_suffix("").parts))
                for name in sorted(filter(NAME.fullmatch, vars(module))):
                    yield name, what_is_set(getattr(module, name)(), blank)


def what_is_set(preset: Any, blank: dict[str, Any]) -> dict[str, Any]:
    """Apply its precision and overlaps as `runtime_config_update` does, and compare with fresh classes."""
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    if isinstance(preset.mixed_precision, str):
        preset.mixed_precision = get_mixed_precision_config(preset.mixed_precision)
    preset.mixed_precision.finalize()
    preset.mixed_precision.setup(preset.model, preset.optimizer, preset.ddp)
    if preset.comm_overlap is not None:
        preset.comm_overlap.data_parallel_size = 2
        preset.comm_overlap.finalize()
        preset.comm_overlap.setup(preset.model, preset.optimizer, preset.ddp)
    values = {}
    for section, names in CHOSEN.items():
        part = getattr(preset, section)
        for name in names:
            value = plain(getattr(part, name))
            if value is not None and (name in ALWAYS or value != plain(getattr(blank[section], name))):
                values[f"{section}.{name}"] = value
    if "model.fp8" not in values:
        values.pop("model.fp8_recipe", None)  # read with it alone
    return values


def plain(value: Any) -> Any:
    """As JSON has it; formats by the names that bridge.json has for them."""
    if dataclasses.is_dataclass(value) or type(value).__name__ == "dtype":
        return str(value).replace("torch.", "").replace("float32", "fp32").replace("bfloat16", "bf16")
    return list(value) if isinstance(value, tuple) else value
