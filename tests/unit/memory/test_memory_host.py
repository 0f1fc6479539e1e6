"""Host memory of a node: its processes times what each of them keeps there, named and summing exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shapes import LLAMA3_8B

from llmlaunch.frameworks.deepspeed.facts import deepspeed_facts, loading_facts
from llmlaunch.frameworks.megatron.facts import megatron_facts
from llmlaunch.layout import Layout
from llmlaunch.memory.constants import constant
from llmlaunch.memory.estimator import Estimate, estimate
from llmlaunch.memory.host import HostNode
from llmlaunch.memory.job import Job
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.workload import Workload

NODE = HostNode(processes=8)
WORK = Workload(8192, 64, "bf16")
PARAMETERS = 8_030_261_248
DATA_8 = Layout(data=8, zero_stage=1)


def megatron(layout: Layout, node: HostNode = NODE, techniques: Techniques = NO_TECHNIQUES) -> Estimate:
    return estimate(Job(LLAMA3_8B, WORK, megatron_facts(), techniques=techniques), layout, node=node)


def deepspeed(layout: Layout, node: HostNode = NODE, techniques: Techniques = NO_TECHNIQUES) -> Estimate:
    return estimate(Job(LLAMA3_8B, WORK, deepspeed_facts(), techniques=techniques), layout, node=node)


def next_power_of_two(size: float) -> int:
    return 1 << (round(size) - 1).bit_length()


@pytest.mark.parametrize("layout", [DATA_8, Layout(tensor=2, pipeline=2, data=2, micro_batch_size=2)])
def test_terms_are_of_the_whole_node_and_sum_to_it(layout: Layout) -> None:
    priced = megatron(layout, HostNode(processes=8, checkpoints=True))
    assert priced.host_bytes_per_node == sum(priced.host_terms.values())
    assert priced.host_terms["processes"] == 8 * constant("process_host_bytes")


def test_without_the_nodes_nothing_is_said() -> None:
    assert estimate(Job(LLAMA3_8B, WORK, megatron_facts()), DATA_8).host_bytes_per_node is None


def test_deepspeed_writes_one_tensor_after_the_other() -> None:
    """The flat 16-bit parameters, whole on each rank under ZeRO 1, are the largest; under ZeRO 3 an fp32 shard is."""
    saves = HostNode(processes=8, checkpoints=True)
    assert deepspeed(DATA_8, saves).host_terms["checkpoint"] == pytest.approx(8 * 2 * PARAMETERS, rel=1e-3)
    sharded = deepspeed(replace(DATA_8, zero_stage=3), saves)
    assert sharded.host_terms["checkpoint"] == pytest.approx(4 * PARAMETERS, rel=1e-3)


def test_deepspeeds_offloaded_states_are_pinned_in_powers_of_two() -> None:
    """ZeRO 2: 8 bytes of moments as they are; 12 bytes pinned, whose flat fp32 tensor is rounded up."""
    offloaded = deepspeed(replace(DATA_8, zero_stage=2), techniques=Techniques(offload_optimizer=1.0))
    shard = PARAMETERS / 8
    pinned = 12 * shard * next_power_of_two(4 * shard) / (4 * shard)
    assert offloaded.host_terms["offloaded_optimizer"] == pytest.approx(8 * (8 * shard + pinned), rel=1e-3)


def offloaded_activations(job: Job, heads: int) -> int:
    job = replace(job, shape=replace(LLAMA3_8B, mtp_num_layers=heads))
    return estimate(job, Layout(data=8), node=NODE).host_terms["offloaded_activations"]


@pytest.mark.parametrize("pinned", [True, False])
def test_a_prediction_heads_layer_leaves_the_device_like_each_of_the_decoders(pinned: bool) -> None:
    """One layer's stay on the device."""
    facts = megatron_facts()
    facts = replace(facts, host=replace(facts.host, activations_pinned=pinned))
    job = Job(LLAMA3_8B, WORK, facts, techniques=Techniques(offload_modules=("core_attn",)))
    without, one = (offloaded_activations(job, heads) for heads in (0, 1))
    assert one / 32 == without / 31 > 0


def test_the_loader_holds_five_batches_and_masks_where_it_makes_them() -> None:
    """On one rank of each tensor-parallel group: four of eight at tensor 2."""
    layout = Layout(tensor=2, data=4, micro_batch_size=2)
    assert megatron(layout).host_terms["data_loader"] == 4 * 5 * 2 * 40 * 8192
    facts = megatron_facts()
    masks = Job(LLAMA3_8B, WORK, replace(facts, host=replace(facts.host, loader_mask=True)))
    made = 4 * 2 * 8 * 8192**2  # by two workers at a time
    loader = estimate(masks, layout, node=NODE).host_terms["data_loader"]
    assert loader == 4 * 5 * 2 * (8192**2 + 40 * 8192) + made


def test_on_a_cpu_the_processes_are_the_host_memory_and_counted_once() -> None:
    priced = deepspeed(Layout(data=2), HostNode(processes=2, resident=True))
    assert priced.host_bytes_per_node == 2 * priced.worst.device_bytes
    assert {name for name, value in priced.host_terms.items() if value} == {"processes"}


def loading(stage: int, processes: int = 8, techniques: Techniques = NO_TECHNIQUES) -> int:
    job = Job(LLAMA3_8B, WORK, loading_facts(deepspeed_facts()), techniques=techniques)
    node = HostNode(processes=processes)
    return estimate(job, replace(DATA_8, zero_stage=stage), node=node).host_terms["loading"]


def test_under_zero_3_the_first_rank_alone_reads_the_checkpoint() -> None:
    assert loading(3) == pytest.approx(2 * PARAMETERS, abs=8)
    assert loading(3, processes=1) == 2 * PARAMETERS


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_model_that_is_not_made_in_shards_is_whole_on_every_rank_while_it_is_loaded(stage: int) -> None:
    assert loading(stage) == 8 * 2 * PARAMETERS


def test_states_that_come_later_take_the_memory_that_loading_has_let_go_of() -> None:
    offloaded = Techniques(offload_optimizer=1.0)
    assert loading(3, techniques=offloaded) == 0
    job = Job(LLAMA3_8B, WORK, loading_facts(deepspeed_facts()))
    terms = estimate(job, DATA_8, node=HostNode(processes=8, checkpoints=True)).host_terms
    assert terms["loading"] + terms["checkpoint"] == pytest.approx(8 * 2 * PARAMETERS, abs=8)
