"""Arguments of a person's own: every flag of the known parsers is of exactly one class, and a priced one is priced."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from llmlaunch.frameworks.classed_arguments import PRICED, FlagGroup, group_of
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.frameworks.deepspeed.settings import SETTINGS, setting_groups
from llmlaunch.frameworks.deepspeed.trainer_table import ARGUMENTS, shipped_groups, trainer_group, trainer_groups
from llmlaunch.frameworks.megatron.arguments import decided_names
from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.frameworks.megatron.extra_arguments import classed_arguments, megatron_groups
from llmlaunch.frameworks.megatron.flags.table import column
from llmlaunch.frameworks.megatron.parser import KNOWN_VERSIONS, core_parser
from llmlaunch.layout import Layout
from llmlaunch.memory.estimator import estimate
from llmlaunch.memory.job import Job
from llmlaunch.recipe.types import Recipe
from llmlaunch.trainers import TRAINER_MODULES
from support.recipes import recipe_of, small

LAYOUT = Layout(tensor=2, pipeline=2, data=8, zero_stage=1, sequence_parallel=1)


# Arguments that are read into the recipe, and taken from what is handed on.
READ = {row.key for row in ARGUMENTS if row.reads}


def names_of_megatron() -> set[str]:
    return {flag.dest for version in KNOWN_VERSIONS for flag in core_parser(version).flags.values()}


def fields_of_training_arguments() -> set[str]:
    """The fields of transformers' TrainingArguments, read without importing it, which would take seconds."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).with_name("training_args.py").read_text("utf-8"))
    (arguments,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments")
    return {
        node.target.id
        for node in arguments.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_")
    }


def flags_of_the_shipped_trainer() -> set[str]:
    text = "".join(path.read_text("utf-8") for path in TRAINER_MODULES)
    return {flag.replace("-", "_") for flag in re.findall(r'add_argument\(\s*"--([a-z_-]+)"', text)}


TRAINERS = json.loads((Path(__file__).parents[2] / "data" / "trainer_arguments.json").read_text("utf-8"))


def arguments_of_trainers() -> set[str]:
    """The arguments of the trainers that are made of the Trainer; Megatron-SWIFT's own alone."""
    names = {name for trainer in TRAINERS for name in TRAINERS[trainer]["names"] if trainer != "Megatron-SWIFT"}
    return names | (set(TRAINERS["Megatron-SWIFT"]["names"]) - names_of_megatron())


def patterns_for(table: Iterable[FlagGroup], name: str) -> tuple[list[str], list[str]]:
    """The patterns that hold a name with all its values, and the values of those that hold it with some."""
    matches = [
        (pattern, values) for group in table for pattern, values in group.patterns.items() if fnmatchcase(name, pattern)
    ]
    return [pattern for pattern, at in matches if not at], [value for _, at in matches for value in at]


@pytest.mark.parametrize(
    ("table", "names"),
    [
        pytest.param(megatron_groups(), names_of_megatron() - set(decided_names(small())), id="megatron"),
        pytest.param(trainer_groups(), fields_of_training_arguments(), id="hugging-face"),
        pytest.param(trainer_groups(), arguments_of_trainers() - READ, id="trainers"),
        pytest.param(shipped_groups(), flags_of_the_shipped_trainer(), id="shipped"),
    ],
)
def test_every_flag_that_a_parser_knows_is_of_exactly_one_class(table: tuple[FlagGroup, ...], names: set[str]) -> None:
    assert len(names) > 20
    for name in names:
        always, values = patterns_for(table, name)
        assert len(always) == 1 or (values and not always), f"{name}: {always}, {values}"
        assert len(values) == len(set(values)), f"{name}: {values}"


def test_the_subject_of_a_row_of_deepspeed_is_a_group() -> None:
    for groups, rows in ((setting_groups(), SETTINGS), (trainer_groups(), ARGUMENTS)):
        assert {row.subject for row in rows if row.subject} <= {group.title for group in groups}


def test_every_pattern_of_megatron_is_a_flag_that_is_not_refused() -> None:
    names = (names_of_megatron() - set(decided_names(small()))) | column("unsaid").keys() | column("companion").keys()
    patterns = [pattern for group in megatron_groups() for pattern in group.patterns]
    assert [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)] == []


def test_a_row_of_the_table_is_of_the_class_of_its_subject() -> None:
    titles = {group.title for group in megatron_groups()}
    for dest, subject in column("subject").items():
        group = group_of(megatron_groups(), dest, ())
        assert subject in titles
        assert group is None or dest in column("decides") or group.title == subject, dest


def classes(recipe: Recipe, layout: Layout = LAYOUT) -> dict[str, str]:
    backend = DeepSpeed() if recipe.backend.name == "deepspeed" else MegatronLM()
    arguments = backend.classed_arguments(recipe, layout).arguments
    return {argument.text: argument.flag_class.kind for argument in arguments}


def megatron(*words: str) -> Recipe:
    return small(f"backend={{name: megatron-lm, extra_args: {list(words)}}}")


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("--attention-backend", "flash"), "neutral"),
        (("--attention-backend", "unfused"), "priced"),
        (("--attention-backend=unfused",), "priced"),
        (("--attention-backend", "local"), "unknown"),  # of the value nothing is known
        (("--optimizer", "adam"), "neutral"),  # the parser's default
        (("--optimizer", "sgd"), "unknown"),
        (("--adam-eps", "1e-15"), "neutral"),
        (("--no-gradient-accumulation-fusion",), "priced"),
        (("--of-my-fork", "3"), "unknown"),
        (("--wandb-exp-name", "mine"), "neutral"),
        (("--cuda-graph-warmup-steps", "5"), "neutral"),
        (("--delay-offload-until-cuda-graph",), "unknown"),
    ],
)
def test_the_value_of_a_flag_counts(words: tuple[str, ...], kind: str) -> None:
    (found,) = classes(megatron(*words)).values()
    assert found == kind


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("--no-masked-softmax-fusion",), "neutral"),
        (("--no-masked-softmax-fusion", "--transformer-impl", "local"), "unknown"),
        (("--attention-softmax-in-fp32", "--transformer-impl=local"), "unknown"),
    ],
)
def test_what_local_attention_alone_reads_is_neutral_without_it(words: tuple[str, ...], kind: str) -> None:
    recipe = small(f"backend={json.dumps({'name': 'megatron-lm', 'extra_args': words})}")
    first = classed_arguments(recipe, Layout(data=recipe.world_size)).arguments[0]
    assert first.flag_class.kind == kind


def test_a_flag_of_a_recipe_key_names_the_key() -> None:
    (argument,) = MegatronLM().classed_arguments(megatron("--moe-layer-freq", "2"), LAYOUT).arguments
    assert argument.sentence.startswith("unknown: ")
    assert argument.sentence.endswith("the recipe says it as model")


PRICED_WORDS = {
    "gradient_accumulation_fusion": ("--no-gradient-accumulation-fusion",),
    "transformer_impl": ("--transformer-impl", "local"),
    "attention_backend": ("--attention-backend", "unfused"),
    "bias_swiglu_fusion": ("--no-bias-swiglu-fusion",),
    "defer_embedding_wgrad_compute": ("--defer-embedding-wgrad-compute",),
    "wgrad_deferral_limit": ("--defer-embedding-wgrad-compute", "--wgrad-deferral-limit", "3"),
}


def bytes_with(*words: str) -> list[int]:
    recipe = megatron(*words)
    job = Job(recipe.model, recipe.workload, MegatronLM().facts(recipe), techniques=recipe.techniques)
    return [rank.allocated_bytes for rank in estimate(job, LAYOUT).ranks]


def test_every_flag_that_is_called_priced_changes_the_estimate() -> None:
    named = {name for group in megatron_groups() if group.flag_class.kind == PRICED for name in group.patterns}
    assert named == set(PRICED_WORDS)
    sizes = {name: bytes_with(*words) for name, words in PRICED_WORDS.items()}
    assert all(size != bytes_with() for size in sizes.values()), sizes
    assert max(sizes["attention_backend"]) > max(bytes_with())
    assert bytes_with()[-1] < sizes["wgrad_deferral_limit"][-1] < sizes["defer_embedding_wgrad_compute"][-1]


def deepspeed(kind: str, *words: str) -> Recipe:
    script = f"script: /home/me/train.py, script_kind: {kind}, script_args: {list(words)}"
    return recipe_of("llama2-7b-deepspeed", f"backend={{name: deepspeed, {script}}}")


def test_arguments_of_a_script_are_its_own_but_for_those_of_the_framework() -> None:
    words = ("--my-flag", "3", "--torch_compile", "True", "--optim", "adamw_torch", "--eval_strategy=steps")
    here = Layout(data=8, zero_stage=3)
    compiled = {"--my-flag 3": "", "--torch_compile True": "unknown", "--optim adamw_torch": "priced"}
    assert classes(deepspeed("hugging-face", *words), here) == compiled | {"--eval_strategy steps": "unknown"}
    assert classes(deepspeed("own", *words), here) == compiled | {"--eval_strategy steps": ""}


@pytest.mark.parametrize(
    ("switch", "expected"),
    [((), "neutral"), (("--eval_strategy", "no"), "neutral"), (("--do_eval",), "unknown")],
    ids=["no switch", "switched off", "switched on"],
)
def test_the_batch_of_a_validation_counts_only_where_something_turns_validation_on(
    switch: tuple[str, ...], expected: str
) -> None:
    recipe = deepspeed("hugging-face", *switch, "--per_device_eval_batch_size=64")
    assert classes(recipe, Layout(data=8, zero_stage=3))["--per_device_eval_batch_size 64"] == expected


def test_the_shipped_trainer_takes_no_argument_that_it_does_not_know() -> None:
    own = recipe_of("llama2-7b-deepspeed", "backend={name: deepspeed, extra_args: [--mine, '1']}")
    assert classes(own, Layout(data=8, zero_stage=3)) == {"--mine 1": "unknown"}


def test_keys_of_ds_config_are_classed_by_what_the_estimate_counts() -> None:
    settings = {
        "wall_clock_breakdown": True,
        "zero_optimization": {
            "reduce_bucket_size": 300_000_000,
            "allgather_bucket_size": 300_000_000,
            "stage3_prefetch_bucket_size": 900_000_000,
            "stage3_max_reuse_distance": 900_000_000_000,
            "zero_hpz_partition_size": 8,
            "zero_quantized_weights": True,
            "zero_quantized_gradients": False,
        },
        "zenflow": {"topk_ratio": 0.1},
    }
    own = recipe_of(
        "llama2-7b-deepspeed",
        f"backend={json.dumps({'name': 'deepspeed', 'ds_config': settings, 'neutral_args': ['zenflow.topk_ratio']})}",
    )
    zero = "backend.ds_config.zero_optimization."
    assert classes(own, Layout(data=8, zero_stage=3)) == {
        "backend.ds_config.wall_clock_breakdown true": "neutral",
        f"{zero}reduce_bucket_size 300000000": "priced",
        f"{zero}allgather_bucket_size 300000000": "neutral",
        f"{zero}stage3_prefetch_bucket_size 900000000": "priced",
        f"{zero}stage3_max_reuse_distance 900000000000": "priced",
        f"{zero}zero_hpz_partition_size 8": "priced",
        f"{zero}zero_quantized_weights true": "unknown",
        f"{zero}zero_quantized_gradients false": "neutral",
        "backend.ds_config.zenflow.topk_ratio 0.1": "neutral",
    }


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        ("torch_dtype", ("bfloat16",), "neutral"),
        ("eval_steps", ("100",), "neutral"),
        ("report_to", ("wandb",), "neutral"),
        ("dataloader_num_workers", ("8",), "neutral"),
        ("packing", ("true",), "neutral"),
        ("attn_impl", ("flash_attn",), "neutral"),
        ("use_galore", ("False",), "neutral"),
        ("lisa_activated_layers", ("0",), "neutral"),
        ("sequence_parallel_size", ("1",), "neutral"),
        ("sequence_parallel_size", ("4",), "unknown"),
        ("freeze_vit", ("false",), "unknown"),
        ("optim", ("paged_adamw_8bit",), "unknown"),
        ("quant_bits", ("4",), "unknown"),
        ("use_dora", ("true",), "unknown"),
        ("use_badam", (), "unknown"),
        ("tuner_backend", ("unsloth",), "unknown"),
    ],
)
def test_an_argument_is_of_the_class_that_its_value_has(name: str, values: tuple[str, ...], kind: str) -> None:
    group = trainer_group(name, values)
    assert group is not None
    assert group.flag_class.kind == kind
