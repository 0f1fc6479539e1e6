"""No term is negative, and no rank needs less than its parameters, gradients and optimizer states, whatever the
trainer, the number formats, the sharding and the techniques.

The bound knows nothing of the formula: exact parameter counts, the sizes of the groups that may share them, and what
each trainer keeps of a parameter, written down by hand (`Trainer`).
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_jobs import TRAINERS, RandomJob, Trainer, random_jobs
from shapes import LLAMA3_8B

from llmlaunch.frameworks.deepspeed.facts import DeepSpeedOptions, deepspeed_facts
from llmlaunch.frameworks.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.estimator import estimate
from llmlaunch.memory.host import HostNode
from llmlaunch.memory.job import Job, all_ranks
from llmlaunch.memory.layer_bytes import layers_of
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.requests import Adapters
from llmlaunch.workload import Workload
from support.soak import examples


def parameters_of(shape: ModelShape, layout: Layout, rank: int) -> tuple[float, float]:
    """(dense, expert) parameters of a pipeline rank, on each of the devices that split them at most."""
    count, stages = count_parameters(shape), layout.pipeline * layout.virtual_pipeline
    split = layout.layers_by_stage or (shape.num_layers // stages,) * stages
    starts = [sum(split[:stage]) for stage in range(stages)]
    mine = [
        count.layers[layer]
        for stage in range(rank, stages, layout.pipeline)
        for layer in range(starts[stage], starts[stage] + split[stage])
    ]
    dense, expert = sum(layer.total - layer.experts for layer in mine), sum(layer.experts for layer in mine)
    dense += count.embedding * (rank == 0) + count.head * (rank == layout.pipeline - 1)
    return dense / layout.tensor, expert / (layout.expert * layout.expert_tensor)


def least_bytes(trainer: Trainer, shape: ModelShape, layout: Layout, techniques: Techniques, rank: int) -> float:
    dense, expert = parameters_of(shape, layout, rank)
    ranks = layout.tensor * layout.context * layout.data
    everywhere = dense + expert
    shards = dense / (layout.data * layout.context) + expert * layout.expert * layout.expert_tensor / ranks

    def spread(first_stage: int) -> float:
        return shards if layout.zero_stage >= first_stage else everywhere

    parameters = 0.0 if techniques.offload_parameters else trainer.parameter * spread(trainer.sharded_from)
    if techniques.adapters is not None or techniques.trained_layers is not None:
        return parameters  # little or nothing else is trained
    here = 1.0 - techniques.offload_optimizer
    gradients = (1.0 if trainer.offloads is None else here) * trainer.gradient * spread(2)
    return parameters + gradients + here * trainer.states * spread(1)


def negative(terms: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in terms.items() if size < 0}


@pytest.mark.parametrize("name", TRAINERS)
@examples(5, 1000)  # of each trainer
@given(data=st.data())
def test_no_term_is_negative_and_no_rank_needs_less_than_its_states(name: str, data: st.DataObject) -> None:
    drawn: RandomJob = data.draw(random_jobs(name))
    priced = estimate(drawn.job, drawn.layout, drawn.microbatches, node=HostNode(8))
    assert priced.fault is None  # nor does the guard see what is not there
    assert not negative(priced.host_terms)
    for rank in priced.ranks:
        assert not negative(rank.terms)
        assert sum(rank.terms.values()) == rank.device_bytes
        assert rank.allocated_bytes <= rank.reserved_bytes <= rank.device_bytes
        least = least_bytes(drawn.trainer, drawn.job.shape, drawn.layout, drawn.job.techniques, rank.pipeline_rank)
        assert rank.allocated_bytes >= least - 1024, (rank.terms, least)


@pytest.mark.parametrize(
    ("techniques", "pipeline"),
    [(Techniques(adapters=Adapters(16)), 1), (Techniques(trained_layers=3), 1), (Techniques(trained_layers=3), 4)],
)
def test_muon_spares_states_of_trained_matrices_alone(techniques: Techniques, pipeline: int) -> None:
    """-3.2 GiB of states were priced for adapters on Llama 3 8B, -1.6 for three layers; random jobs rarely meet it."""
    job = Job(LLAMA3_8B, Workload(4096, 8), megatron_facts(MegatronOptions(muon=True)), techniques=techniques)
    priced = estimate(job, Layout(pipeline=pipeline, data=8, zero_stage=1))
    assert min(rank.terms["optimizer_states"] for rank in priced.ranks) >= 0
    assert priced.ranks[-1].terms["optimizer_states"] > 0


def test_adapters_free_no_more_of_a_norm_than_a_rank_holds() -> None:
    """With sequence parallelism a rank holds an eighth; the whole copy was taken from it."""
    facts, layout = deepspeed_facts(DeepSpeedOptions()), Layout(tensor=8, sequence_parallel=1)
    job = Job(LLAMA3_8B, Workload(4096, 1), facts, techniques=Techniques(adapters=Adapters(16)))
    (saved,) = layers_of(job, all_ranks(job, LayoutColumns.of([layout]))).tensors
    assert not {name: tensor for name, tensor in saved.items() if tensor.bytes.min() < 0}
