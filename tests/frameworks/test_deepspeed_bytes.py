"""What our table says DeepSpeed's classes hold per parameter, against live tensors of real engines on two ranks: those
recorded, and in `make soak` those of this run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from judges import deepspeed_versions
from trainer_runner import Train

from llmlaunch.assets import asset
from llmlaunch.facts import Gathering
from llmlaunch.families.written import config_of
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.frameworks.deepspeed.config import ds_config, model_config
from llmlaunch.frameworks.deepspeed.facts import ENGINES, Engine, Share
from llmlaunch.layers.modules import ModuleSplit
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.gathering import gathered
from llmlaunch.memory.job import Job, all_ranks
from llmlaunch.memory.weights import rank_parameters
from llmlaunch.models.shape import ModelShape, MoeShape
from llmlaunch.recipe.load import load_recipe
from support.recorded import recorded

pytestmark = pytest.mark.frameworks

RANKS = 2
LAYERS = 16
WIDTH = 256
BUCKET = 4 * WIDTH * WIDTH  # elements: four layers
TENSOR, CONTEXT = Layout(tensor=2), Layout(context=2)
SPLIT_RECIPE = load_recipe(
    asset("recipes", "quickstart.yaml"),
    ("training.sequence_length=64", "training.global_batch_size=1", "training.precision=bf16"),
)
LLAMA = ModelShape("llama", 4, 64, 160, 4, 2, 16, 512, 64)
MIXTURE = replace(LLAMA, family="mixtral", moe=MoeShape(4, 2, 96, 0, (1,) * 4))
COUNTED = [row for row in ENGINES if row.evidence == "counted"]
WIDE = [row for row in COUNTED if row.states == "fp32"]
FOREACH = [row for row in COUNTED if row.foreach_step is not None]
ALONE = [row for row in WIDE if row.stage and (row.precision, row.accumulation) == ("half", "same")]


def label(row: Engine) -> str:
    states = "" if row.states == "fp32" else f" states {row.states}"
    return f"ZeRO {row.stage} {row.precision} {row.accumulation}{states}"


def name_of(row: Engine, microbatches: int) -> str:
    return f"{label(row)} x{microbatches}"


def config(row: Engine, microbatches: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": row.stage}
    if row.stage:
        zero |= {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET, "overlap_comm": False}
    if row.stage == 3:
        nothing = ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
        zero |= {f"stage3_{name}": 0 for name in nothing}
    made = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": microbatches,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
    if row.precision == "half":
        made["bf16"] = {"enabled": True}
        if row.states == "bf16":
            made["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if row.accumulation == "fp32":
        made["data_types"] = {"grad_accum_dtype": "fp32"}
    return made


Count = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def count(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Count]:
    """Count cases, one after the other, in processes of their own."""

    def live(cases: list[dict[str, Any]], ranks: int) -> dict[str, Any]:
        train: Train = request.getfixturevalue("train")
        asked = {"name": "counted", "ranks": ranks, "files": {}, "words": [], "counted": cases}
        result = train([asked], tmp_path_factory.mktemp("counted"))["counted"]
        assert set(result.codes) == {0}, result.said[-3000:]
        line = next(line for line in result.said.splitlines() if line.startswith("COUNTED "))
        counts: dict[str, Any] = json.loads(line.removeprefix("COUNTED "))
        return counts

    with recorded("deepspeed_bytes", deepspeed_versions(), live=()) as record:

        def counted(cases: list[dict[str, Any]], ranks: int = RANKS) -> dict[str, Any]:
            question = json.dumps({"ranks": ranks, "cases": cases})
            counts: dict[str, Any] = record.answer(question, lambda: live(cases, ranks), exact=False)
            return counts

        yield counted


def case(row: Engine, microbatches: int) -> dict[str, Any]:
    precision = "fp32" if row.precision == "fp32" else "bf16"
    return {"name": name_of(row, microbatches), "precision": precision, "config": config(row, microbatches)}


def unfused_case(row: Engine) -> dict[str, Any]:
    return case(row, 1) | {"name": f"{name_of(row, 1)} not fused", "fused": False}


def secondary(microbatches: int = 2) -> dict[str, Any]:
    row = next(row for row in WIDE if row.stage == 3)
    made = case(row, microbatches)
    made["config"]["zero_optimization"]["zero_hpz_partition_size"] = RANKS
    return made | {"name": "hpZ"}


def in_sub_groups(layers: int) -> dict[str, Any]:
    """ZeRO 3 whose shard is stepped so many layers at a time."""
    row = next(row for row in WIDE if row.stage == 3)
    grouped = case(row, 1)
    grouped["config"]["zero_optimization"]["sub_group_size"] = layers * WIDTH * WIDTH // RANKS
    return grouped | {"name": f"sub-groups of {layers}"}


GATHERED = {
    "reuse beyond what may live": (LLAMA, Gathering(30_000, 100_000, 300_000, 1_000)),
    "nothing ahead": (LLAMA, Gathering(0, 0, 0, 0)),
    "one by one": (LLAMA, Gathering(200_000, 500_000, 0, 20_000, sequential=True)),
    "a mixture as one module": (MIXTURE, Gathering(0, 200_000, 300_000, 0)),
}
SUB_GROUPS = (4, 8)


def gathered_case(name: str) -> dict[str, Any]:
    shape, limits = GATHERED[name]
    row = next(row for row in WIDE if row.stage == 3)
    made = case(row, 1)
    made["config"]["zero_optimization"] |= {
        "stage3_prefetch_bucket_size": limits.prefetch_elements,
        "stage3_max_live_parameters": limits.live_elements,
        "stage3_max_reuse_distance": limits.reuse_elements,
        "stage3_param_persistence_threshold": limits.persistent_elements,
        "stage3_allgather_sequential": limits.sequential,
    }
    return made | {"name": name, "gathered": config_of(shape)}


def split_case(layout: Layout, stage: int) -> dict[str, Any]:
    """Our own ds_config of a small Llama, split over both ranks."""
    recipe = SPLIT_RECIPE
    config = ds_config(recipe, replace(layout, zero_stage=stage))
    return {
        "name": layout.describe(),
        "precision": "bf16",
        "tokens": recipe.workload.sequence_length,
        "model": {k: v for k, v in model_config(recipe).items() if k != "model_type"},
        "config": config,
    }


@pytest.fixture(scope="module")
def counted(count: Count) -> dict[str, Any]:
    """The rows with one and with two micro-batches, and with an AdamW that is not fused where that takes more.

    ZeRO 3 has processes of its own, because it frees little, and the second shard of hpZ comes after the rest of it,
    because its groups stay.
    """
    plain = [case(row, m) for row in COUNTED for m in (1, 2)]
    foreach = [unfused_case(row) for row in FOREACH]
    by_stage = {case["name"]: case["config"]["zero_optimization"]["stage"] for case in (*plain, *foreach)}
    sharded = [case for case in (*plain, *foreach) if by_stage[case["name"]] == 3]
    others = [case for case in (*plain, *foreach) if by_stage[case["name"]] < 3]
    grouped = [in_sub_groups(layers) for layers in SUB_GROUPS]
    first = [*others, split_case(TENSOR, 1)]
    second = [*sharded, *grouped, *map(gathered_case, GATHERED), secondary(), split_case(CONTEXT, 2)]
    return count(first) | count(second)


@pytest.fixture(scope="module")
def counted_alone(count: Count) -> dict[str, Any]:
    """ZeRO stages in bf16, on one rank."""
    return count([case(row, 2) for row in ALONE], ranks=1)


def bytes_of(*shares: Share) -> float:
    return sum(whole + sharded / RANKS for whole, sharded in shares)


def bucket(row: Engine) -> float:
    """One bucket of gradients, per parameter."""
    wide = row.precision == "fp32" or row.accumulation == "fp32"
    return (4.0 if wide else 2.0) * BUCKET / (WIDTH * WIDTH * LAYERS)


def lasting(row: Engine) -> float:
    """ZeRO 3 keeps a bucket, of the type gradients are communicated in: the precision."""
    width = 4.0 if row.precision == "fp32" else 2.0
    kept = width * BUCKET / (WIDTH * WIDTH * LAYERS) if row.stage == 3 else 0.0
    return bytes_of(row.lasting) + kept


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("row", COUNTED, ids=label)
def test_an_engine_holds_what_its_row_says(counted: dict[str, Any], row: Engine, microbatches: int) -> None:
    """What lasts, to one of the sixteen layers; the others, to the two buckets the estimate adds to the rows. At the
    end of the backward two more: gloo's threads let go of a bucket when they are done, which depends on the machine.
    """
    found, start = counted[name_of(row, microbatches)], lasting(row)
    assert found["class"] in (*row.name.split(", "), "NoneType")
    assert start * 0.999 <= found["lasting"] <= start * 1.001 + bucket(row) / 4
    expected = {"step": bytes_of(row.step)}
    flattened = row.final if row.flattened else (0.0, 0.0)
    if microbatches > 1:
        expected["accumulated"] = bytes_of(row.accumulated)
        # with gradients accumulated in fp32, the last micro-batch's are added in place
        earlier = (0.0, row.accumulated[1] if row.accumulation == "same" else 0.0)
        expected["final"] = bytes_of(row.final, flattened, earlier)
    else:
        expected["final"] = bytes_of(row.final, flattened)
    for phase, more in expected.items():
        above = (4.0 if phase == "final" else 2.0) * bucket(row)
        assert (start + more) * 0.999 <= found[phase] <= (start + more) * 1.001 + above, phase


@pytest.mark.parametrize(("layout", "stage"), [(TENSOR, 1), (CONTEXT, 2)])
def test_a_split_model_holds_what_we_count(counted: dict[str, Any], layout: Layout, stage: int) -> None:
    """AutoTP leaves embedding and norms whole and gathers the logits; Ulysses shards states over its ranks too."""
    facts = DeepSpeed().facts(SPLIT_RECIPE)
    job = Job(SPLIT_RECIPE.model, SPLIT_RECIPE.workload, facts)
    rows = all_ranks(job, LayoutColumns.of([replace(layout, zero_stage=stage)]))
    mine = rank_parameters(job, rows)
    found = counted[layout.describe()]
    assert found["parameters"] == mine.dense[0]
    assert found["logits"] == SPLIT_RECIPE.model.vocab_size
    shared = layout.data * layout.context
    row = next(row for row in WIDE if (row.stage, row.precision, row.accumulation) == (stage, "half", "same"))
    assert found["lasting"] / mine.dense[0] == pytest.approx(row.lasting[0] + row.lasting[1] / shared, rel=0.02)


@pytest.mark.parametrize("name", GATHERED)
def test_zero_3_gathers_what_the_list_of_parameters_says(counted: dict[str, Any], name: str) -> None:
    shape, limits = GATHERED[name]
    mine = gathered(shape, ModuleSplit(), None, limits, False)
    assert counted[name] == {"most": mine.most, "persistent": mine.persistent}


def test_a_second_shard_is_made_in_the_forward_pass(counted: dict[str, Any]) -> None:
    """ZeRO++'s hpZ over 2 ranks: half of the bf16 parameters once more between micro-batches."""
    row = next(row for row in WIDE if row.stage == 3)
    plain = counted[name_of(row, 2)]
    assert counted["hpZ"]["accumulated"] - plain["accumulated"] == pytest.approx(2.0 / RANKS, abs=0.01)


@pytest.mark.parametrize("row", FOREACH, ids=label)
def test_an_optimizer_that_is_not_fused_holds_one_more_temporary(counted: dict[str, Any], row: Engine) -> None:
    measured = counted[unfused_case(row)["name"]]
    assert row.foreach_step is not None
    assert measured["step"] == pytest.approx(lasting(row) + bytes_of(row.foreach_step), abs=bucket(row) / 4)


@pytest.mark.parametrize("layers", SUB_GROUPS)
def test_zero_3_steps_the_parameters_of_one_sub_group_at_a_time(counted: dict[str, Any], layers: int) -> None:
    """A gradient in fp32 and a flat one in bf16 of the layers of a sub-group, not of the sixteen."""
    row = next(row for row in WIDE if row.stage == 3)
    step = counted[f"sub-groups of {layers}"]["step"] - counted[name_of(row, 1)]["lasting"]
    assert step == pytest.approx(bytes_of(row.step) * layers / LAYERS, rel=0.02)


@pytest.mark.parametrize("row", ALONE, ids=lambda row: f"ZeRO {row.stage}")
def test_a_single_rank_makes_the_same_buckets(counted_alone: dict[str, Any], row: Engine) -> None:
    """One while gradients are collected (2 shows what is left of it); that of 3 is there from start to end."""
    seen = counted_alone[name_of(row, 2)]
    alone = row.lasting[0] + row.lasting[1]
    accumulated = alone + row.accumulated[0] + row.accumulated[1]
    assert seen["final"] - accumulated >= bucket(row)
    assert (seen["lasting"] - alone >= bucket(row)) == (row.stage == 3)
    if row.stage == 3:
        assert seen["step"] == pytest.approx(alone + bucket(row) + sum(row.step), rel=0.01)
