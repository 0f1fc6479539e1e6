"""When a job is told to save: early enough for the checkpoint, and never more than sbatch can be told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmlaunch.errors import UserError
from llmlaunch.frameworks.checkpoints import checkpoint_bytes, lead_seconds, refuse_short_time, save_seconds, tracker
from llmlaunch.frameworks.resharding import other_world_refusal, reshards, saved_by_parameter
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.recipe.types import Recipe
from support.recipes import recipe_of

SAVING = ("training.save_interval=100", "training.checkpoint_path=/ckpt")
BIG = Layout(8, 4, virtual_pipeline=5, data=16, sequence_parallel=1, zero_stage=1)


def saving(name: str, *overrides: str) -> Recipe:
    return recipe_of(name, *SAVING, *overrides)


def test_what_the_person_says_a_checkpoint_takes_counts() -> None:
    recipe = saving("llama3-70b", "restart={save_seconds: 300}")
    assert save_seconds(recipe, BIG) == 300
    # told during a regular save, Megatron-LM saves twice
    assert lead_seconds(recipe, BIG, 20.0) == 2 * 300 + 2 * 20 + 60


def test_a_job_that_is_to_save_may_have_to_end_an_evaluation_first() -> None:
    recipe = saving("llama3-70b", "restart={save_seconds: 300}", "training.evaluation={interval: 50, iterations: 30}")
    assert lead_seconds(recipe, BIG, 20.0) == 2 * 300 + 2 * 20 + 30 * 20 / 3 + 60


def test_the_lead_covers_save_and_step_and_fits_sbatch() -> None:
    recipe = saving("llama3-70b")
    seconds = save_seconds(recipe, BIG)
    assert seconds >= checkpoint_bytes(recipe) / 57.5e9  # the fastest file system a source speaks of
    for step in (None, 0.1, 600.0):
        assert seconds + (step or 0) < lead_seconds(recipe, BIG, step) <= 65535


def test_a_checkpoint_of_70_billion_parameters_is_a_terabyte() -> None:
    assert checkpoint_bytes(saving("llama3-70b")) == pytest.approx(70.55e9 * 14, rel=0.001)


def test_a_small_checkpoint_still_has_two_minutes() -> None:
    recipe = saving("quickstart")
    assert save_seconds(recipe, Layout(data=2)) == 120
    assert lead_seconds(recipe, Layout(data=2), 1.0) == 120 + 2 + 60


def test_a_lead_no_sbatch_takes_is_refused() -> None:
    with pytest.raises(UserError, match="at most 65535; set restart"):
        lead_seconds(saving("quickstart", "restart={save_seconds: 65535}"), Layout(data=2), 1.0)


@pytest.mark.parametrize(
    ("slurm", "message"),
    [
        *((f"{{time: '{time}'}}", r"time: \d+ s are less than twice the 182 s") for time in ("5", "4:59", "0-0:05")),
        ("{time: '1-0', time-min: '2'}", "time-min: 120 s"),
    ],
)
def test_a_limit_that_leaves_no_time_to_train_is_refused_whichever_slurm_may_give(slurm: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"slurm\.{message}"):
        refuse_short_time(saving("quickstart", f"slurm={slurm}"), 182)


@pytest.mark.parametrize("limit", ["7", "1:00:00", "1-0", "UNLIMITED"])
def test_a_longer_limit_is_not(limit: str) -> None:
    refuse_short_time(saving("quickstart", f'slurm.time="{limit}"'), 182)


def test_each_backend_names_its_last_checkpoint_in_a_file() -> None:
    assert tracker(saving("llama3-70b")) == "latest_checkpointed_iteration.txt"
    assert tracker(saving("quickstart")) == "latest"


def test_a_checkpoint_does_not_care_what_is_recomputed() -> None:
    for name, layout in (("llama3-70b", BIG), ("quickstart", Layout(data=2, micro_batch_size=2, zero_stage=2))):
        lighter = replace(layout, micro_batch_size=1, recompute=RECOMPUTE_FULL)
        assert reshards(saving(name), layout, lighter)


def test_zero_loads_at_its_own_stage_and_our_script_converts_it_for_other_ranks() -> None:
    recipe, saved = saving("quickstart"), Layout(data=2, zero_stage=1)
    assert not reshards(recipe, saved, replace(saved, zero_stage=2))
    assert reshards(recipe, saved, replace(saved, data=4))
    assert not reshards(recipe, replace(saved, tensor=2), Layout(tensor=2, data=4, zero_stage=1))
    own = saving("quickstart", "backend={name: deepspeed, script: train.py}")
    frozen = saving("quickstart", "training.adapters={rank: 8}")
    for refused in (own, frozen):
        assert not reshards(refused, saved, replace(saved, data=4))
        assert other_world_refusal(refused, saved)


def test_megatron_loads_another_split_only_where_states_are_saved_by_parameter() -> None:
    wider = replace(BIG, pipeline=8, data=8)
    assert not reshards(saving("llama3-70b"), BIG, wider)
    assert reshards(saving("llama3-70b", "on_oom=fallback"), BIG, wider)
    assert reshards(saving("llama3-70b", "on_oom=fallback"), BIG, replace(BIG, virtual_pipeline=1))
    by_hand = "backend={name: megatron-lm, extra_args: [--dist-ckpt-optim-fully-reshardable]}"
    assert reshards(saving("llama3-70b", by_hand), BIG, wider)
    assert reshards(saving("llama3-70b", "nodes={count: 64, at_least: 32}"), BIG, replace(BIG, data=8))
    assert not reshards(saving("llama3-70b", "on_oom={layouts: 2, after_checkpoint: stop}"), BIG, wider)
    assert reshards(saving("llama3-70b", "on_oom={layouts: 2, after_checkpoint: restart}"), BIG, wider)


def test_states_are_not_gathered_where_a_node_cannot_hold_them() -> None:
    """70 billion parameters on one device: eight ranks of a node would gather 6.8 TB."""
    recipe = saving("llama3-70b", "on_oom=fallback")
    assert saved_by_parameter(recipe, BIG)
    assert not saved_by_parameter(recipe, replace(BIG, tensor=1, pipeline=1, data=512))
    assert saved_by_parameter(recipe, replace(BIG, tensor=1, pipeline=1, data=512, zero_stage=0))
