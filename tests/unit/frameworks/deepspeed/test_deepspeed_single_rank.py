"""A rank of a DeepSpeed job by itself: the job's words but for what that needs, or a refusal with its reason."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import NodeVariable
from llmlaunch.frameworks.base import RankAlone, Rendered
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.frameworks.deepspeed.scripts import KINDS
from llmlaunch.frameworks.deepspeed.trace import SCRIPTS_REFUSED, rank_alone
from llmlaunch.layout import Layout
from llmlaunch.trainers import RANK_ALONE
from support.backend_output import value_of
from support.recipes import recipe_of

GPU, LAYOUT = "llama2-7b-deepspeed", Layout(data=64, micro_batch_size=2, zero_stage=3)
STEPS = 3
GALLERY = {
    GPU: LAYOUT,
    "qwen2.5-7b-deepspeed": LAYOUT,
    "llama3.1-8b-ulysses": Layout(data=8, context=8, zero_stage=3),
    "llama3.1-70b-lora": LAYOUT,
    "quickstart": Layout(data=2, micro_batch_size=2, zero_stage=1),
}


def job_and_rank(*overrides: str, name: str = GPU, layout: Layout | None = None) -> tuple[Rendered, RankAlone]:
    recipe, layout = recipe_of(name, *overrides), layout or GALLERY[name]
    rendered = DeepSpeed().render(recipe, layout)
    return rendered, rank_alone(recipe, layout, rendered, 0, STEPS)


def alone(*overrides: str, name: str = GPU, layout: Layout | None = None) -> RankAlone:
    return job_and_rank(*overrides, name=name, layout=layout)[1]


@pytest.mark.parametrize("name", GALLERY)
def test_rank_0_of_the_whole_world_for_a_few_steps_with_the_batch_and_all_of_zero_of_the_job(name: str) -> None:
    rendered, rank = job_and_rank(name=name)
    program, ranks = rank.program, str(GALLERY[name].world_size)
    assert program[:2] == (NodeVariable("LLMLAUNCH_RUN_DIR", "/trainer/rank_alone.py"), rendered.program[0])
    assert (rank.rank, rank.environment["WORLD_SIZE"], value_of(program, "--alone")) == (0, ranks, ranks)
    assert (value_of(program, "--steps"), value_of(program, "--data")) == (str(STEPS), "mock")
    assert rank.files["trainer/rank_alone.py"] == RANK_ALONE.read_bytes()
    assert "ds_config.json" not in rank.files


def test_all_other_words_are_the_jobs() -> None:
    rendered, rank = job_and_rank("backend.extra_args=[--adapter-rank, '4']")
    changed = {"--alone", "--steps", "--log-interval", "--data", "--tokenizer", "--save", "--save-interval"}
    theirs = {each.flag: each.values for each in rendered.arguments if each.flag not in changed}
    assert {each.flag: each.values for each in rank.arguments if each.flag not in changed} == theirs
    assert rank.program[-2:] == rank.own_words == ("--adapter-rank", "4")


def test_nothing_is_saved_loaded_or_read() -> None:
    begun = ("training.start_from=/w", "training.learning_rate=1.0e-5")
    saved = ("training.checkpoint_path=/c", "training.save_interval=100", *begun)
    rank = alone(*saved, "data={path: /d, tokenizer: /t}")
    assert not {"--save", "--save-interval", "--weights", "--tokenizer", "/c", "/w", "/d", "/t"} & set(rank.program)
    for message in ("dataset is not read", "nothing is saved", "weights are drawn, not loaded"):
        assert sum(message in note for note in rank.notes) == 1


def test_rows_are_not_read_and_not_packed_and_nothing_is_answered_or_exported() -> None:
    rank = alone("data={path: /d, format: chat, tokenizer: /t, packed: true, chat_template: /c}", "training.export=/e")
    assert not {"--format", "--packed", "--chat-template", "/c", "--samples", "--export"} & set(rank.program)
    assert any("not packed" in note for note in rank.notes)


def test_made_up_tokens_are_not_told_where_the_job_has_them_too() -> None:
    assert not alone("data={mock: true}").notes


def test_fp16_begins_where_nothing_overflows() -> None:
    rank = alone("training.precision=fp16")
    scaled = json.loads(rank.files["ds_config.json"])
    assert scaled["fp16"] == {"enabled": True, "loss_scale": 0, "initial_scale_power": 0}
    assert any("scaled by 1" in note for note in rank.notes)


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        (GPU, "layout={zero_stage: 3, offload_optimizer: 1.0}", "this rank's share"),
        ("quickstart", "model.moe={num_experts: 4, topk: 2, ffn_hidden_size: 96}", "router"),
    ],
)
def test_how_one_rank_differs_from_the_job_is_noted(name: str, override: str, message: str) -> None:
    assert any(message in note for note in alone(override, name=name).notes)


def test_a_rank_that_does_not_exist_is_refused() -> None:
    recipe, layout = recipe_of("quickstart"), GALLERY["quickstart"]
    with pytest.raises(UserError, match="no pipeline rank 1; the only one is 0"):
        rank_alone(recipe, layout, DeepSpeed().render(recipe, layout), 1, STEPS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_of_the_persons_own_is_refused_with_the_reason(kind: str) -> None:
    own = ("backend.script=/home/me/train.py", f"backend.script_kind={kind}", "data={path: /d, tokenizer: /t}")
    with pytest.raises(UserError, match=r"/home/me/train\.py can be run alone") as caught:
        alone(*own, layout=replace(LAYOUT, zero_stage=1))
    assert SCRIPTS_REFUSED[kind] in str(caught.value)
