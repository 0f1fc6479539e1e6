"""What CUDA graphs add to a rank's peak, by hand, and that they never spare memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from shapes import LLAMA3_8B, MEGATRON, MIXTRAL, job_of, ranks

from llmlaunch.effects.cuda_graphs import captured_activations
from llmlaunch.effects.recompute import recomputed_layer
from llmlaunch.layout import RECOMPUTE_SELECTIVE, Layout, LayoutColumns
from llmlaunch.memory.job import all_ranks
from llmlaunch.memory.moments import transient_terms
from llmlaunch.memory.workspace import layer_backward
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import Techniques

TENSOR = Layout(tensor=4, data=2, sequence_parallel=1, zero_stage=1)
STAGES = replace(TENSOR, pipeline=4)
NODE_BYTES = 10_240
assert MIXTRAL.moe is not None
INPUT = 2 * 4096 * 4096 // 4  # of a layer, on each of four tensor ranks
SCOPES = [("attn",), ("mlp",), ("attn", "mlp"), ("layer",), ("full_iteration",)]


def graph_bytes(layout: Layout, *scopes: str, shape: ModelShape = LLAMA3_8B) -> list[int]:
    """Return the graphs' term at the peak of each pipeline rank."""
    return [rank.terms["cuda_graphs"] for rank in ranks(shape, layout, techniques=Techniques(cuda_graphs=scopes))]


def moment_bytes(layout: Layout, *scopes: str, shape: ModelShape = LLAMA3_8B) -> list[float]:
    """Return the graphs' term of the first rank at each moment, the optimizer's step last."""
    job = job_of(shape, layout, MEGATRON, Techniques(cuda_graphs=scopes))
    rows = all_ranks(job, LayoutColumns.of([layout]), np.array([8]))
    return [float(moment["cuda_graphs"][0]) for moment in transient_terms(job, rows).moments]


def test_attention_holds_its_own_temporaries_two_gradients_and_the_driver_s_kernels() -> None:
    heads = 4096 * (2 * 4096 + 2 * 1024) // 4  # gradients of the output, and of Q, K and V
    temporary = 2 * (heads + 4096 * 4096 + 2 * 4096 * 4096 // 4)
    assert graph_bytes(TENSOR, "attn") == [32 * 36 * NODE_BYTES + 2 * INPUT + temporary]


def test_whole_layers_keep_their_output_beside_the_next_one_s_input() -> None:
    loss, head, layer, step = moment_bytes(TENSOR, "layer")
    static = 32 * 60 * NODE_BYTES + 2 * INPUT + 32 * INPUT
    plain = job_of(LLAMA3_8B, TENSOR, MEGATRON)
    rows = all_ranks(plain, LayoutColumns.of([TENSOR]), np.array([8]))
    alive, temporary = transient_terms(plain, rows).moments[2], float(layer_backward(plain, rows)[0])
    # the embedding's gradient, whole, beside the pool
    assert loss == head == layer == static + temporary
    assert step == static + temporary + float(alive["activations"][0])
    assert moment_bytes(TENSOR, "attn", "mlp") == [loss, head, layer, step]


def test_a_whole_iteration_keeps_all_its_tensors_while_the_optimizer_runs() -> None:
    plain = job_of(LLAMA3_8B, TENSOR, MEGATRON)
    *passes, _ = transient_terms(plain, all_ranks(plain, LayoutColumns.of([TENSOR]), np.array([8]))).moments
    pool = max(sum(float(column[0]) for column in moment.values()) for moment in passes)
    kernels = 8 * 32 * 60 * NODE_BYTES
    assert moment_bytes(TENSOR, "full_iteration") == [kernels] * 3 + [kernels + pool]


def test_a_mixture_s_captured_activations_are_those_before_tokens_travel() -> None:
    layout = Layout(data=8, expert=8, zero_stage=1)
    job = job_of(MIXTRAL, layout, MEGATRON, Techniques(cuda_graphs=("moe_router", "moe_preprocess")))
    held = captured_activations(job, all_ranks(job, LayoutColumns.of([layout]), np.array([8])))
    norm = 4096 * (2 * 4096 + 4 + 2 * 4096)  # its input, statistics and output
    router = 4096 * 8 * 12  # scores and the order of all choices
    assert held.tolist() == [32 * (norm + router)]
    assert MIXTRAL.moe is not None
    shared = replace(MIXTRAL, moe=replace(MIXTRAL.moe, shared_expert_ffn_hidden_size=1024))
    both = [Techniques(cuda_graphs=("moe_router",), overlap_shared_expert=overlapped) for overlapped in (False, True)]
    jobs = [job_of(shared, layout, MEGATRON, techniques) for techniques in both]
    inside, outside = (
        captured_activations(each, all_ranks(each, LayoutColumns.of([layout]), np.array([8]))) for each in jobs
    )
    assert (inside - outside).tolist() == [32 * 4096 * 1024 * 6]


@pytest.mark.parametrize("scopes", SCOPES, ids=["+".join(scopes) for scopes in SCOPES])
@pytest.mark.parametrize("layout", [TENSOR, STAGES, replace(STAGES, virtual_pipeline=2, recompute=1)])
def test_no_graph_spares_memory(layout: Layout, scopes: tuple[str, ...]) -> None:
    graphed = ranks(LLAMA3_8B, layout, techniques=Techniques(cuda_graphs=scopes))
    for plain, more in zip(ranks(LLAMA3_8B, layout), graphed, strict=True):
        assert more.device_bytes > plain.device_bytes
        assert {
            name: size for name, size in more.terms.items() if name not in ("cuda_graphs", "allocator_cache")
        }.items() >= {"parameters": plain.terms["parameters"]}.items()


def test_what_a_layer_recomputes_lies_in_its_pool() -> None:
    stage = replace(STAGES, recompute=RECOMPUTE_SELECTIVE)
    graphed = Techniques(cuda_graphs=("layer",), recompute_modules=("mlp",))
    job = job_of(LLAMA3_8B, stage, MEGATRON, graphed)
    rows = all_ranks(job, LayoutColumns.of([stage]), np.array([8]))
    loss, _, layer, _ = (moment["cuda_graphs"] for moment in transient_terms(job, rows).moments)
    temporary = layer_backward(job, rows) + recomputed_layer(job, rows)
    assert np.abs(loss - layer - temporary)[1:].max() <= 1
    assert recomputed_layer(job, rows).min() > 0
