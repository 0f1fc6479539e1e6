"""Communication that overlaps: what it needs, what it is rendered as, and what it does to bytes and seconds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmlaunch.backends.argument import command_words
from llmlaunch.backends.megatron.backend import MegatronLM
from llmlaunch.backends.megatron.overlap import OVERLAP_RULES
from llmlaunch.backends.registry import backend_for
from llmlaunch.errors import UserError
from llmlaunch.layout import RECOMPUTE_FULL, Layout, LayoutColumns, Situation
from llmlaunch.planner.judge import judge_layouts
from llmlaunch.planner.setting import setting_of
from llmlaunch.recipe.types import Recipe
from support.recipes import recipe_of

DENSE, MIXTURE = "llama3-70b", "mixtral-8x7b"
SPLIT = Layout(8, 4, data=16, sequence_parallel=1, zero_stage=1)
EXCHANGING = Layout(1, 1, data=64, expert=8, zero_stage=1)
HIDDEN = "layout.overlap_expert_communication=true"


def words(layout: Layout, recipe: Recipe) -> tuple[str, ...]:
    return command_words(MegatronLM().render(recipe, layout).arguments)


def broken(layout: Layout, recipe: Recipe) -> set[str]:
    columns = LayoutColumns.of([layout])
    at = Situation(columns, recipe.model, recipe.workload, recipe.cluster, recipe.nodes, recipe.techniques)
    return {rule.key for rule in OVERLAP_RULES if not np.all(rule.allows(at))}


def priced(layout: Layout, recipe: Recipe) -> tuple[float, int]:
    one = judge_layouts(setting_of(recipe, MegatronLM()), [layout])[0]
    assert one.step_seconds is not None
    assert one.device_bytes is not None
    return one.step_seconds, one.device_bytes


def test_tensor_parallelism_beside_products_is_faster_and_takes_buffers() -> None:
    asked = recipe_of(DENSE, "layout.tp_comm_overlap=true")
    assert "--tp-comm-overlap" in words(SPLIT, asked)
    plain, hidden = priced(SPLIT, recipe_of(DENSE)), priced(SPLIT, asked)
    assert hidden[0] < plain[0]
    assert hidden[1] > plain[1]


def test_it_needs_sequence_parallelism() -> None:
    alone, asked = Layout(8, 4, data=16, zero_stage=1), recipe_of(DENSE, "layout.tp_comm_overlap=true")
    assert broken(alone, asked) == {"hidden-tensor-sequence"}
    assert broken(SPLIT, asked) == broken(alone, recipe_of(DENSE)) == set()


def test_the_exchange_of_experts_may_be_hidden_without_delaying_gradients() -> None:
    said = words(EXCHANGING, recipe_of(MIXTURE, HIDDEN))
    assert "--overlap-moe-expert-parallel-comm" in said
    assert "--delay-wgrad-compute" not in said
    both = recipe_of(MIXTURE, "layout={overlap_expert_communication: true, delay_weight_gradients: true}")
    assert words(EXCHANGING, both).count("--overlap-moe-expert-parallel-comm") == 1
    plain, hidden = priced(EXCHANGING, recipe_of(MIXTURE)), priced(EXCHANGING, recipe_of(MIXTURE, HIDDEN))
    assert hidden[0] < plain[0]
    assert hidden[1] == plain[1]


@pytest.mark.parametrize(
    ("key", "layout"),
    [
        ("hidden-exchange-experts", Layout(data=64, zero_stage=1)),
        ("hidden-exchange-no-full", Layout(data=64, expert=8, zero_stage=1, recompute=RECOMPUTE_FULL)),
        ("hidden-exchange-interleaved", Layout(pipeline=4, data=16, expert=8, zero_stage=1)),
    ],
)
def test_what_a_hidden_exchange_needs(key: str, layout: Layout) -> None:
    assert broken(layout, recipe_of(MIXTURE, HIDDEN)) == {key}
    assert broken(layout, recipe_of(MIXTURE)) == broken(EXCHANGING, recipe_of(MIXTURE, HIDDEN)) == set()


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        (DENSE, (HIDDEN,)),
        (MIXTURE, (HIDDEN, "layout.token_dispatcher=allgather")),
        (MIXTURE, (HIDDEN, "layout.recompute=selective", "layout.recompute_modules=[moe]")),
        (MIXTURE, (HIDDEN, "training.precision=fp32")),
    ],
)
def test_what_a_hidden_exchange_cannot_do_is_refused_by_name(name: str, overrides: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=r"layout\.overlap_expert_communication: "):
        MegatronLM().rules(recipe_of(name, *overrides))


def test_all_to_all_deals_out_the_heads_of_a_tensor_rank() -> None:
    asked = recipe_of(DENSE, "layout.context_comm=a2a")
    fits = Layout(1, 4, context=8, data=16, zero_stage=1)  # 64 heads, 8 query groups
    assert "--cp-comm-type" in words(fits, asked)
    assert broken(fits, asked) == set()
    assert broken(Layout(2, 4, context=8, data=8, zero_stage=1), asked) == {"all-to-all-heads"}  # 4 groups a rank
    assert broken(Layout(2, 4, context=8, data=8, zero_stage=1), recipe_of(DENSE)) == set()
    assert MegatronLM().facts(asked).context_all_to_all
    several = replace(fits, micro_batch_size=8)  # so that activations are the peak
    assert priced(several, asked)[1] > priced(several, recipe_of(DENSE))[1]


@pytest.mark.parametrize("asked", ["overlap_expert_communication=true", "tp_comm_overlap=true", "context_comm=a2a"])
def test_deepspeed_has_none_of_it(asked: str) -> None:
    recipe = recipe_of("llama2-7b-deepspeed", f"layout.{asked}")
    with pytest.raises(UserError, match=f"layout.{asked.partition('=')[0]}: "):
        backend_for(recipe).rules(recipe)
