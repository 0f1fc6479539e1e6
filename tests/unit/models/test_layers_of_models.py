"""A model is a list of layers: all parameters of every preset are those of its layers' matrices and vectors."""

from __future__ import annotations

import pytest

from llmlaunch.layers.layer import Layer
from llmlaunch.layers.model import model_of
from llmlaunch.models.parameters import count_parameters
from llmlaunch.models.presets import load_preset, preset_names


def parameters(layer: Layer) -> float:
    total = 0.0
    for branch in layer.branches:
        total += branch.norms * branch.norm_parameters + branch.mixing_parameters
        for block in branch.blocks:
            total += sum(vector.size for vector in block.vectors)
            total += sum(matrix.count * (matrix.elements + matrix.biases) for matrix in block.matrices)
    return total


@pytest.mark.parametrize("name", preset_names())
def test_layers_of_a_preset_have_all_its_parameters(name: str) -> None:
    shape = load_preset(name)
    model = model_of(shape)
    counted = [layer.total for layer in count_parameters(shape).layers]
    assert [parameters(model.kinds[kind]) for kind in model.order] == counted
