"""What frees a saved tensor, and what moves it to the host, are modules that a recipe can name, and each of them does
so in some model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import get_args

import pytest
from shapes import MEGATRON, job_of

from llmlaunch.families.hub_ids import load_preset, preset_names
from llmlaunch.frameworks.deepspeed.facts import deepspeed_facts
from llmlaunch.frameworks.deepspeed.family_facts import with_family
from llmlaunch.layers.block import Block, Saved
from llmlaunch.layers.model import model_of
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.job import all_ranks
from llmlaunch.memory.layer_bytes import layers_of
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.requests import Adapters
from llmlaunch.techniques.treatments import OffloadModule, RecomputeModule

ALONE = Layout()
RECOMPUTED, OFFLOADED = frozenset(get_args(RecomputeModule)), frozenset(get_args(OffloadModule))
TECHNIQUES = (Techniques(), Techniques(adapters=Adapters(16)))


@cache
def tensors_of(preset: str) -> tuple[Saved, ...]:
    """Return all tensors that layers of a preset save under either trainer, with adapters and without."""
    return tuple(_tensors(preset))


def _tensors(preset: str) -> Iterator[Saved]:
    shape = load_preset(preset)
    for facts in (MEGATRON, with_family(deepspeed_facts(), shape, 4096)):
        for techniques in TECHNIQUES:
            job = job_of(shape, ALONE, facts, techniques)
            for tensors in layers_of(job, all_ranks(job, LayoutColumns.of([ALONE]))).tensors:
                yield from tensors.values()


def blocks_of(preset: str) -> Iterator[Block]:
    for layer in model_of(load_preset(preset)).kinds:
        yield from layer.blocks


@pytest.mark.parametrize("preset", preset_names())
def test_tensors_are_freed_and_moved_by_modules_that_a_recipe_names(preset: str) -> None:
    for tensor in tensors_of(preset):
        assert RECOMPUTED.issuperset(tensor.freed_by)
        assert OFFLOADED.issuperset(tensor.moved_by)
        assert tensor.with_module is None or tensor.with_module in RECOMPUTED
    for block in blocks_of(preset):
        assert RECOMPUTED.issuperset(block.repeated_modules)


def test_every_module_frees_or_moves_something_of_a_preset() -> None:
    tensors = [tensor for preset in preset_names() for tensor in tensors_of(preset)]
    assert {module for tensor in tensors for module in tensor.freed_by} == RECOMPUTED
    assert {module for tensor in tensors for module in tensor.moved_by} == OFFLOADED
