"""One rank of a Megatron-LM job by itself: the job's words, but for what that needs."""

from __future__ import annotations

import pytest

from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import NodeVariable
from llmlaunch.frameworks.base import RankAlone
from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.frameworks.megatron.parser import KNOWN_VERSIONS, core_parser
from llmlaunch.frameworks.megatron.trace import LEFT_OUT, REFUSED, omitted_techniques, rank_alone
from llmlaunch.layout import Layout
from support.backend_output import value_of
from support.recipes import recipe_of

STEPS = 3
FOUR_STAGES = Layout(tensor=8, pipeline=4, data=16, sequence_parallel=1, zero_stage=1)  # 512 devices


def alone(pipeline_rank: int, *overrides: str, layout: Layout = FOUR_STAGES, name: str = "llama3-70b") -> RankAlone:
    recipe = recipe_of(name, *overrides)
    return rank_alone(recipe, layout, MegatronLM().render(recipe, layout), pipeline_rank, STEPS)


def test_it_is_told_the_place_of_its_stages_first_rank_also_where_stages_are_not_outermost() -> None:
    assert [alone(rank).rank for rank in range(4)] == [0, 128, 256, 384]
    assert alone(2).environment == {"WORLD_SIZE": "512", "RANK": "256", "LOCAL_RANK": "0"}
    mapped = "backend.extra_args=[--use-tp-pp-dp-mapping]"
    assert [alone(rank, mapped).rank for rank in range(4)] == [0, 8, 16, 24]


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="no pipeline rank 4: ranks are 0 to 3"):
        alone(4)


def test_all_other_words_are_the_jobs_in_its_order() -> None:
    recipe = recipe_of("llama3-70b", "data.mock=true")
    job = [str(word) for word in MegatronLM().render(recipe, FOUR_STAGES).program[1:]]
    for flag in ("--train-iters", "--log-interval"):
        place = job.index(flag)
        del job[place : place + 2]
    ours = ["--fake-process-group", "--train-iters", "3", "--lr-decay-iters", str(recipe.training.steps)]
    assert list(alone(0, "data.mock=true").program[2:]) == [*job, *ours, "--log-interval", "1"]


def test_nothing_is_saved_loaded_or_read() -> None:
    reading = (
        "training.checkpoint_path=/c",
        "training.save_interval=100",
        "training.start_from=/w",
        "data={path: /d}",
        "training.learning_rate=1.0e-5",
    )
    rank = alone(1, *reading, "training.tensorboard=/t")
    assert not {"--save", "--load", "--pretrained-checkpoint", "--data-path", "--tensorboard-dir"} & set(rank.program)
    assert not {"/c", "/w", "/d", "/t", "99,1,0"} & set(rank.program)
    assert "--mock-data" in rank.program
    assert any("dataset is not read" in note for note in rank.notes)
    assert any("--save" in note and "nothing is saved" in note for note in rank.notes)


def test_a_persons_own_words_stay_but_for_those_in_the_way() -> None:
    own = "backend.extra_args=[--rampup-batch-size, '16', '16', '98765', --no-bias-swiglu-fusion, --exit-interval=5]"
    words = alone(0, own).program
    assert "--no-bias-swiglu-fusion" in words
    assert not {"--rampup-batch-size", "98765", "--exit-interval=5"} & set(words)
    horizon = alone(0, "backend.extra_args=[--lr-decay-iters, '77']").program
    assert value_of(horizon, "--lr-decay-iters") == "77"


def test_experts_get_even_shares_where_no_router_can_learn_to_share() -> None:
    mixture = alone(0, layout=Layout(pipeline=4, data=16, expert=8, zero_stage=1), name="mixtral-8x7b")
    assert "--moe-router-force-load-balancing" in mixture.program
    assert any("random experts" in note for note in mixture.notes)
    assert "--moe-router-force-load-balancing" not in alone(0).program


def test_in_fp16_the_first_step_is_not_skipped() -> None:
    words = alone(0, "training.precision=fp16", "training.gradient_dtype=fp32").program
    assert value_of(words, "--initial-loss-scale") == "1"
    assert "--initial-loss-scale" not in alone(0).program


def test_every_word_it_adds_has_a_reason_and_every_argument_is_in_the_program() -> None:
    rank = alone(0, "data={path: /d}")
    assert all(each.reason.keys or each.reason.why for each in rank.arguments)
    assert {each.flag for each in rank.arguments} <= set(rank.program)


def test_it_is_started_by_the_script_that_makes_up_the_others() -> None:
    rank = alone(0)
    assert rank.program[0] == NodeVariable("LLMLAUNCH_RUN_DIR", "/trainer/rank_alone.py")
    assert rank.program[1] == NodeVariable("MEGATRON_LM_PATH", "/pretrain_gpt.py")
    assert b"FakeStore" in rank.files["trainer/rank_alone.py"]


@pytest.mark.parametrize(
    ("overrides", "layout", "name", "why"),
    [
        (("layout.token_dispatcher=flex",), Layout(data=16, expert=8, zero_stage=1), "mixtral-8x7b", "flex dispatcher"),
        (("layout.tp_comm_overlap=true",), FOUR_STAGES, "llama3-70b", "real NCCL or MPI"),
        (("backend.extra_args=[--use-torch-fsdp2]",), FOUR_STAGES, "llama3-70b", "--use-torch-fsdp2"),
    ],
)
def test_what_no_rank_can_do_alone_is_refused_with_the_reason(
    overrides: tuple[str, ...], layout: Layout, name: str, why: str
) -> None:
    with pytest.raises(UserError, match=why):
        alone(0, *overrides, layout=layout, name=name)


def test_every_version_has_the_flag_that_makes_it_possible_and_those_left_out_or_refused_are_flags() -> None:
    assert all("--fake-process-group" in core_parser(version).flags for version in KNOWN_VERSIONS)
    assert {*LEFT_OUT, *REFUSED} <= set(core_parser("0.19").flags)


@pytest.mark.parametrize(("graphs", "omitted"), [("attn", 1), ("full_iteration", 2)])
def test_an_all_to_all_has_no_number_of_rows_and_is_in_no_graph_of_the_iteration(graphs: str, omitted: int) -> None:
    rows = "token_dispatcher: flex, flex_backend: hybridep, expert_rank_capacity_factor: 1.5, paged_stash: {}"
    ways = ("cluster=b200-x8", "training.fp8=mxfp8", f"layout={{{rows}, cuda_graphs: [{graphs}]}}")
    exchange, *others = omitted_techniques(recipe_of("mixtral-8x7b", *ways), traced=False)
    assert exchange.instead["paged_stash"] is exchange.instead["expert_rank_capacity_factor"] is None
    assert [each.name for each in others] == ["cuda_graphs"][: omitted - 1]
