"""What of Megatron core 0.19 knows only CUDA, told about the CPU. Apply after Megatron is imported."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from typing import Any

import torch
from megatron.core.datasets import gpt_dataset, utils
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as fsdp
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.torch_norm import WrappedTorchNorm

_build_norm = WrappedTorchNorm.__new__


def _norm(cls: Any, config: Any, *args: Any, **options: Any) -> torch.nn.Module:
    """Torch's norms under sequence parallelism: like Apex's (fusions/fused_layer_norm.py), each rank norms its own part
    of the sequence, and the mark makes finalize_model_grads.py sum the gradients over the tensor ranks."""
    plain = copy.copy(config)
    plain.sequence_parallel = False
    norm: torch.nn.Module = _build_norm(cls, plain, *args, **options)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


_build_attention = DotProductAttention.__init__


def _attention(
    self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **named: Any
) -> None:
    """Latent attention names the widths of its heads (multi_latent_attention.py), which only Transformer Engine's
    attention takes; the computation itself looks at the tensors, and at this one width."""
    _build_attention(self, *args, **named)
    if v_channels is not None:
        self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels


def _on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """`maybe_move_tensor_to_cpu` leaves a tensor that is there already as it is; all-to-all wants numbers, though."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


_prepare_reduction = fsdp.gradient_reduce_preprocessing


def _scale_before_the_sum(gradients: torch.Tensor, factor: float, config: Any) -> Any:
    """Megatron-FSDP scales inside NCCL's sum; Gloo cannot."""
    plain = copy.copy(config)
    plain.gradient_reduce_div_fusion = False
    return _prepare_reduction(gradients, factor, plain)


_state_of_optimizer = DistributedOptimizer.state_dict


def _state_once_there(self: Any) -> Any:
    """Before it loads, the optimizer is asked for its states. With torch's Adam, which makes them in its first step,
    that ends at `assert len(steps) == 1`; for Megatron-FSDP Megatron itself makes them so."""
    if not self.optimizer.state:
        self._init_optimizer_states_with_dummy_values()
    return _state_of_optimizer(self)


_set_states = DistributedOptimizer._set_main_param_and_optimizer_states


def _set_states_but_the_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
    """Torch's Adam counts steps in a tensor of every parameter, which was set from the groups already."""
    _set_states(self, parameter, {"step": None, **tensors})


_load_optimizer = DistributedOptimizer.load_state_dict


def _load_with_steps_apart(self: Any, states: dict[str, Any]) -> None:
    """One tensor of the step is given to all parameters, and each would count it on (distrib_optimizer.py)."""
    _load_optimizer(self, states)
    for state in self.optimizer.state.values():
        state["step"] = state["step"].clone()


def _patch_resume() -> None:
    """Of the distributed optimizer with torch's Adam, where neither Apex nor Transformer Engine has one."""
    DistributedOptimizer.load_state_dict = _load_with_steps_apart
    DistributedOptimizer.state_dict = _state_once_there
    DistributedOptimizer._set_main_param_and_optimizer_states = _set_states_but_the_step


def _take_values(kept: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Megatron compiles this in C++ and shares the memory; a copy has the same values and needs no compiler."""
    source = recomputed.untyped_storage()
    kept.untyped_storage().resize_(source.nbytes())
    kept.untyped_storage().copy_(source)


def _patch_recompute() -> None:
    """Of a module alone: without Transformer Engine it asks whether 8 bits are on all the same (CheckpointWithoutOutput
    takes `fp8=False` for a yes)."""
    random._get_share_storage = lambda: _take_values
    random.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
    random.activation_recompute_forward = random.fp8_autocast = lambda **options: contextlib.nullcontext()


def _prepare_quickly() -> None:
    """A mock dataset of 100,000 documents shuffles millions of samples in every rank; the process through which a
    checkpoint's writers answer would import torch once more, were it no fork."""
    gpt_dataset.MockGPTLowLevelDataset.size = 1000
    queue = filesystem_async.get_write_results_queue
    filesystem_async.get_write_results_queue = functools.partial(queue, "fork")


def patch_megatron() -> None:
    utils.compile_helpers = lambda: None  # the wheel holds them compiled; only a checkout has their Makefile
    random._get_cuda_rng_state = lambda *args, **options: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **options: torch.set_rng_state(state)
    WrappedTorchNorm.__new__ = _norm
    token_dispatcher.maybe_move_tensor_to_cpu = _on_the_host
    DotProductAttention.__init__ = _attention
    _patch_recompute()
    _patch_resume()
    _prepare_quickly()
    fsdp.gradient_reduce_preprocessing = _scale_before_the_sum
