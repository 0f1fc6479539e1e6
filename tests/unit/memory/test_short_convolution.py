"""Gated short convolutions among layers of attention (LFM2), against sums done by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from layer_tensors import layer_tensors
from shapes import job_of

from llmlaunch.frameworks.deepspeed.facts import DeepSpeedOptions, deepspeed_facts
from llmlaunch.layers.block import Behind
from llmlaunch.layers.columns import LayerColumns
from llmlaunch.layers.modules import Module, ModuleSplit, ModuleStyle
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.layers.short_convolution import ShortConvolution
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.job import Job, RankColumns, all_ranks
from llmlaunch.models.shape import ModelShape, ShortConvolutionShape
from llmlaunch.techniques import NO_TECHNIQUES
from llmlaunch.timing.arithmetic import token_flops

N, H, FFN = 1024, 2048, 8192
CONVOLUTIONS = ShortConvolutionShape((2, 5, 8, 10, 12, 14), kernel=3)
LFM2 = ModelShape(
    *("lfm2", 16, H, FFN, 32, 8, 64, 65536, 128000), tied_embeddings=True, qk_layernorm=True,
    short_convolution=CONVOLUTIONS,
)  # fmt: skip
FACTS = deepspeed_facts(DeepSpeedOptions(precision="bf16"))
ALONE = Layout(data=2)
BIASED = replace(LFM2, short_convolution=replace(CONVOLUTIONS, kernel=4, bias=True))


def value(function: Any, shape: ModelShape = LFM2, layout: Layout = ALONE, **techniques: Any) -> Any:
    job = job_of(shape, layout, FACTS, replace(NO_TECHNIQUES, **techniques), length=N)
    return function(job, all_ranks(job, LayoutColumns.of([layout])))


def tensors(shape: ModelShape = LFM2, layout: Layout = ALONE, **techniques: Any) -> dict[str, float]:
    def of_job(job: Job, rows: RankColumns) -> dict[str, float]:
        kept = layer_tensors(job, rows, block=ShortConvolution)
        return {name: float(column[0]) for name, column in kept.items() if name.startswith("convolution_")}

    counted: dict[str, float] = value(of_job, shape, layout, **techniques)
    return counted


def test_parameters_of_the_published_model() -> None:
    """LFM2-1.2B has 1,170,340,608 parameters."""
    convolution, attention = 4 * H * H + 3 * H, 2 * H * H + 2 * H * 512 + 2 * 64
    layers = 10 * convolution + 6 * attention + 16 * (3 * H * FFN + 2 * H)
    assert count_parameters(LFM2).total == 65536 * H + layers + H == 1_170_340_608


def test_biases_are_those_of_both_projections_and_of_the_convolution() -> None:
    assert ShortConvolution(H, 4, bias=True).total_parameters == 4 * H * H + 4 * H + (3 + 1 + 1) * H


def test_a_layer_keeps_six_tensors_as_wide_as_the_stream() -> None:
    """Two gates and what is convolved, their product, the padded convolution of that, and the gated result, in 16 bits;
    an unfused norm's input with its copy in fp32 and what it puts out."""
    assert tensors() == {
        "convolution_norm_input": N * (H * (2 + 4) + 4),
        "convolution_norm_output": N * H * 2,
        "convolution_projection": N * H * 3 * 2,
        "convolution_input": N * H * 2,
        "convolution_output": (N + 2) * H * 2,
        "convolution_proj_input": N * H * 2,
    }
    assert tensors(BIASED)["convolution_output"] == (N + 3) * H * 2


def test_each_sequence_of_a_micro_batch_is_padded() -> None:
    kept = tensors(layout=Layout(data=2, micro_batch_size=4))
    assert kept["convolution_output"] == 4 * (N + 2) * H * 2


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_gated_output_has_three_gradients(tensor: int) -> None:
    """Its own and those of both factors, in 16 bits, while the input of the projection behind it is gone; where that is
    not kept, nothing is."""
    layouts = LayoutColumns.of([Layout(tensor=tensor)])
    c, block = LayerColumns(FACTS, NO_TECHNIQUES, N, layouts), ShortConvolution(H, 3)
    kept, nothing = block.saved(c), Behind(lambda: np.zeros(1))
    assert block.backward(c, kept, nothing) == 2 * 2 * N * H / tensor
    del kept["convolution_proj_input"]
    assert block.backward(c, kept, nothing) == 3 * 2 * N * H / tensor
    later = Behind(lambda: np.full(1, 7.0), last_layer=5.0)
    assert block.backward(c, kept, later) == 3 * 2 * N * H / tensor - 12


def test_the_module_of_the_block_has_the_convolution_among_its_own_parameters() -> None:
    """transformers/models/lfm2/modeling_lfm2.py Lfm2ShortConv.forward, 5.23, runs two linear layers and reads the
    weights of a third module."""
    block = ShortConvolution(H, 3, bias=True)
    assert block.modules(ModuleStyle()) == [
        Module((3 * H, H), inside=2),
        Module((H * 3 * H, 3 * H)),
        Module((H * H, H)),
    ]
    halves = block.modules(ModuleStyle(ModuleSplit(tensor=2)))
    assert [module.parameters for module in halves] == [
        (3 * H // 2, H // 2),
        (H * 3 * H // 2, 3 * H // 2),
        (H // 2 * H, H),
    ]


@pytest.mark.parametrize("tensor", [1, 2])
def test_gates_and_convolution_move_memory_and_multiply_little(tensor: int) -> None:
    """Forward a product of two tensors, a convolution of one, and a product: 3 + 2 + 3. Backward twice two products,
    the padding of one tensor, the convolution of a gradient beside its input, three tensors put together, and turned:
    12 + 2 + 3 + 6 + 6."""
    c = LayerColumns(FACTS, NO_TECHNIQUES, N, LayoutColumns.of([Layout(tensor=tensor)]))
    block = ShortConvolution(H, 3)
    forward, backward = block.memory_work(c)
    assert forward.rows * forward.bytes == N * H * 2 * 8 / tensor
    assert backward.rows * backward.bytes == N * H * 2 * 29 / tensor
    assert block.sequence_work(c) is None
    assert block.recurrent_flops == 3 * 2 * H
    assert block.token_elements == 4 * H * H


def test_flops_of_a_model_are_those_of_its_layers_of_each_kind() -> None:
    """Six operations for each weight of linear layers and head that a token meets (Kaplan et al. 2020), the
    convolutions, and half of the square of scores in layers of attention."""
    convolved = 4 * H * H + 3 * H
    attended = 2 * H * H + 2 * H * 512 + N / 2 * 2 * H
    expected = 6.0 * (10 * convolved + 6 * attended + 16 * 3 * H * FFN + 65536 * H)
    assert token_flops(LFM2, N).total == pytest.approx(expected, rel=1e-12)
