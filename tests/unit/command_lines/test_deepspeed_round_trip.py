"""Public commands of DeepSpeed and Hugging Face's Trainer become recipes that load, are priced, and render to the same
arguments and the same ds_config.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmlaunch.command_lines.command import Reading, TrainerCommand, Unset
from llmlaunch.command_lines.recipe_draft import ScriptOptions, true_or_false
from llmlaunch.documents.nested import leaves, value_at
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed, classed_arguments
from llmlaunch.frameworks.deepspeed.command_line import read_deepspeed
from llmlaunch.frameworks.deepspeed.hugging_face import DEFAULTS, family_of_script
from llmlaunch.frameworks.deepspeed.settings import SETTINGS
from llmlaunch.frameworks.megatron.command_line import pinned_layout
from llmlaunch.planner.planning import make_plan
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe
from support.plans import setting_for

FACTS = Path(__file__).resolve().parents[2] / "data" / "command_lines" / "deepspeed"
LINES = sorted(path.stem for path in FACTS.glob("*.json"))
BY_NAME = {name: json.loads((FACTS / f"{name}.json").read_text("utf-8")) for name in LINES}
RENDERED = [name for name in LINES if BY_NAME[name]["rendered"]]
WITH_DS_CONFIG = [name for name in RENDERED if any(path.endswith(".json") for path in BY_NAME[name].get("files", ()))]
# What a file does not say is this (deepspeed/runtime/zero/config.py, runtime/config.py, fp16/loss_scaler.py, 0.19.8).
DEEPSPEED_DEFAULTS = {
    "gradient_clipping": 0.0, "fp16.loss_scale": 0, "fp16.initial_scale_power": 16,
    "zero_optimization.contiguous_gradients": True, "zero_optimization.reduce_scatter": True,
    "zero_optimization.overlap_comm": False, "zero_optimization.reduce_bucket_size": 500_000_000,
    "zero_optimization.allgather_bucket_size": 500_000_000, "zero_optimization.sub_group_size": 1_000_000_000,
    "zero_optimization.stage3_prefetch_bucket_size": 50_000_000,
    "zero_optimization.stage3_param_persistence_threshold": 100_000,
    "zero_optimization.stage3_max_live_parameters": 1_000_000_000,
    "zero_optimization.stage3_max_reuse_distance": 1_000_000_000, "zero_optimization.offload_optimizer.ratio": 1.0,
    "zero_optimization.offload_optimizer.pin_memory": False, "zero_optimization.offload_param.pin_memory": False,
}  # fmt: skip
ARITHMETIC = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Said in another way, or for what the recipe was supplied with.
TRANSLATED = ("warmup_ratio", "num_train_epochs", "max_steps", "warmup_steps", "deepspeed", "fsdp", "config")


@dataclass(frozen=True)
class PublicCommand:
    """A command of a public script and the recipe that was read of it."""

    facts: Mapping[str, Any]
    command: TrainerCommand
    reading: Reading
    recipe: Recipe


def words_of(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words that facts of a command line stand for: flag = value, values, or true."""
    yield from facts.get("positional", ())
    for flag, value in facts["arguments"].items():
        yield flag
        if value is not True:
            yield from value if isinstance(value, list) else [value]


def read(name: str, folder: Path) -> PublicCommand:
    facts = json.loads((FACTS / f"{name}.json").read_text("utf-8"))
    command = TrainerCommand(
        facts["trainer"],
        tuple(words_of(facts)),
        launcher=facts["launcher"],
        nodes=facts["nodes"],
        devices_per_node=facts["devices_per_node"],
        slurm=facts.get("slurm", {}),
        unset=tuple(Unset(variable, 1) for variable in facts.get("unset", ())),
        launcher_options=facts.get("launcher_options", {}),
        files={path: json.dumps(values) for path, values in facts.get("files", {}).items()},
        folder=folder,
        place="train.sh:1",
    )
    reading = read_deepspeed(command)
    place = folder / "recipe.yaml"
    place.write_text(yaml.safe_dump(dict(reading.document), sort_keys=False), "utf-8")
    supplied = [f"{key}={json.dumps(value)}" for key, value in facts["supplied"].items()]
    return PublicCommand(facts, command, reading, load_recipe(place, supplied))


@pytest.mark.parametrize("name", LINES)
def test_a_public_command_becomes_a_recipe_that_is_priced(name: str, tmp_path: Path) -> None:
    public = read(name, tmp_path)
    assert public.reading.kind == public.facts["kind"]
    for key, value in public.facts["expected"].items():
        found: Any = public.reading.document
        for part in key.split("."):
            found = found[part]
        assert found == value, key
    assert (public.reading.not_rendered is None) == public.facts["rendered"]
    plan = make_plan(setting_for(public.recipe))
    assert plan.layout == pinned_layout(public.recipe)
    unknown = classed_arguments(public.recipe, plan.layout).unknown
    assert {each.flag_class.key for each in unknown} <= {"training.evaluation"}


@pytest.mark.parametrize("name", RENDERED)
def test_the_trainers_arguments_round_trip(name: str, tmp_path: Path) -> None:
    public = read(name, tmp_path)
    original = options_of(public)
    rendered = DeepSpeed().render(public.recipe, pinned_layout(public.recipe))
    words = [w if isinstance(w, str) else f"${w.name}{w.suffix}" for w in rendered.program[1:]]
    again = ScriptOptions(words, "rendered", file_words(public) if original.has("config") else ())
    family = family_of_script(public.command.trainer, original)
    told = {w.lstrip("-") for each in public.reading.unread for w in each.words} | set(public.facts.get("unset", ()))
    told |= {sentence.partition(":")[0].lstrip("-") for sentence in public.reading.missing}
    translated = set(TRANSLATED) | set(public.facts.get("translated", ()))
    for flag in names_of(original) - told - translated:
        assert same(original.values(flag), again.values(flag), tmp_path), flag
    for flag in names_of(again) - names_of(original) - translated - {"save_strategy"}:
        default = family.defaults.get(flag, DEFAULTS.get(flag))
        assert same((str(True if default is None else default),), again.values(flag), tmp_path), flag


def options_of(public: PublicCommand) -> ScriptOptions:
    """Return the options of a command, with those of the file of arguments that it names."""
    return ScriptOptions(public.command.arguments, "original", file_words(public))


def file_words(public: PublicCommand) -> list[str]:
    """Return the arguments in the file of them that a command names, as words of a command line."""
    path = next((word for word in public.command.arguments if word in public.facts.get("files", {})), "")
    words: list[str] = []
    for key, value in public.facts["files"][path].items() if path.endswith(".yaml") else ():
        if not isinstance(value, dict) or key == "gradient_checkpointing_kwargs":
            values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
            words += [f"--{key}", *map(str, values)]
    return words


def names_of(options: ScriptOptions) -> set[str]:
    return {group[0].lstrip("-").partition("=")[0].replace("-", "_") for group in options.all() if group[0][0] == "-"}


def same(one: tuple[str, ...] | None, other: tuple[str, ...] | None, folder: Path) -> bool:
    """Compare values as the trainer reads them: numbers by value, flags by truth, folders by place."""
    if one is None or other is None or len(one or "x") != len(other or "x"):
        return False
    return all(plain(a, folder) == plain(b, folder) for a, b in zip(one or ("True",), other or ("True",), strict=True))


def plain(text: str, folder: Path) -> Any:
    try:
        return float(text)
    except ValueError:
        truth = true_or_false(text)
        return text.removeprefix(f"{folder}/").removeprefix("./") if truth is None else truth


@pytest.mark.parametrize("name", WITH_DS_CONFIG)
def test_the_ds_config_round_trips(name: str, tmp_path: Path) -> None:
    public = read(name, tmp_path)
    rendered = json.loads(DeepSpeed().render(public.recipe, pinned_layout(public.recipe)).files["ds_config.json"])
    original = json.loads(next(text for path, text in public.command.files.items() if path.endswith(".json")))
    told = {word for each in public.reading.unread for word in each.words}
    said = set(dict(leaves(original)))
    for key in said - told - {"zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device"}:
        value, again = value_at(original, key), value_at(rendered, key)
        if value == "auto" and again != "auto":
            value = filled_in(key, public.recipe)
        if key.endswith(".enabled") and again is None:
            again = False
        off = key.split(".")[0] in ("fp16", "bf16") and not value_at(rendered, f"{key.split('.')[0]}.enabled")
        assert off or value == again, key
    noted = " ".join(public.reading.notes)
    for key in set(dict(leaves(rendered))) - said - set(ARITHMETIC) - {row.key for row in SETTINGS if row.adds}:
        value = value_at(rendered, key)
        device = key.endswith(".device")
        expected = device or key.endswith(".enabled") or value == DEEPSPEED_DEFAULTS.get(key)
        assert expected or f"adds {key}" in noted, key
    micro, accumulated = (rendered[name] for name in ARITHMETIC[1:])
    layout = pinned_layout(public.recipe)
    assert micro * accumulated * layout.data == public.recipe.workload.global_batch_size


def filled_in(key: str, recipe: Recipe) -> Any:
    """Return what the Trainer puts in place of "auto" (transformers/integrations/deepspeed.py, 5.23)."""
    layout, training = pinned_layout(recipe), recipe.training
    return {
        "train_batch_size": recipe.workload.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.num_microbatches(recipe.workload.global_batch_size),
        "gradient_clipping": training.gradient_clipping,
        "fp16.enabled": recipe.workload.precision == "fp16",
        "bf16.enabled": recipe.workload.precision == "bf16",
    }[key]
