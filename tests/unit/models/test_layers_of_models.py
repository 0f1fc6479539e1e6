"""A model is a list of layers: the parameters of its layers by block, by hand."""

from __future__ import annotations

from llmlaunch.families.hub_ids import load_preset
from llmlaunch.layers.attention import Attention
from llmlaunch.layers.block import Block
from llmlaunch.layers.layer import Layer
from llmlaunch.layers.mixture import Mixture
from llmlaunch.layers.mlp import Mlp
from llmlaunch.layers.model import model_of


def first_layer(name: str) -> Layer:
    model = model_of(load_preset(name))
    return model.kinds[model.order[0]]


def parameters(layer: Layer, kind: type[Block]) -> float:
    return sum(block.total_parameters for block in layer.blocks_of(kind))


def norms(layer: Layer) -> float:
    return layer.total_parameters - sum(block.total_parameters for block in layer.blocks)


def test_a_llama_layer_has_two_blocks_and_two_norms() -> None:
    layer = first_layer("llama3-8b")
    assert parameters(layer, Attention) == 4096 * (4096 + 2 * 1024) + 4096 * 4096
    assert parameters(layer, Mlp) == 3 * 4096 * 14336
    assert norms(layer) == 2 * 4096


def test_gemma_2_has_four_norms_a_layer() -> None:
    assert norms(first_layer("gemma2-9b")) == 4 * 3584


def test_a_mixture_is_a_router_experts_and_perhaps_a_shared_expert_with_its_gate() -> None:
    assert parameters(first_layer("mixtral-8x7b"), Mixture) == 8 * 4096 + 8 * 3 * 4096 * 14336
    (shared,) = first_layer("qwen2-57b-a14b").blocks_of(Mixture)
    assert isinstance(shared, Mixture)
    assert sum(matrix.total_parameters for matrix in shared.routing_matrices) == 3584 * (64 + 1)
