"""Communication that overlaps: what it needs, what it is rendered as, and what it does to bytes and seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmlaunch.backends.megatron.backend import MegatronLM
from llmlaunch.backends.megatron.techniques import OVERLAP_RULES
from llmlaunch.errors import UserError
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.planner.judge import judge_layouts
from llmlaunch.planner.setting import setting_of
from llmlaunch.recipe.types import Recipe
from support.backend_output import refused_by, words_of
from support.recipes import recipe_of

DENSE, MIXTURE = "llama3-70b", "mixtral-8x7b"
SPLIT = Layout(8, 4, data=16, sequence_parallel=1, zero_stage=1)
EXCHANGING = Layout(1, 1, data=64, expert=8, zero_stage=1)
HIDDEN = "layout.overlap_expert_communication=true"


def broken(layout: Layout, recipe: Recipe) -> set[str]:
    return refused_by(recipe, layout, OVERLAP_RULES)


def priced(layout: Layout, recipe: Recipe) -> tuple[float, int]:
    verdict = judge_layouts(setting_of(recipe, MegatronLM()), [layout])[0]
    assert verdict.step_seconds is not None
    assert verdict.device_bytes is not None
    return verdict.step_seconds, verdict.device_bytes


def test_tensor_parallelism_beside_products_is_faster_takes_buffers_and_needs_sequence_parallelism() -> None:
    silent, asking = recipe_of(DENSE), recipe_of(DENSE, "layout.tp_comm_overlap=true")
    assert "--tp-comm-overlap" in words_of(asking, SPLIT)
    plain, hidden = priced(SPLIT, silent), priced(SPLIT, asking)
    assert hidden[0] < plain[0]
    assert hidden[1] > plain[1]
    alone = replace(SPLIT, sequence_parallel=0)
    assert broken(alone, asking) == {"hidden-tensor-sequence"}
    assert broken(SPLIT, asking) == broken(alone, silent) == set()


def test_the_exchange_of_experts_may_be_hidden_without_delaying_gradients() -> None:
    program = words_of(recipe_of(MIXTURE, HIDDEN), EXCHANGING)
    assert "--overlap-moe-expert-parallel-comm" in program
    assert "--delay-wgrad-compute" not in program
    both = recipe_of(MIXTURE, "layout={overlap_expert_communication: true, delay_weight_gradients: true}")
    assert words_of(both, EXCHANGING).count("--overlap-moe-expert-parallel-comm") == 1
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
    silent, asking = recipe_of(DENSE), recipe_of(DENSE, "layout.context_comm=a2a")
    fits = Layout(1, 4, context=8, data=16, zero_stage=1)  # 64 heads, 8 query groups
    assert "--cp-comm-type" in words_of(asking, fits)
    assert broken(fits, asking) == set()
    four_groups = replace(fits, tensor=2, data=8)
    assert broken(four_groups, asking) == {"all-to-all-heads"}
    assert broken(four_groups, silent) == set()
    assert MegatronLM().facts(asking).context_all_to_all
    several = replace(fits, micro_batch_size=8)  # so that activations are the peak
    assert priced(several, asking)[1] > priced(several, silent)[1]
