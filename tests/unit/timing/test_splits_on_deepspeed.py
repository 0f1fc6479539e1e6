"""What splitting a job costs on DeepSpeed: AutoTP's reductions, gathered logits, gradients that travel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmlaunch.backends.deepspeed.backend import DeepSpeed
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.job import Job
from llmlaunch.timing.exchange import tensor_passes
from llmlaunch.timing.products import split_of
from llmlaunch.timing.stages import pieces
from llmlaunch.timing.step import update_seconds
from support.recipes import recipe_of

RECIPE = recipe_of("llama2-7b-deepspeed")
JOB = Job(RECIPE.model, RECIPE.workload, DeepSpeed().facts(RECIPE))


def test_autotp_reduces_seven_times_a_layer() -> None:
    """Forward after attention and MLP; backward for queries, keys, values, gate and up. Each is two passes."""
    at = split_of(JOB, LayoutColumns.of([Layout(tensor=2, data=8)]))
    passes = tensor_passes(JOB, at, np.ones(1), mixture=False)
    assert (passes.waited, passes.beside) == (2 * 7.0, 0.0)


def test_gathered_logits_travel_a_vocabulary_wide() -> None:
    at = split_of(JOB, LayoutColumns.of([Layout(tensor=2, data=8)]))
    split = replace(JOB, facts=replace(JOB.facts, logits_gathered=False))
    gathered, apart = (pieces(job, RECIPE.cluster, at).seconds.last[0] for job in (JOB, split))
    assert gathered > apart


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_travel_in_the_precision_of_the_computation(stage: int) -> None:
    layouts = LayoutColumns.of([Layout(data=16, zero_stage=stage), Layout(tensor=4, data=4, zero_stage=stage)])
    seconds = update_seconds(JOB, RECIPE.cluster, layouts).reduce_seconds
    assert seconds[0] > seconds[1] > 0.0
