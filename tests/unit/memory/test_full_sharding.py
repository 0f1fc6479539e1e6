"""Fully sharded data parallelism: what is gathered, what is not yet reduced, and which moment is the peak."""

from __future__ import annotations

import numpy as np
import pytest
from shapes import LLAMA2_7B, LLAMA3_8B, LLAMA3_70B, MIXTRAL, job_of, ranks

from llmlaunch.facts import MemoryFacts
from llmlaunch.frameworks.megatron.facts import MegatronOptions
from llmlaunch.frameworks.megatron.sharding_rules import megatron_fsdp_facts
from llmlaunch.layout import RECOMPUTE_FULL, Layout, LayoutColumns
from llmlaunch.memory.estimator import RankEstimate
from llmlaunch.memory.job import all_ranks
from llmlaunch.memory.states import states
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.units import GIB
from validation.fsdp import (
    atorch_facts,
    internevo_facts,
    torchtitan_facts,
    torchtune_facts,
)

LLAMA3_8B_PARAMETERS = 8_030_261_248
LLAMA2_7B_PARAMETERS = 6_738_415_616
BLOCK, ROOT = (
    218_112_000,
    2 * 128256 * 4096 + 4096,
)  # parameters of Llama 3 8B's blocks, each, and of what is around them
TITAN = torchtitan_facts(compiled=True, compiled_loss=False, float8_gather=False, tensor=1)


def peak(
    facts: MemoryFacts,
    layout: Layout,
    length: int = 4096,
    shape: ModelShape = LLAMA3_8B,
    microbatches: int = 1,
    techniques: Techniques = NO_TECHNIQUES,
    rank: int = 0,
) -> RankEstimate:
    return ranks(shape, layout, facts, techniques, length, microbatches)[rank]


def sharded(data: int, **more: int) -> Layout:
    return Layout(data=data, zero_stage=3, **more)


@pytest.mark.parametrize("expert", [1, 8])
def test_only_what_rests_in_shards_is_gathered_and_reduced(expert: int) -> None:
    """Experts alone, where two tensor-parallel ranks hold the same ones and share them; all but the experts, where
    eight ranks hold others each."""
    layout = Layout(tensor=2, zero_stage=3) if expert == 1 else Layout(data=8, expert=8, zero_stage=3)
    facts = megatron_fsdp_facts(MegatronOptions(gradient_accumulation_fusion=False))
    job = job_of(MIXTRAL, layout, facts, NO_TECHNIQUES, 4096, 1)
    priced = states(job, all_ranks(job, LayoutColumns.of([layout])))
    if expert == 1:  # a layer's are more than the billion elements that may be on their way
        experts = 8 * 3 * 4096 * 14336
        assert priced.gathered[0] == 2 * 2 * experts
        assert priced.unreduced[0] == (2 + 2 * 4) * experts
    else:
        block = 2 * 4096**2 + 2 * 4096 * 1024 + 8 * 4096 + 2 * 4096
        root = 2 * 32000 * 4096 + 4096
        assert priced.gathered[0] == 2 * (13 * block + root), "its own and half a billion elements ahead"
        assert priced.unreduced[0] == 2 * (block + 32000 * 4096) + 4 * 10**9


def test_a_pure_16_bit_adam_step_with_foreach_holds_ten_bytes_a_parameter() -> None:
    facts = torchtune_facts("bf16", True, True, optimizer_in_backward=False, fused_optimizer=False)
    terms = peak(facts, Layout(recompute=RECOMPUTE_FULL), length=128).terms
    step = sum(terms[name] for name in ("parameters", "gradients", "optimizer_states", "optimizer_step"))
    assert step == 10 * LLAMA3_8B_PARAMETERS  # 74.79 GiB, traced; 74.807 GiB measured with what is around it
    assert step / GIB == pytest.approx(74.79, abs=0.005)


def test_an_optimizer_in_the_backward_pass_never_holds_all_gradients() -> None:
    def of(in_backward: bool) -> RankEstimate:
        return peak(torchtune_facts("bf16", True, True, in_backward), Layout(recompute=RECOMPUTE_FULL), length=128)

    assert of(True).terms["gradients"] == 0
    largest_matrix = 2 * 128256 * 4096
    assert of(False).allocated_bytes - of(True).allocated_bytes >= 2 * LLAMA3_8B_PARAMETERS - largest_matrix


def test_states_fall_with_the_shard_group_as_measured() -> None:
    """ATorch, Llama 2 7B: 39596.3 MiB on 8 devices, 34776.7 on 16, 32366.8 on 32 (dlrover 11bf2fb)."""
    layouts = [sharded(n, micro_batch_size=4, recompute=RECOMPUTE_FULL) for n in (8, 16, 32)]
    allocated = [peak(atorch_facts(), layout, shape=LLAMA2_7B).allocated_bytes / 2**20 for layout in layouts]
    measured = np.array([39596.3, 34776.7, 32366.8])
    assert np.diff(allocated) == pytest.approx(np.diff(measured), rel=0.01)
    assert -np.diff(allocated)[0] * 2**20 == pytest.approx(12 * LLAMA2_7B_PARAMETERS / 16, rel=1e-6)


def test_internevos_step_holds_28_bytes_a_parameter() -> None:
    terms = peak(internevo_facts(), sharded(4, recompute=RECOMPUTE_FULL), length=2048, microbatches=4).terms
    step = sum(terms[name] for name in ("parameters", "gradients", "optimizer_states", "optimizer_step"))
    assert step == pytest.approx(28 * LLAMA3_8B_PARAMETERS / 4)


@pytest.mark.parametrize("gradients", ["fp32", "bf16"])
def test_megatron_fsdp_gathers_and_reduces_up_to_its_limits(gradients: str) -> None:
    facts = megatron_fsdp_facts(MegatronOptions(gradient_dtype=gradients))
    terms = peak(facts, sharded(8, recompute=RECOMPUTE_FULL), length=1024).terms
    assert terms["gathered_parameters"] == 2 * (ROOT + 4 * BLOCK)  # one, and three more to reach half a billion
    assert terms["unreduced_gradients"] == (4 if gradients == "fp32" else 2) * 1_000_000_000


LINEAR_WEIGHTS = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)  # of Llama 3 8B's blocks


@pytest.mark.parametrize(
    ("recipe", "capability", "shard_bytes", "scale_bytes", "gathered_bytes"),
    [
        ("tensorwise", 10.0, 1.0, 0.0, 1.0),
        ("tensorwise", 9.0, 1.0, 0.0, 2.0),  # Hopper's transposed weights are made when a unit is gathered
        ("mxfp8", 10.0, 2.0, 2 / 32, 2 + 2 / 32),  # both orientations rest in shards, their scales whole
    ],
)
def test_narrow_parameters_of_megatron_fsdp_rest_in_shards(
    recipe: str, capability: float, shard_bytes: float, scale_bytes: float, gathered_bytes: float
) -> None:
    options = MegatronOptions(fp8_recipe=recipe, fp8_parameters=True, compute_capability=capability)
    facts, others = megatron_fsdp_facts(options), LLAMA3_8B_PARAMETERS - LINEAR_WEIGHTS
    assert facts.states.full_sharding is not None
    assert facts.states.full_sharding.gathered_bytes == gathered_bytes
    terms = peak(facts, sharded(64)).terms
    assert terms["parameters"] == round(2 * others / 64)
    assert terms["weight_copies"] == round(shard_bytes * LINEAR_WEIGHTS / 64 + scale_bytes * LINEAR_WEIGHTS)
    # ZeRO 2 shards gradients alone
    whole = peak(facts, Layout(data=64, zero_stage=2)).terms
    assert whole["parameters"] == 2 * others
    assert whole["weight_copies"] == gathered_bytes * LINEAR_WEIGHTS


def test_narrow_copies_beside_sharded_parameters_are_cached_whole() -> None:
    """Transformer Engine's linear layers cache them for the next micro-batch and know nothing of units
    (transformer_engine/pytorch/module/linear.py `_fp8_workspaces`, 2.20)."""
    options = MegatronOptions(fp8_recipe="tensorwise", compute_capability=10.0)
    for layout in (sharded(64), Layout(data=64, zero_stage=2)):
        assert peak(megatron_fsdp_facts(options), layout).terms["weight_copies"] == LINEAR_WEIGHTS


def test_narrow_parameters_in_shards_do_not_hide_a_death() -> None:
    """Llama 3 70B on 64 B200 without recompute was priced at 55.6 GiB, with -125.4 GiB of parameters: 145 GiB of
    activations, 17 of gradients and states, 17 gathered or not reduced yet, the cache and the context are 186."""
    options = MegatronOptions(fp8_recipe="tensorwise", fp8_parameters=True, compute_capability=10.0)
    rank = peak(megatron_fsdp_facts(options), sharded(64), length=8192, shape=LLAMA3_70B)
    assert rank.device_bytes / GIB == pytest.approx(186, abs=2)
    assert min(rank.terms.values()) >= 0


def test_outputs_that_hold_keys_and_values_hold_them_through_the_backward_pass() -> None:
    layout = sharded(8, micro_batch_size=4, recompute=RECOMPUTE_FULL)
    terms = peak(atorch_facts(), layout, shape=LLAMA2_7B).terms
    assert terms["returned_keys_values"] == 32 * 2 * 2 * 4096 * 4 * 4096  # 8 GiB
    assert "returned_keys_values" not in peak(TITAN, layout, shape=LLAMA2_7B).terms
