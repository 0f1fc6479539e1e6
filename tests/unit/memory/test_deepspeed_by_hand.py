"""What DeepSpeed's engine and Hugging Face's layers hold for a moment, against sums done by hand. Traces of the real
code hold the same terms (tests/frameworks)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from shapes import LLAMA3_8B, MIXTRAL, job_of

from llmlaunch.facts import NONE, Gathering, MemoryFacts
from llmlaunch.frameworks.deepspeed.facts import DeepSpeedOptions, deepspeed_facts
from llmlaunch.frameworks.deepspeed.family_facts import with_family
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.job import Job, RankColumns, all_ranks
from llmlaunch.memory.loss import final_norm, logits, table_gradient
from llmlaunch.memory.moments import transient_terms
from llmlaunch.memory.states import states
from llmlaunch.memory.weights import largest_parameter
from llmlaunch.memory.workspace import layer_backward
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.techniques.requests import Adapters
from support.changed_facts import changed

N, H, F = 4096, 4096, 14336  # tokens, hidden size, columns of the MLP
TABLE = 128256 * H
PARAMETERS = count_parameters(LLAMA3_8B).total
TILED = Techniques(loss="tiled")
ZERO_1 = Layout(data=64, zero_stage=1)
EVERYTHING = Gathering(10**13, 10**13, 10**13, sequential=True)


def value(
    function: Callable[[Job, RankColumns], Any],
    layout: Layout = ZERO_1,
    facts: MemoryFacts | None = None,
    techniques: Techniques = NO_TECHNIQUES,
    rank: int = 0,
) -> float:
    job = job_of(LLAMA3_8B, layout, facts or deepspeed_facts(), techniques, N, 1)
    return float(np.broadcast_to(function(job, all_ranks(job, LayoutColumns.of([layout]))), layout.pipeline)[rank])


def test_a_tiled_loss_holds_them_beside_a_tiles_logits_and_the_norm() -> None:
    def at_the_loss(job: Job, rows: RankColumns) -> Any:
        return transient_terms(job, rows).moments[0]["logits_and_loss"]

    tile = value(logits, techniques=TILED) + value(final_norm, techniques=TILED)
    assert value(at_the_loss, techniques=TILED) == pytest.approx(tile + 2 * N * H + 2 * TABLE, abs=2)


def test_a_tiled_loss_holds_the_hidden_states_it_reads_while_layers_run_backward() -> None:
    stages = Layout(pipeline=2, data=8)

    def beside_a_layer(job: Job, rows: RankColumns) -> Any:
        return transient_terms(job, rows).moments[2].get("logits_and_loss", np.zeros(len(rows)))

    assert [value(beside_a_layer, stages, techniques=TILED, rank=rank) for rank in (0, 1)] == [0, 2 * N * H]
    assert value(beside_a_layer) == 0


def test_all_layers_read_one_set_of_cosines_and_sines() -> None:
    def embedding(job: Job, rows: RankColumns) -> Any:
        return transient_terms(job, rows).moments[0]["embedding"]

    made_in_a_kernel = changed(deepspeed_facts(), rotary_bytes=0.0)
    assert value(embedding) - value(embedding, facts=made_in_a_kernel) == 2 * 2 * N * 128


def test_an_unfused_norm_runs_backward_beside_what_the_mlp_has_not_let_go() -> None:
    """So many bytes an element that the norm outweighs all else of the layer's backward pass."""

    def backward(norm_bytes: float, chunks: int = 1, layout: Layout = ZERO_1) -> float:
        facts = changed(deepspeed_facts(), norm_backward_bytes=norm_bytes)
        return value(layer_backward, layout, facts, Techniques(mlp_chunks=chunks))

    assert deepspeed_facts().layer.norm_backward_bytes == 20
    assert backward(200) - backward(150) == 50 * N * H
    more = 2 * 2 * N * F - 2 * N * H
    assert backward(200, chunks=64) - backward(200) == more, "in pieces its input alone is saved to be let go"
    split = Layout(tensor=2, data=32, zero_stage=1)
    assert backward(200, chunks=64, layout=split) - backward(200, layout=split) == 2 * 2 * N * F / 2 - 2 * N * H


def test_gradients_on_their_way_to_the_host_pass_a_buffer_of_the_largest_parameter() -> None:
    layout = Layout(data=64, zero_stage=2)
    facts = deepspeed_facts(DeepSpeedOptions(offload_optimizer=True))
    without = changed(facts, host_transfer_bytes=NONE)
    for name in ("forward", "backward", "final", "buckets"):

        def moment(job: Job, rows: RankColumns, name: str = name) -> Any:
            return getattr(states(job, rows), name)

        assert value(moment, layout, facts) - value(moment, layout, without) == 2 * TABLE, name


def test_zero_steps_on_whole_gradients_of_all_that_touches_its_share() -> None:
    """The table is larger than a share of one in 64, so the rank that holds a piece of it keeps all of its gradient."""
    share = PARAMETERS / 64
    facts = deepspeed_facts()
    without = changed(facts, touched_gradient_bytes=NONE)

    def norm(job: Job, rows: RankColumns) -> Any:
        return states(job, rows).norm

    def step(job: Job, rows: RankColumns) -> Any:
        return states(job, rows).step

    assert value(norm, facts=facts) == pytest.approx(8 * share + 2 * TABLE)
    assert value(step, facts=facts) - value(step, facts=without) == pytest.approx(2 * (TABLE - share))


def test_under_ulysses_buckets_are_reduced_in_fp32() -> None:
    """ZeRO 1 copies a parameter larger than its bucket, and once more in the wider type."""
    facts = deepspeed_facts(DeepSpeedOptions(sequence_ranks=2))
    narrow = changed(facts, widened_bucket_bytes=0.0)

    def backward(job: Job, rows: RankColumns) -> Any:
        return states(job, rows).backward

    layout = Layout(context=2, data=32, zero_stage=1)
    assert value(backward, layout, facts) - value(backward, layout, narrow) == 4 * TABLE


def test_zero_3_does_not_keep_a_frozen_embedding_gathered() -> None:
    facts = changed(deepspeed_facts(), gathering=EVERYTHING)
    layout = Layout(data=64, zero_stage=3)

    def parameters(job: Job, rows: RankColumns) -> Any:
        return states(job, rows).parameters

    adapters = Adapters(8)
    trained = value(parameters, layout, facts)
    frozen = value(parameters, layout, facts, Techniques(adapters=adapters))
    assert trained - frozen == pytest.approx(2 * TABLE, rel=0.1)  # adapters add what they hold themselves


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("expert", [8, 4])
def test_what_a_stage_gathers_arrives_in_buffers_where_several_devices_share_it(rank: int, expert: int) -> None:
    """Eight layers of Mixtral, with adapters or without: eight devices share what is no expert; 8 / expert devices
    share each expert, so that nobody shares those of expert 8, which are there once, here or copied from the host."""
    h, layout = H, Layout(pipeline=4, data=8, expert=expert, zero_stage=3)
    adapters = Adapters(rank) if rank else None
    dense = 8 * (2 * h * h + 2 * h * 1024 + 8 * h + 2 * h + rank * (2 * (h + h) + 2 * (h + 1024)))
    experts, group = 8 * (8 // expert) * 3 * (h * F + rank * (h + F)), 8 // expert

    def parameter_bytes(offload: bool = False, sequential: bool = False, secondary: int = 1) -> float:
        gathering = replace(EVERYTHING, sequential=sequential)
        facts = changed(deepspeed_facts(), gathering=gathering, secondary_ranks=secondary)
        techniques = Techniques(adapters=adapters, offload_parameters=offload)
        job = job_of(MIXTRAL, layout, facts, techniques, N, 1)
        return float(states(job, all_ranks(job, LayoutColumns.of([layout]))).parameters[1])

    shards, shared = dense / 8 + experts / group, experts if group > 1 else 0
    assert parameter_bytes() == 2 * (shards + 2 * dense + 2 * shared)
    assert parameter_bytes(sequential=True) == 2 * (shards + dense + shared)
    assert parameter_bytes(offload=True) == 2 * (2 * dense + experts + shared)
    assert parameter_bytes(offload=True, sequential=True) == 2 * (dense + experts)
    assert parameter_bytes(secondary=8) - parameter_bytes() == 2 * (dense + experts) / 8


def test_gate_and_up_are_two_parameters_but_in_families_that_fuse_them() -> None:
    """With a table smaller than either: the largest parameter decides buffers and norms."""
    shape = replace(LLAMA3_8B, vocab_size=1000)
    layout = Layout(data=8, zero_stage=1)
    for family, largest in (("llama", H * F), ("phi3", 2 * H * F)):
        facts = with_family(deepspeed_facts(), replace(shape, family=family), N)
        job = job_of(shape, layout, facts, NO_TECHNIQUES, N, 1)
        assert largest_parameter(job, all_ranks(job, LayoutColumns.of([layout])))[0] == largest


def test_the_gradient_of_a_table_that_tensor_parallelism_leaves_whole_is_whole() -> None:
    assert value(table_gradient, Layout(tensor=4, data=16)) == 2 * TABLE
    divided = changed(deepspeed_facts(), embedding_whole=False)
    assert value(table_gradient, Layout(tensor=4, data=16), divided) == 2 * TABLE / 4
