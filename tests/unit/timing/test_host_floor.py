"""The host's floor under a step: what one thread takes to launch a layer's kernels and to gather parameters module by
module, for every trainer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timed_jobs import BASE, FACTS, LLAMA, term, total

from llmlaunch.facts import MemoryFacts
from llmlaunch.families.hub_ids import load_preset
from llmlaunch.frameworks.deepspeed.facts import DeepSpeedOptions, deepspeed_facts
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.memory.job import Job
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.timing.products import constant, replaced
from llmlaunch.workload import Workload
from support.changed_facts import changed
from support.soak import examples

EAGER, LIGER = deepspeed_facts(), deepspeed_facts(DeepSpeedOptions(liger=True))
SHORT, LONG = Workload(256, 64), Workload(16384, 64)


def trained(
    facts: MemoryFacts = EAGER, work: Workload = SHORT, techniques: Techniques = NO_TECHNIQUES, model: str = "llama3-8b"
) -> Job:
    return Job(load_preset(model), work, facts, techniques=techniques)


def spread(zero_stage: int = 2, recompute: int = 0) -> Layout:
    return Layout(1, 1, data=8, zero_stage=zero_stage, recompute=recompute)


@pytest.mark.parametrize("facts", [FACTS, EAGER, LIGER])
@examples(5, 2000)
@given(st.sampled_from([128, 512, 2048, 8192]), st.integers(0, 3), st.integers(0, 2), st.floats(0, 1e-4))
def test_a_slower_host_never_makes_a_step_faster_nor_a_step_shorter_than_its_device_needs(
    facts: MemoryFacts, tokens: int, zero_stage: int, recompute: int, seconds: float
) -> None:
    job, layout = trained(facts, Workload(tokens, 64)), spread(zero_stage, recompute)
    with replaced({"kernel_host_seconds": 0.0, "gather_host_seconds": 0.0}):
        device = total(layout, job)
    with replaced({"kernel_host_seconds": seconds}):
        bound = total(layout, job)
    with replaced({"kernel_host_seconds": 2 * seconds}):
        assert device <= bound <= total(layout, job) * (1 + 1e-12)


@examples(8, 2000)
@given(st.sampled_from([128, 1024, 8192]), st.floats(1, 4), st.integers(0, 3))
def test_more_kernels_are_never_faster(tokens: int, times: float, zero_stage: int) -> None:
    launched = tuple(times * count for count in EAGER.layer.kernels.launched)
    more = changed(EAGER, kernels=replace(EAGER.layer.kernels, launched=launched))
    work = Workload(tokens, 64)
    assert total(spread(zero_stage), trained(EAGER, work)) <= total(spread(zero_stage), trained(more, work))


def test_a_step_of_short_sequences_takes_what_the_host_takes() -> None:
    """Four times the tokens cost a host that cannot keep up nothing; a layer takes what launching it takes."""
    first, second = (total(spread(), trained(EAGER, Workload(tokens, 64))) for tokens in (32, 128))
    assert second == pytest.approx(first, rel=0.05)
    launched = 8 * LLAMA.num_layers * sum(EAGER.layer.kernels.launched) * constant("kernel_host_seconds")
    assert launched < first < 1.5 * launched


@pytest.mark.parametrize("facts", [FACTS, EAGER])
def test_the_floor_vanishes_under_large_models_and_long_sequences(facts: MemoryFacts) -> None:
    for layout in (spread(2), spread(3)):
        job = trained(facts, LONG, model="llama3-70b")
        with replaced({"kernel_host_seconds": 0.0, "gather_host_seconds": 0.0}):
            device = total(layout, job)
        assert total(layout, job) == pytest.approx(device, rel=1e-9)
        assert term("gather_hooks", layout, job) == 0


def test_hooks_that_gather_parameters_hold_up_short_steps_alone() -> None:
    assert term("gather_hooks", spread(3), trained()) > 0
    assert term("gather_hooks", spread(3, RECOMPUTE_FULL), trained()) > term("gather_hooks", spread(3), trained())
    assert term("gather_hooks", spread(2), trained()) == 0
    assert term("gather_hooks", spread(3), trained(work=LONG)) == 0
    assert (
        term("gather_hooks", replace(BASE, zero_stage=3), Job(LLAMA, SHORT, FACTS)) == 0
    )  # Megatron has no such hooks


def test_what_is_gathered_in_the_step_is_waited_for() -> None:
    hidden = changed(EAGER, gathered_in_step=False)
    assert term("data_parallel", spread(2), trained(EAGER, LONG)) > term(
        "data_parallel", spread(2), trained(hidden, LONG)
    )
    late = changed(EAGER, reduced_at_end=True)
    assert term("data_parallel", spread(1), trained(late, LONG)) > term(
        "data_parallel", spread(1), trained(EAGER, LONG)
    )
