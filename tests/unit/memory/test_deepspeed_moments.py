"""DeepSpeed's bytes: which row a configuration takes, and when gradients, buckets and gathered parameters are alive."""

from __future__ import annotations

from dataclasses import replace

import pytest
from shapes import LLAMA3_8B, ranks

from llmlaunch.facts import Gathering, MemoryFacts
from llmlaunch.frameworks.deepspeed.facts import DeepSpeedOptions, ZeroSettings, deepspeed_facts, engine_of
from llmlaunch.layers.modules import ModuleSplit
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.memory.estimator import RankEstimate
from llmlaunch.memory.gathering import gathered
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from support.changed_facts import changed

PARAMETERS = count_parameters(LLAMA3_8B).total
TABLE = LLAMA3_8B.vocab_size * LLAMA3_8B.hidden_size
SHORT = 8  # tokens: activations of next to nothing
BARE = {"workspace_bytes": 0.0, "cache_share": 0.0, "bucket_bytes": 0.0, "gathering": None}


def rank(
    facts: MemoryFacts,
    layout: Layout,
    tokens: int = SHORT,
    microbatches: int = 1,
    techniques: Techniques = NO_TECHNIQUES,
) -> RankEstimate:
    return ranks(LLAMA3_8B, layout, facts, techniques, tokens, microbatches)[0]


def state(estimated: RankEstimate) -> float:
    """Bytes per parameter of what lasts."""
    return sum(estimated.terms[name] for name in ("parameters", "optimizer_states", "gradients")) / PARAMETERS


@pytest.mark.parametrize(
    ("stage", "precision", "accumulation", "offload", "name"),
    [
        (0, "bf16", None, False, "FP16_Optimizer, FP16_UnfusedOptimizer"),
        (0, "fp32", None, False, "AdamW"),
        (1, "bf16", "fp32", False, "BF16_Optimizer"),
        (1, "bf16", "fp32", True, "DeepSpeedZeroOptimizer"),
        (2, "fp16", None, False, "DeepSpeedZeroOptimizer"),
        (3, "fp32", None, True, "DeepSpeedZeroOptimizer_Stage3"),
    ],
)
def test_the_row_is_that_of_the_class_deepspeed_takes(
    stage: int, precision: str, accumulation: str | None, offload: bool, name: str
) -> None:
    assert engine_of(stage, DeepSpeedOptions(precision, accumulation, offload)).name == name


def test_without_zero_fp32_has_no_master_copy() -> None:
    plain = deepspeed_facts(DeepSpeedOptions("fp32"))
    assert state(rank(plain, Layout(data=4))) == pytest.approx(12.0)
    assert state(rank(plain, Layout(data=4, zero_stage=1))) == pytest.approx(4.0 + 12.0 / 4.0)


def test_the_bf16_optimizer_keeps_whole_fp32_gradients() -> None:
    wide = deepspeed_facts(DeepSpeedOptions("bf16", accumulation="fp32"))
    assert state(rank(wide, Layout(data=8, zero_stage=1))) == pytest.approx(2.0 + 4.0 + 12.0 / 8.0)


def test_zero_3_starts_from_the_whole_model_unless_it_is_made_in_shards() -> None:
    layout = Layout(data=64, zero_stage=3)
    whole = rank(changed(deepspeed_facts(DeepSpeedOptions(offload_optimizer=True)), **BARE), layout)
    split = changed(deepspeed_facts(DeepSpeedOptions(offload_optimizer=True, split_from_start=True)), **BARE)
    assert whole.allocated_bytes == 2 * PARAMETERS
    assert rank(split, layout).allocated_bytes < PARAMETERS


def test_a_fused_loss_makes_the_heads_gradient_in_the_forward_pass() -> None:
    """Liger: the sum, one chunk's product and its fp32 copy, and one head-sized gradient later on."""
    facts = changed(deepspeed_facts(DeepSpeedOptions(liger=True)), **BARE, flat_step=False)
    loss = rank(facts, Layout(data=8, zero_stage=2), 16384).terms["logits_and_loss"]
    hidden = 16384 * LLAMA3_8B.hidden_size
    assert loss == pytest.approx(8 * TABLE + 2 * 2 * hidden + 2 * 2 * hidden + 4 * 16384)


def test_a_linear_that_keeps_its_weight_keeps_all_that_is_gathered_unless_layers_are_recomputed() -> None:
    """`memory_efficient_linear: false`: whole parameters in the compute type beside the shard."""
    facts = changed(
        deepspeed_facts(DeepSpeedOptions(zero=ZeroSettings(memory_efficient_linear=False), split_from_start=True)),
        **BARE,
    )
    layout = Layout(data=8, zero_stage=3)
    assert rank(facts, layout).terms["parameters"] == pytest.approx(2 * PARAMETERS / 8 + 2 * PARAMETERS, abs=1)
    recomputed = rank(facts, replace(layout, recompute=RECOMPUTE_FULL)).terms["parameters"]
    assert recomputed == pytest.approx(2 * PARAMETERS / 8 + 2 * TABLE, abs=1)


def test_checkpoints_cut_from_mlp_blocks_waste_a_part_of_them() -> None:
    """3.5 layer inputs fit a block of the MLP's width, so half of one is lost to every three."""
    cut = changed(deepspeed_facts(DeepSpeedOptions(split_from_start=True)), **BARE, flat_step=False)
    layout = Layout(data=8, zero_stage=3, recompute=RECOMPUTE_FULL)
    wasted = (
        rank(cut, layout, 65536).reserved_bytes
        - rank(changed(cut, cut_checkpoints=False), layout, 65536).reserved_bytes
    )
    inputs = 32 * 65536 * LLAMA3_8B.hidden_size * 2
    assert wasted == pytest.approx(inputs * 0.5 / 3)


def step_of(facts: MemoryFacts, layout: Layout) -> float:
    """Bytes of the optimizer step's temporaries, where nothing else can be the peak."""
    alone = changed(facts, **BARE, lasting_bucket_bytes=0.0, logit_bytes=0.0, logit_gradient_bytes=0.0)
    return rank(alone, layout).terms["optimizer_step"]


def test_zero_3_steps_one_sub_group_at_a_time() -> None:
    """The fp32 gradient and a flat copy of that in bf16, of 1e9 parameters and the last one beyond them."""
    facts = deepspeed_facts(DeepSpeedOptions(split_from_start=True))
    assert step_of(facts, Layout(data=2, zero_stage=3)) == pytest.approx(6 * (1e9 + TABLE / 2))
    assert step_of(facts, Layout(data=16, zero_stage=3)) == pytest.approx(6 * PARAMETERS / 16)
    assert step_of(facts, Layout(data=2, zero_stage=2)) == pytest.approx(8 * PARAMETERS / 2)


def test_an_optimizer_that_is_not_fused_takes_two_more_bytes() -> None:
    """The root of the second moments, 4 bytes, after the flat copy of the gradients is gone."""
    fused, foreach = (
        step_of(deepspeed_facts(DeepSpeedOptions(fused_optimizer=is_fused, split_from_start=True)), layout)
        for is_fused, layout in ((True, Layout(data=16, zero_stage=3)), (False, Layout(data=16, zero_stage=3)))
    )
    assert foreach - fused == pytest.approx(2 * PARAMETERS / 16)


def test_a_single_device_copies_parameters_from_the_host() -> None:
    """What it holds of them is what several devices hold."""
    facts = replace(deepspeed_facts(DeepSpeedOptions(offload_optimizer=True, split_from_start=True)))
    streamed = Techniques(offload_optimizer=1.0, offload_parameters=True)

    def parameters(devices: int, techniques: Techniques) -> float:
        return rank(facts, Layout(data=devices, zero_stage=3), techniques=techniques).terms["parameters"]

    most = max(gathered(LLAMA3_8B, ModuleSplit(), None, Gathering(), again).most for again in (False, True))
    assert parameters(1, streamed) == parameters(8, streamed) == 2 * most
    assert parameters(1, Techniques(offload_optimizer=1.0)) == 2 * PARAMETERS


def test_ulysses_ranks_share_states_and_reduce_in_fp32() -> None:
    facts = deepspeed_facts(DeepSpeedOptions(sequence_ranks=4, split_from_start=True))
    alone = deepspeed_facts(DeepSpeedOptions(split_from_start=True))
    assert state(rank(changed(facts, **BARE), Layout(data=2, context=4, zero_stage=1))) == pytest.approx(2.0 + 12.0 / 8)
    assert (alone.zero.widened_bucket_bytes, facts.zero.widened_bucket_bytes) == (0.0, 4.0)
    assert facts.zero.bucket_bytes == alone.zero.bucket_bytes
