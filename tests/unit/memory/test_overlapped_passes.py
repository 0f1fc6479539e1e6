"""What passes that share a schedule hold, against sums done by hand and traces of Megatron core 0.19.2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from shapes import LLAMA3_8B, MIXTRAL, job_of

from llmlaunch.columns import FloatColumn
from llmlaunch.effects.delayed_weight_gradients import DelayedWeightGradientsEffect
from llmlaunch.effects.expert_overlap import ExpertOverlapEffect
from llmlaunch.frameworks.megatron.facts import megatron_facts
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.constants import constant
from llmlaunch.memory.effects import Effect, effects_in_use
from llmlaunch.memory.estimator import estimate
from llmlaunch.memory.job import Job, RankColumns, all_ranks
from llmlaunch.models.shape import ModelShape, MoeShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from support.changed_facts import changed

N, H = 4096, 4096
BALANCED = changed(megatron_facts(), expert_imbalance=1.0)
OVERLAP = Techniques(overlap_expert_communication=True)
DELAY = Techniques(overlap_expert_communication=True, delay_weight_gradients=True)
ALONE = Layout(data=8, expert=8, zero_stage=1)
STAGES = Layout(pipeline=2, virtual_pipeline=2, data=8, expert=8, zero_stage=1)
ROUTED = 2 * N * 2 * H  # bytes of two copies of every token
# Per token of Mixtral: two norms with their statistics, queries, keys and values, attention's output with a statistic
# of each head, scores and order of eight experts.
BEFORE_EXPERTS = N * (2 * (4 * H + 4) + 2 * (H + 2 * 1024) + 2 * H + 4 * 32 + 12 * 8)
# Qwen3-30B with fewer layers, as it was traced: 8 layers and 128 experts of which a rank has 8.
QWEN3 = ModelShape(
    "qwen-cut", 8, 2048, 6144, 32, 4, 128, 1024, 40960, qk_layernorm=True, moe=MoeShape(128, 8, 768, 0, (1,) * 8)
)
SIXTEEN = Layout(data=16, expert=16, zero_stage=1)

Terms = Mapping[str, FloatColumn]


def effect_in_use(job: Job, kind: type[Effect]) -> Effect:
    """Return the effect of one kind where the job uses it, else one that does nothing."""
    return next((effect for effect in effects_in_use(job) if isinstance(effect, kind)), Effect())


def paired_layer(job: Job, rows: RankColumns) -> Terms:
    return effect_in_use(job, ExpertOverlapEffect).beside_layer(job, rows)


def left_over(job: Job, rows: RankColumns) -> Terms:
    return effect_in_use(job, ExpertOverlapEffect).at_the_loss(job, rows)


def delayed_weight_gradients(job: Job, rows: RankColumns) -> Terms:
    return effect_in_use(job, DelayedWeightGradientsEffect).beside_layer(job, rows)


def value(
    terms: Callable[[Job, RankColumns], Terms],
    shape: ModelShape = MIXTRAL,
    layout: Layout = ALONE,
    techniques: Techniques = OVERLAP,
    rank: int = 0,
    microbatches: int = 8,
) -> dict[str, float]:
    job = job_of(shape, layout, BALANCED, techniques, N, microbatches)
    rows = all_ranks(job, LayoutColumns.of([layout]))
    return {name: float(np.broadcast_to(column, len(rows))[rank]) for name, column in terms(job, rows).items()}


def test_nothing_is_paired_where_micro_batches_come_one_after_the_other() -> None:
    for terms in (paired_layer, left_over, delayed_weight_gradients):
        assert value(terms, techniques=NO_TECHNIQUES) == {}


@pytest.mark.parametrize(
    ("layout", "rank", "microbatches"),
    [
        (ALONE, 0, 1),
        (STAGES, 0, 2),
        (replace(STAGES, pipeline=3, layers_by_stage=(6, 6, 5, 5, 5, 5)), 1, 3),
        (replace(STAGES, pipeline=4), 0, 5),
        (replace(STAGES, pipeline=4), 3, 2),
    ],
)
def test_a_warm_up_that_takes_all_forward_passes_leaves_none_to_pair(
    layout: Layout, rank: int, microbatches: int
) -> None:
    """Of two chunks on rank r of p: 2 (p - r - 1) + p + 1 passes."""
    for terms in (paired_layer, left_over):
        assert value(terms, layout=layout, rank=rank, microbatches=microbatches) == {"paired_layer": 0.0}
        assert value(terms, layout=layout, rank=rank, microbatches=microbatches + 1)["paired_layer"] > 0


def test_a_layer_that_runs_forward_has_saved_all_before_its_experts() -> None:
    assert value(paired_layer) == {"paired_layer": BEFORE_EXPERTS + ROUTED}
    stream = N * 2 * H
    assert value(paired_layer, layout=STAGES)["paired_layer"] == BEFORE_EXPERTS + ROUTED + 4 * stream


def test_an_offloaded_norm_is_not_kept_before_experts() -> None:
    techniques = replace(OVERLAP, offload_modules=("mlp_norm",))
    assert value(paired_layer, techniques=techniques)["paired_layer"] == BEFORE_EXPERTS + ROUTED - N * (2 * H + 4)


def test_what_a_backward_pass_leaves_is_there_at_the_next_loss() -> None:
    stream = N * 2 * H
    assert value(left_over) == {"paired_layer": 2 * stream}
    assert value(left_over, layout=STAGES) == {"paired_layer": ROUTED + 5 * stream}


def test_delayed_weight_gradients_keep_the_gradient_of_what_experts_put_out() -> None:
    assert value(delayed_weight_gradients, techniques=DELAY) == {"delayed_weight_gradients": ROUTED}
    dense = N * (2 * H + (2 * 2 + 2) * 14336)
    assert value(delayed_weight_gradients, LLAMA3_8B, Layout(data=8), DELAY) == {"delayed_weight_gradients": dense}
    tensor = Layout(tensor=2, data=4, sequence_parallel=1)
    assert value(delayed_weight_gradients, LLAMA3_8B, tensor, DELAY) == {"delayed_weight_gradients": dense / 2}


@pytest.mark.parametrize(
    ("techniques", "layout", "rank", "traced_gib"),
    [
        (NO_TECHNIQUES, SIXTEEN, 0, 10.299),
        (OVERLAP, SIXTEEN, 0, 10.601),
        (DELAY, SIXTEEN, 0, 10.726),
        (OVERLAP, replace(STAGES, pipeline=4), 0, 8.722),
        (OVERLAP, replace(STAGES, pipeline=4), 2, 6.974),
    ],
    ids=["in turn", "overlapped", "delayed", "stages first", "stages third"],
)
def test_traced_ranks_take_what_is_planned(
    techniques: Techniques, layout: Layout, rank: int, traced_gib: float
) -> None:
    """Traced under fake tensors (tests/frameworks/traced_cases.py), where kernel libraries have no workspace."""
    facts = changed(BALANCED, workspace_bytes=BALANCED.allocator.workspace_bytes - constant("workspace_bytes"))
    job = job_of(QWEN3, layout, facts, techniques, 4096, 8)
    allocated = estimate(job, layout, num_microbatches=8).ranks[rank].allocated_bytes
    assert allocated / 2**30 == pytest.approx(traced_gib, rel=0.005)
