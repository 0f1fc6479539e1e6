"""A stand-in for TransformerEngine's compiled extension: output shapes only, under TransformerEngine's own Python.

Each function allocates what the C++ of the same name allocates and hands back (TransformerEngine 2.20,
`transformer_engine/pytorch/csrc/extensions/*.cpp`); workspaces inside a kernel call are left out. A function that is
not written here raises when it is called.
"""

from __future__ import annotations

import enum
import importlib.machinery
import os
import sys
import types
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from trace_checks import NotTraceable

DTYPES = {
    "kByte": (0, torch.uint8),
    "kInt32": (2, torch.int32),
    "kFloat32": (4, torch.float32),
    "kFloat16": (5, torch.float16),
    "kBFloat16": (6, torch.bfloat16),
    "kFloat8E4M3": (7, torch.float8_e4m3fn),
    "kFloat8E5M2": (8, torch.float8_e5m2),
    "kFloat4E2M1": (10, torch.uint8),
}
TORCH_DTYPE = dict(DTYPES.values())
CUBLAS_VERSION = 120900
CUDNN_VERSION = 91300


def gemm_shape(a: Tensor, transa: bool, b: Tensor, transb: bool) -> tuple[int, ...]:
    """gemm.cpp getGemmOutputShape: column-major D = op(A) op(B)."""
    rows = (b.shape[-1],) if transb else tuple(b.shape[:-1])
    return (*rows, a.numel() // a.shape[-1] if transa else a.shape[-1])


def generic_gemm(
    a: Tensor,
    transa: bool,
    b: Tensor,
    transb: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_input: Tensor | None,
    grad: bool,
    *rest: Any,
    **options: Any,
) -> tuple[Any, ...]:
    if quantizer is not None:
        raise NotTraceable("a quantized GEMM output is not modelled")
    dtype = a.dtype if out_dtype is None else TORCH_DTYPE[int(out_dtype)]
    if out is None:
        out = torch.empty(gemm_shape(a, transa, b, transb), dtype=dtype, device=a.device)
    bias_grad = torch.empty(b.shape[-1], dtype=out.dtype, device=b.device) if grad and bias is not None else None
    before_gelu = torch.empty_like(out) if gelu and not grad else gelu_input
    return out, bias_grad, before_gelu, options.get("extra_output")


def te_general_grouped_gemm(
    a: list[Tensor],
    transa: bool,
    b: list[Tensor],
    transb: bool,
    out: list[Tensor] | None,
    out_dtype: Any,
    splits: Any,
    bias: list[Tensor],
    *rest: Any,
) -> Any:
    if out is None:
        raise NotTraceable("a grouped GEMM that allocates its own output is not modelled")
    return bias


def _row_statistics(x: Tensor) -> Tensor:
    return torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)


def rmsnorm_fwd(x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, *rest: Any) -> tuple[Any, ...]:
    return torch.empty_like(x) if out is None else out, None, _row_statistics(x)


def rmsnorm_bwd(dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, *rest: Any) -> tuple[Any, ...]:
    return torch.empty_like(x), torch.empty_like(gamma)


def rmsnorm_bwd_add(dz: Tensor, x: Tensor, add: Tensor, rsigma: Tensor, gamma: Tensor, *rest: Any) -> tuple[Any, ...]:
    return torch.empty_like(x), torch.empty_like(gamma)


def layernorm_fwd(x: Tensor, weight: Tensor, bias: Any, eps: float, out: Any, *rest: Any) -> tuple[Any, ...]:
    return torch.empty_like(x) if out is None else out, _row_statistics(x), _row_statistics(x)


def layernorm_bwd(dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, *rest: Any) -> tuple[Any, ...]:
    return torch.empty_like(x), torch.empty_like(gamma), torch.empty_like(gamma)


ATTENTION_FORWARD_Q = 16  # positions of q, k, v in the argument lists of cpp_extensions/fused_attn.py
ATTENTION_BACKWARD_Q = 19
SOFTMAX_OFFSET = 27  # of the forward pass, and what it saved in the backward pass: statistics, dropout's seed, offsets
SAVED = 25


def fused_attn_fwd(*args: Any) -> list[Tensor]:
    q, _, v = args[ATTENTION_FORWARD_Q : ATTENTION_FORWARD_Q + 3]
    *tokens, heads, _ = q.shape  # sbhd, what Megatron feeds, or thd of packed sequences
    out = torch.empty(*tokens, heads, v.shape[-1], dtype=q.dtype, device=q.device)
    statistics = torch.empty(*reversed(tokens[1:]), heads, tokens[0], 1, dtype=torch.float32, device=q.device)
    offsets = args[SOFTMAX_OFFSET]
    saved = [] if offsets is None else [offsets]
    return [out, statistics, torch.empty(2, dtype=torch.int64, device=q.device), *saved]


def fused_attn_bwd(*args: Any) -> list[Tensor | None]:
    q, k, v = args[ATTENTION_BACKWARD_Q : ATTENTION_BACKWARD_Q + 3]
    _, _, *offsets = args[SAVED]
    return [*(torch.empty_like(t) for t in (q, k, v)), None, torch.empty_like(offsets[0]) if offsets else None]


def fused_rope_forward(x: Tensor, *rest: Any, **options: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def multi_tensor_l2norm(chunk: int, flag: Tensor, lists: list[list[Tensor]], *rest: Any) -> tuple[Tensor, Tensor]:
    device = lists[0][0].device
    return torch.empty(1, device=device), torch.empty(0, device=device)


def nothing(*args: Any, **options: Any) -> None:
    """A kernel that writes into tensors it is given."""


def _half(x: Tensor) -> Tensor:
    return torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)


ADAM_VARIANTS = ("param_remainder", "fp8", "capturable", "capturable_master")
FUNCTIONS = {
    **{
        function.__name__: function
        for function in (
            *(generic_gemm, te_general_grouped_gemm, fused_attn_fwd, fused_attn_bwd, fused_rope_forward),
            *(rmsnorm_fwd, rmsnorm_bwd, rmsnorm_bwd_add, layernorm_fwd, layernorm_bwd, multi_tensor_l2norm),
        )
    },
    "fused_rope_backward": fused_rope_forward,
    "swiglu": lambda x, quantizer: _half(x),
    "dswiglu": lambda grad, x, quantizer: torch.empty_like(x),
    **dict.fromkeys(("multi_tensor_scale", "multi_tensor_scale_tensor", "multi_tensor_adam"), nothing),
    **dict.fromkeys((f"multi_tensor_adam_{how}" for how in ADAM_VARIANTS), nothing),
    "get_cublasLt_version": lambda: CUBLAS_VERSION,
    "get_cudnn_version": lambda: CUDNN_VERSION,
    "get_num_cublas_streams": lambda: 4,
    "get_stream_priority_range": lambda *_: (0, -5),
    "device_supports_multicast": lambda *_: True,
    "ubuf_built_with_mpi": lambda: False,
}


class _Names(type):
    """An enumeration of the extension whose values nobody computes with: any name is a distinct integer.

    Calling it means a function that this stand-in lacks.
    """

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        number = 1 + len([name for name in vars(cls) if not name.startswith("_")])
        enumeration: Any = enum.IntEnum
        value = enumeration(cls.__name__, {name: number})[name]
        setattr(cls, name, value)
        return value

    def __call__(cls, *args: Any, **options: Any) -> Any:
        raise NotTraceable(f"transformer_engine_torch.{cls.__name__} is not modelled")


def _extension() -> types.ModuleType:
    module = types.ModuleType("transformer_engine_torch")
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    module.__dict__.update(FUNCTIONS)
    Backend = enum.IntEnum("Backend", {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2})
    module.__dict__["DType"] = enum.IntEnum("DType", {name: value for name, (value, _) in DTYPES.items()})
    module.__dict__["NVTE_Fused_Attn_Backend"] = Backend
    module.__dict__["get_fused_attn_backend"] = lambda *_: (Backend.NVTE_F16_arbitrary_seqlen, "")

    def unknown(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        names = _Names(name, (), {})
        setattr(module, name, names)
        return names

    module.__dict__["__getattr__"] = unknown
    return module


def install() -> None:
    """Make `import transformer_engine.pytorch` work without its compiled parts."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # transformer_engine/common/__init__.py: load no shared library
    # Imported only to export models, which nothing here does; it needs ONNX.
    sys.modules["transformer_engine.pytorch.onnx_extensions"] = MagicMock()
    sys.modules["transformer_engine_torch"] = _extension()
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = nothing
    import transformer_engine.pytorch
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention as attention

    choose = attention.dpa_utils.get_attention_backend

    def choose_for_plain_tensors(parameters: Any) -> Any:
        parameters.qkv_type = Tensor  # a fake tensor stands for a plain one
        return choose(parameters)

    attention.dpa_utils.get_attention_backend = choose_for_plain_tensors
