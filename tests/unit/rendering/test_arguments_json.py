"""arguments.json leaves nothing out: what the scripts say, it explains."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.assets import asset
from llmlaunch.frameworks.framework import backend_for
from llmlaunch.planner.plan import as_planned
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.setting import setting_of
from llmlaunch.recipe.load import load_recipe
from llmlaunch.rendering.provenance import gather_provenance
from llmlaunch.rendering.run_directory import run_files
from support.json_schemas import validate
from support.rendered_jobs import shown_words

SCHEMA = Path(__file__).resolve().parents[3] / "docs" / "schemas" / "arguments.schema.json"
RECIPE = """\
schema: 1
name: explained
model:
  base: llama3-8b
  num_layers: 16
backend:
  name: megatron-lm
  extra_args: [--tensorboard-dir, /scratch/tb]
cluster: h100-80gb-x8
nodes: 2
training:
  sequence_length: 4096
  global_batch_size: 64
  steps: 100
data: {mock: true}
layout:
  tensor: [2, 4]
  pipeline: auto
  micro_batch_size: 1
environment:
  NCCL_DEBUG: WARN
slurm:
  partition: gpu
"""


FEW = "layout={context: 1, micro_batch_size: 1, layers_by_stage: even, recompute: full, techniques: asked}"


def rendered(path: Path, *overrides: str) -> dict[str, bytes]:
    recipe = load_recipe(path, overrides)
    backend = backend_for(recipe)
    plan = make_plan(setting_of(recipe, backend))
    recipe = as_planned(recipe, plan.chosen)
    return run_files(recipe, plan, {}, backend.render(recipe, plan.layout), gather_provenance(recipe))


def entries(files: dict[str, bytes], kind: str) -> dict[str, dict[str, Any]]:
    entries = json.loads(files["arguments.json"])["entries"]
    return {entry["name"]: entry for entry in entries if entry["kind"] == kind}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("recipe") / "explained.yaml"
    path.write_text(RECIPE)
    return rendered(path, "training.seed=7")


@pytest.fixture(scope="module", params=["quickstart", "mixtral-8x7b", "llama2-7b-deepspeed"])
def gallery(request: pytest.FixtureRequest) -> dict[str, bytes]:
    return rendered(asset("recipes", f"{request.param}.yaml"), FEW)


def started_and_explained(files: dict[str, bytes]) -> tuple[list[str], list[str]]:
    """The words of command.txt, where scripts of ours are the node's own copies, and of arguments.json."""
    words = shown_words(files["command.txt"])
    arguments = [word.replace("$LLMLAUNCH_NODE_FILES", "$LLMLAUNCH_RUN_DIR") for word in words]
    document = json.loads(files["arguments.json"])
    explained = list(document["program"])
    for entry in document["entries"]:
        if entry["kind"] == "argument":
            explained += [entry["name"], *entry["value"].split()]
    return arguments, explained


def test_every_word_of_the_program_is_there(gallery: dict[str, bytes]) -> None:
    arguments, explained = started_and_explained(gallery)
    assert arguments == explained


@pytest.mark.parametrize(("backend", "recipe"), [("deepspeed", "llama2-7b-deepspeed"), ("megatron-lm", "llama3-70b")])
def test_words_for_a_script_of_ones_own_are_there_once(backend: str, recipe: str) -> None:
    own = f"backend={{name: {backend}, script: train.py, script_args: [--epochs, '3'], extra_args: [--fast]}}"
    files = rendered(asset("recipes", f"{recipe}.yaml"), own, FEW)
    arguments, explained = started_and_explained(files)
    assert arguments == explained
    assert len(json.loads(files["arguments.json"])["program"]) == 1
    assert entries(files, "argument")["--epochs"]["from"][0]["key"] == "backend.script_args"


def test_it_is_what_its_schema_says(gallery: dict[str, bytes]) -> None:
    validate(json.loads(gallery["arguments.json"]), json.loads(SCHEMA.read_text()))


def test_every_exported_variable_and_every_directive_is_there(gallery: dict[str, bytes]) -> None:
    assert set(json.loads(gallery["run.json"])["launch"]["environment"]) == set(entries(gallery, "variable"))
    directives = re.findall(r"^#SBATCH (--[a-z-]+)", gallery["job.sbatch"].decode(), re.MULTILINE)
    assert directives == list(entries(gallery, "directive"))


def test_every_key_of_a_configuration_file_is_there(gallery: dict[str, bytes]) -> None:
    if "ds_config.json" not in gallery:
        assert not entries(gallery, "setting")
        return
    whole = json.loads(gallery["ds_config.json"])
    for name, entry in entries(gallery, "setting").items():
        value = whole
        for part in name.split("."):
            value = value.pop(part) if not isinstance(value[part], dict) or not value[part] else value[part]
        assert json.dumps(value) == entry["value"]
    assert not [key for key, value in whole.items() if not isinstance(value, dict) or any(value.values())]


def test_nothing_is_without_a_reason(gallery: dict[str, bytes]) -> None:
    listed = json.loads(gallery["arguments.json"])["entries"]
    assert [entry["name"] for entry in listed if not entry["from"] and not entry["why"]] == []


@pytest.mark.parametrize(
    ("flag", "source", "place"),
    [
        ("--seq-length", "recipe", "recipe.yaml:12"),
        ("--num-layers", "recipe", "recipe.yaml:5"),
        ("--hidden-size", "model", "recipe.yaml:4"),
        ("--seed", "command line", "training.seed=7"),
        ("--micro-batch-size", "recipe", "recipe.yaml:19"),
        ("--tensor-model-parallel-size", "planner", "recipe.yaml:17"),
        ("--pipeline-model-parallel-size", "planner", "recipe.yaml:18"),
        ("--context-parallel-size", "planner", None),
        ("--lr", "default", None),
        ("--tensorboard-dir", "recipe", "recipe.yaml:8"),
    ],
)
def test_an_argument_names_its_line(files: dict[str, bytes], flag: str, source: str, place: str | None) -> None:
    (origin,) = entries(files, "argument")[flag]["from"]
    assert (origin["source"], origin["place"]) == (source, place)


def test_variables_and_directives_name_theirs(files: dict[str, bytes]) -> None:
    assert entries(files, "variable")["NCCL_DEBUG"]["from"][0]["place"] == "recipe.yaml:21"
    assert entries(files, "variable")["OMP_NUM_THREADS"]["why"]
    assert entries(files, "directive")["--partition"]["from"][0]["place"] == "recipe.yaml:23"
    assert entries(files, "directive")["--nodes"]["from"][0]["place"] == "recipe.yaml:10"


def test_the_planner_says_what_another_value_would_cost(files: dict[str, bytes]) -> None:
    (origin,) = entries(files, "argument")["--context-parallel-size"]["from"]
    compared = r"the best layout with \d+ is ([\d.]+ % slower|[\d.]+ % faster (but|and) needs .* GiB (more|less))"
    assert re.fullmatch(rf"the planner, among [\d,]+ layouts; (the runners-up have it, too|{compared})", origin["said"])
