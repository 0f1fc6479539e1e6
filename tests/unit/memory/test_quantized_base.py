"""Frozen weights in 4 bits beneath adapters: what rests narrow, and what is wide while a layer runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shapes import LLAMA3_8B, job_of

from llmlaunch.effects.quantized_base import NF4_BYTES, QuantizedBaseEffect
from llmlaunch.frameworks.deepspeed.facts import DeepSpeedOptions, deepspeed_facts
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.estimator import RankEstimate, estimate, worst_ranks
from llmlaunch.memory.states import least_state_bytes
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.requests import Adapters

LORA = Techniques(adapters=Adapters(16))
QLORA = Techniques(adapters=Adapters(16, base="nf4"))
LAYOUT = Layout(data=8, zero_stage=2)
# the linear layers of a block: queries, keys and values, what puts attention out, gate and up, down
LINEARS = 32 * 4096 * ((4096 + 2 * 1024) + 4096 + 3 * 14336)
LARGEST = 4096 * 14336
FACTS = deepspeed_facts(DeepSpeedOptions())


def rank(techniques: Techniques, length: int = 512, shape: ModelShape = LLAMA3_8B) -> RankEstimate:
    return estimate(job_of(shape, LAYOUT, FACTS, techniques, length, 1), LAYOUT).ranks[0]


def test_linear_layers_of_the_blocks_rest_in_half_a_byte_and_their_scales() -> None:
    assert pytest.approx(0.5 + 8 / 64 / 8 + 32 / (64 * 256) / 8) == NF4_BYTES  # QLoRA, section 3: 0.127 bits a weight
    spared = rank(LORA).terms["parameters"] - rank(QLORA).terms["parameters"]
    assert spared == pytest.approx((2.0 - NF4_BYTES) * LINEARS, rel=1e-9)


def test_the_widest_weight_is_written_out_beside_the_layer_that_runs_backward() -> None:
    small = replace(LLAMA3_8B, vocab_size=1024)  # the peak is in a layer, not at the loss
    assert rank(QLORA, shape=small).terms["dequantized_weight"] == 2.0 * LARGEST
    assert "dequantized_weight" not in rank(LORA, shape=small).terms


def test_no_rank_needs_less_than_the_floor() -> None:
    """Nor less for a parameter than a quantized one takes."""
    job, columns = job_of(LLAMA3_8B, LAYOUT, FACTS, QLORA, 512, 1), LayoutColumns.of([LAYOUT])
    assert 0 < least_state_bytes(job, columns)[0] <= worst_ranks(job, columns).device_bytes[0]
    assert QuantizedBaseEffect().least_parameter_bytes(job, 2.0) == NF4_BYTES
