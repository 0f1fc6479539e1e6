"""What a vision encoder holds on the first pipeline rank, against sums done by hand and a trace of Bridge's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from shapes import job_of

from llmlaunch.facts import MemoryFacts
from llmlaunch.families.hub_ids import load_preset
from llmlaunch.frameworks.deepspeed.facts import deepspeed_facts
from llmlaunch.frameworks.megatron.facts import megatron_facts
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_NONE, Layout, LayoutColumns
from llmlaunch.memory.job import Job, RankColumns, all_ranks
from llmlaunch.memory.layer_bytes import layers_of
from llmlaunch.memory.moments import transient_terms
from llmlaunch.memory.vision import encoder_activations, encoder_backward
from llmlaunch.memory.weights import distinct_matrices, rank_parameters, trained_parameters
from llmlaunch.models.sections import Vision
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from support.changed_facts import changed

FACTS = megatron_facts()
WHOLE = load_preset("qwen3-vl-8b")
assert WHOLE.vision is not None
ENCODER = WHOLE.vision
TEXT = replace(WHOLE, vision=None)
N = 4096  # tokens of a sequence
DEPTH, H, FFN, HEADS, D, HIDDEN, MERGED = 27, 1152, 4304, 16, 72, 4096, 4608
PATCHES, TENSOR, MICRO_BATCH = 48 * 48, 2, 2
NUMBERS = 3 * 2 * 16 * 16  # of a patch
STAGES = Layout(tensor=TENSOR, pipeline=4, data=2, micro_batch_size=MICRO_BATCH)
BLOCK = 2 * (2 * 2 * H + 8) + 4 * 4 * D + (4 * 2 * H + 4 * HEADS + 2 * 2 * FFN) / TENSOR
BLOCK_PARAMETERS = (4 * H * H + 2 * H * FFN + 3 * H + FFN) / TENSOR + 6 * H
PATCH_PARAMETERS = (NUMBERS + 1 + 2304) * H
PROJECTOR_PARAMETERS = 4 * (MERGED * (MERGED + HIDDEN + 1) / TENSOR + HIDDEN) + 2 * H + 3 * 2 * MERGED
PROJECTOR = 2 * H + 2 * 2 * H / TENSOR
LAST = 2 * H + 8


def shape_of(**changes: Any) -> ModelShape:
    return replace(WHOLE, vision=replace(ENCODER, **changes))


def values(
    function: Callable[[Job, RankColumns], Any],
    shape: ModelShape = WHOLE,
    layout: Layout = STAGES,
    techniques: Techniques = NO_TECHNIQUES,
    facts: MemoryFacts = FACTS,
) -> list[float]:
    job = job_of(shape, layout, facts, techniques, N)
    rows = all_ranks(job, LayoutColumns.of([layout]))
    return list(map(float, np.broadcast_to(function(job, rows), len(rows))))


def test_the_first_rank_holds_the_encoder_and_splits_its_linears() -> None:
    of_encoder = DEPTH * BLOCK_PARAMETERS + PATCH_PARAMETERS + PROJECTOR_PARAMETERS
    whole, text = (values(lambda job, rows: rank_parameters(job, rows).dense, shape) for shape in (WHOLE, TEXT))
    assert [both - alone for both, alone in zip(whole, text, strict=True)] == [of_encoder, 0, 0, 0]

    def trained(job: Job, rows: RankColumns) -> Any:
        return trained_parameters(job, rows, rank_parameters(job, rows)).dense

    assert values(trained) == whole
    frozen = values(trained, shape_of(frozen=True))
    assert [both - alone for both, alone in zip(frozen, text, strict=True)] == [PROJECTOR_PARAMETERS, 0, 0, 0]


@pytest.mark.parametrize(("frozen", "of_blocks"), [(False, 4 * H * H + 2 * H * FFN), (True, 0)])
def test_each_trained_matrix_of_another_shape_has_a_stub(frozen: bool, of_blocks: int) -> None:
    with_encoder, text = (values(distinct_matrices, shape) for shape in (shape_of(frozen=frozen), TEXT))
    expected = (of_blocks + MERGED * (MERGED + HIDDEN)) / TENSOR
    assert [both - alone for both, alone in zip(with_encoder, text, strict=True)] == [expected, 0, 0, 0]


def kept(saved: float) -> list[float]:
    """Four micro-batches of two samples in flight, and the images of one."""
    return [MICRO_BATCH * PATCHES * (4 * saved + 4 * NUMBERS), 0, 0, 0]


def test_blocks_keep_what_bridge_was_traced_to_keep() -> None:
    assert pytest.approx(23632) == BLOCK
    inputs = 2 * NUMBERS + 4 * 12
    saved = DEPTH * BLOCK + inputs + 4 * PROJECTOR + LAST
    assert values(encoder_activations) == pytest.approx(kept(saved))
    four = shape_of(depth=4, deepstack=(1,))  # traced with fake tensors: a patch keeps 113,266 bytes
    tokens = 2 * 2 * HIDDEN / 4  # the trace holds what projectors put out
    assert values(encoder_activations, four) == pytest.approx(kept(113_266 - tokens), rel=1e-4)
    full = replace(STAGES, recompute=RECOMPUTE_FULL)
    again = DEPTH * 2 * H + inputs + 4 * PROJECTOR + LAST
    assert values(encoder_activations, layout=full) == pytest.approx(kept(again))
    groups = replace(full, recompute_layers=3)
    thirds = DEPTH / 3 * 2 * H + inputs + 4 * PROJECTOR + LAST
    assert values(encoder_activations, layout=groups) == pytest.approx(kept(thirds))
    first_ten = replace(full, recompute_layers=10)
    block = Techniques(recompute_method="block")
    ten = again + (DEPTH - 10) * (BLOCK - 2 * H)
    assert values(encoder_activations, layout=first_ten, techniques=block) == pytest.approx(kept(ten))
    for layers in (0, 40):
        whole = replace(full, recompute_layers=layers)
        assert values(encoder_activations, layout=whole, techniques=block) == pytest.approx(kept(again))
    one_group = replace(full, recompute_layers=40)
    assert values(encoder_activations, layout=one_group) == pytest.approx(kept(again - (DEPTH - 1) * 2 * H))


def test_a_frozen_encoder_keeps_what_projectors_read() -> None:
    saved = 3 * 2 * H + 4 * PROJECTOR + LAST
    assert values(encoder_activations, shape_of(frozen=True)) == pytest.approx(kept(saved))


def test_transformers_keeps_queries_keys_and_values_mixed_and_the_output_twice() -> None:
    alone = Layout(micro_batch_size=1)
    block = 2 * (2 * 2 * H + 8) + 7 * 2 * H + 4 * HEADS + 2 * 2 * FFN
    saved = DEPTH * block + 2 * NUMBERS + 4 * 12 + 4 * (2 * H + 2 * 2 * H) + LAST
    counted = values(encoder_activations, layout=alone, facts=deepspeed_facts())
    assert counted == pytest.approx([PATCHES * (saved + 4 * NUMBERS)])


def test_attention_that_is_not_fused_keeps_probabilities_of_each_image() -> None:
    alone, two = Layout(micro_batch_size=1), shape_of(images_per_sample=2)
    eager = changed(deepspeed_facts(), attention_scores_saved=True, score_gradient_bytes=4.0)
    scores = 2 * PATCHES * HEADS * PATCHES
    for softmax_bytes, kept_bytes in ((4.0, 2 + 4), (None, 2), (2.0, 2)):
        facts = changed(eager, softmax_bytes=softmax_bytes)
        fused, more = (values(encoder_activations, two, alone, facts=each)[0] for each in (deepspeed_facts(), facts))
        assert more - fused == pytest.approx(DEPTH * kept_bytes * scores)
    fused, more = (values(encoder_backward, two, alone, facts=each)[0] for each in (deepspeed_facts(), eager))
    assert more - fused == pytest.approx(4 * scores)
    split = values(encoder_backward, two, replace(alone, tensor=2), facts=eager)[0]
    assert split - values(encoder_backward, two, replace(alone, tensor=2))[0] == pytest.approx(4 * scores / 2)


GRADIENTS = 2 * (2 * H + 2 * FFN / TENSOR) + 2 * 4 * HIDDEN / 4


@pytest.mark.parametrize(
    ("changes", "recompute", "layers", "alive"),
    [
        ({}, RECOMPUTE_NONE, 0, GRADIENTS),
        ({}, RECOMPUTE_FULL, 0, GRADIENTS + BLOCK),
        ({}, RECOMPUTE_FULL, 3, GRADIENTS + 3 * BLOCK),
        ({"frozen": True}, RECOMPUTE_FULL, 0, 2 * (2 * H + 2 * H / TENSOR) + 2 * 4 * HIDDEN / 4),
    ],
)
def test_gradients_of_a_block_and_of_tokens_are_alive_in_the_backward_pass(
    changes: dict[str, Any], recompute: int, layers: int, alive: float
) -> None:
    layout = replace(STAGES, recompute=recompute, recompute_layers=layers)
    expected = [MICRO_BATCH * PATCHES * alive, 0, 0, 0]
    assert values(encoder_backward, shape_of(**changes), layout) == pytest.approx(expected)


def test_the_term_is_alive_in_every_pass_and_not_in_the_step() -> None:
    job = job_of(WHOLE, STAGES, FACTS, NO_TECHNIQUES, N)
    rows = all_ranks(job, LayoutColumns.of([STAGES]))
    terms = transient_terms(job, rows)
    expected = np.rint(encoder_activations(job, rows)).tolist()
    *passes, step = terms.moments
    assert [moment["encoder_activations"].tolist() for moment in passes] == [expected] * len(passes)
    assert "encoder_activations" not in step


def test_every_layer_of_the_decoder_keeps_its_own_turns_beside_images() -> None:
    more, text = (values(lambda job, rows: layers_of(job, rows).totals[0], shape) for shape in (WHOLE, TEXT))
    assert [both - alone for both, alone in zip(more, text, strict=True)] == [N * MICRO_BATCH * 2 * 4 * 128] * 4


def test_the_encoder_of_a_preset_is_qwen3_vls() -> None:
    assert Vision(DEPTH, H, FFN, HEADS, deepstack=(8, 16, 24)) == ENCODER
    assert (ENCODER.patches_per_sample, ENCODER.tokens_per_sample) == (PATCHES, PATCHES // 4)
