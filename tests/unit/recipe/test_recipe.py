"""A recipe resolved: shipped ones, defaults, pins, overrides, the digest, and what editors and docs are told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from llmlaunch.assets import asset
from llmlaunch.errors import UserError
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import AUTO_NODES, NO_BUDGET, Budget, Recipe
from support.json_schemas import validate
from support.recipe_keys import reference_table, schema
from support.recipes import SMALL, recipe_of, small

Write = Callable[[str | bytes], Path]
GOOD = SMALL.read_text(encoding="utf-8")
ROOT = Path(__file__).parents[3]


def test_the_70b_recipe_is_what_checks_rely_on() -> None:
    recipe = recipe_of("llama3-70b")
    assert (recipe.model.name, recipe.backend.name, recipe.cluster.name) == (
        "llama3-70b",
        "megatron-lm",
        "h100-80gb-x8",
    )
    assert (recipe.nodes, recipe.world_size) == (64, 512)
    assert (recipe.workload.sequence_length, recipe.workload.global_batch_size) == (8192, 1024)
    assert (recipe.workload.precision, recipe.data.mock, recipe.pins) == ("bf16", True, {})


def test_the_quickstart_is_small_real_and_needs_no_gpu() -> None:
    recipe = recipe_of("quickstart")
    assert 8e6 < count_parameters(recipe.model).total < 10e6
    assert (recipe.cluster.accelerator.kind, recipe.world_size, recipe.nodes) == ("cpu", 2, 1)
    assert recipe.data.python_source
    assert recipe.model.vocab_size == 256
    assert recipe.training.steps >= 20


def test_what_is_not_said_has_a_default() -> None:
    recipe = small()
    assert recipe.training.learning_rate == 3e-4
    assert (recipe.memory.limit, recipe.memory.risk, recipe.memory.floor_gib) == (None, None, None)
    assert recipe.slurm == {"exclusive": True, "time": "24:00:00"}
    assert (recipe.container, recipe.code.snapshot, recipe.python) == (None, False, None)
    assert recipe.monitor.interval_seconds == 1.0


def test_every_key_reaches_the_recipe(write: Write) -> None:
    recipe = load_recipe(
        write(
            GOOD.replace(
                "backend: megatron-lm", "backend: {name: megatron-lm, version: '0.19', path: /opt/m, extra_args: [--x]}"
            )
            .replace("precision: bf16", "precision: fp16\n  seed: 7\n  save_interval: 5\n  checkpoint_path: /ck")
            .replace(
                "layout: auto", "layout: {tensor: [2, 4], sequence_parallel: true, recompute: full, context: auto}"
            )
            .replace("{mock: true}", "{path: /data, tokenizer: gpt2}")
            + "  exclusive: false\n  nice: 5\n"
            "memory: {limit: 0.9, floor_gib: 2}\n"
            "environment: {OMP_NUM_THREADS: 4, NCCL_DEBUG: INFO}\n"
            "secrets: [HF_TOKEN]\n"
            "setup: [module load cuda]\n"
            "container: {image: /c/a.sqsh, mounts: ['/a:/b', '/a:/b:ro']}\n"
            "code: snapshot\n"
            "monitor: {interval_seconds: 0.5}\n"
            "python: /opt/py/bin/python\n"
        )
    )
    assert (recipe.backend.version, recipe.backend.path, recipe.backend.extra_args) == ("0.19", "/opt/m", ("--x",))
    assert (recipe.training.seed, recipe.training.save_interval, recipe.training.checkpoint_path) == (7, 5, "/ck")
    assert recipe.pins == {"tensor": (2, 4), "sequence_parallel": True, "recompute": "full"}
    assert (recipe.data.path, recipe.data.tokenizer) == ("/data", "gpt2")
    assert recipe.slurm == {"exclusive": False, "time": "24:00:00", "nice": 5}
    assert (recipe.memory.limit, recipe.memory.floor_bytes) == (0.9, 2 * 2**30)
    assert recipe.environment == {"OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO"}
    assert (recipe.secrets, recipe.setup) == (("HF_TOKEN",), ("module load cuda",))
    assert recipe.container is not None
    assert recipe.container.mounts == ("/a:/b", "/a:/b:ro")
    assert (recipe.code.snapshot, recipe.monitor.interval_seconds) == (True, 0.5)
    assert recipe.python == "/opt/py/bin/python"


def test_sequences_longer_than_the_model_is_built_for_are_remarked_on() -> None:
    assert small().assumptions == ()
    assert "longer than the 4096 llama2-7b is built for" in small("model=llama2-7b").assumptions[0]


# --- how many nodes, for how long


def test_nodes_may_be_left_open_and_pins_of_any_size_with_them() -> None:
    recipe = small("nodes=auto", "layout={tensor: 8, pipeline: 32}")
    assert recipe.nodes == AUTO_NODES
    assert recipe.budget == NO_BUDGET
    validate(yaml.safe_load(GOOD) | {"nodes": "auto", "budget": {"days": 14}}, schema())


def test_a_budget_is_of_days_device_hours_and_nodes() -> None:
    recipe = small("budget={days: 14, gpu_hours: 5000, max_nodes: 64}")
    assert recipe.budget == Budget(14.0, 5000.0, 64)


@pytest.mark.parametrize(
    ("tokens", "steps"),
    [("4194304", 1), ("4194305", 2), ("1.5T", 357628), ("300B", 71526), ("0.5M", 1), ('"4195K"', 2)],
)
def test_tokens_are_as_many_steps_as_see_them_all(tokens: str, steps: int) -> None:
    recipe = small(f"training.tokens={tokens}")
    assert recipe.workload.tokens_per_step == 4194304
    assert recipe.training.steps == steps
    assert recipe.digest == small(f"training.steps={steps}").digest


def test_a_length_of_the_command_line_replaces_the_other_of_the_file() -> None:
    assert small("training.tokens=1T").training.steps == 238419
    assert small("training.tokens=1T", "training.steps=7").training.steps == 7


def test_the_json_schema_wants_one_length() -> None:
    recipe, training = yaml.safe_load(GOOD), {"sequence_length": 8, "global_batch_size": 8}
    validate(recipe | {"training": training | {"tokens": "15T"}}, schema())
    wrong: list[dict[str, Any]] = [{}, {"steps": 1, "tokens": 8}, {"tokens": "15 T"}]
    for length in wrong:
        with pytest.raises(jsonschema.ValidationError):
            validate(recipe | {"training": training | length}, schema())


# --- overrides


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("nodes=8", lambda r: r.nodes, 8),
        ("training.learning_rate=1.0e-3", lambda r: r.training.learning_rate, 0.001),
        ("layout.tensor=[2, 4]", lambda r: r.pins, {"tensor": (2, 4)}),
        ("layout={tensor: 2, pipeline: 4}", lambda r: r.pins, {"tensor": 2, "pipeline": 4}),
        ("model.num_layers=8", lambda r: (r.model.num_layers, r.model.hidden_size), (8, 4096)),
        ("cluster.devices_per_node=4", lambda r: (r.world_size, r.cluster.accelerator.name), (16, "h100-80gb")),
        ("cluster.accelerator.memory_gib=70", lambda r: r.cluster.accelerator.memory_bytes, 70 * 2**30),
        ("backend.path=/opt/megatron", lambda r: (r.backend.name, r.backend.path), ("megatron-lm", "/opt/megatron")),
        ("slurm.partition=gpu", lambda r: r.slurm["partition"], "gpu"),
        ('slurm.time="1:00:00"', lambda r: r.slurm["time"], "1:00:00"),
        ("setup=[module load a, module load b]", lambda r: r.setup, ("module load a", "module load b")),
        ("environment.A=b=c", lambda r: r.environment, {"A": "b=c"}),
        ("code.path=/src", lambda r: (r.code.path, r.code.snapshot), ("/src", False)),
    ],
)
def test_an_override_sets_one_thing(override: str, read: Callable[[Recipe], Any], value: Any) -> None:
    recipe = small(override)
    assert read(recipe) == value
    assert recipe.overrides == (override,)
    assert recipe.text == GOOD


@pytest.mark.parametrize("written", ["1e-5", "+1E-05"])
def test_a_number_with_an_exponent_needs_no_point(write: Write, written: str) -> None:
    """YAML 1.1 reads 1e-5 as text; people, and YAML 1.2, read it as a number."""
    in_file = load_recipe(write(GOOD.replace("steps: ", f"learning_rate: {written}\n  steps: ", 1)))
    assert in_file.training.learning_rate == float(written)
    assert small(f"training.learning_rate={written}").training.learning_rate == float(written)
    with pytest.raises(UserError, match="must be a finite number, above 0"):
        small(f"training.learning_rate='{written}'")


def test_overrides_apply_in_order_and_reach_into_lists() -> None:
    assert small("setup=[a, b]", "setup.1=c", "setup.2=d").setup == ("a", "c", "d")
    assert small("nodes=1", "nodes=2").nodes == 2
    assert small("code=snapshot", "code.path=/src").code.snapshot


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nodes", "override nodes: is not key=value; write nodes=VALUE, without spaces around the ="),
        ("training..steps=4", "is not key=value"),
        (
            "nodes=1e2",
            "override nodes=1e2: nodes: must be a whole number, at least 1 and at most 100000, not '1e2'; YAML reads",
        ),
        ("trainer.steps=4", "override trainer.steps=4: trainer: is not a known key; did you mean training?"),
        ("layout={tensor: 2", "override layout={tensor: 2: is not valid YAML"),
        ("setup.0=x", "setup: must be a list"),
        ("name=\udcff", "is not UTF-8"),
    ],
)
def test_a_wrong_override_is_named(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        small(override)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# --- digest


def test_the_digest_is_of_the_meaning_not_of_the_writing(write: Write) -> None:
    first = small().digest
    assert len(first) == 64
    reordered = "# a remark\n" + "".join(
        reversed([f"{part}\n" for part in GOOD.strip().split("\n") if part[0] != " "][:6])
    )
    reordered += GOOD[GOOD.index("training:") :] + "memory: {calibration: in-use}\n"
    assert load_recipe(write(reordered)).digest == first
    assert load_recipe(write(GOOD.replace("steps: 1000", "steps: 5")), ["training.steps=1000"]).digest == first
    spelled = GOOD.replace("model: llama3-8b", "model: {base: llama3-8b}").replace("llama3-8b}", "llama3-8b}  # same")
    assert load_recipe(write(spelled)).model.num_layers == 32


@pytest.mark.parametrize(
    ("name", "layout", "digest"),
    [
        ("llama3-8b", "tensor: 2", "d06eacd24544c9cd"),
        ("llama3-8b", "tp_comm_overlap: true, loss: native", "3037d92529fbb77f"),
        ("mixtral-8x7b", "token_dispatcher: allgather", "523055b6150f8abf"),
    ],
)
def test_stored_digests_hold(name: str, layout: str, digest: str) -> None:
    """A key that is new must not change what older recipes mean. Change these figures only with what the recipe names:
    a preset, a profile, or what a key means where it is absent."""
    assert recipe_of(name, f"layout={{{layout}}}").digest.startswith(digest)


@pytest.mark.parametrize("off", ["tp_comm_overlap: false", "loss: none", "loss_tiles: 8, loss: tiled"])
def test_what_a_recipe_pins_is_not_what_is_left_to_the_search(off: str) -> None:
    assert recipe_of("llama3-8b", f"layout={{{off}}}").digest != recipe_of("llama3-8b").digest


# --- what others read


def test_another_process_reads_the_same_digest_and_imports_little() -> None:
    """`check` starts with this; the frameworks and the heavy libraries have no place on the way."""
    path = asset("recipes", "llama3-70b.yaml")
    program = (
        "import sys; from llmlaunch.recipe.load import load_recipe; "
        f"print(load_recipe({str(path)!r}).digest, *sorted(sys.modules), sep='\\n')"
    )
    environment = {"PYTHONPATH": str(ROOT / "wrapper"), "PYTHONHASHSEED": "7", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    digest, *loaded = done.stdout.split()
    assert digest == load_recipe(path).digest
    heavy = {"torch", "jinja2", "sqlalchemy", "rich", "numpy", "transformers", "deepspeed", "jsonschema"}
    assert not heavy & set(loaded)


@pytest.mark.parametrize(
    "line", ["nodes: many", "nods: 4", "budget: {days: 0}", "layout: {tensor: 0}", "name: ../x", "backend: megatron"]
)
def test_the_json_schema_refuses_mistakes_in_the_editor(line: str) -> None:
    wrong = yaml.safe_load(GOOD) | yaml.safe_load(line)
    with pytest.raises(jsonschema.ValidationError):
        validate(wrong, schema())


def test_the_docs_list_every_key_as_the_schema_has_it() -> None:
    text = (ROOT / "docs" / "recipe-keys.md").read_text(encoding="utf-8")
    table = text.partition("<!-- keys -->\n")[2].partition("<!-- end of keys -->")[0]
    assert table.strip() == reference_table().strip(), "docs/recipe-keys.md is behind the keys; run: make docs-tables"


def test_every_key_has_a_meaning() -> None:
    rows = [line.split(" | ") for line in reference_table().splitlines()[2:]]
    assert len(rows) > 80
    assert all(row[-1].removesuffix(" |").strip() for row in rows)
