"""What a search combines with every layout, because it decides what fits: of activations and of model states."""

from __future__ import annotations

from typing import Literal

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import (
    ACTIVATIONS_ON_HOST,
    EXPERTS,
    LATENT_ATTENTION,
    SHARED_EXPERT,
    TechniqueHabit,
    key_of,
    technique,
)


@section
class CheckpointOffload:
    """The inputs of layers that full recompute keeps wait in host memory: DeepSpeed's `cpu_checkpointing`. It moves
    what full recompute keeps, and nothing else."""

    offload_checkpoints: bool = technique(
        "The layer inputs recompute: full keeps wait in host memory; absent = searched",
        default=False,
        bit_equal="copies come back from the host as they left",
        belongs=("recompute", "full"),
        habit=ACTIVATIONS_ON_HOST,
        on_host="checkpoints",
        effects=("offload",),
        source="ZeRO-Infinity (Rajbhandari et al. 2021, section 5.1)",
        saves="the layer inputs full recompute keeps",
        costs="host memory and the link to it",
    )


OffloadModule = Literal["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]


@section
class ModuleOffload:
    """Fine-grained activation offloading of Megatron core: what modules save waits in host memory. Names of modules are
    those of Megatron's fine-grained offload."""

    offload_modules: tuple[str, ...] = technique(
        "Modules whose saved inputs wait in host memory; [] = none, absent = searched",
        default=(),
        written=tuple[OffloadModule, ...] | None,
        bit_equal="copies come back from the host as they left",
        needs={"moe_act": EXPERTS, "expert_fc1": EXPERTS},
        habit=ACTIVATIONS_ON_HOST,
        on_host="modules",
        effects=("offload",),
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


RecomputeModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
AGAIN = "the same kernels run again, on the same input and with the same random numbers"


@section
class Recompute:
    """Selective and full recompute: activations that the backward pass computes again. How they are recomputed, and how
    many layers, is the layout's to say. Names of modules are those of Megatron's selective recompute. Without
    `recompute_modules`, it takes the backend's default."""

    recompute_modules: tuple[str, ...] = technique(
        "What recompute: selective recomputes; absent = searched",
        default=(),
        written=tuple[RecomputeModule, ...] | None,
        min_length=1,
        bit_equal=AGAIN,
        belongs=("recompute", "selective"),
        needs={"moe": EXPERTS, "moe_act": EXPERTS, "shared_experts": SHARED_EXPERT, "mla_up_proj": LATENT_ATTENTION},
        effects=("recompute",),
        source="Korthikanti et al. 2022, section 5",
        saves="what the named modules save",
        costs="their forward pass once more",
    )
    recompute_method: str = technique(
        "recompute: full keeps the input of groups of layers (uniform), or recomputes some layers of each model chunk "
        "only (block); absent = uniform where full is pinned, else searched",
        default="uniform",
        written=Literal["uniform", "block"] | None,
        bit_equal=AGAIN,
        belongs=("recompute", "full"),
        effects=("recompute",),
        source="Chen et al. 2016; Korthikanti et al. 2022, section 5",
        saves="all a layer saves but its input; block: of some layers, uniform: all but one input in each group",
        costs="up to one more forward pass",
    )


@section
class HostParameters:
    """Parameters rest on the host: DeepSpeed's `offload_param` of ZeRO 3. Each pass reads the parameters over the
    host's link."""

    offload_parameters: bool = technique(
        "Parameters rest on the host and are streamed in (ZeRO 3); absent = searched",
        default=False,
        bit_equal="copies come back from the host as they left",
        habit=TechniqueHabit("parameters on the host", 0.10, "every pass then waits for the host's link"),
        on_host="parameters",
        effects=("host_parameters",),
        source="ZeRO-Infinity; Superpipeline; KARMA; M6-10T",
        saves="the parameters, but those that run now",
        costs="host memory, every pass reads them over the link",
    )


@section
class HostOptimizer:
    """Optimizer states rest on the host, and are updated there. DeepSpeed's CPU Adam, Megatron's hybrid optimizer."""

    offload_optimizer: float = technique(
        "Share of the optimizer states held and updated on the host; absent = searched",
        default=0.0,
        ge=0,
        le=1,
        rounding="Adam on the host's cores rounds otherwise than the fused one on the device",
        habit=TechniqueHabit(
            "optimizer on the host",
            0.10,
            "host memory and its link are shared with data loading and checkpoints, and differ from node to node",
        ),
        on_host="optimizer",
        effects=("host_optimizer",),
        source="ZeRO-Offload (Ren et al. 2021); M6-10T (Lin et al. 2021)",
        saves="the share of master weights and moments",
        costs="host memory, a slower step",
    )

    @property
    def steps_on_the_host(self) -> bool:
        """Whether CPU cores take part in the optimizer step."""
        return self.offload_optimizer > 0
