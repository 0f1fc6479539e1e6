"""Number formats on Megatron-LM and Transformer Engine: what a device and a layout allow, arguments, and the record."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmlaunch.columns import BoolColumn
from llmlaunch.frameworks.base import Requirement, implies
from llmlaunch.layers.matrix import INPUTS, OUTPUTS
from llmlaunch.layers.model import model_of
from llmlaunch.layout import RECOMPUTE_SELECTIVE, Rule, Situation
from llmlaunch.models.shape import ModelShape
from llmlaunch.recipe.types import Recipe

ARGUMENTS = "megatron/training/arguments.py validate_args, core 0.19"
CONFIG = "megatron/core/transformer/transformer_config.py, core 0.19"
OPTIMIZER = "megatron/core/optimizer/optimizer_config.py, core 0.19"
SUPPORT = "transformer_engine/pytorch/quantization.py, 2.20"

# From and below which CUDA compute capability Transformer Engine multiplies so (quantization.py _compute_*_support).
CAPABILITIES = {
    "delayed": (8.9, 100.0),
    "tensorwise": (8.9, 100.0),
    "blockwise": (9.0, 100.0),
    "mxfp8": (10.0, 12.0),
    "nvfp4": (10.0, 100.0),
}
# Of what the rows of a narrow product and the sizes of its matrices must be multiples: (rows, sizes).
MULTIPLES = {"delayed": (8, 16), "tensorwise": (8, 16), "blockwise": (8, 16), "mxfp8": (32, 32), "nvfp4": (16, 16)}
NOT_WITH_DELAYED = frozenset({"layernorm", "moe_act"})


def cannot_multiply(recipe: Recipe) -> bool:
    """The device is known, and it has no such products."""
    name, device = recipe.training.numbers.narrow, recipe.cluster.accelerator
    if name is None:
        return False
    if device.kind != "gpu":
        return True
    if device.platform == "rocm":  # products of blocks of 32 came with CDNA 4, those of nvfp4 are NVIDIA's
        return name == "nvfp4" or (name == "mxfp8" and "fp4" not in device.flops_per_second)
    if device.compute_capability is None:
        return False
    least, below = CAPABILITIES[name]
    return not least <= float(device.compute_capability) < below


def narrow(recipe: Recipe, *names: str) -> bool:
    return recipe.training.numbers.narrow in names


def kept_remainders(recipe: Recipe) -> bool:
    """fp32 main parameters as the optimizer keeps them: the 16 low bits beside the bf16 parameter."""
    numbers = recipe.training.numbers
    return numbers.optimizer is not None and numbers.optimizer.main_parameters == "fp32"


NUMBER_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "fp8-device",
        "training.fp8",
        "delayed and tensorwise need compute capability 8.9 (Ada, Hopper), blockwise 9.0 (Hopper), mxfp8 10.0 to 11.x "
        "(Blackwell of data centres); choose another format or another accelerator, or remove it",
        SUPPORT,
        lambda r: not narrow(r, "nvfp4") and cannot_multiply(r),
    ),
    Requirement(
        "fp4-device",
        "training.fp4",
        "nvfp4 needs compute capability 10.0 (Blackwell); choose another accelerator, or remove it",
        SUPPORT,
        lambda r: narrow(r, "nvfp4") and cannot_multiply(r),
    ),
    Requirement(
        "main-parameters-of-megatron",
        "training.optimizer.main_parameters",
        "--main-params-dtype is fp32 or fp16; write one of these (backend: deepspeed has bf16)",
        "megatron/training/arguments.py _add_experimental_args, core 0.19",
        lambda r: r.training.numbers.optimizer is not None and r.training.numbers.optimizer.main_parameters == "bf16",
    ),
    Requirement(
        "fp8-parameters-and-remainders",
        "training.optimizer.main_parameters",
        "fp32 is kept as the 16 low bits of bf16 parameters, and with fp8_parameters there are none; write "
        "main_parameters: fp16, or remove fp8_parameters",
        "transformer_engine/pytorch/optimizers/fused_adam.py initialize_state, 2.20",
        lambda r: narrow(r, "delayed") and r.training.numbers.narrow_parameters and kept_remainders(r),
    ),
)


def offload_needs_delayed(s: Situation) -> BoolColumn:
    narrow_parameters = s.numbers.narrow_parameters and s.numbers.narrow != "delayed"
    return np.full(len(s.layouts), not (narrow_parameters and s.techniques.offload_optimizer > 0))


def delayed_keeps_norms(s: Situation) -> BoolColumn:
    forbidden = s.numbers.narrow == "delayed" and bool(NOT_WITH_DELAYED & set(s.techniques.recompute_modules))
    return implies(forbidden, np.not_equal(s.layouts.recompute, RECOMPUTE_SELECTIVE))


def narrow_sizes(s: Situation) -> BoolColumn:
    """Every matrix of the blocks, divided as the layout divides it, has sizes the products take."""
    if s.numbers.narrow is None:
        return np.ones(len(s.layouts), dtype=np.bool_)
    multiple, fits = MULTIPLES[s.numbers.narrow][1], np.ones(len(s.layouts), dtype=np.bool_)
    for size, split in _sizes(s.shape):
        fits &= _multiple(size, 1 if split is None else getattr(s.layouts, split), multiple)
    return fits


def _sizes(shape: ModelShape) -> set[tuple[int, str | None]]:
    """Return the sizes of the matrices that narrower formats take, each with the size of a layout that divides it."""
    sizes: set[tuple[int, str | None]] = set()
    for block in model_of(shape).blocks:
        for matrix in block.matrices:
            if matrix.narrow:
                split = "expert_tensor" if matrix.of_experts else "tensor"
                sizes.add((int(matrix.inputs), split if matrix.divided == INPUTS else None))
                sizes.add((int(matrix.outputs), split if matrix.divided == OUTPUTS else None))
    return sizes


def _multiple(size: int, split: NDArray[np.int64] | int, multiple: int) -> BoolColumn:
    column: BoolColumn = np.equal(size % (np.asarray(split) * multiple), 0)
    return column


def narrow_rows(s: Situation) -> BoolColumn:
    if s.numbers.narrow is None:
        return np.ones(len(s.layouts), dtype=np.bool_)
    rows = s.workload.sequence_length * s.layouts.micro_batch_size // s.layouts.context
    column: BoolColumn = np.equal(rows % MULTIPLES[s.numbers.narrow][0], 0)
    return column


NUMBER_RULES: tuple[Rule, ...] = (
    Rule(
        "fp8-parameters-distributed",
        "fp8_parameters needs zero_stage 1 or more: --fp8-param-gather needs --use-distributed-optimizer",
        ARGUMENTS,
        lambda s: implies(s.numbers.narrow_parameters, s.layouts.zero_stage > 0),
        of_techniques=True,
    ),
    Rule(
        "optimizer-formats-distributed",
        "optimizer needs zero_stage 1: --use-precision-aware-optimizer needs --use-distributed-optimizer, and "
        "Megatron-FSDP has main parameters of its own",
        OPTIMIZER,
        lambda s: implies(s.numbers.optimizer is not None, np.equal(s.layouts.zero_stage, 1)),
        of_techniques=True,
    ),
    Rule(
        "optimizer-formats-on-device",
        "optimizer needs offload_optimizer: 0: on the host the states are fp32, whatever their formats",
        "megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, core 0.19",
        lambda s: np.full(len(s.layouts), s.numbers.optimizer is None or s.techniques.offload_optimizer == 0),
        of_techniques=True,
    ),
    Rule(
        "fp8-parameters-on-device",
        "fp8_parameters with offload_optimizer needs fp8: delayed",
        ARGUMENTS,
        offload_needs_delayed,
        of_techniques=True,
    ),
    Rule(
        "delayed-keeps-norms",
        "fp8: delayed cannot recompute layernorm or moe_act: their second pass would move the scales",
        CONFIG,
        delayed_keeps_norms,
        of_techniques=True,
    ),
    Rule(
        "narrow-sizes",
        "fp8 and fp4 need matrices whose sizes on every rank are multiples of 16, mxfp8 of 32",
        "transformer_engine/pytorch/utils.py assert_dim_for_fp8_exec, 2.20; megatron/core/fp8_utils.py "
        "get_fp8_align_size, core 0.19",
        narrow_sizes,
    ),
    Rule(
        "narrow-rows",
        "fp8 and fp4 need micro-batches of a multiple of 8 tokens on every rank, nvfp4 of 16, mxfp8 of 32",
        "transformer_engine/pytorch/utils.py assert_dim_for_fp8_exec, 2.20; transformer_engine/pytorch/tensor "
        "is_quantizable, 2.20",
        narrow_rows,
    ),
)
