"""Seconds of layers and ends, which uneven stages are balanced by; and what splitting a job costs on DeepSpeed:
AutoTP's reductions, gathered logits, gradients that travel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from timed_jobs import BASE, H100, LLAMA, WORK, job, time_of

from llmlaunch.families.hub_ids import load_preset
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.layers.model import model_of
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.job import Job
from llmlaunch.models.shape import ModelShape, SlidingWindow
from llmlaunch.timing.network import tensor_passes
from llmlaunch.timing.products import pace, split_of
from llmlaunch.timing.stages import pieces, stage_seconds, stages
from llmlaunch.timing.step import update_seconds
from support.changed_facts import changed
from support.recipes import recipe_of


def test_a_step_is_its_stages() -> None:
    """1F1B: every stage once, and the slowest for each further micro-batch."""
    seconds = stage_seconds(job(), H100, LayoutColumns.of([BASE]))
    microbatches = BASE.num_microbatches(WORK.global_batch_size)
    stages = [16 * seconds.layers[0][0] + end[0] for end in (seconds.first, seconds.last)]
    expected = sum(stages) + (microbatches - 1) * max(stages)
    apart = ("pipeline_transfer", "stragglers", "data_parallel", "optimizer")
    terms = time_of(BASE).terms
    assert sum(float(terms[name][0]) for name in terms if name not in apart) == pytest.approx(expected)


HYBRID = replace(load_preset("qwen3.5-27b"), num_layers=8, mtp_num_layers=0)


@pytest.mark.parametrize("shape", [HYBRID, replace(LLAMA, sliding_window=SlidingWindow(1024, full_every=4))])
def test_a_stage_takes_what_its_own_layers_take(shape: ModelShape) -> None:
    """With as many chunks as every so many layers one is full, one rank holds all of those."""
    layouts = LayoutColumns.of(
        [Layout(1, 4, data=8, virtual_pipeline=shape.num_layers // 4, zero_stage=1), Layout(data=8)]
    )
    seconds = stage_seconds(job(shape), H100, layouts)
    held = stages(job(shape), layouts, seconds)
    narrow, full = (float(column[0]) for column in seconds.layers)
    count, ends = shape.num_layers / 4, [float(seconds.first[0]), 0.0, 0.0, float(seconds.last[0])]
    each = [count * (full if rank == 3 else narrow) + end for rank, end in enumerate(ends)]
    assert held.slowest_seconds[0] == pytest.approx(max(each))
    assert held.all_seconds[0] == pytest.approx(sum(each))
    assert held.slowest_seconds[1] == pytest.approx(held.all_seconds[1])


def test_a_delta_net_turns_no_positions() -> None:
    at = split_of(job(HYBRID), LayoutColumns.of([Layout(data=8)]))
    delta, full = pieces(job(HYBRID), H100, at).layers
    turned = 2 * 2 * (HYBRID.query_width + HYBRID.key_value_width) * at.tokens  # elements of two bytes, both ways
    more = full.element_wise.forward - delta.element_wise.forward
    assert more == pytest.approx(turned / pace(job(HYBRID), H100).element_wise)


ON_DEEPSPEED = recipe_of("llama2-7b-deepspeed")
DEEPSPEED = Job(ON_DEEPSPEED.model, ON_DEEPSPEED.workload, DeepSpeed().facts(ON_DEEPSPEED))


def test_autotp_reduces_seven_times_a_layer() -> None:
    """Forward after attention and MLP; backward for queries, keys, values, gate and up. Each is two passes."""
    at = split_of(DEEPSPEED, LayoutColumns.of([Layout(tensor=2, data=8)]))
    passes = tensor_passes(DEEPSPEED, at, np.ones(1), model_of(DEEPSPEED.shape).kinds[0])
    assert (passes.waited, passes.beside) == (2 * 7.0, 0.0)


def test_gathered_logits_travel_a_vocabulary_wide() -> None:
    at = split_of(DEEPSPEED, LayoutColumns.of([Layout(tensor=2, data=8)]))
    split = replace(DEEPSPEED, facts=changed(DEEPSPEED.facts, logits_gathered=False))
    gathered, apart = (pieces(job, ON_DEEPSPEED.cluster, at).seconds.last[0] for job in (DEEPSPEED, split))
    assert gathered > apart


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_travel_in_the_precision_of_the_computation(stage: int) -> None:
    layouts = LayoutColumns.of([Layout(data=16, zero_stage=stage), Layout(tensor=4, data=4, zero_stage=stage)])
    seconds = update_seconds(DEEPSPEED, ON_DEEPSPEED.cluster, layouts).reduce_seconds
    assert seconds[0] > seconds[1] > 0.0
