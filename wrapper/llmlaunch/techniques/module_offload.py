"""Fine-grained activation offloading of Megatron core: what modules save waits in host memory."""

from __future__ import annotations

from typing import Literal

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import ACTIVATIONS_ON_HOST, EXPERTS, key_of, technique

__all__ = ["ModuleOffload", "ModuleOffloadShare", "OffloadModule"]

OffloadModule = Literal["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]


@section
class ModuleOffload:
    """Names of modules are those of Megatron's fine-grained offload."""

    offload_modules: tuple[str, ...] = technique(
        "Modules whose saved inputs wait in host memory; [] = none, absent = searched",
        default=(),
        written=tuple[OffloadModule, ...] | None,
        bit_equal="copies come back from the host as they left",
        needs={"moe_act": EXPERTS, "expert_fc1": EXPERTS},
        habit=ACTIVATIONS_ON_HOST,
        on_host="modules",
        source="Megatron core, fine-grained activation offloading",
        saves="the saved inputs of the named modules",
        costs="host memory and the link to it",
    )


@section
class ModuleOffloadShare:
    """The share of these tensors that waits there, which no search chooses."""

    offload_fraction: float = technique(
        "megatron-lm: share of offload_modules' tensors that leave the device, those of the first layers of each chunk",
        default=1.0,
        gt=0,
        le=1,
        belongs=(key_of(ModuleOffload), None),
        source="Megatron core, fine-grained activation offloading",
        saves="that share of what offload_modules would move",
        costs="less host memory and less to travel than all of it",
    )
