"""Logs as trainers print them, for tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

LOGS = Path(__file__).resolve().parents[1] / "data" / "logs"

# Llama 3 8B on one node of eight H100, as pretrain_gpt.py prints its arguments
LLAMA = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "kv_channels": 128,
    "seq_length": 8192,
    "max_position_embeddings": 8192,
    "vocab_size": 128256,
    "padded_vocab_size": 128256,
    "make_vocab_size_divisible_by": 128,
    "tokenizer_type": "NullTokenizer",
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rotary_base": 500000,
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "bf16": True,
    "params_dtype": "torch.bfloat16",
    "accumulate_allreduce_grads_in_fp32": True,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 1,
    "sequence_parallel": True,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "micro_batch_size": 1,
    "global_batch_size": 64,
    "train_iters": 1000,
    "lr": 3e-4,
    "mock_data": True,
    "world_size": 8,
}


def megatron_arguments(values: Mapping[str, Any]) -> list[str]:
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(values.items())]
    return [
        "------------------------ arguments ------------------------",
        *lines,
        "-------------------- end of arguments ---------------------",
    ]


def megatron_memory(rank: int, allocated_mib: float, reserved_mib: float, iterations: int = 2) -> str:
    return (
        f"[Rank {rank}] (after {iterations} iterations) memory (MB) | allocated: 10.00 | "
        f"max allocated: {allocated_mib:.2f} | reserved: {reserved_mib:.2f} | max reserved: {reserved_mib:.2f}"
    )


def megatron_step(step: int, milliseconds: float, steps: int = 1000) -> str:
    return (
        f" [2026-02-03 04:05:06.000007] iteration {step:8d}/{steps:8d} | consumed samples: {64 * step:12d} |"
        f" elapsed time per iteration (ms): {milliseconds:.1f} | throughput per GPU (TFLOP/s/GPU): 400.5 |"
        " learning rate: 1.000000E-04 | global batch size:    64 | lm loss: 1.100000E+01 | loss scale: 1.0 |"
        " grad norm: 1.000 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.10 GiB of"
    " which 1.50 GiB is free. Including non-PyTorch memory, this process has 77.60 GiB memory in use. Of the allocated"
    " memory 70.00 GiB is allocated by PyTorch, and 5.00 GiB is reserved by PyTorch but unallocated."
)


def megatron_log(values: Mapping[str, Any] = LLAMA, memory: Iterable[str] = (), milliseconds: float = 2500.0) -> str:
    """Return a log with six steps, the first of them slow."""
    steps = [megatron_step(1, 20 * milliseconds), *(megatron_step(n, milliseconds + n) for n in range(2, 7))]
    return "\n".join([*megatron_arguments(values), *steps[:2], *memory, *steps[2:]]) + "\n"
