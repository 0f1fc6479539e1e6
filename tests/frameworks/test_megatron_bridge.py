"""Megatron-Bridge 0.6.2 as it is published: its own ConfigContainer takes what we render for it, and gives Megatron
core the configuration that Megatron-LM's own arguments give it, field by field, in the gallery and at random."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from judges import FRAMEWORKS, TRACED, line_for_line, megatron_python

from llmlaunch.assets import asset
from llmlaunch.frameworks.bridge.backend import MegatronBridge
from llmlaunch.frameworks.bridge.rules import BRIDGE_REQUIREMENTS
from llmlaunch.frameworks.bridge.settings import MEGATRON_DEFAULTS
from llmlaunch.frameworks.megatron.flags.table import bridge_fields
from llmlaunch.frameworks.megatron.program import environment
from llmlaunch.layout import Layout
from llmlaunch.planner.plan import as_planned
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe
from support.megatron_cases import Case, cases, refusals
from support.plans import gallery_setting, legal_layouts, plan_of
from support.recipes import gallery_of, recipe_of
from support.soak import SOAK, in_soak, share
from support.words import word_tokenizer

pytestmark = pytest.mark.frameworks

BRIDGE = FRAMEWORKS / "bridge-0.6"
RECIPES = Path(str(asset("recipes")))
MEGATRON = gallery_of("megatron-lm")
EXAMPLES = int(os.environ.get("LLMLAUNCH_ORACLE_EXAMPLES", "8" if SOAK else "2"))
PLANNED = "LLMLAUNCH_ORACLE_EXAMPLES" in os.environ  # `make oracle-full`

# What may differ, and why it is no difference for Megatron core. Anything else fails.
JUSTIFIED = {
    "model.tensor_parallel_num_weight_shards": "None is the tensor parallel size, which Megatron-LM says",
    "model.expert_tensor_parallel_num_weight_shards": "None is the expert tensor parallel size",
    "model.mtp_num_layers": "None and 0 are both: no prediction head; where there are some, the two are the same",
    "model.use_cpu_initialization": "None and False are both: on the device",
    "model.use_te_rng_tracker": "Bridge wants it here, Megatron-LM hands its argument to the generator itself",
    "model.vocab_size": "Bridge pads no number that it is told, so it is told the padded one, compared below",
    "model.should_pad_vocab": "the same",
    "model.seq_length": "Megatron-LM's is that of learned positions; where they are learned, the two are the same",
    "model.rope_scaling_factor": "read with the scaling of Llama 3.1 alone, and then the same",
    "model.hybrid_stack_spec": "the same",
    "model.transformer_layer_spec": "who describes the layers; what they say is compared",
    "optimizer.fp8_recipe": "read with parameters in 8 bits alone, and then the same",
    "optimizer.muon_momentum": "read with optimizer: muon alone",
    "ddp.data_parallel_sharding_strategy": "read with Megatron-FSDP alone, and then the same",
    "ddp.use_custom_fsdp": "the old name of use_megatron_fsdp, which nothing reads",
    "scheduler.lr_decay_iters": "None is the number of steps, which Bridge writes down",
}
IN_VALIDATION = (
    "train.eval_iters",
    "train.eval_interval",
    "train.skip_train",
)  # where Bridge moved them, compared there

NO_FIELD = "(no such field)"  # as the judge says it

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    if not BRIDGE.is_dir():
        pytest.fail("Megatron-Bridge is missing: `make install-frameworks` installs it")
    with line_for_line(megatron_python(), TRACED / "bridge_judge.py") as say:
        yield lambda **job: json.loads(say(json.dumps({"environment": {}, "compute_capability": "9.0", **job})))


def on_bridge(recipe: Recipe) -> Recipe:
    return replace(recipe, backend=replace(recipe.backend, name="megatron-bridge"))


def test_layers_with_gated_delta_nets_are_those_of_megatron(ask: Ask) -> None:
    recipe = recipe_of("qwen3-30b-a3b", "model=qwen3-next-80b-a3b")
    check_alike(ask, Case(recipe, Layout(2, 2, data=8, expert=8, sequence_parallel=1, zero_stage=1)))


@pytest.mark.parametrize("precision", ["bf16", *in_soak("fp16", "fp32")])
def test_layers_of_one_part_each_are_those_of_megatron(ask: Ask, precision: str) -> None:
    words = ("model={base: nemotron-3-super, mtp_num_layers: 2, mtp_repeated: true}", f"training.precision={precision}")
    check_alike(ask, Case(recipe_of("qwen3-30b-a3b", *words), Layout(2, 2, data=8, expert=8, sequence_parallel=1)))


def test_experts_with_a_fixed_number_of_rows_are_those_of_megatron(ask: Ask) -> None:
    rows = "token_dispatcher: flex, flex_backend: hybridep, expert_rank_capacity_factor: 1.5, paged_stash: {}"
    blackwell = ("cluster=b200-x8", "training.fp8=mxfp8", f"layout={{{rows}}}")
    check_alike(ask, Case(recipe_of("qwen3-30b-a3b", *blackwell), Layout(data=8, expert=8, zero_stage=1)))


def test_latent_attention_is_stretched_as_no_argument_of_megatron_says(ask: Ask) -> None:
    """Kimi K2's yarn; all but that is as Megatron-LM's arguments have it."""
    case = Case(recipe_of("kimi-k2"), Layout(2, data=128, expert=64, sequence_parallel=1, zero_stage=1))
    settings = rendered_settings(case.recipe, case.layout)
    assert settings["model"]["beta_fast"] == 1.0
    answer = check_alike(ask, case, apart=("model.beta_fast",))
    assert sorted(answer["differences"]["model.beta_fast"]) == ["1.0", "32"]


SPLIT = Layout(2, 2, data=4, context=2, sequence_parallel=1, zero_stage=1)
TUNED = (
    "backend=megatron-bridge",
    f"training.start_from={RECIPES}",
    "training.sequence_length=64",
    "training.learning_rate=1.0e-5",
)  # a folder


def tuned(*overrides: str) -> Recipe:
    return recipe_of("llama3-8b", *TUNED, *overrides)


def rendered_settings(recipe: Recipe, layout: Layout) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(MegatronBridge().render(on_bridge(recipe), layout).files["bridge.json"])
    return made


def check_alike(ask: Ask, case: Case, apart: Container[str] = ()) -> dict[str, Any]:
    """Check that Bridge takes the job and configures Megatron core as Megatron-LM does, `apart` from some fields, and
    return the judge's answer."""
    made = rendered_settings(case.recipe, case.layout)
    answer = ask(
        world_size=case.recipe.world_size,
        settings=made,
        arguments=case.words,
        environment=environment(case.recipe, case.layout),
        compute_capability=case.recipe.cluster.accelerator.compute_capability or "9.0",
    )
    assert answer["refused"] is None, answer["refused"]
    unlike: Mapping[str, list[str]] = answer["differences"]
    names = sorted(unlike.keys() - JUSTIFIED.keys() - set(IN_VALIDATION))
    unjustified = {name: unlike[name] for name in names if name not in apart}
    assert not unjustified, unjustified
    assert made["model"]["vocab_size"] == case.recipe.model.padded_vocab_size(case.layout.tensor)
    if case.recipe.model.position_embedding == "learned_absolute":
        assert "model.seq_length" not in unlike
    scaling = case.recipe.model.rope_scaling
    if scaling is not None and scaling.kind == "llama3":
        assert "model.rope_scaling_factor" not in unlike
    if case.recipe.model.mtp_num_layers:
        assert "model.mtp_num_layers" not in unlike
    if case.layout.zero_stage >= 2:
        assert "ddp.data_parallel_sharding_strategy" not in unlike
    if case.recipe.training.fp8_parameters:
        assert "optimizer.fp8_recipe" not in unlike
    if "scheduler.lr_decay_iters" in unlike:
        assert unlike["scheduler.lr_decay_iters"] == ["None", str(case.recipe.training.steps)]
    return answer


@pytest.mark.parametrize("name", share(MEGATRON, lambda name: PLANNED or name in MEGATRON[::9]))
def test_the_gallery_configures_megatron_core_alike_on_both_backends(ask: Ask, name: str) -> None:
    """With one of its legal layouts, and with the planned one where there is time to plan."""
    recipe, layouts = next(legal_layouts(gallery_setting(name)))
    check_alike(ask, Case(recipe, layouts.row(len(layouts) // 2)))
    if PLANNED:
        plan = plan_of(name)
        check_alike(ask, Case(as_planned(load_recipe(RECIPES / f"{name}.yaml", ()), plan.chosen), plan.layout))


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), deadline=None)
@given(case=cases())
def test_what_our_rules_allow_bridge_takes_and_configures_alike(ask: Ask, case: Case) -> None:
    assume(not refusals(case))
    assume(not any(requirement.broken(case.recipe) for requirement in BRIDGE_REQUIREMENTS))
    check_alike(ask, case)


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    recipe = load_recipe(RECIPES / "llama3-8b.yaml", ())
    return rendered_settings(recipe, Layout(2, 2, data=8, sequence_parallel=1, zero_stage=1))


def test_every_default_that_is_said_differs_from_bridges(ask: Ask, small: dict[str, Any]) -> None:
    theirs = ask(world_size=32, settings=small, defaults=list(MEGATRON_DEFAULTS))["defaults"]
    same = [name for name, value in MEGATRON_DEFAULTS.items() if theirs[name] == repr(value)]
    assert not same


def test_every_field_of_the_table_is_one_of_bridges(ask: Ask) -> None:
    """With two models that have all fields there are between them, and data from files."""
    data, hybrid = "data={path: /data/text, tokenizer: /models/words}", "model={base: nemotron-3-super}"
    gpt = fields_that_bridge_lacks(ask, recipe_of("deepseek-v2-lite", data))
    assert not gpt & fields_that_bridge_lacks(ask, recipe_of("qwen3-30b-a3b", hybrid, data))


def fields_that_bridge_lacks(ask: Ask, recipe: Recipe) -> set[str]:
    made = rendered_settings(recipe, Layout(expert=2, data=recipe.world_size, zero_stage=1))
    read_by_the_program = {"dataset.kind", "dataset.train_data_path", "dataset.valid_data_path"}
    names = {name for fields in bridge_fields().values() for name, _ in fields} - read_by_the_program
    answer = ask(world_size=recipe.world_size, settings=made, defaults=sorted(names))
    assert answer["refused"] is None
    return {name for name, default in answer["defaults"].items() if default == NO_FIELD}


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("model", {"num_attention_heads": 33}, "must be a multiple of tensor_model_parallel_size"),
        ("model", {"context_parallel_size": 5}, "is not divisible by total_model_size"),
        ("model", {"recompute_granularity": "full"}, "recompute_method"),
        ("scheduler", {"lr_warmup_fraction": 0.1}, "Cannot specify lr_warmup_fraction"),
        ("dataset", {"seq_length": 4096}, "sequence length configuration in model config and dataset config match"),
        ("train", {"of_nobody": 3}, "unexpected keyword argument 'of_nobody'"),
    ],
)
def test_it_can_say_no_before_the_training(
    ask: Ask, small: dict[str, Any], section: str, values: dict[str, Any], said: str
) -> None:
    settings = json.loads(json.dumps(small))
    place = settings
    for name in section.split("."):
        place = place[name]
    place.update(values)
    answer = ask(world_size=32, settings=settings, check=True)
    assert answer["code"] == 3
    refusal = " ".join(answer["said"].split())
    assert refusal.startswith("Megatron-Bridge refuses its settings: "), refusal
    assert said in refusal, refusal


def test_it_says_yes_before_the_training(ask: Ask, small: dict[str, Any]) -> None:
    answer = ask(world_size=32, settings=small, check=True)
    assert answer["code"] == 0
    assert answer["said"].endswith("Megatron-Bridge takes the settings of 32 rank(s)\n"), answer["said"]


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        (["checkpoint.also_save_hf_checkpoint=true", f"checkpoint.hf_source_path={RECIPES}"], 0, "takes the settings"),
        (["checkpoint.also_save_hf_checkpoint=true"], 3, "requires an HF source to template config/tokenizer files"),
        (["logger.of_nobody=1"], 3, "unexpected keyword argument 'of_nobody'"),
    ],
)
def test_bridges_own_classes_judge_fields_of_a_persons_own(ask: Ask, fields: list[str], code: int, said: str) -> None:
    recipe = recipe_of("llama3-8b", f"backend={json.dumps({'name': 'megatron-bridge', 'extra_args': fields})}")
    answer = ask(world_size=32, settings=rendered_settings(recipe, SPLIT), check=True)
    assert (answer["code"], said in " ".join(answer["said"].split())) == (code, True), answer["said"]


CHAT = [
    [{"role": "user", "content": "two and three?"}, {"role": "assistant", "content": "five"}],
    [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "a cat"}],
]
ROWS = {
    "chat": [{"messages": turns} for turns in CHAT],
    "prompt-completion": [{"prompt": turns[0]["content"], "completion": turns[1]["content"]} for turns in CHAT],
}


@pytest.mark.parametrize("kind", ROWS)
def test_answers_alone_are_learned_from_rows(ask: Ask, tmp_path: Path, kind: str) -> None:
    lines = "".join(f"{json.dumps(row)}\n" for row in ROWS[kind])
    for name in ("training", "validation"):
        (tmp_path / f"{name}.jsonl").write_text(lines, "utf-8")
    tokenizer = word_tokenizer(tmp_path / "tokenizer")
    recipe = tuned(
        f"data={{path: {tmp_path}, format: {kind}, tokenizer: {tokenizer}}}",
        "training.evaluation={interval: 10, iterations: 1}",
    )
    answer = ask(world_size=32, settings=rendered_settings(recipe, SPLIT), rows=True)
    assert answer == {"refused": None, "shape": [2, 64], "learned": ["five <eos>", "a cat <eos>"], "validation": 2}


MANY = [{"prompt": "what is it?", "completion": " ".join(["a"] * count)} for count in (20, 9, 40, 3, 30, 9, 3, 12)]


@pytest.mark.parametrize(("layout", "multiple"), [(replace(SPLIT, context=1, data=8), 1), (SPLIT, 4)])
def test_rows_are_packed_by_bridge_as_the_training_finds_them(
    ask: Ask, tmp_path: Path, layout: Layout, multiple: int
) -> None:
    """Each row of a sequence ends where the next begins, no row attends to another, and all answers are learned."""
    recipe = packed_rows(tmp_path, "training.global_batch_size=2")
    answer = ask(world_size=8, settings=rendered_settings(recipe, layout), packed=True)
    assert answer["refused"] is None
    assert answer["found"] == 2  # of training and validation, so that nothing is packed twice
    sequences = answer["sequences"]
    assert answer["said"].splitlines()[-2:] == [
        f"{name}.jsonl of {tmp_path} fills {len(sequences)} sequence(s) of 64 tokens"
        for name in ("training", "validation")
    ]
    assert 3 <= len(sequences) < len(MANY)  # of 150 tokens and more
    answers = sum(len(row["completion"].split()) + len(["<eos>"]) for row in MANY)
    assert sum(len(each["learned"].split()) for each in sequences) == answers
    assert {each["tokens"] for each in sequences} == {64}
    rows = [end - begin for each in sequences for begin, end in pairwise(each["ends"])]
    assert not any(each["mask"] for each in sequences)
    assert sum(rows) == 64 * len(sequences)
    assert not any(length % multiple for length in rows)


def test_rows_that_cannot_be_packed_end_the_job_before_it_begins(ask: Ask, tmp_path: Path) -> None:
    def refusal(*overrides: str) -> str:
        answer = ask(world_size=8, settings=rendered_settings(packed_rows(tmp_path, *overrides), SPLIT), packed=True)
        return str(answer["refused"])

    few = " sequence(s) of 64 tokens, fewer than the {} of training.global_batch_size"
    refused = refusal("training.global_batch_size=64")
    assert (refused.startswith(f"training.jsonl of {tmp_path} fills "), few.format(64) in refused) == (True, True)
    later = (tmp_path / "training.jsonl").stat().st_mtime + 3600
    os.utime(tmp_path / "training.jsonl", (later, later))
    changed = refusal("training.global_batch_size=2")
    assert changed.startswith(
        f"{tmp_path}/training.jsonl was changed after its rows were packed; remove {tmp_path}/packed"
    )
    assert refusal("data.path=/nowhere").startswith("the rows of /nowhere cannot be packed: ")


def test_an_evaluation_takes_a_whole_batch_of_packed_rows_too(ask: Ask, tmp_path: Path) -> None:
    recipe = packed_rows(tmp_path, "training.global_batch_size=2")
    (tmp_path / "validation.jsonl").write_text(f"{json.dumps(MANY[0])}\n", "utf-8")
    answer = ask(world_size=8, settings=rendered_settings(recipe, SPLIT), packed=True)
    assert answer["refused"].startswith(f"validation.jsonl of {tmp_path} fills 1 sequence(s) of 64 tokens, fewer than")


def packed_rows(folder: Path, *overrides: str) -> Recipe:
    for name in ("training", "validation"):
        if not (folder / f"{name}.jsonl").exists():
            (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in MANY), "utf-8")
    tokenizer = word_tokenizer(folder / "tokenizer")
    rows = f"data={{path: {folder}, format: prompt-completion, tokenizer: {tokenizer}, packed: true}}"
    return tuned(rows, "training.evaluation={interval: 10, iterations: 1}", *overrides)


def test_bridge_packs_sequences_for_micro_batches_of_one_alone(ask: Ask, tmp_path: Path) -> None:
    settings = rendered_settings(packed_rows(tmp_path), SPLIT)
    settings["train"]["micro_batch_size"] = 2
    answer = ask(world_size=32, settings=settings, check=True)
    assert (answer["code"], "Micro batch size should be 1" in " ".join(answer["said"].split())) == (3, True)


ADAPTERS = "training.adapters={rank: 16, target_modules: [linear_qkv, linear_proj]}"


def test_finetuning_configures_megatron_core_as_pretraining_does(ask: Ask) -> None:
    """Packed rows, too."""
    recipe = tuned("data={path: /data/squad, format: chat, tokenizer: /models/llama3, packed: true}", ADAPTERS)
    check_alike(ask, Case(recipe, SPLIT), apart=["model.calculate_per_token_loss"])
