"""Seconds of layers and ends, which uneven stages are balanced by."""

from __future__ import annotations

import numpy as np
import pytest
from timed_jobs import BASE, H100, LLAMA, MIXTRAL, WORK, alternating, job, time_of

from llmlaunch.layout import LayoutColumns
from llmlaunch.timing.stages import stage_seconds


def test_a_step_is_its_stages() -> None:
    """1F1B: every stage once, and the slowest for each further micro-batch."""
    seconds = stage_seconds(job(), H100, LayoutColumns.of([BASE]))
    microbatches = BASE.num_microbatches(WORK.global_batch_size)
    stages = [16 * seconds.dense_layer[0] + seconds.first[0], 16 * seconds.dense_layer[0] + seconds.last[0]]
    expected = sum(stages) + (microbatches - 1) * max(stages)
    apart = ("pipeline_transfer", "stragglers", "data_parallel", "optimizer")
    terms = time_of(BASE).terms
    assert sum(float(terms[name][0]) for name in terms if name not in apart) == pytest.approx(expected)


def test_a_model_without_a_kind_of_layer_spends_nothing_on_it() -> None:
    columns = LayoutColumns.of([BASE])
    dense, mixture = (stage_seconds(job(shape), H100, columns) for shape in (LLAMA, MIXTRAL))
    assert dense.mixture_layer == 0 < dense.dense_layer
    assert mixture.dense_layer == 0 < mixture.mixture_layer
    both = stage_seconds(job(alternating()), H100, columns)
    assert both.dense_layer == pytest.approx(dense.dense_layer)
    assert both.mixture_layer > 0


def test_the_head_is_worth_more_than_the_embedding() -> None:
    seconds = stage_seconds(job(), H100, LayoutColumns.of([BASE]))
    assert np.all(seconds.last > seconds.dense_layer)
    assert np.all(seconds.first < 0.2 * seconds.last)
