"""Techniques become the flags they stand for, or are refused with the reason and the backend that has one."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest

from llmlaunch.backends.deepspeed import techniques as deepspeed_techniques
from llmlaunch.backends.deepspeed.backend import DeepSpeed
from llmlaunch.backends.megatron import techniques as megatron_techniques
from llmlaunch.backends.megatron.versions import core_parser
from llmlaunch.backends.registry import backend_for
from llmlaunch.documents.keys import key_names
from llmlaunch.errors import UserError
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Layout
from llmlaunch.models.shape import MoeShape
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.setting import setting_of
from llmlaunch.techniques import Techniques
from llmlaunch.trainers import TRAINER
from support.backend_output import ds_config, refused_by, render, words_of
from support.recipes import recipe_of
from support.technique_list import TECHNIQUE_LIST

DENSE, MIXTURE, DEEPSPEED = "llama3-8b", "mixtral-8x7b", "llama2-7b-deepspeed"
OWN = "backend={name: deepspeed, script: train.py}"
GPUS = Layout(4, 1, data=8, sequence_parallel=1, zero_stage=1)
EXPERTS = Layout(2, 1, data=32, expert=8, sequence_parallel=1, zero_stage=1)
FULL, SELECTIVE = replace(GPUS, recompute=RECOMPUTE_FULL), replace(GPUS, recompute=RECOMPUTE_SELECTIVE)
INTERLEAVED = replace(FULL, pipeline=4, virtual_pipeline=2, data=2)  # 4 layers a chunk
ZERO_3 = Layout(data=16, zero_stage=3)


def command(name: str, layout: Layout, *overrides: str) -> str:
    return " ".join(words_of(recipe_of(name, *overrides), layout))


RENDERED = [
    (FULL, "layout={recompute: full}", "full --recompute-method uniform --recompute-num-layers 1"),
    (
        replace(FULL, recompute_layers=4),
        "layout={recompute: full}",
        "--recompute-method uniform --recompute-num-layers 4",
    ),
    (FULL, "layout={recompute: full, recompute_method: block}", "--recompute-method block --recompute-num-layers 32"),
    (SELECTIVE, "layout={recompute: selective}", "--recompute-granularity selective --recompute-modules core_attn"),
    (
        SELECTIVE,
        "layout={recompute: selective, recompute_modules: [layernorm, mlp]}",
        "--recompute-modules layernorm mlp",
    ),
    (
        GPUS,
        "layout={offload_modules: [core_attn, attn_proj]}",
        "--fine-grained-activation-offloading --offload-modules core_attn attn_proj",
    ),
    (replace(GPUS, offload_layers=3), "layout=auto", "--cpu-offloading-num-layers 3"),
    (
        GPUS,
        "layout={offload_optimizer: 0.5}",
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --use-precision-aware-optimizer",
    ),
    (GPUS, "layout={loss: native}", "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native"),
    (GPUS, "layout={mlp_chunks: 8}", "--mlp-chunks-for-training 8"),
    (GPUS, "training.gradient_dtype=bf16", "--grad-reduce-in-bf16"),
    (
        INTERLEAVED,
        "layout={recompute: full, recompute_method: block}",
        "--recompute-method block --recompute-num-layers 4",
    ),
    (EXPERTS, "layout={delay_weight_gradients: true}", "--overlap-moe-expert-parallel-comm --delay-wgrad-compute"),
    (EXPERTS, "layout={delay_weight_gradients: true}", "--moe-token-dispatcher-type alltoall"),
    (EXPERTS, "layout={token_dispatcher: allgather}", "--moe-token-dispatcher-type allgather"),
]


@pytest.mark.parametrize(("layout", "override", "flags"), RENDERED, ids=[flags for _, _, flags in RENDERED])
def test_megatron_is_told(layout: Layout, override: str, flags: str) -> None:
    assert f" {flags} " in command(MIXTURE if layout is EXPERTS else DENSE, layout, override)


def test_offloaded_activations_need_a_variable_and_nothing_else_does() -> None:
    offloading = "layout={offload_modules: [core_attn]}"
    assert render(recipe_of(DENSE, offloading), GPUS).environment["NVTE_CPU_OFFLOAD_V1"] == "1"
    assert "NVTE_CPU_OFFLOAD_V1" not in render(recipe_of(DENSE), GPUS).environment
    with pytest.raises(UserError, match="NVTE_CPU_OFFLOAD_V1"):
        render(recipe_of(DENSE, offloading, "environment={NVTE_CPU_OFFLOAD_V1: '0'}"), GPUS)


def test_deepspeed_moves_states_and_parameters_to_the_host() -> None:
    whole = ds_config(recipe_of(DEEPSPEED, "layout={offload_optimizer: 1.0}"), replace(ZERO_3, zero_stage=1))
    assert whole["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True, "ratio": 1.0}
    assert whole["zero_force_ds_cpu_optimizer"] is False
    streamed = ds_config(recipe_of(DEEPSPEED, "layout={offload_parameters: true}"), ZERO_3)["zero_optimization"]
    assert streamed["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert "offload_optimizer" not in streamed


def test_a_share_of_the_optimizer_is_kept_by_cutting_the_shard_into_groups() -> None:
    zero = ds_config(recipe_of(DEEPSPEED, OWN, "layout={offload_optimizer: 0.5}"), ZERO_3)["zero_optimization"]
    shard = 6_738_415_616 / 16
    assert zero["offload_optimizer"]["ratio"] == 0.5
    assert 19 <= shard / zero["sub_group_size"] <= 21


def test_host_memory_is_not_pinned_where_it_is_the_device() -> None:
    recipe = recipe_of("quickstart", "layout={offload_optimizer: 1.0, offload_parameters: true}")
    zero = ds_config(recipe, Layout(data=2, zero_stage=3))["zero_optimization"]
    assert zero["offload_optimizer"]["pin_memory"] is False
    assert zero["offload_param"]["pin_memory"] is False


SCRIPT_FLAGS = [
    ("layout={mlp_chunks: 8}", "--mlp-chunks 8"),
    ("layout={loss: tiled}", "--loss-tiles 8"),
    ("layout={loss: tiled, loss_tiles: 32}", "--loss-tiles 32"),
    ("training.adapters={rank: 16}", "--adapter-rank 16"),
    ("training.adapters={rank: 16, frozen_down: true}", "--adapter-rank 16 --frozen-adapter-down"),
    ("training.trained_layers=4", "--trained-layers 4"),
]


@pytest.mark.parametrize(("override", "flags"), SCRIPT_FLAGS, ids=[flags for _, flags in SCRIPT_FLAGS])
def test_the_script_is_told_words_it_knows(override: str, flags: str) -> None:
    assert flags in command(DEEPSPEED, ZERO_3, override)
    assert all(f'"{flag}"' in TRAINER.read_text() for flag in re.findall(r"--[\w-]+", flags))
    assert flags.split()[0] not in command(DEEPSPEED, ZERO_3)


def test_checkpoints_on_the_host_are_told_to_the_script_and_to_deepspeed() -> None:
    layout, override = replace(ZERO_3, recompute=RECOMPUTE_FULL), "layout={recompute: full, offload_checkpoints: true}"
    assert "--gradient-checkpointing --offload-checkpoints" in command(DEEPSPEED, layout, override)
    config = ds_config(recipe_of(DEEPSPEED, override), layout)
    assert config["activation_checkpointing"] == {"cpu_checkpointing": True}
    assert "activation_checkpointing" not in ds_config(recipe_of(DEEPSPEED), layout)


REFUSED = {
    "no-adapters": (DENSE, ["training.adapters={rank: 4}"], "training.adapters: .*backend: deepspeed has them"),
    "no-frozen-layers": (DENSE, ["training.trained_layers=4"], "training.trained_layers: .*backend: deepspeed"),
    "no-parameter-offload": (DENSE, ["layout={offload_parameters: true}"], "backend: deepspeed with zero_stage: 3"),
    "no-checkpoint-offload": (
        DENSE,
        ["layout={recompute: full, offload_checkpoints: true}"],
        "layout.offload_checkpoints: .*backend: deepspeed",
    ),
    "no-te-loss": (DENSE, ["layout={loss: te}"], "layout.loss: te: .*write loss: native"),
    "no-tiled-loss": (DENSE, ["layout={loss: tiled}"], "layout.loss: .*backend: deepspeed has loss: tiled"),
    "recomputed-mlp-is-whole": (
        DENSE,
        ["layout={recompute: selective, recompute_modules: [mlp], mlp_chunks: 2}"],
        "layout.mlp_chunks: ",
    ),
    "projection-needs-attention": (DENSE, ["layout={offload_modules: [attn_proj]}"], "attn_proj needs core_attn"),
    "recomputed-experts-stay": (
        MIXTURE,
        ["layout={recompute: selective, recompute_modules: [moe], offload_modules: [moe_act]}"],
        "layout.offload_modules: moe_act",
    ),
    "some-layers-stay": (DENSE, ["layout={offload_layers: 32}"], "at least one layer must stay"),
    "delayed-gradients-need-half": (
        MIXTURE,
        ["training.precision=fp32", "layout={delay_weight_gradients: true}"],
        "precision bf16 or fp16",
    ),
    "delayed-gradients-need-alltoall": (
        MIXTURE,
        ["layout={delay_weight_gradients: true, token_dispatcher: allgather}"],
        "token_dispatcher: alltoall",
    ),
    "delayed-gradients-keep-experts": (
        MIXTURE,
        ["layout={delay_weight_gradients: true, recompute: selective, recompute_modules: [moe]}"],
        "remove moe from recompute_modules",
    ),
    "every-layer-recomputed": (
        DEEPSPEED,
        ["layout={recompute: full, recompute_method: block}"],
        "layout.recompute_method: .*backend: megatron-lm",
    ),
    "one-layer-groups": (
        DEEPSPEED,
        ["layout={recompute: full, recompute_layers: 2}"],
        "layout.recompute_layers: .*backend: megatron-lm",
    ),
    "no-module-offload": (DEEPSPEED, ["layout={offload_modules: [core_attn]}"], "backend: megatron-lm has --offload"),
    "no-layer-offload": (DEEPSPEED, ["layout={offload_layers: 2}"], "backend: megatron-lm has --cpu-offloading"),
    "checkpoints-leave-a-gpu": (
        "quickstart",
        ["layout={recompute: full, offload_checkpoints: true}"],
        "layout.offload_checkpoints: on a CPU the host is the device",
    ),
    "whole-optimizer-offload": (DEEPSPEED, ["layout={offload_optimizer: 0.5}"], "write 1.0, or use a script"),
    "whole-or-tiled-loss": (DEEPSPEED, ["layout={loss: native}"], "backend: megatron-lm has native"),
    "counted-loss": (DEEPSPEED, [OWN, "layout={loss: native}"], "native or te loss spares is not counted"),
    "dense-tiles": (DEEPSPEED, ["model=mixtral-8x7b", "layout={loss: tiled}"], "a mixture's balancing loss"),
    "dense-chunks": (DEEPSPEED, ["model=mixtral-8x7b", "layout={mlp_chunks: 2}"], "chunks dense MLPs"),
    "dense-adapters": (DEEPSPEED, ["model=mixtral-8x7b", "training.adapters={rank: 2}"], "a mixture's experts"),
    "no-delayed-gradients": (DEEPSPEED, ["layout={delay_weight_gradients: true}"], "megatron-lm has --delay-wgrad"),
    "no-hidden-exchange": (
        DEEPSPEED,
        ["layout={overlap_expert_communication: true}"],
        "layout.overlap_expert_communication: .*so no token travels",
    ),
    "no-hidden-tensor": (
        DEEPSPEED,
        ["layout={tp_comm_overlap: true}"],
        "layout.tp_comm_overlap: .*megatron-lm has --tp",
    ),
    "no-ring": (DEEPSPEED, ["layout={context_comm: p2p}"], "layout.context_comm: .*Ulysses here"),
    "no-dispatcher": (
        DEEPSPEED,
        ["model=mixtral-8x7b", "layout={token_dispatcher: allgather}"],
        "backend: megatron-lm has --moe-token-dispatcher-type",
    ),
    "gradients-as-computed": (
        DEEPSPEED,
        ["training.precision=fp16", "training.gradient_dtype=fp32"],
        "training.gradient_dtype: gradients accumulate in the precision of the computation",
    ),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_a_backend_cannot_do_is_refused_before_anything_is_searched(key: str) -> None:
    name, overrides, message = REFUSED[key]
    recipe = recipe_of(name, *overrides)
    backend = backend_for(recipe)
    with pytest.raises(UserError, match=message) as refusal:
        make_plan(setting_of(recipe, backend))
    assert "\n" not in str(refusal.value)
    with pytest.raises(UserError, match=message):
        backend.render(recipe, GPUS if backend.name == "megatron-lm" else ZERO_3)


def test_every_requirement_has_its_case() -> None:
    keys = [r.key for r in (*megatron_techniques.REQUIREMENTS, *deepspeed_techniques.REQUIREMENTS)]
    assert sorted(keys) == sorted(REFUSED)


def test_a_script_of_ones_own_does_what_it_likes_but_not_to_deepspeed() -> None:
    recipe = recipe_of(DEEPSPEED, OWN, "layout={offload_modules: [core_attn], mlp_chunks: 4, loss: fused_linear}")
    assert DeepSpeed().rules(recipe)
    assert "--mlp-chunks" not in words_of(recipe, ZERO_3)
    with pytest.raises(UserError, match=r"training\.gradient_dtype"):
        DeepSpeed().rules(recipe_of(DEEPSPEED, OWN, "training.precision=fp16", "training.gradient_dtype=fp32"))


ONE_STAGE, TWO_STAGES = replace(GPUS, offload_layers=2), replace(GPUS, pipeline=2)
TWO_EXPERT_STAGES = replace(EXPERTS, pipeline=2)
MODULES, DELAYED = "layout={offload_modules: [core_attn]}", "layout={delay_weight_gradients: true}"
PART, WHOLE = "layout={offload_optimizer: 0.5}", "layout={offload_optimizer: 1.0}"
PARAMETERS = "layout={offload_parameters: true}"

# key of the rule, recipe, the override that asks, a layout refused then, one that is not
RULED = [
    ("offload-layers-one-stage", DENSE, None, replace(ONE_STAGE, pipeline=2), TWO_STAGES),
    ("offload-layers-no-recompute", DENSE, None, replace(FULL, offload_layers=2), FULL),
    ("offload-layers-some-stay", DENSE, None, replace(GPUS, offload_layers=32), replace(GPUS, offload_layers=31)),
    ("offload-layers-no-modules", DENSE, MODULES, ONE_STAGE, GPUS),
    ("offload-modules-no-full", DENSE, MODULES, FULL, SELECTIVE),
    ("offload-optimizer-distributed", DENSE, PART, replace(GPUS, zero_stage=0), GPUS),
    ("delayed-gradients-experts", MIXTURE, DELAYED, GPUS, EXPERTS),
    ("delayed-gradients-no-full", MIXTURE, DELAYED, replace(EXPERTS, recompute=RECOMPUTE_FULL), EXPERTS),
    (
        "delayed-gradients-interleaved",
        MIXTURE,
        DELAYED,
        TWO_EXPERT_STAGES,
        replace(TWO_EXPERT_STAGES, virtual_pipeline=2),
    ),
    ("offload-optimizer-zero", DEEPSPEED, WHOLE, replace(ZERO_3, zero_stage=0), replace(ZERO_3, zero_stage=1)),
    ("offload-part-zero-3", DEEPSPEED, PART, replace(ZERO_3, zero_stage=2), ZERO_3),
    ("offload-parameters-zero-3", DEEPSPEED, PARAMETERS, replace(ZERO_3, zero_stage=2), ZERO_3),
]


@pytest.mark.parametrize(("key", "name", "override", "refused", "legal"), RULED, ids=[case[0] for case in RULED])
def test_each_rule_refuses_what_it_is_there_for(
    key: str, name: str, override: str | None, refused: Layout, legal: Layout
) -> None:
    own = [OWN] if key == "offload-part-zero-3" else []  # the shipped script offloads all or nothing
    silent = recipe_of(name, *own)
    asking = recipe_of(name, *own, override) if override else silent
    assert key in refused_by(asking, refused)
    assert key not in refused_by(asking, legal)
    rules = [rule for rule in backend_for(asking).rules(asking) if rule.key == key]
    assert not override or not refused_by(silent, refused, rules), "a technique nobody asked for refuses a layout"


def test_every_technique_rule_has_its_case() -> None:
    keys = [r.key for r in (*megatron_techniques.TECHNIQUE_RULES, *deepspeed_techniques.TECHNIQUE_RULES)]
    elsewhere = ("offload-optimizer-half", "recomputed-mlp-unbiased")
    assert sorted(keys) == sorted([*(case[0] for case in RULED), *elsewhere])


def test_megatron_recomputes_no_mlp_with_biases() -> None:
    recipe = recipe_of(DENSE, "layout={recompute: selective, recompute_modules: [mlp]}")
    for biased, layout, refused in ((True, SELECTIVE, True), (True, FULL, False), (False, SELECTIVE, False)):
        shape = replace(recipe.model, linear_bias=biased)
        assert ("recomputed-mlp-unbiased" in refused_by(replace(recipe, model=shape), layout)) is refused


@pytest.mark.parametrize(("precision", "refused"), [("fp32", True), ("bf16", False), ("fp16", False)])
def test_megatron_offloads_no_optimizer_of_fp32(precision: str, refused: bool) -> None:
    recipe = recipe_of(DENSE, f"training.precision={precision}", PART)
    assert ("offload-optimizer-half" in refused_by(recipe, GPUS)) is refused


def test_the_planner_keeps_to_them() -> None:
    recipe = recipe_of(DENSE, "layout={offload_layers: 2}")
    plan = make_plan(setting_of(recipe, backend_for(recipe)))
    assert (plan.layout.pipeline, plan.layout.recompute) == (1, 0)
    assert plan.refused["offload-layers-one-stage"] > 0


@pytest.mark.parametrize("name", [DENSE, DEEPSPEED])
@pytest.mark.parametrize("what", ["swapped_share: 0.5", "sampled_share: 0.5", "weight_versions: 2"])
def test_what_no_backend_runs_is_planned_and_never_rendered(name: str, what: str) -> None:
    recipe = recipe_of(name, f"what_if={{{what}}}")
    backend = backend_for(recipe)
    plan = make_plan(setting_of(recipe, backend))
    with pytest.raises(UserError, match=rf"what_if\.{what.split(':')[0]}: no backend runs it"):
        backend.render(recipe, plan.layout)


def test_the_table_lists_every_key_and_no_flag_the_parser_lacks() -> None:
    listed = {key.split(":")[0] for entry in TECHNIQUE_LIST for key in entry.keys}
    layout = {f"layout.{key}" for section in (Techniques, MoeShape) for key in key_names(section, "layout")}
    what_ifs = {f"what_if.{key}" for key in key_names(Techniques, "what_if")}
    training = {"training.adapters", "training.trained_layers", "training.gradient_dtype"}
    numbers = {"layout.recompute", "layout.recompute_layers", "layout.offload_layers"}
    assert listed == layout | what_ifs | training | numbers
    keys = {key.split(".")[-1] for key in listed} - {"token_dispatcher", "gradient_dtype"}
    assert keys - {name.split(".")[-1] for name in numbers} == {field.name for field in fields(Techniques)}
    flags = set(core_parser("0.19").flags)
    for entry in TECHNIQUE_LIST:
        assert set(re.findall(r"--[\w-]+", entry.megatron or "")) <= flags
        assert all(f'"{flag}"' in TRAINER.read_text() for flag in re.findall(r"--[\w-]+", entry.deepspeed or ""))
