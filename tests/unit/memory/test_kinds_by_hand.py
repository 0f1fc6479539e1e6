"""Layers that see everything and have heads of their own beside those with a window (Gemma 4), against sums done by
hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layer_tensors import rank_tensors
from shapes import job_of

from llmlaunch.families.hub_ids import load_preset
from llmlaunch.frameworks.deepspeed.facts import DeepSpeedOptions, deepspeed_facts
from llmlaunch.frameworks.deepspeed.family_facts import with_family
from llmlaunch.layers.model import model_of
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.activations import kept_by_layer, largest_layer, returned_key_values
from llmlaunch.memory.job import Job, RankColumns, all_ranks
from llmlaunch.memory.weights import rank_parameters
from support.changed_facts import changed

N = 1024  # tokens of a sequence, as many as a window has
HEADS = 32
QUERIES, KEYS = (HEADS * 256, HEADS * 512), (16 * 256, 4 * 512)
GEMMA = load_preset("gemma4-31b")
FACTS = with_family(deepspeed_facts(DeepSpeedOptions(precision="bf16")), GEMMA, N)


ALONE = Layout(data=2)


def value(function: Any, layout: Layout = ALONE, shape: Any = GEMMA, **facts: Any) -> float:
    job = job_of(shape, layout, changed(FACTS, **facts), length=N)
    return float(np.broadcast_to(function(job, all_ranks(job, LayoutColumns.of([layout]))), 1)[0])


def attention(job: Job, rows: RankColumns) -> Any:
    return rank_tensors(job, rows, "attn_qkv", "attn_qk_norm", "attn_value_norm", "attn_output")


def test_the_last_of_six_layers_sees_everything() -> None:
    assert model_of(GEMMA).order == (0, 0, 0, 0, 0, 1) * 10


def test_all_layers_add_up_to_the_published_number() -> None:
    counts = value(lambda job, rows: rank_parameters(job, rows).dense)
    assert counts == pytest.approx(30_697_345_280, rel=1e-12)
    assert count_parameters(GEMMA).total == 30_697_345_280


def test_values_are_normed_without_a_weight_and_heads_kept_by_their_kind() -> None:
    norm = 2 + FACTS.layer.norm_extra_bytes
    kept = [
        2 * (queries + 2 * keys)
        + norm * (queries + keys)
        + 4 * (queries + keys) / width
        + 4 * keys * (1 + 2 / width)
        + 2 * queries
        + 4 * HEADS
        for queries, keys, width in zip(QUERIES, KEYS, (256, 512), strict=True)
    ]
    assert value(attention) == pytest.approx(N * (50 * kept[0] + 10 * kept[1]))
    of_kinds = [value(lambda job, rows, kind=kind: kept_by_layer(job, rows)[kind]) for kind in (0, 1)]
    assert value(largest_layer) == max(of_kinds)
    returned = value(returned_key_values, key_values_returned=True)
    assert returned == pytest.approx(60 * N * 2 * 2 * (5 * KEYS[0] + KEYS[1]) / 6)
