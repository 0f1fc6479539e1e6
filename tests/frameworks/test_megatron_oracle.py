"""Our rules against real Megatron core 0.19.2: what we plan it takes, what we refuse it refuses, in the layer we name.

About a third of the random jobs are legal by our rules, and most of the others break one rule alone. `make oracle-full`
asks thousands. Where we refuse what Megatron takes, `DISAGREEMENTS` says so, and each of them is shown here. Jobs that
the random ones do not reach follow: FSDP, overlap, data and checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from judges import MegatronJudge, Verdict

from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.frameworks.megatron.rules import requirements_for, rules_for
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Layout, LayoutColumns
from llmlaunch.models.shape import MlaShape, ModelShape
from llmlaunch.planner.legality import situation
from llmlaunch.planner.plan import as_planned
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.setting import setting_of
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import Techniques
from support.megatron_cases import BASE, Case, cases, refusals
from support.megatron_disagreements import DISAGREEMENTS, layer_of
from support.recipes import gallery_of, recipe_of
from support.soak import SOAK, share

pytestmark = pytest.mark.frameworks

EXAMPLES = int(os.environ.get("LLMLAUNCH_ORACLE_EXAMPLES", "150" if SOAK else "10"))
PLACES = {rule.key: rule.where for rule in (*requirements_for(), *rules_for())}


def verdict_of(megatron: MegatronJudge, case: Case, until: str | None = None) -> Verdict:
    capability = case.recipe.cluster.accelerator.compute_capability or "9.0"
    return megatron(
        case.recipe.world_size, case.words, case.environment, capability, case.rank, until=until or case.until
    )


def stricter(case: Case) -> set[str]:
    """The rules with which we refuse what Megatron takes, here."""
    one = situation(case.recipe, LayoutColumns.of([case.layout]))
    return {each.rule for each in DISAGREEMENTS if each.applies(one)[0]}


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_we_and_megatron_agree(case: Case, megatron: MegatronJudge) -> None:
    ours, theirs = refusals(case), verdict_of(megatron, case)
    if ours and theirs.accepted and case.until != "step":
        theirs = verdict_of(megatron, case, until="step")
    if not ours:
        assert theirs.accepted, theirs
    elif theirs.accepted:
        assert theirs.stopped or set(ours) <= stricter(case), f"we refuse what Megatron takes: {ours}"
    elif len(ours) == 1 and set(ours) - stricter(case):
        assert theirs.layer == layer_of(PLACES[ours[0]]), theirs


MEGATRON = gallery_of("megatron-lm")


@pytest.mark.parametrize("name", share(MEGATRON, MEGATRON[::9]))
def test_megatron_takes_what_the_gallery_is_planned_with(name: str, megatron: MegatronJudge) -> None:
    """Up to the layers of every rank and chunk: models of this size take their time under fake tensors. In `make soak`
    the alternatives, too."""
    recipe = recipe_of(name)
    plan = make_plan(setting_of(recipe, MegatronLM()))
    for candidate in (plan.chosen, *(plan.alternatives if SOAK else ())):
        case = Case(as_planned(recipe, candidate), candidate.layout)
        theirs = verdict_of(megatron, case, until="stages")
        assert theirs.accepted, (str(case), theirs)


SMALL = ModelShape("small", 4, 64, 128, 4, 4, 16, 512, 256)


def small(layout: Layout, shape: ModelShape = SMALL, precision: str = "bf16", **ways: object) -> Case:
    cluster = replace(BASE.cluster, devices_per_node=layout.world_size)
    training = replace(BASE.training, sequence_length=64, global_batch_size=4 * layout.data, precision=precision)
    recipe: Recipe = replace(BASE, model=shape, cluster=cluster, nodes=1, training=training, pins={})
    return Case(replace(recipe, techniques=Techniques(**ways)), layout)  # type: ignore[arg-type]


def pinned(case: Case) -> Case:
    return replace(case, recipe=replace(case.recipe, pins={"zero_stage": case.layout.zero_stage}))


SHOWN = {
    "sequence-needs-tensor": small(Layout(sequence_parallel=1)),
    "stages-hold-some": small(Layout(pipeline=3, layers_by_stage=(2, 0, 2))),
    "recomputed-mlp-is-whole": small(Layout(recompute=RECOMPUTE_SELECTIVE), recompute_modules=("mlp",), mlp_chunks=2),
    "sharded-one-stage": pinned(small(Layout(pipeline=2, data=2, zero_stage=3))),
    "offload-modules-no-full": small(Layout(recompute=RECOMPUTE_FULL), offload_modules=("core_attn",)),
    "latents-need-sequence": small(
        Layout(tensor=2), replace(SMALL, mla=MlaShape(None, 32, 16, 16, 16), qk_layernorm=True)
    ),
    "instances-distributed": pinned(small(Layout(data=4, zero_stage=2), optimizer_instances=2)),
}


def test_every_disagreement_is_shown() -> None:
    assert sorted(SHOWN) == sorted(each.rule for each in DISAGREEMENTS)


@pytest.mark.parametrize("key", SHOWN)
def test_megatron_takes_what_we_refuse_on_purpose(key: str, recorded_megatron: MegatronJudge) -> None:
    assert refusals(SHOWN[key]) == [key]
    theirs = verdict_of(recorded_megatron, SHOWN[key], until="step")
    assert theirs.accepted, theirs


# What no layout can be rendered to say; the words stand for it.
SAID = {
    "experts": ("--expert-model-parallel-size", "2"),
    "stages-named": ("--pipeline-model-parallel-layout", "Et|t|ttL"),
    "stages-hold-all": ("--pipeline-model-parallel-layout", "Ett|tttL"),
    "no-te-loss": ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te"),
    "no-alibi": ("--position-embedding-type", "alibi"),
    "no-checkpoint-offload": (
        "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1",
        "--cpu-offloading-num-layers", "1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("key", SAID)
def test_megatron_refuses_the_words_no_layout_says(key: str, recorded_megatron: MegatronJudge) -> None:
    case = small(Layout(pipeline=2, data=2) if key.startswith("stages") else Layout(data=2))
    theirs = recorded_megatron(case.recipe.world_size, [*case.words, *SAID[key]], case.environment)
    assert theirs.layer == (layer_of(PLACES[key]) if key != "stages-named" else "arguments"), theirs


SMALL_DENSE = (
    "model={num_layers: 4, hidden_size: 64, ffn_hidden_size: 96, num_attention_heads: 8, num_query_groups: 4, "
    "vocab_size: 512}"
)
SMALL_MIXTURE = SMALL_DENSE[:-1] + ", moe: {num_experts: 4, topk: 2, ffn_hidden_size: 32}}"
SHORT = ("nodes=1", "training={sequence_length: 64, global_batch_size: 16, steps: 10}")
SAVING = ("training.save_interval=5", "training.checkpoint_path=/ckpt")
HIDDEN = "layout.overlap_expert_communication=true"


MakeCase = Callable[[], Case]


def rendered(layout: Layout, *overrides: str, mixture: bool = False) -> MakeCase:
    def made() -> Case:
        recipe = recipe_of("llama3-8b", SMALL_MIXTURE if mixture else SMALL_DENSE, *SHORT, *overrides)
        assert recipe.world_size == layout.world_size
        return Case(recipe, layout)

    return made


def sharded(stage: int, layout: Layout, *overrides: str, mixture: bool = False) -> MakeCase:
    return rendered(replace(layout, zero_stage=stage), f"layout.zero_stage={stage}", *overrides, mixture=mixture)


STAGES, EXPERTS = Layout(pipeline=2, data=4, zero_stage=1), Layout(data=8, expert=4, zero_stage=1)
ITERATION, ATTENTION = "layout.cuda_graphs=[full_iteration]", "layout.cuda_graphs=[attn]"
ROWS = "token_dispatcher: flex, flex_backend: hybridep, expert_rank_capacity_factor: 1.5"
BLACKWELL = ("model.moe.ffn_hidden_size=64", "cluster=b200-x8", "training.fp8=mxfp8")
SPLIT = Layout(2, context=2, data=2, sequence_parallel=1)


def fixed(ways: str, layout: Layout = EXPERTS) -> MakeCase:
    return rendered(layout, *BLACKWELL, f"layout={{{ways}}}", mixture=True)


TAKEN = {
    "stage 2": sharded(2, Layout(data=8)),
    "stage 3": sharded(3, Layout(data=8), *SAVING),
    "stage 3, split": sharded(3, SPLIT, "training.gradient_dtype=bf16"),
    "stage 2, split": sharded(2, SPLIT),
    "stage 3, mixture": sharded(3, Layout(data=8, expert=4), mixture=True),
    "stage 3, mixture, hidden": sharded(3, Layout(data=8, expert=4), HIDDEN, mixture=True),
    "stage 3 in fp16": sharded(3, Layout(data=8), "training.precision=fp16"),
    "user buffers": rendered(replace(SPLIT, zero_stage=1), "layout.tp_comm_overlap=true"),
    "hidden exchange": rendered(Layout(data=8, expert=4, zero_stage=1), HIDDEN, mixture=True),
    "hidden exchange, interleaved": rendered(
        Layout(pipeline=2, virtual_pipeline=2, data=4, expert=4, zero_stage=1), HIDDEN, mixture=True
    ),
    "all-to-all": rendered(Layout(context=4, data=2, zero_stage=1), "layout.context_comm=a2a"),
    "a blend": rendered(
        Layout(data=8), "data={blend: [{path: /a, weight: 1}, {path: /b, weight: 2.5}], cache_path: /c, split: '9,1,0'}"
    ),
    "a tokenizer": rendered(
        Layout(data=8), "data={path: /a, tokenizer: /t.model, tokenizer_type: SentencePieceTokenizer}"
    ),
    "old checkpoints": rendered(Layout(data=8), *SAVING, "training.checkpoint_format=torch", "layout.zero_stage=0"),
    "tensorboard": rendered(Layout(data=8), "training.tensorboard=/tb"),
    "graphs of attention": rendered(STAGES, "layout.cuda_graphs=[attn]"),
    "graphs of layers": rendered(STAGES, "layout.cuda_graphs=[layer]"),
    "a graph of the iteration": rendered(replace(STAGES, recompute=RECOMPUTE_FULL), ITERATION),
    "graphs of a mixture": rendered(
        Layout(data=8, expert=4, zero_stage=1), "layout.cuda_graphs=[attn, moe_router, moe_preprocess]", mixture=True
    ),
    "two optimizers": rendered(Layout(data=8, expert=4, zero_stage=1), "layout.optimizer_instances=2", mixture=True),
    "a fixed number of rows": fixed(ROWS),
    "pages": fixed(f"{ROWS}, paged_stash: {{host_factor: 0.5}}"),
    "a graph of the iteration with a mixture": fixed(f"{ROWS}, paged_stash: {{}}, cuda_graphs: [full_iteration]"),
    "Muon": rendered(Layout(data=8, expert=4, zero_stage=1), "training.optimizer=muon", mixture=True),
    "a share of offloaded modules": rendered(
        STAGES, "layout={offload_modules: [core_attn, attn_proj], offload_fraction: 0.5}"
    ),
}
REFUSED = {
    "user buffers without sequence parallelism": (
        rendered(Layout(2, data=4, zero_stage=1), "layout.tp_comm_overlap=true"),
        "hidden-tensor-sequence",
        "sequence parallelism is enabled",
    ),
    "more optimizers than divide the ranks": (
        rendered(Layout(data=8, expert=4, zero_stage=1), "layout.optimizer_instances=4", mixture=True),
        "instances-divide",
        "divisible by partial DistOpt shard factor",
    ),
    "rows for DeepEP": (
        fixed("token_dispatcher: flex, expert_rank_capacity_factor: 1.5"),
        "fixed-rows-by-hybridep",
        "requires moe_flex_dispatcher_backend to be",
    ),
    "pages without a number of rows": (
        fixed("token_dispatcher: flex, flex_backend: hybridep, paged_stash: {}"),
        "stash-of-fixed-rows",
        "moe_paged_stash requires moe_expert_rank_capacity_factor",
    ),
    "pages for what is offloaded": (
        fixed(f"{ROWS}, paged_stash: {{}}, offload_modules: [moe_act]"),
        "stash-in-place-of-offload",
        "offload_modules must not include",
    ),
    "pages beside offloaded layers": (
        fixed(f"{ROWS}, paged_stash: {{}}", replace(EXPERTS, offload_layers=1)),
        "stash-no-offloaded-layers",
        "moe_paged_stash cannot be enabled with cpu_offloading",
    ),
    "hidden exchange without experts apart": (
        rendered(Layout(data=8, zero_stage=1), HIDDEN, mixture=True),
        "hidden-exchange-experts",
        "expert model parallelism",
    ),
    "hidden exchange in plain stages": (
        rendered(Layout(pipeline=2, data=4, expert=4, zero_stage=1), HIDDEN, mixture=True),
        "hidden-exchange-interleaved",
        "virtual_pipeline_model_parallel_size",
    ),
    "hidden exchange by allgather": (
        rendered(Layout(data=8, expert=4, zero_stage=1), HIDDEN, "layout.token_dispatcher=allgather", mixture=True),
        "hidden-exchange-needs-alltoall",
        "alltoall/flex",
    ),
    "graphs of what full recompute repeats": (
        rendered(replace(STAGES, recompute=RECOMPUTE_FULL), ATTENTION),
        "graphs-no-full-recompute",
        "full recompute is only supported with full iteration CUDA graph",
    ),
    "graphs of offloaded layers": (
        rendered(Layout(data=8, offload_layers=1, zero_stage=1), ATTENTION),
        "graphs-no-offloaded-layers",
        "CUDA graphs not supported with CPU offloading",
    ),
    "a graph of offloaded modules": (
        rendered(STAGES, ITERATION, "layout.offload_modules=[core_attn]"),
        "graphs-no-offloaded-modules",
        "fine_grained_offloading_max_inflight_offloads must be a non-negative integer",
    ),
    "graphs of a mixture that is recomputed": (
        rendered(
            Layout(data=8, expert=4, zero_stage=1, recompute=RECOMPUTE_SELECTIVE),
            *("layout.cuda_graphs=[moe_router]", "layout.recompute=selective", "layout.recompute_modules=[moe]"),
            mixture=True,
        ),
        "graphs-no-recomputed-mixture",
        "moe recompute is not supported with moe_router CUDA graph",
    ),
    "graphs of preparations alone": (
        rendered(Layout(data=8, expert=4, zero_stage=1), "layout.cuda_graphs=[moe_preprocess]", mixture=True),
        "graphs-preprocess-router",
        "moe_preprocess cuda graph is only supported with moe_router cuda graph",
    ),
    "graphs of a router that is not there": (
        rendered(STAGES, "layout.cuda_graphs=[moe_router]"),
        "graphs-mixture-parts",
        "moe cuda graph is only supported for MoE",
    ),
    "graphs of dense layers that are not there": (
        rendered(Layout(data=8, expert=4, zero_stage=1), "layout.cuda_graphs=[mlp]", mixture=True),
        "graphs-dense-mlp",
        "mlp cuda graph is only supported for dense layers",
    ),
    "torch_dcp": (
        rendered(Layout(data=8), *SAVING, "training.checkpoint_format=torch_dcp"),
        "no-torch-dcp",
        "torch_dcp is only tested with FSDP",
    ),
    "fsdp_dtensor without its implementation": (
        rendered(Layout(data=8), *SAVING, "training.checkpoint_format=fsdp_dtensor"),
        "format-of-sharded",
        "only tested with Megatron FSDP",
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_we_render_of_sharding_overlap_data_and_checkpoints_is_taken(
    recorded_megatron: MegatronJudge, name: str
) -> None:
    case = TAKEN[name]()
    assert refusals(case) == []
    theirs = verdict_of(recorded_megatron, case, until="stages")
    assert theirs.accepted, (theirs, case.words)


@pytest.mark.parametrize("name", REFUSED)
def test_what_we_refuse_is_refused_for_that_reason(recorded_megatron: MegatronJudge, name: str) -> None:
    make, key, why = REFUSED[name]
    case = make()
    assert refusals(case) == [key]
    theirs = verdict_of(recorded_megatron, case, until="stages")
    assert why in theirs.error, theirs


def test_one_connection_is_refused_where_parameters_are_gathered(recorded_megatron: MegatronJudge) -> None:
    case = TAKEN["stage 3, split"]()
    theirs = recorded_megatron(8, case.words, {**case.environment, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}, until="stages")
    assert "FSDP requires CUDA_DEVICE_MAX_CONNECTIONS > 1 or unset" in theirs.error
