"""Constants that tensors are multiplied by (Granite, Falcon-H1): what their products keep, move and launch."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from shapes import LLAMA3_8B, job_of

from llmlaunch.cluster.load import load_cluster
from llmlaunch.errors import UserError
from llmlaunch.families.lookup import find_model
from llmlaunch.frameworks.deepspeed.facts import DeepSpeedOptions, deepspeed_facts
from llmlaunch.layers.attention import Attention
from llmlaunch.layers.block import Behind
from llmlaunch.layers.columns import LayerColumns
from llmlaunch.layers.mlp import Mlp
from llmlaunch.layers.model import model_of
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.models.shape import ModelShape, Multipliers
from llmlaunch.techniques import NO_TECHNIQUES
from llmlaunch.timing.step import step_time

N, H, FFN, E = 1024, 4096, 14336, 2
FACTS = deepspeed_facts(DeepSpeedOptions(precision="bf16"))
ALONE = Layout(data=2)
RESIDUAL = Multipliers(residual=0.22)
GRANITE = replace(LLAMA3_8B, multipliers=Multipliers(embedding=12.0, logits=0.0625, residual=0.22))
EVERY = replace(
    LLAMA3_8B,
    multipliers=Multipliers(keys=0.5, attention_input=1.0, attention_output=0.9, gate=0.3, mlp_output=0.1),
)


def blocks(shape: ModelShape) -> tuple[Attention, Mlp]:
    attention, mlp = model_of(shape).kinds[0].blocks
    assert isinstance(attention, Attention)
    assert isinstance(mlp, Mlp)
    return attention, mlp


def element_wise(shape: ModelShape) -> float:
    job = job_of(shape, ALONE, FACTS, NO_TECHNIQUES, length=N)
    return float(step_time(job, load_cluster("h100-80gb-x8"), LayoutColumns.of([ALONE])).terms["element_wise"][0])


def test_each_block_multiplies_what_the_shape_says() -> None:
    assert [block.scaled for block in blocks(GRANITE)] == [(H,), (H,)]
    assert [block.scaled for block in blocks(EVERY)] == [(H, 1024, H), (FFN, H)]
    assert [block.scaled for block in blocks(LLAMA3_8B)] == [(), ()]


@pytest.mark.parametrize(("shape", "apart"), [(LLAMA3_8B, 0), (GRANITE, 1), (EVERY, 1)])
def test_the_gradient_of_a_multiplied_output_is_a_tensor_of_its_own(shape: ModelShape, apart: int) -> None:
    """Beside the residual stream's, while the second linear layer runs backward: with few tokens, and the gradient of
    its weight, that is the worst step of an MLP."""
    few = 8
    c = LayerColumns(FACTS, NO_TECHNIQUES, few, LayoutColumns.of([ALONE]))
    _, mlp = blocks(replace(shape, gated_mlp=False))
    steps = mlp.backward(c, mlp.saved(c), Behind(lambda: np.zeros(1)))
    assert steps == E * few * (apart * H + FFN) + E * H * FFN


def test_each_product_is_read_and_written_in_either_pass_and_is_a_kernel() -> None:
    """Those of two branches in 32 layers, that of the embedding and that of the logits."""
    work = [element_wise(shape) for shape in (LLAMA3_8B, GRANITE, replace(GRANITE, multipliers=RESIDUAL))]
    layers, all_ = work[2] - work[0], work[1] - work[0]
    assert layers > 0
    assert (all_ - layers) / layers == pytest.approx((H + 128256) / (32 * 2 * H), rel=1e-6)
    assert [sum(len(block.scaled) for block in blocks(shape)) for shape in (GRANITE, EVERY)] == [2, 5]


def test_the_parts_of_a_mixer_are_five() -> None:
    known = find_model({"base": "llama3-8b", "multipliers": {"mamba_parts": [1.0, 0.5, 0.25, 2.0, 1.0]}})
    assert known.multipliers == Multipliers(mamba_parts=(1.0, 0.5, 0.25, 2.0, 1.0))
    for wrong in ([1.0], [1.0] * 4 + [0.0], [1.0] * 6):
        with pytest.raises(UserError, match="mamba_parts"):
            find_model({"base": "llama3-8b", "multipliers": {"mamba_parts": wrong}})


def test_absent_constants_are_no_products() -> None:
    assert all(field.default is None for field in fields(Multipliers))
