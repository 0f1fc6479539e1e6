"""What a newcomer gets wrong is answered with what is wrong, where, and how it is mended."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llmlaunch.documents.keys import dotted_keys
from llmlaunch.documents.likely_meaning import read_vocabulary
from llmlaunch.layout import Layout
from llmlaunch.planner.plan import Candidate
from llmlaunch.recipe.types import VOCABULARY, recipe_form
from llmlaunch.rendering.arguments_json import comparison
from llmlaunch.store.database import open_store
from llmlaunch.store.runs import put_runs
from llmlaunch.units import GIB
from support.command_line import CommandLine

RECIPE = """\
schema: 1
name: small
model: llama3-8b
backend: megatron-lm
cluster: h100-80gb-x8
nodes: 2
training:
  sequence_length: 2048
  global_batch_size: 16
  steps: 10
data: {mock: true}
"""

FEW = "layout={context: 1, micro_batch_size: 1, layers_by_stage: even, recompute: none, techniques: asked}"

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """`write("nodes: 2", "nodes:2")` writes recipe.yaml with one text replaced, in the working directory."""
    monkeypatch.chdir(tmp_path)

    def written(old: str = "", new: str = "") -> Path:
        assert old in RECIPE
        path = Path("recipe.yaml")
        path.write_text(RECIPE.replace(old, new, 1) if old else RECIPE + new, encoding="utf-8")
        return path

    return written


# an override, and what the message says of it
OVERRIDES = {
    # keys of other tools
    "layout.tp=2": "layout.tp: is not a known key; did you mean layout.tensor?",
    "tensor_model_parallel_size=2": "did you mean layout.tensor?",
    "training.micro_batch_size=1": "did you mean layout.micro_batch_size?",
    "precision=bf16": "precision: is not a known key; did you mean training.precision?",
    "training.gradient_accumulation_steps=4": "it follows from training.global_batch_size",
    "tensr_parallel=2": "tensr_parallel: is not a known key;",
    "foo=1": "foo: is not a known key; known: schema, name, model, backend",
    # values of other tools
    "backend=megatron": "deepspeed, megatron-bridge or a mapping, not 'megatron'; did you mean megatron-lm?",
    "backend=pytorch": "a training script of your own runs under deepspeed",
    "precision=fp8": "keep precision: bf16 and write training.fp8",
    "layout=automatic": "did you mean auto?",
    "container=/x.sqsh": "container: must be a mapping, not '/x.sqsh'; did you mean container.image=/x.sqsh?",
    "data=/data/tokens": "did you mean data.path=/data/tokens?",
    "training.optimizer=adam": "AdamW is the optimizer of every training here",
    # numbers
    "training.sequence_length=8k": "not '8k'; did you mean 8192?",
    "training.sequence_length=4,096": "not '4,096'; did you mean 4096?",
    "memory.limit=80": "must be a finite number, above 0 and at most 1, not 80; did you mean 0.8?",
    "memory.limit=64GiB": "it is the share of the device's memory that may be filled: 0.8 for 64 of 80 GiB",
    "memory.limit=80%": "not '80%'; did you mean 0.8?",
    "nodes=2 nodes": "did you mean 2?",
    "watchdog.floor_seconds=10m": "did you mean 600?",
    # the shape of an override
    "nodes=": "override nodes=: has no value; write one behind the =, leave the override out, or take the key",
    "nodes:4": "override nodes:4: is not key=value; did you mean nodes=4?",
    'model="llama3-8b': "a quote or bracket that is opened must be closed",
    # what belongs to other models and versions
    "schema=2": "schema: 2 is of a newer llmlaunch; this one, 0.1.0, reads schema: 1. Upgrade it: pip install",
    # YAML's own words
    "environment.X=on": "YAML reads an unquoted on as true: quote it: 'environment.X=\"on\"'",
}  # fmt: skip


@pytest.mark.parametrize(("override", "says"), OVERRIDES.items(), ids=OVERRIDES)
def test_a_wrong_override_is_answered_with_what_was_meant(
    llmlaunch: CommandLine, write: Write, override: str, says: str
) -> None:
    message = llmlaunch("check", write(), override, code=2).stderr
    assert message.startswith("error: override ")
    assert says in message
    assert len(message.splitlines()) == 1
    assert len(message) < 500


# a text of the recipe, what stands in its place, and the beginning and the end of the message
FILES = [
    ("nodes: 2", "nodes:2", "recipe.yaml:6: is not valid YAML", "write a space after the colon: `nodes: 2`"),
    ("nodes: 2", "nodes = 2", "recipe.yaml:6: ", "write a colon and a space: `nodes: 2`"),
    ("nodes: 2", "<<<<<<< HEAD\nnodes: 2\n=======\nnodes: 4\n>>>>>>> theirs",
     "recipe.yaml:6: '<<<<<<< HEAD' marks a merge conflict", "remove the lines of <<<<<<<, ======= and >>>>>>>"),
    ("", "layout: {tensor:2}\n", "recipe.yaml:12: layout.tensor:2: is not", "space after the colon: tensor: 2"),
    ("", "layout:\n  tensor:2\n  pipeline: 1\n", "recipe.yaml:13: ", "a space after the colon: `tensor: 2`"),
    ("", "training.seed: 5\n", "recipe.yaml:12: training.seed: is not", "in the file write seed: below training:"),
    ("", "environment:\n  X: on\n", "recipe.yaml:13: environment.X: must", 'unquoted on as true: quote it: "on"'),
    ("", "environment:\n  X: a: b\n", "recipe.yaml:13: ", "quote a value that has a colon and a space in it"),
    ("nodes: 2", "nodes: “2”", "recipe.yaml:6: nodes: must be a whole number", "did you mean 2?"),
    ("data: {mock: true}", "data: [mock]", "recipe.yaml:11: data: must be", "the brackets and the dashes of a list"),
    ("", "setup: module load cuda\n", "recipe.yaml:12: setup: must be a list", "[module load cuda]"),
    ("", "setup: |\n  module load x\n  y\n", "recipe.yaml:12: setup: must be", "each line with a dash and a space"),
    ("", "layout: {recompute: on}\n", "recipe.yaml:12: layout.recompute: must be", "did you mean full?"),
    ("", "restart: 5\n", "recipe.yaml:12: restart: must be none or a mapping", "did you mean restart.times: 5?"),
    ("", "tracking: wandb\n", "recipe.yaml:12: tracking: must be", "write tracking: {wandb: {project: NAME}}"),
    ("nodes: 2", "nodes: 2.0", "recipe.yaml:6: nodes: must be a whole number", "not 2.0; did you mean 2?"),
    ("model: llama3-8b", "model: https://huggingface.co/Qwen/Qwen3-8B", "recipe.yaml:3: ", "model: Qwen/Qwen3-8B"),
    ("model: llama3-8b", "model: {name: llama3-8b}", "recipe.yaml:3: model.name: is not written", "model: {base: NAME"),
    ("{mock: true}", '{mock: "true"}', "recipe.yaml:11: data.mock: must be true or false", "remove the quotes"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "begin", "end"), FILES, ids=[new or old for old, new, *_ in FILES])
def test_a_mistake_in_the_file_is_answered_at_its_line(
    llmlaunch: CommandLine, write: Write, old: str, new: str, begin: str, end: str
) -> None:
    message = llmlaunch("check", write(old, new), code=2).stderr
    assert message.startswith(f"error: {begin}")
    assert end in message


# a command line, and what the message says of it
COMMAND_LINES = {
    "chek recipe.yaml": "no command 'chek'; did you mean: llmlaunch check recipe.yaml",
    "recipe.yaml": "a command stands before the recipe; did you mean: llmlaunch check recipe.yaml",
    "squeue": "did you mean: llmlaunch status",
    "xyz": "no command 'xyz'; known: init, check, plan",
    "calibrate lst": "did you mean: llmlaunch calibrate list",
    "check recipe.yaml --nodes 4": "a key of the recipe is written without dashes: nodes=4",
    "check recipe.yaml --tp 2": "a key of the recipe is written without dashes: layout.tensor=2",
    "submit recipe.yaml --dryrun": "submit: there is no option --dryrun; did you mean --dry-run?",
    "runs --nonsense": "runs: there is no option --nonsense; known: --state",
    "plan": "plan: name a RECIPE: llmlaunch plan recipe.yaml; `llmlaunch init` writes a recipe",
    "logs": "logs: name a RUN: llmlaunch logs last; `llmlaunch runs` lists the runs",
    "render recipe.yaml": "render: needs --output",
    "init qwen3": "did you mean qwen3-8b or qwen3-32b or qwen3-30b-a3b?",
    "init nonsense": "there are: deepseek-v2-lite, deepseek-v3",
    "check recipe.yaml layout.tensor = 2": "write layout.tensor=VALUE, without spaces around the =",
    "check recipe.yaml other.yaml": "a command takes one recipe, and overrides behind it",
    "plan - --lock": "standard input",
    "check recpie.yaml": "recpie.yaml: cannot be read: No such file or directory; did you mean recipe.yaml?",
    "check llama3-70b": "llama3-70b: is no file; `llmlaunch init llama3-70b` writes a recipe to start from",
    "check .": ".: is a directory; name the file in it, such as recipe.yaml",
    "status nonsense": "no such run directory",
}


@pytest.mark.parametrize(("words", "says"), COMMAND_LINES.items(), ids=COMMAND_LINES)
def test_a_mistyped_command_line_is_answered_with_the_nearest(
    llmlaunch: CommandLine, write: Write, monkeypatch: pytest.MonkeyPatch, words: str, says: str
) -> None:
    write()
    monkeypatch.setattr("sys.stdin", io.StringIO(RECIPE))
    message = llmlaunch(*words.split(), code=2).stderr
    assert message.splitlines()[-1].startswith("error: ")
    assert says in message


def test_a_mistyped_run_is_answered_with_the_nearest(llmlaunch: CommandLine) -> None:
    with open_store() as store, store.write() as connection:
        put_runs(
            connection, {f"{name}-1": {"directory": f"/runs/{name}", "state": "running"} for name in ("a", "first")}
        )
    assert "did you mean first-1?" in llmlaunch("status", "frist-1", code=2).stderr


def test_an_argument_that_was_not_rendered_is_answered_with_the_nearest(llmlaunch: CommandLine, write: Write) -> None:
    llmlaunch("render", write(), FEW, "-o", "run")
    message = llmlaunch("explain-args", Path("run"), "--", "--tensor-parallel-size", code=2).stderr
    assert "nothing of that name is rendered" in message
    assert "did you mean tensor-model-parallel-size" in message


def test_a_search_that_finds_nothing_safe_says_so_in_words(llmlaunch: CommandLine, write: Write) -> None:
    out = llmlaunch("check", write(), FEW, "memory.limit=0.01", "-v", code=3).stdout
    assert re.search(r"Searched [\d,]+ layouts; none is safe \(llmlaunch plan shows why\)", out)
    assert "evidence: no measured run of Megatron-LM on h100-80gb yet. After your first run: llmlaunch collect" in out
    assert "Assumed: Megatron core 0.19 (set backend.version to change it)" in out


@pytest.mark.parametrize(
    ("step_seconds", "device_gib", "says"),
    [
        (1.008, 50, "is 0.8 % slower"),
        (0.999, 58.7, "is 0.1 % faster but needs 8.70 GiB more"),
        (0.999, 40, "is 0.1 % faster and needs 10.0 GiB less"),
        (1.0, 60, "is as fast and needs 10.0 GiB more"),
    ],
)
def test_no_layout_is_said_to_be_less_than_nothing_slower(step_seconds: float, device_gib: float, says: str) -> None:
    chosen = Candidate(Layout(), 50 * GIB, 0, 1.0, 1.0)
    other = replace(chosen, device_bytes=int(device_gib * GIB), step_seconds=step_seconds)
    assert comparison(chosen, other, "2") == f"the best layout with 2 {says}"


def test_a_recipe_may_come_from_standard_input(
    llmlaunch: CommandLine, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_file = llmlaunch.json("check", write(), FEW)
    monkeypatch.setattr("sys.stdin", io.StringIO(RECIPE))
    assert llmlaunch.json("check", "-", FEW)["layout"] == of_file["layout"]
    llmlaunch("render", "-", FEW, "-o", "run")  # the same text again
    assert Path("run/recipe.yaml").read_text(encoding="utf-8") == RECIPE
    for text, says in (("", "standard input: is empty"), ("nodes: [1", "standard input:1: is not valid YAML")):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert says in llmlaunch("check", "-", code=2).stderr


def test_every_word_of_other_tools_stands_for_a_key_that_recipes_have() -> None:
    words, known = read_vocabulary(VOCABULARY), {*dotted_keys(recipe_form()), "slurm", "environment"}
    free_form = ("slurm.", "environment.")
    keys = [*words.keys, *words.values, *words.unknown_values, *words.inner_keys]
    assert [key for key in keys if key not in known and not key.startswith(free_form)] == []
    assert [f"{k}.{name}" for k, name in words.inner_keys.items() if f"{k}.{name}" not in known and k != "slurm"] == []


def test_no_word_of_other_tools_stands_for_two_keys() -> None:
    words = read_vocabulary(VOCABULARY)
    theirs = [word for words_of_key in words.keys.values() for word in words_of_key]
    assert sorted({word for word in theirs if theirs.count(word) > 1}) == []
