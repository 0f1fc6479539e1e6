"""Mamba-2 mixers of Transformers, whose kernel has the last projection inside it, and blocks side by side in one
branch, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from shapes import LLAMA3_8B

from llmlaunch.facts import MemoryFacts
from llmlaunch.frameworks.deepspeed.facts import DeepSpeedOptions, deepspeed_facts
from llmlaunch.frameworks.megatron.facts import megatron_facts
from llmlaunch.layers.attention import Attention
from llmlaunch.layers.block import Behind, Block
from llmlaunch.layers.columns import LayerColumns
from llmlaunch.layers.layer import Branch, Layer
from llmlaunch.layers.mamba import Mamba2
from llmlaunch.layers.mlp import Mlp
from llmlaunch.layers.model import Model, model_of
from llmlaunch.layers.modules import Module, ModuleStyle
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.job import Job
from llmlaunch.memory.layer_bytes import job_columns
from llmlaunch.memory.priced_layers import PricedLayers
from llmlaunch.models.sections import Mamba
from llmlaunch.models.shape import Multipliers
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.workload import Workload

N, H, HEADS, HEAD, STATE, GROUPS = 1024, 512, 8, 64, 32, 2
INNER, CONVOLVED = HEADS * HEAD, HEADS * HEAD + 2 * GROUPS * STATE
PROJECTED = INNER + CONVOLVED + HEADS
NORMED = Mamba2(H, HEADS, HEAD, STATE, GROUPS, chunk=64)
PLAIN = replace(NORMED, gated_norm=False)
EAGER = deepspeed_facts(DeepSpeedOptions(precision="bf16"))
NOTHING = Behind(lambda: np.zeros(1))
# two fp32 states between chunks, and both once more in 16 bits; products of a group; steps and decays, and a copy
SCAN = 12 * INNER * STATE / 64 + 4 * GROUPS * 64 + (8 + 2) * HEADS


def columns(facts: MemoryFacts = EAGER, tokens: int = N, techniques: Techniques = NO_TECHNIQUES) -> LayerColumns:
    return LayerColumns(facts, techniques, tokens, LayoutColumns.of([Layout()]))


def sizes(block: Mamba2, facts: MemoryFacts = EAGER) -> dict[str, float]:
    return {name: float(tensor.bytes[0]) for name, tensor in block.saved(columns(facts)).items()}


def backward(
    block: Mamba2, tokens: int = N, facts: MemoryFacts = EAGER, techniques: Techniques = NO_TECHNIQUES
) -> float:
    c = columns(facts, tokens, techniques)
    return float(np.ravel(block.backward(c, block.saved(c), NOTHING))[0])


def test_one_kernel_keeps_what_goes_in_and_what_the_scan_puts_out() -> None:
    """Statistics of a norm behind the gate are those of each group."""
    kept = {"mamba_columns": N * 2 * PROJECTED, "mamba_scan": N * 2 * INNER}
    assert sizes(PLAIN) == kept
    assert sizes(NORMED) == kept | {"mamba_statistics": N * 4 * GROUPS}


def test_a_mixer_without_a_norm_keeps_the_gated_output_for_its_projection_alone() -> None:
    facts = megatron_facts()
    kept = {"mamba_columns": N * 2 * PROJECTED, "mamba_scan": N * 2 * INNER, "mamba_proj_input": N * 2 * INNER}
    assert sizes(PLAIN, facts) == kept
    assert sizes(NORMED, facts) == kept | {"mamba_scan": N * 4 * INNER, "mamba_statistics": N * 4 * GROUPS}
    gone = backward(NORMED, facts=facts) - backward(PLAIN, facts=facts)
    assert gone == -N * (2 * INNER + 4 * GROUPS)


@pytest.mark.parametrize("block", [NORMED, PLAIN])
def test_one_kernel_makes_the_input_of_the_last_projection_again(block: Mamba2) -> None:
    """Beside convolved columns, gradients of these and of all columns, and gradients before and behind the gate."""
    alive = 2 * (2 * CONVOLVED + PROJECTED + 3 * INNER)
    assert backward(block) == N * (alive + SCAN)
    apart = replace(block, scaled_output=True)
    assert backward(apart) == N * (alive + SCAN + 2 * H)
    c = columns()
    freed = Behind(lambda: np.full(1, 7.0), last_layer=5.0)
    assert block.backward(c, block.saved(c), freed) == N * (alive + SCAN) - 12


def test_parameters_follow_kernel_biases_and_norm() -> None:
    assert PLAIN.total_parameters == H * (PROJECTED + INNER) + 5 * CONVOLVED + 3 * HEADS
    assert NORMED.total_parameters == PLAIN.total_parameters + INNER
    assert replace(PLAIN, kernel=3, kernel_bias=False).total_parameters == PLAIN.total_parameters - 2 * CONVOLVED


def test_the_module_of_a_mixer_hands_all_weights_but_the_first_to_the_kernel() -> None:
    own = (4 * CONVOLVED, CONVOLVED, HEADS, HEADS, HEADS, INNER, INNER * H)
    assert NORMED.modules(ModuleStyle()) == [Module(own, inside=1), Module((H * PROJECTED,))]


def test_a_shape_says_how_its_mixers_are_made() -> None:
    mamba = Mamba("MM", 8, 64, 32, 2, convolution_kernel=3, convolution_bias=False, chunk=64, gated_norm=False)
    constants = Multipliers(mamba_input=1.25, mamba_parts=(1.0, 1.0, 1.0, 1.0, 1.0), mamba_output=0.5)
    (mixer,) = model_of(replace(LLAMA3_8B, num_layers=2, mamba=mamba, multipliers=constants)).blocks
    made = Mamba2(4096, 8, 64, 32, 2, kernel=3, kernel_bias=False, chunk=64, gated_norm=False)
    assert mixer == replace(made, scaled=(4096, PROJECTED, 4096), scaled_input=True, scaled_output=True)
    (alone,) = model_of(replace(LLAMA3_8B, num_layers=2, mamba=Mamba("MM", 8, 64, 32, 2))).blocks
    assert alone == Mamba2(4096, 8, 64, 32, 2)


def test_operations_follow_chunk_and_kernel() -> None:
    forward, _ = PLAIN.sequence_work(columns())
    products = 2 * 64 * GROUPS * STATE + 64 * INNER + 4 * INNER * STATE + 2 * 4 * CONVOLVED
    assert forward.recurrence == products
    through = 4 * CONVOLVED + 6 * INNER + 6 * INNER * STATE / 64 + 4 * GROUPS * 64
    assert forward.bytes == 2 * through
    assert NORMED.sequence_work(columns())[0].bytes == 2 * (through + 2 * INNER)
    assert PLAIN.recurrent_flops == 7 * INNER * STATE + 2 * 4 * CONVOLVED


def layers(blocks: tuple[Block, ...]) -> PricedLayers:
    """A layer with these side by side behind its first norm, and an MLP behind its second."""
    branches = (Branch(H, blocks, float(H)), Branch(H, (Mlp(H, 1280),), float(H)))
    model = Model((Layer(branches),), (0,))
    job = Job(LLAMA3_8B, Workload(N, 1, "bf16"), EAGER)
    return PricedLayers(model, ((0,),), job_columns(job, LayoutColumns.of([Layout()])), None, Branch.saved)


ATTENTION = Attention(H, 8, 2, 64)


@pytest.mark.parametrize(("own_inputs", "inputs"), [(0, 1), (1, 2), (2, 2)])
def test_blocks_side_by_side_keep_the_output_of_one_norm_and_their_own_inputs(own_inputs: int, inputs: int) -> None:
    """A block that multiplies the norm's output by a constant keeps the product, and the output is kept for others."""
    blocks = (replace(PLAIN, scaled_input=own_inputs > 0), replace(ATTENTION, scaled_input=own_inputs > 1))
    (tensors,) = layers(blocks).tensors
    first = {name: float(tensor.bytes[0]) for name, tensor in tensors.items() if not name.startswith("mlp_")}
    of_attention = N * 2 * (8 + 2 * 2) * 64, N * (2 * 512 + 4 * 8)
    assert first == {
        "mamba_norm_input": N * (H * (2 + 4) + 4),
        "mamba_norm_output": inputs * N * H * 2,
        **sizes(PLAIN),
        "attn_qkv": of_attention[0],
        "attn_output": of_attention[1],
        "attn_uncopied_values": float(tensors["attn_uncopied_values"].bytes[0]),
    }
    (total,) = layers(blocks).totals
    mlp = N * (H * (2 + 4) + 4) + N * H * 2 + 4 * N * 2 * 1280
    assert total == sum(first.values()) - first["attn_uncopied_values"] + mlp


@pytest.mark.parametrize("own_input", [False, True])
def test_the_first_of_two_blocks_runs_backward_when_the_second_has_let_go(own_input: bool) -> None:
    """The gradient of the norm's output waits for the mixer's; what attention kept is free, as what the MLP kept."""
    second = replace(ATTENTION, scaled_input=own_input)
    both = layers((PLAIN, second))
    c, own, branches = both.columns, both.tensors[0], both.model.kinds[0].branches
    mlp = N * (H * (2 + 4) + 4) + N * H * 2 + 4 * N * 2 * 1280
    kept = N * (2 * (8 + 2 * 2) * 64 + 2 * 512 + 4 * 8) + own_input * N * H * 2
    waiting = N * H * 2
    steps = [
        float(np.ravel(block.backward(c, own, Behind(partial(both._freed_behind, branches, 0, beside))))[0])
        for block, beside in ((PLAIN, (second,)), (second, ()))
    ]
    assert steps[0] == backward(PLAIN) - mlp - kept + waiting
    attention = ATTENTION.backward(c, own, Behind(lambda: np.full(1, float(mlp))))
    assert steps[1] == float(np.ravel(attention)[0])
    (worst,) = both.backward(lambda: np.zeros(1, dtype=np.int64), [])
    assert float(worst[0]) >= max(steps)
