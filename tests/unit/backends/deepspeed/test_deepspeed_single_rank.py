"""A rank of a DeepSpeed job by itself: the job's words but for what that needs, or a refusal with its reason."""

from __future__ import annotations

import json

import pytest

from llmlaunch.assets import asset
from llmlaunch.backends.argument import NodeVariable
from llmlaunch.backends.base import RankAlone, Rendered
from llmlaunch.backends.deepspeed.backend import DeepSpeed
from llmlaunch.backends.deepspeed.rank_alone import SCRIPTS_REFUSED, rank_alone
from llmlaunch.backends.deepspeed.scripts import KINDS
from llmlaunch.errors import UserError
from llmlaunch.layout import Layout
from llmlaunch.recipe.load import load_recipe
from llmlaunch.trainers import RANK_ALONE

LAYOUT = Layout(data=64, micro_batch_size=2, zero_stage=3)
STEPS = 3
GALLERY = {
    "llama2-7b-deepspeed": LAYOUT,
    "qwen2.5-7b-deepspeed": LAYOUT,
    "llama3.1-8b-ulysses": Layout(data=8, context=8, zero_stage=3),
    "llama3.1-70b-lora": LAYOUT,
    "quickstart": Layout(data=2, micro_batch_size=2, zero_stage=1),
}


def both(*overrides: str, layout: Layout = LAYOUT, name: str = "llama2-7b-deepspeed") -> tuple[Rendered, RankAlone]:
    recipe = load_recipe(asset("recipes", f"{name}.yaml"), overrides)
    rendered = DeepSpeed().render(recipe, layout)
    return rendered, rank_alone(recipe, layout, rendered, 0, STEPS)


def alone(*overrides: str, layout: Layout = LAYOUT, name: str = "llama2-7b-deepspeed") -> RankAlone:
    return both(*overrides, layout=layout, name=name)[1]


def value(one: RankAlone, flag: str) -> object:
    assert one.program.count(flag) == 1
    return one.program[one.program.index(flag) + 1]


@pytest.mark.parametrize("name", GALLERY)
def test_rank_0_of_the_whole_world_for_a_few_steps(name: str) -> None:
    rendered, one = both(name=name, layout=GALLERY[name])
    ranks = str(GALLERY[name].world_size)
    assert one.program[:2] == (NodeVariable("LLMLAUNCH_RUN_DIR", "/trainer/rank_alone.py"), rendered.program[0])
    assert (one.rank, one.environment["WORLD_SIZE"], value(one, "--alone")) == (0, ranks, ranks)
    assert (value(one, "--steps"), value(one, "--data")) == (str(STEPS), "mock")
    assert one.files["trainer/rank_alone.py"] == RANK_ALONE.read_bytes()


@pytest.mark.parametrize("name", GALLERY)
def test_the_batch_and_all_of_zero_are_the_jobs(name: str) -> None:
    assert "ds_config.json" not in alone(name=name, layout=GALLERY[name]).files


def test_all_other_words_are_the_jobs() -> None:
    rendered, one = both("backend.extra_args=[--adapter-rank, '4']")
    changed = {"--alone", "--steps", "--log-interval", "--data", "--tokenizer", "--save", "--save-interval"}
    theirs = {each.flag: each.values for each in rendered.arguments if each.flag not in changed}
    assert {each.flag: each.values for each in one.arguments if each.flag not in changed} == theirs
    assert one.program[-2:] == one.own_words == ("--adapter-rank", "4")


def test_nothing_is_saved_loaded_or_read() -> None:
    saved = ("training.checkpoint_path=/c", "training.save_interval=100", "training.start_from=/w")
    one = alone(*saved, "data={path: /d, tokenizer: /t}")
    assert not {"--save", "--save-interval", "--weights", "--tokenizer", "/c", "/w", "/d", "/t"} & set(one.program)
    for told in ("dataset is not read", "nothing is saved", "weights are drawn, not loaded"):
        assert sum(told in note for note in one.notes) == 1


def test_made_up_tokens_are_not_told_where_the_job_has_them_too() -> None:
    assert not alone("data={mock: true}").notes


def test_fp16_begins_where_nothing_overflows() -> None:
    one = alone("training.precision=fp16")
    scaled = json.loads(one.files["ds_config.json"])
    assert scaled["fp16"] == {"enabled": True, "loss_scale": 0, "initial_scale_power": 0}
    assert any("scaled by 1" in note for note in one.notes)


def test_what_is_offloaded_is_told_to_be_one_ranks_share() -> None:
    assert any("this rank's share" in note for note in alone("layout={zero_stage: 3, offload_optimizer: 1.0}").notes)


def test_what_a_router_makes_of_made_up_weights_is_told() -> None:
    mixture = "model.moe={num_experts: 4, topk: 2, ffn_hidden_size: 96}"
    assert any("router" in note for note in alone(mixture, name="quickstart", layout=GALLERY["quickstart"]).notes)


def test_a_rank_that_does_not_exist_is_refused() -> None:
    recipe = load_recipe(asset("recipes", "quickstart.yaml"))
    layout = GALLERY["quickstart"]
    with pytest.raises(UserError, match="no pipeline rank 1; the only one is 0"):
        rank_alone(recipe, layout, DeepSpeed().render(recipe, layout), 1, STEPS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_of_the_persons_own_is_refused_with_the_reason(kind: str) -> None:
    words = ("backend.script=/home/me/train.py", f"backend.script_kind={kind}", "data={path: /d, tokenizer: /t}")
    with pytest.raises(UserError, match=r"/home/me/train\.py can be run alone") as caught:
        alone(*words, layout=Layout(data=64, micro_batch_size=2, zero_stage=1))
    assert SCRIPTS_REFUSED[kind] in str(caught.value)
