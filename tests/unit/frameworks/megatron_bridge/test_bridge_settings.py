"""What is rendered for Megatron-Bridge: a file of plain values, each with its reason, and a program that reads it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import NodeVariable
from llmlaunch.frameworks.bridge.backend import MegatronBridge
from llmlaunch.frameworks.bridge.settings import settings_of
from llmlaunch.frameworks.classed_arguments import NEUTRAL, UNKNOWN
from llmlaunch.frameworks.framework import backend_for
from llmlaunch.frameworks.megatron.flags.table import bridge_fields, flags
from llmlaunch.frameworks.megatron.parser import NEWEST, core_parser
from llmlaunch.layout import Layout
from llmlaunch.planner.search_space import technique_space
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import NO_TECHNIQUES
from support.backend_output import render
from support.recipes import recipe_of

DENSE = Layout(2, 4, virtual_pipeline=2, data=4, sequence_parallel=1, zero_stage=1)
EVEN = Layout(2, 1, data=16, sequence_parallel=1, zero_stage=1)


def on_bridge(name: str, *overrides: str) -> Recipe:
    return recipe_of(name, "backend=megatron-bridge", *overrides)


def settings(recipe: Recipe, layout: Layout) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(render(recipe, layout).files["bridge.json"])
    return made


def test_the_program_is_one_script_and_its_settings() -> None:
    recipe = on_bridge("llama3-8b")
    rendered = render(recipe, DENSE)
    words = [NodeVariable("LLMLAUNCH_RUN_DIR", f"/{file}") for file in ("trainer/megatron_bridge.py", "bridge.json")]
    assert rendered.program == tuple(words)
    assert rendered.check == (*words, "--check", "32", "--compute-capability", "9.0")
    assert set(rendered.files) == {"trainer/megatron_bridge.py", "bridge.json"}
    assert rendered.required_variables == ()  # Bridge is a package, not a checkout


def test_every_value_has_its_reason() -> None:
    rendered = render(on_bridge("mixtral-8x7b"), Layout(1, 4, data=16, expert=8, zero_stage=1))
    made = json.loads(rendered.files["bridge.json"])
    assert rendered.settings["model.moe_router_topk"].keys == ("model.moe.topk",)
    assert rendered.settings["optimizer.lr"].keys == ("training.learning_rate",)
    for name in rendered.settings:
        place: Any = made
        for part in name.split("."):
            place = place[part]


def test_values_have_the_types_of_their_fields() -> None:
    made = settings(on_bridge("llama3-8b", "training.learning_rate=1"), DENSE)
    assert made["model"]["num_layers"] == 32
    assert type(made["model"]["hidden_dropout"]) is float
    assert type(made["optimizer"]["lr"]) is float
    assert made["model"]["bf16"] is True


def test_the_model_is_told_the_padded_vocabulary() -> None:
    """Bridge's set-up does not pad a number that it is told (training/setup.py _validate_and_set_vocab_size, 0.6)."""
    made = settings(on_bridge("llama3-8b", "model.vocab_size=50257"), EVEN)
    assert (made["model"]["vocab_size"], made["model"]["should_pad_vocab"]) == (50432, False)
    assert made["tokenizer"]["vocab_size"] == 50257


def test_gradients_accumulate_as_the_recipe_says() -> None:
    for overrides, wide in (
        ((), True),
        (("training.gradient_dtype=bf16",), False),
        (("training.precision=fp16",), False),
    ):
        assert settings(on_bridge("llama3-8b", *overrides), DENSE)["ddp"]["grad_reduce_in_fp32"] is wide


def test_chunks_of_one_rank_overlap_their_messages() -> None:
    for layout, overlapped in ((DENSE, True), (EVEN, False)):
        made = settings(on_bridge("llama3-8b"), layout)
        transformer = made["model"]
        assert (transformer["overlap_p2p_comm"], transformer["batch_p2p_comm"]) == (overlapped, not overlapped)
        assert made["ddp"]["align_param_gather"] is overlapped


def test_data_of_ones_own_is_named_as_bridge_reads_it() -> None:
    made = settings(on_bridge("llama3-8b", "data={path: /data/text_document, tokenizer: /models/llama3}"), DENSE)
    assert made["dataset"]["kind"] == "indexed"
    assert made["dataset"]["data_path"] == ["/data/text_document"]
    assert made["tokenizer"]["tokenizer_model"] == "/models/llama3"


OF_ATTENTION = "[q_proj, k_proj, v_proj, o_proj]"
EXPERTS = "num_experts: 8, topk: 2, ffn_hidden_size: 14336, shared_expert_ffn_hidden_size: 64"
SHARED_EXPERT = f"model={{base: mixtral-8x7b, moe: {{{EXPERTS}}}}}"
FP8_PARAMETERS, BESIDE = (
    ("training.fp8=delayed", "training.fp8_parameters=true"),
    "were tried beside fp8 and recompute alone",
)
PARTS = "training.adapters={rank: 16, target_modules: [q_proj, v_proj]}"
ADAPTED = ("training.adapters={rank: 16}", "training.start_from=/models/llama3")


def test_adapters_are_trained_beside_weights_that_are_there() -> None:
    made = settings(on_bridge("llama3-8b", *ADAPTED), DENSE)
    assert (made["task"], made["peft"]) == ("finetune", {"dim": 16, "alpha": 16})
    made = settings(on_bridge("llama3-8b", *ADAPTED, f"training.adapters.target_modules={OF_ATTENTION}"), DENSE)
    assert made["peft"] == {"dim": 16, "alpha": 16, "target_modules": ["linear_qkv", "linear_proj"]}


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("llama3-8b", ADAPTED[:1], r"training\.adapters: stand beside weights that are there"),
        ("llama3-8b", ("training.adapters={rank: 16, frozen_down: true}", ADAPTED[1]), "trains both matrices"),
        ("llama3-8b", ("training.adapters={rank: 16, base: nf4}", ADAPTED[1]), "keeps frozen weights in the compute"),
        ("llama3-8b", (PARTS, ADAPTED[1]), "beside linear_qkv and linear_fc1 as a whole"),
        ("qwen3-30b-a3b", (*ADAPTED, "model=qwen3-next-80b-a3b"), "in other ways, which are not priced yet"),
        ("llama3-8b", ("training.optimizer=muon",), "Bridge 0.6 has muon give each rank whole tables"),
        ("deepseek-v3", (*ADAPTED, "layout.overlap_shared_expert=true"), BESIDE),
        (
            "mixtral-8x7b",
            (*ADAPTED, "layout={recompute: selective, recompute_modules: [moe]}"),
            BESIDE,
        ),
        ("llama3-8b", (*ADAPTED, *FP8_PARAMETERS), BESIDE),
        ("llama3-8b", (*ADAPTED, "layout.zero_stage=3"), BESIDE),
        ("llama3-8b", (*ADAPTED, "layout.cuda_graphs=[attn]"), BESIDE),
    ],
)
def test_adapters_that_nobody_tried_are_refused(name: str, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MegatronBridge().rules(on_bridge(name, *overrides))


def test_adapters_stand_beside_experts_too() -> None:
    for more in ((), (SHARED_EXPERT,)):
        assert MegatronBridge().rules(on_bridge("mixtral-8x7b", *ADAPTED, *more))


def test_attention_in_latents_has_layers_of_its_own_to_adapt() -> None:
    """Bridge's own default names linear_qkv, which latent attention has not, and says nothing of it."""
    plain = ["linear_kv_down_proj", "linear_kv_up_proj", "linear_proj", "linear_fc1", "linear_fc2"]
    made = settings(on_bridge("deepseek-v3", *ADAPTED), DENSE)
    assert made["peft"]["target_modules"] == ["linear_q_down_proj", "linear_q_up_proj", *plain]
    made = settings(on_bridge("deepseek-v3", "model=deepseek-v2-lite", *ADAPTED), DENSE)
    assert made["peft"]["target_modules"] == ["linear_q_proj", *plain]
    mlp = "training.adapters.target_modules=[linear_fc1, linear_fc2]"
    made = settings(on_bridge("deepseek-v3", *ADAPTED, mlp), DENSE)
    assert made["peft"]["target_modules"] == ["linear_fc1", "linear_fc2"]


def test_an_adapter_keeps_its_input_in_the_compute_format() -> None:
    fp8 = on_bridge("llama3-8b", *ADAPTED, "training.fp8=tensorwise")
    wide, narrow = (MegatronBridge().facts(replace(fp8, techniques=each)) for each in (fp8.techniques, NO_TECHNIQUES))
    assert (wide.layer.linear_input_bytes, narrow.layer.linear_input_bytes) == (2.0, 1.0)
    assert wide.layer.quantized is not None
    assert narrow.layer.quantized is not None
    assert wide.layer.quantized.weight_copy_bytes == narrow.layer.quantized.weight_copy_bytes


def test_a_search_offers_nothing_untried_beside_adapters() -> None:
    recipe = on_bridge("llama3-8b", *ADAPTED)
    space = technique_space(recipe, MegatronBridge())
    assert space.step
    assert not any(
        step.cuda_graphs or step.offload_modules or step.tp_comm_overlap or step.solved == "offload_layers"
        for step in space.step
    )
    assert not any(state.offload_optimizer for state in space.state)
    mixture = technique_space(on_bridge("mixtral-8x7b", *ADAPTED), MegatronBridge())
    assert not any("moe" in step.recompute_modules for step in mixture.step)


def test_rows_are_finetuned_on() -> None:
    rows = "data={path: /data/squad, format: chat, tokenizer: /models/llama3}"
    with pytest.raises(UserError, match=r"data\.format: goes on from weights that are there"):
        MegatronBridge().rules(on_bridge("llama3-8b", rows))
    made = settings(
        on_bridge("llama3-8b", rows, "training.start_from=/models/llama3", "training.learning_rate=1.0e-5"), DENSE
    )
    assert (made["task"], made["checkpoint"]["pretrained_checkpoint"]) == ("finetune", "/models/llama3")
    assert made["dataset"] == {
        "kind": "rows",
        "preprocessing": {"kind": "chat"},
        "dataset_root": "/data/squad",
        "seq_length": 8192,
        "dataset_kwargs": {"pad_to_max_length": True},
        "seed": 1234,
        "do_validation": False,
        "do_test": False,
    }


PACKED = (
    "data={path: /data/squad, format: chat, tokenizer: /models/llama3, packed: true}",
    "training.start_from=/models/w",
    "training.learning_rate=1.0e-5",
)


@pytest.mark.parametrize(("context", "pieces"), [(1, 1), (2, 4)])
def test_rows_are_packed_before_the_training(context: int, pieces: int) -> None:
    """Each context rank has two pieces of every row, so that rows are filled up to a multiple of that."""
    workers = "dataset.offline_packing_specs.num_tokenizer_workers"
    bridge = f"backend={{name: megatron-bridge, extra_args: [{workers}=16], neutral_args: [{workers}]}}"
    recipe, layout = on_bridge("llama3-8b", *PACKED, bridge), replace(DENSE, context=context, data=4 // context)
    rendered = render(recipe, layout)
    dataset = json.loads(rendered.files["bridge.json"])["dataset"]
    assert dataset["enable_offline_packing"] is True
    sizes = {"packed_sequence_size": 8192, "pad_seq_to_mult": pieces}
    assert dataset["offline_packing_specs"] == {**sizes, "num_tokenizer_workers": 16}
    assert dataset["dataset_kwargs"] == {"pad_to_max_length": True}
    assert rendered.settings["dataset.offline_packing_specs.pad_seq_to_mult"].keys == ("data.packed", "layout.context")
    assert rendered.prepare == (*rendered.program, "--pack")
    assert any(note.startswith("data.packed: global_batch_size counts sequences") for note in rendered.notes)


def test_rows_that_are_not_packed_leave_nothing_to_prepare() -> None:
    recipe = on_bridge("llama3-8b", PACKED[0].replace(", packed: true", ""), *PACKED[1:])
    assert render(recipe, DENSE).prepare == ()
    assert "offline_packing_specs" not in settings(recipe, DENSE)["dataset"]


def test_a_search_offers_nothing_that_packed_rows_exclude() -> None:
    packed, whole = (technique_space(on_bridge("mixtral-8x7b", *data), MegatronBridge()) for data in (PACKED, ()))
    assert packed.step
    assert not any(step.cuda_graphs or step.overlap_expert_communication for step in packed.step)
    assert any(step.overlap_expert_communication for step in whole.step)


@pytest.mark.parametrize(
    ("name", "override", "sentence"),
    [
        ("mixtral-8x7b", "layout.overlap_expert_communication=true", "does not tell the layers where rows end"),
        ("llama3-8b", "layout.cuda_graphs=[attn]", "want as many rows in every sequence"),
        ("llama3-8b", "training.precision=fp32", "without flash or fused attention"),
        ("qwen3-30b-a3b", "model=nemotron-3-nano", "keep rows apart in other ways"),
    ],
)
def test_what_would_mix_packed_rows_is_refused(name: str, override: str, sentence: str) -> None:
    with pytest.raises(UserError, match=rf"data\.packed: .*{sentence}"):
        MegatronBridge().rules(on_bridge(name, *PACKED, override))


def test_checkpoints_are_saved_and_gone_on_from_in_one_folder() -> None:
    saving = ("training.save_interval=100", "training.checkpoint_path=/ckpt")
    made = settings(on_bridge("llama3-8b", *saving), DENSE)
    expected = {"save": "/ckpt", "load": "/ckpt", "save_interval": 100, "ckpt_format": "torch_dist"}
    assert expected.items() <= made["checkpoint"].items()
    assert made["train"]["exit_signal_handler"] is True


def test_what_the_node_knows_is_named_by_its_variable() -> None:
    made = settings(on_bridge("llama3-8b", "tracking={wandb: {project: p, name: n}}"), DENSE)
    assert made["logger"]["tensorboard_dir"] == {"variable": "LLMLAUNCH_RUN_DIR", "suffix": "/tensorboard"}


def test_text_of_a_recipe_stays_text() -> None:
    nasty = "/tmp/$(touch x)`id`';{{ 7*7 }}"
    made = settings(on_bridge("llama3-8b", f"training.start_from={json.dumps(nasty)}"), DENSE)
    assert made["checkpoint"]["pretrained_checkpoint"] == nasty


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("backend={name: megatron-bridge, extra_args: [--x]}",), "set fields of its ConfigContainer"),
        (("backend={name: megatron-bridge, script: /x.py}",), "script belongs to megatron-lm and deepspeed"),
        (("backend={name: megatron-bridge, path: /x}",), "path is the Megatron-LM checkout"),
        (("backend={name: megatron-bridge, ds_config: {a: 1}}",), "ds_config belongs to deepspeed"),
    ],
)
def test_words_of_other_backends_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe_of("llama3-8b", *overrides)


def with_fields(*fields: str, neutral: str = "") -> Recipe:
    backend = {"name": "megatron-bridge", "extra_args": list(fields), "neutral_args": [neutral] if neutral else []}
    return recipe_of("llama3-8b", f"backend={json.dumps(backend)}")


def test_fields_of_ones_own_stand_beside_the_recipes() -> None:
    recipe = with_fields(
        "checkpoint.also_save_hf_checkpoint=true", "train.manual_gc_interval=100", "logger.log_params_norm=yes"
    )
    made = settings(recipe, DENSE)
    assert made["checkpoint"]["also_save_hf_checkpoint"] is True
    assert made["train"]["manual_gc_interval"] == 100
    rendered = render(recipe, DENSE)
    assert rendered.settings["train.manual_gc_interval"].keys == ("backend.extra_args",)
    assert len(rendered.program) == 2


@pytest.mark.parametrize(
    ("field", "neutral", "kind"),
    [
        ("checkpoint.also_save_hf_checkpoint=true", "", NEUTRAL),
        ("optimizer.adam_eps=1.0e-8", "", NEUTRAL),
        ("model.cpu_offloading_weights=true", "", UNKNOWN),
        ("model.cpu_offloading_weights=true", "model.cpu_offloading_weights", NEUTRAL),
        ("ddp.nccl_ub=true", "", UNKNOWN),
    ],
)
def test_a_field_is_of_the_class_of_its_section_or_of_megatrons_flag(field: str, neutral: str, kind: str) -> None:
    (classed,) = MegatronBridge().classed_arguments(with_fields(field, neutral=neutral), DENSE).arguments
    assert classed.flag_class.kind == kind, classed.sentence


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("model.num_layers=4",), r"model\.num_layers: is for the recipe to decide"),
        (("model.recompute_granularity=full",), "is for the recipe to decide"),
        (("mixed_precision.fp8=true",), "is of no section that is rendered"),
        (("train.manual_gc=true", "train.manual_gc=false"), "is there twice"),
    ],
)
def test_fields_that_the_plan_rests_on_are_refused(fields: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        render(with_fields(*fields), DENSE)


def test_cpus_and_longer_learned_positions_are_refused() -> None:
    short = on_bridge("gpt3-175b", "training.sequence_length=1024")
    with pytest.raises(UserError, match="makes as many as a sequence is long"):
        backend_for(short).rules(short)
    with pytest.raises(UserError, match="trains on GPUs alone"):
        MegatronBridge().rules(on_bridge("llama3.2-1b", "cluster=cpu-x2"))


def test_narrow_weights_that_bridge_would_misread_are_not_saved() -> None:
    narrow = ("training.fp8=tensorwise", "training.fp8_parameters=true")
    saving = ("training.save_interval=100", "training.checkpoint_path=/ckpt")
    refused = on_bridge("llama3-8b", *narrow, *saving)
    with pytest.raises(UserError, match="in slices, each with another scale"):
        MegatronBridge().rules(refused)
    MegatronBridge().rules(on_bridge("llama3-8b", *narrow))
    MegatronBridge().rules(on_bridge("llama3-8b", narrow[0], *saving))


# Flags that are written where Megatron-LM is started, and not for Bridge.
NEVER_FOR_BRIDGE = {
    "--non-persistent-save-interval": "the requirement no-non-persistent-on-bridge",
    "--non-persistent-ckpt-type": "the same",
    **dict.fromkeys(
        (flag for flag in core_parser(NEWEST).flags if "-dsa-" in flag),
        "the requirement no-sparse-attention-on-bridge",
    ),
    "--cuda-graph-scope": "core 0.16, which Bridge 0.6 does not take",
    "--num-layers-per-virtual-pipeline-stage": "the same",
}


def test_every_flag_that_is_written_has_fields_or_a_reason_to_have_none() -> None:
    written = {row.name for row in flags() if row.writes}
    assert len(written) > 180
    assert written - bridge_fields().keys() == NEVER_FOR_BRIDGE.keys() & written
    assert not NEVER_FOR_BRIDGE.keys() & bridge_fields().keys()


NON_PERSISTENT = "training.non_persistent_save_interval"


def test_an_argument_without_a_field_is_refused_by_name() -> None:
    recipe = on_bridge("llama3-8b", "training.save_interval=10", "training.checkpoint_path=/c", f"{NON_PERSISTENT}=2")
    with pytest.raises(UserError, match=rf"{NON_PERSISTENT}: backend: megatron-bridge has no setting for it"):
        settings_of(recipe, EVEN)
