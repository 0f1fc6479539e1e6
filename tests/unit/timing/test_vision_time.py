"""Seconds of a vision encoder: its arithmetic by hand, what freezing and recompute change, and which stage waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from timed_jobs import H100, job

from llmlaunch.families.hub_ids import load_preset
from llmlaunch.layout import RECOMPUTE_FULL, Layout, LayoutColumns
from llmlaunch.models.shape import ModelShape
from llmlaunch.timing.arithmetic import token_flops
from llmlaunch.timing.products import pace, split_of
from llmlaunch.timing.stages import pieces
from llmlaunch.timing.step import step_time
from llmlaunch.timing.vision import encoder_flops, encoder_seconds
from support.changed_facts import changed

WHOLE = load_preset("qwen3-vl-8b")
assert WHOLE.vision is not None
TEXT, ENCODER = replace(WHOLE, vision=None), WHOLE.vision
DEPTH, H, FFN, HIDDEN, MERGED, PATCHES, TOKENS = 27, 1152, 4304, 4096, 4608, 2304, 576
BLOCKS = DEPTH * (4 * H * H + 2 * H * FFN)
PROJECTED = 4 * (MERGED * MERGED + MERGED * HIDDEN)
ALONE = Layout(data=8, zero_stage=1)
STAGES = Layout(pipeline=4, data=2, zero_stage=1)


def shape_of(**changes: Any) -> ModelShape:
    return replace(WHOLE, vision=replace(ENCODER, **changes))


def seconds(layout: Layout = ALONE, shape: ModelShape = WHOLE) -> dict[str, float]:
    at = split_of(job(shape), LayoutColumns.of([layout]))
    kinds = encoder_seconds(job(shape), H100, at, pace(job(shape), H100))
    return {kind: float(np.broadcast_to(column, 1)[0]) for kind, column in kinds.items()}


def test_the_arithmetic_of_images() -> None:
    encoder = 2 * PATCHES * (BLOCKS + 1536 * H + DEPTH * 2 * PATCHES * H)
    assert encoder_flops(WHOLE) == 3 * encoder + 6 * TOKENS * PROJECTED
    assert encoder_flops(shape_of(frozen=True)) == encoder + 6 * TOKENS * PROJECTED
    more = token_flops(WHOLE, 8192).total - token_flops(TEXT, 8192).total
    assert more == pytest.approx(encoder_flops(WHOLE) / 8192)


def test_large_products_and_attention_take_their_arithmetic() -> None:
    """A hundred images, so that what is counted once for each matrix does not count."""
    many, speed = seconds(shape=shape_of(images_per_sample=100)), pace(job(), H100)
    products = 6.0 * 100 * (PATCHES * (BLOCKS + 1536 * H) + TOKENS * PROJECTED) / speed.wide
    assert products < many["matrix_products"] < 1.5 * products
    scores = DEPTH * 4.0 * PATCHES * H * 100 * PATCHES
    each = 1 / speed.attention_forward + 2.5 / speed.attention_backward
    assert many["attention"] == pytest.approx(scores * each)


def test_kinds_follow_images_tensor_parallelism_freezing_and_recompute() -> None:
    once = seconds()
    twice = seconds(shape=shape_of(images_per_sample=2))
    assert twice["attention"] == pytest.approx(2 * once["attention"])
    assert twice["element_wise"] == pytest.approx(2 * once["element_wise"])
    assert once["tensor_parallel"] == 0 < seconds(Layout(tensor=2, data=4))["tensor_parallel"]
    assert seconds(Layout(tensor=2, data=4))["attention"] == pytest.approx(once["attention"] / 2)
    frozen = seconds(shape=shape_of(frozen=True))
    assert all(frozen[kind] < once[kind] for kind in ("matrix_products", "attention", "element_wise"))
    again = seconds(replace(ALONE, recompute=RECOMPUTE_FULL))
    forward = once["attention"] / (1 + 2.5 * pace(job(), H100).attention_forward / pace(job(), H100).attention_backward)
    assert forward < again["recompute"] < sum(once.values())
    assert "recompute" not in seconds(replace(ALONE, recompute=RECOMPUTE_FULL), shape_of(frozen=True))
    assert seconds(shape=TEXT) == {}


def test_attention_that_is_not_fused_goes_through_memory() -> None:
    eager = replace(job(WHOLE), facts=changed(job(WHOLE).facts, attention_scores_saved=True))
    at, speed = split_of(eager, LayoutColumns.of([ALONE])), pace(eager, H100)
    slow = float(encoder_seconds(eager, H100, at, speed)["attention"][0])
    products, scores = 3 * 4.0 * PATCHES * H * PATCHES / speed.wide, 2 * 6 * 2 * 16 * PATCHES * PATCHES
    assert slow == pytest.approx(DEPTH * (products + scores / speed.element_wise))


def test_the_first_stage_runs_the_encoder_and_the_others_wait_for_it() -> None:
    def parts(shape: ModelShape) -> Any:
        return pieces(job(shape), H100, split_of(job(shape), LayoutColumns.of([STAGES]))).seconds

    both, text = parts(WHOLE), parts(TEXT)
    assert both.first - text.first == pytest.approx(sum(seconds(STAGES).values()))
    assert both.last == text.last

    def total(*layers: int) -> float:
        columns = LayoutColumns.of([replace(STAGES, layers_by_stage=layers)])
        return float(step_time(job(shape_of(images_per_sample=8)), H100, columns).total[0])

    assert total(6, 10, 11, 9) < total(9, 9, 9, 9)


def test_a_step_is_the_sum_of_its_kinds() -> None:
    layouts = LayoutColumns.of([STAGES, replace(STAGES, recompute=RECOMPUTE_FULL)])
    step = step_time(job(WHOLE), H100, layouts)
    assert sum(step.terms.values()) == pytest.approx(step.total)
