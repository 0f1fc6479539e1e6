"""The kind of a model, by which measured runs are counted: the same from a preset and from a record of its run."""

from __future__ import annotations

import pytest

from llmlaunch.models.presets import load_preset
from llmlaunch.models.shape import kind_of


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama3-8b", "dense gated"),
        ("mixtral-8x7b", "mixture gated"),
        ("deepseek-v3", "latent-attention mixture gated"),
        ("gpt3-13b", "dense ungated"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(load_preset(name)) == kind
