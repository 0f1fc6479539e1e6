"""What Megatron-Bridge makes of Megatron core's model before a training, and how it calls it (0.6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

import bridge_packages

Build = Callable[..., Any]
ROWS, LONGEST = 16, 2048  # which no allocation depends on: attention within rows keeps as much as over all of them


def with_adapters(build: Build, settings: Mapping[str, Any]) -> Build:
    """Return `build` with Bridge's own LoRA around what it makes, as a training's pre-wrap hook has it before DDP.

    Raises:
        ModuleNotFoundError: this environment has no Megatron-Bridge.
    """
    bridge_packages.install()
    from megatron.bridge.peft.lora import LoRA

    adapters = LoRA(**settings)
    return lambda *sizes, **options: adapters(build(*sizes, **options))


def with_packed_rows(build: Build) -> Build:
    """Return `build` with each model called as training/gpt_step.py does where a sequence holds several rows."""
    return lambda *sizes, **options: _of_packed_rows(build(*sizes, **options))


def _of_packed_rows(model: Any) -> Any:
    own = model.forward

    def forward(*tensors: Any, **options: Any) -> Any:
        ends = torch.zeros(ROWS + 1, dtype=torch.int32, device="cuda")
        lengths = {"max_seqlen_q": LONGEST, "max_seqlen_kv": LONGEST}
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, **lengths)
        return own(*tensors, **options, packed_seq_params=packed)

    model.forward = forward
    return model
