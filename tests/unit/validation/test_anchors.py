"""The two anchors are the published formulas, digit for digit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmlaunch.layout import RECOMPUTE_SELECTIVE, Layout
from llmlaunch.models.shape import ModelShape
from validation.anchors import ANCHORS, ReferenceJob, fujii_first_stage, megatron_theory

GIB, MIB = 2**30, 2**20
LLAMA_8B = ModelShape("llama3-8b", 32, 4096, 14336, 32, 8, 128, 128256, 8192)
LLAMA_70B = ModelShape("llama3-70b", 80, 8192, 28672, 64, 8, 128, 128256, 8192)
GPT_175B = ModelShape(
    "gpt3-175b", 96, 12288, 49152, 96, 96, 128, 51200, 2048, tied_embeddings=True, gated_mlp=False,
    linear_bias=True, normalization="LayerNorm",
)  # fmt: skip


def split(
    tensor: int, pipeline: int, data: int, context: int = 1, virtual: int = 1, sequence_parallel: bool = True
) -> Layout:
    return Layout(
        tensor=tensor, pipeline=pipeline, data=data, context=context, virtual_pipeline=virtual, zero_stage=1,
        sequence_parallel=int(sequence_parallel), recompute=RECOMPUTE_SELECTIVE if sequence_parallel else 0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tensor", "context", "pipeline", "micro_batch", "data", "weights", "activations"),
    [
        (2, 1, 1, 1, 2, 44.87260437011719, 22.64453125),
        (1, 2, 1, 1, 2, 67.30887222290039, 22.64453125),
        (2, 1, 2, 1, 32, 11.919273376464844, 20.75),
        (2, 2, 1, 2, 32, 23.137436628341675, 22.64453125),
    ],
)
def test_fujii_gives_the_values_of_its_authors_tests(
    tensor: int, context: int, pipeline: int, micro_batch: int, data: int, weights: float, activations: float
) -> None:
    layout = Layout(
        tensor=tensor, context=context, pipeline=pipeline, micro_batch_size=micro_batch, data=data, zero_stage=1
    )
    result = fujii_first_stage(ReferenceJob(LLAMA_8B, layout, 8192, None))
    assert result is not None
    assert result.weights_and_optimizer_bytes / GIB == pytest.approx(weights, rel=1e-6)
    assert result.activation_bytes / GIB == pytest.approx(activations, rel=1e-6)


@pytest.mark.parametrize(
    ("shape", "layout", "sequence", "weights", "activations", "total"),
    [
        (LLAMA_8B, split(1, 1, 8, sequence_parallel=False), 8192, 57437, 38762, 96199),
        (LLAMA_8B, split(2, 1, 4), 8192, 34463, 18468, 52931),
        (LLAMA_8B, split(2, 2, 2), 8192, 22976, 16416, 39392),
        (LLAMA_8B, split(2, 2, 2, context=2), 8192, 22976, 16416, 39392),
        (LLAMA_70B, split(4, 8, 2, virtual=5), 8192, 27494, 48279, 75772),
        (LLAMA_70B, split(4, 4, 2, context=2, virtual=5), 8192, 51976, 47178, 99153),
        (LLAMA_70B, split(8, 4, 4), 8192, 19497, 20512, 40009),
        (GPT_175B, split(8, 8, 16), 2048, 18006, 9816, 27822),
        (GPT_175B, split(8, 8, 1, virtual=3), 2048, 48016, 12679, 60695),
    ],
)
def test_megatron_theory_gives_what_megatron_prints(
    shape: ModelShape, layout: Layout, sequence: int, weights: int, activations: int, total: int
) -> None:
    padded = replace(shape, vocab_size=shape.padded_vocab_size(layout.tensor))
    result = megatron_theory(ReferenceJob(padded, layout, sequence, None))
    assert result is not None
    assert result.weights_and_optimizer_bytes / MIB == pytest.approx(weights, abs=1)
    assert result.activation_bytes / MIB == pytest.approx(activations, abs=1)
    assert result.total_bytes / MIB == pytest.approx(total, abs=1.5)


def test_every_anchor_says_what_it_ignores() -> None:
    assert set(ANCHORS) == {"fujii", "megatron_theory"}
    assert all(anchor.ignores for anchor in ANCHORS.values())
