"""The techniques that a search tries on Megatron-LM: what is recomputed and offloaded, how model states are treated,
and the switches that this model, device and version of core have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from llmlaunch.frameworks.base import StateTechniques, StepTechniques
from llmlaunch.frameworks.megatron.sharding import asks_for_sharding, sharding_techniques
from llmlaunch.frameworks.megatron.techniques import DEFAULT_MODULES
from llmlaunch.layers.mlp import Mlp
from llmlaunch.layers.model import model_of
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.layout import OFFLOAD_LAYERS, RECOMPUTE_FULL, RECOMPUTE_LAYERS, RECOMPUTE_SELECTIVE
from llmlaunch.models.shape import ModelShape
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques.switches import FULL_ITERATION
from llmlaunch.timing.products import EAGER_LOSS_BYTES, NATIVE_LOSS_BYTES

Modules = tuple[str, ...]
Switches = dict[str, Any]

AMPERE, HOPPER = 8.0, 9.0
NODE_DEVICES = 8
OFFLOADED_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
CHUNKS = 4  # of an MLP that is chunked: more spare little, and every one is launched by itself
LONG = 16384  # tokens of a sequence, from which on it is worth asking how its parts are exchanged
LEAST_GAIN = 0.02
NARROW = 2048  # hidden size of a dense model up to which a host may launch kernels more slowly than a device runs them
# Linear layers in these formats hand user buffers what they can send.
FORMATS_OF_USER_BUFFERS = (None, "delayed", "tensorwise")


def step_techniques(recipe: Recipe) -> tuple[StepTechniques, ...]:
    """Return all treatments of activations, each with all sets of switches; the plainest come first. Activations that
    go to the host leave little to gain by the rarer switches, so the two are not tried together."""
    treatments = _treatments(recipe)
    on_device = [step for step in treatments if not step.offload_modules and step.solved != OFFLOAD_LAYERS]
    library = bool(flex_backends(recipe))
    return tuple(
        replace(step, **switches)
        for switches in _switch_sets(recipe)
        for step in (on_device if _is_rare(switches, library) else treatments)
    )


def _is_rare(switches: Switches, library: bool) -> bool:
    beside = "delay_weight_gradients" in switches or "overlap_shared_expert" in switches
    return beside or (library and "token_dispatcher" not in switches)


def _treatments(recipe: Recipe) -> list[StepTechniques]:
    """None, every set of modules that lets go of something, every layer, and so many layers as it takes; nothing or
    growing sets of modules offloaded beside them, or the first layers whole."""
    plain = StepTechniques()
    modules = [StepTechniques(recompute=RECOMPUTE_SELECTIVE, recompute_modules=names) for names in _module_sets(recipe)]
    block = StepTechniques(recompute=RECOMPUTE_FULL, recompute_method="block", solved=RECOMPUTE_LAYERS)
    choices = [plain, *modules, StepTechniques(recompute=RECOMPUTE_FULL), block]
    if recipe.model.moe is None:
        choices += [replace(step, mlp_chunks=CHUNKS) for step in (plain, block)]
    if recipe.cluster.accelerator.kind != "gpu":
        return choices
    offloaded = [
        _offloading(choice, names) for choice, names in product((plain, *modules), _offload_sets(recipe.model))
    ]
    layers = [StepTechniques(solved=OFFLOAD_LAYERS)] if recipe.model.mamba is None else []
    return [*choices, *(choice for choice in offloaded if choice is not None), *layers]


def _switch_sets(recipe: Recipe) -> list[Switches]:
    """Return the sets of switches worth a search, none first. On a CPU there is nothing to run beside another."""
    if recipe.cluster.accelerator.kind != "gpu":
        return [{}]
    kinds = [kind for kind in _switch_kinds(recipe) if len(kind) > 1]
    sets = [{name: value for part in chosen for name, value in part.items()} for chosen in product(*kinds)]
    return sorted(sets, key=len)


def _switch_kinds(recipe: Recipe) -> Iterator[list[Switches]]:
    """Yield what excludes one another, the neutral choice first."""
    off: Switches = {}
    if _has_user_buffers(recipe):
        yield [off, {"tp_comm_overlap": True}]
    if recipe.workload.sequence_length >= LONG:
        yield [off, {"context_comm": "a2a"}]
    if _loss_may_gain(recipe):
        yield [off, {"loss": "native"}]
    if recipe.model.moe is not None:
        yield [off, *({"token_dispatcher": "flex", "flex_backend": library} for library in flex_backends(recipe)[:1])]
        yield _overlapped(recipe.model)
    if searches_graphs(recipe):
        yield [off, *({"cuda_graphs": scopes} for scopes in _graphed(recipe))]


def _overlapped(shape: ModelShape) -> list[Switches]:
    """What the exchange of tokens may run beside; each excludes the others."""
    hidden = {"overlap_expert_communication": True}
    ways: list[Switches] = [{}, hidden, {**hidden, "delay_weight_gradients": True}]
    if shape.mamba is not None:
        ways = [{}]
    moe = shape.moe
    shared = moe is not None and moe.shared_expert_ffn_hidden_size > 0 and moe.latent_size is None
    return [*ways, {"overlap_shared_expert": True}] if shared else ways


def flex_backends(recipe: Recipe) -> list[str]:
    """Return the libraries of the job's environment that a search may send tokens with, the better first."""
    if recipe.technique_limit or "token_dispatcher" in recipe.fixed:
        return []
    return [library for library in usable_libraries(recipe) if library in recipe.backend.libraries]


def usable_libraries(recipe: Recipe) -> list[str]:
    """Return the libraries that could send tokens on these devices, were they there: in time they are alike, and
    DeepEP's buffers do not grow with a micro-batch. It knows nodes of eight and no NVLink beyond them
    (csrc/kernels/configs.cuh NUM_MAX_NVL_PEERS, 1.2.1). HybridEP's kernels copy as Hopper and later do."""
    cluster = recipe.cluster
    capability = float(cluster.accelerator.compute_capability or HOPPER)
    on_cuda = cluster.accelerator.kind == "gpu" and cluster.accelerator.platform == "cuda"
    if recipe.model.moe is None or not on_cuda or recipe.workload.precision == "fp32":
        return []
    whole_nodes = cluster.devices_per_node == cluster.nvlink_domain_devices == NODE_DEVICES
    deepep = ["deepep"] if capability >= AMPERE and whole_nodes else []
    return [*deepep, "hybridep"] if capability >= HOPPER else deepep


def searches_graphs(recipe: Recipe) -> bool:
    """Return whether a search tries CUDA graphs: where the device may wait for the host to launch kernels."""
    return recipe.model.moe is not None or recipe.model.hidden_size <= NARROW


def _graphed(recipe: Recipe) -> list[tuple[str, ...]]:
    """Return the most that graphs capture without switching off the look for losses that are no numbers, which a graph
    of the whole iteration needs."""
    from llmlaunch.frameworks.megatron.cuda_graphs import graph_scopes

    return [scopes for scopes in graph_scopes(recipe) if scopes != (FULL_ITERATION,)][-1:]


def _loss_may_gain(recipe: Recipe) -> bool:
    """Whether what a compiled loss spares of device memory's bandwidth could be LEAST_GAIN of a step, if the device did
    nothing but multiply, at its peak. Gradients of its logits are always bf16."""
    accelerator, shape = recipe.cluster.accelerator, recipe.model
    peak = accelerator.flops_per_second.get("bf16")
    if recipe.workload.precision != "bf16" or shape.moe is not None or not peak:
        return False
    spared_seconds = (EAGER_LOSS_BYTES - NATIVE_LOSS_BYTES) * shape.vocab_size / accelerator.memory_bytes_per_second
    return spared_seconds >= LEAST_GAIN * 6.0 * count_parameters(shape).total / peak


def _has_user_buffers(recipe: Recipe) -> bool:
    """Whether tensor parallelism can run beside the products. User buffers need multicast, which came with Hopper
    (transformer_engine/pytorch/module/base.py initialize_ub, 2.20), and latent attention's projections have none
    (megatron/core/extensions/transformer_engine.py TELinear, core 0.19)."""
    capability = recipe.cluster.accelerator.compute_capability
    new = recipe.cluster.accelerator.platform == "cuda" and (capability is None or float(capability) >= HOPPER)
    half = recipe.workload.precision != "fp32" and recipe.training.numbers.narrow in FORMATS_OF_USER_BUFFERS
    return new and half and recipe.model.mla is None


def _module_sets(recipe: Recipe) -> list[Modules]:
    """Sets of `--recompute-modules` of this model. Fused attention keeps no scores, so core_attn would spare nothing;
    norms fused into the linear after them likewise. moe is the whole mixture, and takes the place of its parts."""
    shape = recipe.model
    parts: list[tuple[Modules, ...]] = []
    if model_of(shape).has(Mlp):
        parts.append(((), ("mlp",)))
    if shape.mla is not None or shape.compressed_attention is not None:
        parts.append(((), ("mla_up_proj",)))
    if shape.moe is not None:
        parts.append(((), ("layernorm",)))
        experts: list[Modules] = [(), ("moe_act",)]
        if shape.moe.shared_expert_ffn_hidden_size:
            experts += [("shared_experts",), ("moe_act", "shared_experts")]
        parts.append((*experts, ("moe",)))
    sets = [tuple(name for part in chosen for name in part) for chosen in product(*parts)]
    pin = recipe.pins.get("recompute")
    if "selective" in (pin if isinstance(pin, tuple) else (pin,)):
        sets.append(DEFAULT_MODULES)
    return [names for names in sets if names]


def _offload_sets(shape: ModelShape) -> list[Modules]:
    """Growing sets of `--offload-modules`: a module moves as many bytes as it spares, so what counts is how many."""
    attention: list[Modules] = [("core_attn", "attn_proj"), ("qkv_linear", "core_attn", "attn_proj")]
    if shape.moe is None:
        return attention
    experts: list[Modules] = [("moe_act",), ("expert_fc1", "moe_act")]
    return [*experts, attention[0], *((*first, *second) for first, second in product(attention, experts[1:]))]


def _offloading(choice: StepTechniques, names: Modules) -> StepTechniques | None:
    """None where Megatron refuses the two together, or what is offloaded is made again anyway."""
    made_again = {"moe": {"moe_act", "expert_fc1"}, "moe_act": {"moe_act"}}
    if any(made_again.get(module, set()) & set(names) for module in choice.recompute_modules):
        return None
    return replace(choice, offload_modules=names)


def state_techniques(recipe: Recipe) -> tuple[StateTechniques, ...]:
    """Return the treatments of model states that the search tries: with and without the distributed optimizer, with its
    states on the host in shares, or Megatron-FSDP; in bf16 gradients may accumulate in either format."""
    free = "gradient_dtype" not in recipe.fixed and recipe.workload.precision == "bf16"
    formats = ("fp32", "bf16") if free else (recipe.training.gradient_dtype,)
    if asks_for_sharding(recipe):
        return sharding_techniques(formats)
    on_host = recipe.cluster.accelerator.kind == "gpu" and not recipe.training.muon
    offloads = OFFLOADED_SHARES if on_host else (0.0,)
    stages = [(0, 0.0), *((1, offload) for offload in offloads)]
    return tuple(
        StateTechniques(zero_stage=stage, gradient_dtype=dtype, offload_optimizer=offload)
        for dtype in formats
        for stage, offload in stages
    )
