"""A locked plan stays: `plan --lock` writes it beside the recipe, and check, render and submit keep to it whatever a
calibration, a margin or another version of llmlaunch would choose. `--replan` says what that is, and what it gains."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmlaunch.app import planned_run
from llmlaunch.app.rendered_job import rendered_job, rendered_recipe
from llmlaunch.assets import asset
from llmlaunch.calibration.lessons import Lessons
from llmlaunch.memory.job import Correction
from support.command_line import CommandLine

FEW = (
    "layout: {pipeline: 2, virtual_pipeline: [1, 4], context: 1, micro_batch_size: 1, "
    "layers_by_stage: even, recompute: none, offload_modules: [], offload_layers: 0, offload_optimizer: 0}"
)
# what a version that chooses otherwise would have written: half as fast as what this one chooses
SLOWER = {
    "\n  tensor: 1": "\n  tensor: 4",
    "data: 16": "data: 4",
    "sequence_parallel: false": "sequence_parallel: true",
}


@pytest.fixture(autouse=True)
def megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_PATH", str(tmp_path))


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """llama3-8b on four nodes, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return recipe_in(tmp_path)


def recipe_in(folder: Path) -> Path:
    path = folder / "train.yaml"
    path.write_text(asset("recipes", "llama3-8b.yaml").read_text().replace("layout: auto", FEW))
    assert FEW in path.read_text()
    return path


@pytest.fixture(scope="module")
def locked_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return planned_run.plan(recipe_in(tmp_path_factory.mktemp("locked"))).write_lock().read_text()


@pytest.fixture
def lock(recipe: Path, locked_text: str) -> Path:
    path = recipe.with_name("train.lock.yaml")
    path.write_text(locked_text)
    return path


def choice(plan: dict[str, Any]) -> tuple[Any, ...]:
    return plan["layout"], plan["techniques"], plan["gradient_dtype"]


@pytest.fixture
def other_version(lock: Path) -> Path:
    """A lock that another version of llmlaunch wrote, of a plan that this one would not choose."""
    text = lock.read_text()
    for before, after in SLOWER.items():
        assert before in text
        text = text.replace(before, after)
    lock.write_text(re.sub(r"llmlaunch: \S+", "llmlaunch: 0.9.7", text))
    return lock


def test_it_is_the_plan_that_was_shown(llmlaunch: CommandLine, recipe: Path) -> None:
    shown = llmlaunch.json("check", recipe)
    assert shown["locked_by"] is None
    assert "train.lock.yaml; commit it beside the recipe" in llmlaunch("plan", recipe, "--lock").stderr
    kept = llmlaunch.json("check", recipe)
    assert kept["locked_by"] == "train.lock.yaml"
    assert choice(kept) == choice(shown)
    assert kept["step_seconds"] == shown["step_seconds"]
    assert kept["memory"] == shown["memory"]


def test_the_same_plan_is_the_same_file(llmlaunch: CommandLine, recipe: Path, lock: Path) -> None:
    before = lock.read_bytes()
    llmlaunch("plan", recipe, "--lock")
    assert lock.read_bytes() == before
    assert len(before) < 1500


def test_it_survives_a_version_that_would_choose_otherwise(
    llmlaunch: CommandLine, recipe: Path, other_version: Path
) -> None:
    kept, anew = llmlaunch.json("check", recipe), llmlaunch.json("check", recipe, "--replan")
    assert (kept["layout"]["tensor"], anew["layout"]["tensor"], anew["locked_by"]) == (4, 1, None)
    llmlaunch("render", recipe, "-o", "run")
    assert choice(json.loads(Path("run/plan.json").read_text())) == choice(kept)
    explained = llmlaunch("explain-args", "run", "tensor-model-parallel-size").stdout
    assert "train.lock.yaml, which keeps the recipe to an earlier plan" in explained
    assert "--tensor-model-parallel-size 4" in " ".join(Path("run/command.txt").read_text().split())


def test_it_survives_a_margin(llmlaunch: CommandLine, recipe: Path, lock: Path) -> None:
    locked, margin = llmlaunch.json("check", recipe), ("memory.limit=0.5", "memory.floor_gib=0")
    kept = llmlaunch.json("check", recipe, *margin)
    assert choice(kept) == choice(locked)
    assert kept["verdict"] == "tight"
    output = llmlaunch("submit", recipe, *margin, "--dry-run")
    assert "warning: tight by what is known today, and kept by train.lock.yaml" in output.stderr
    assert "safe in place of tight (--replan)" in output.stderr


def test_it_survives_a_calibration(
    llmlaunch: CommandLine, recipe: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = llmlaunch.json("check", recipe)
    correction = Correction(torch_share=0.4, calibration_id="c1")
    lessons_of = planned_run.lessons_of

    def calibrated(*arguments: Any) -> Lessons:
        lessons = lessons_of(*arguments)
        return Lessons(lessons.bound, correction, lessons.support, lessons.own_runs)

    monkeypatch.setattr(planned_run, "lessons_of", calibrated)
    kept, anew = llmlaunch.json("check", recipe), llmlaunch.json("check", recipe, "--replan")
    assert kept["memory"]["correction"]["calibration_id"] == "c1"
    assert choice(kept) == choice(locked) != choice(anew)


def test_a_replan_says_what_changes_and_what_it_gains(
    llmlaunch: CommandLine, recipe: Path, other_version: Path
) -> None:
    note = next(line for line in llmlaunch("check", recipe).stderr.splitlines() if "(--replan)" in line)
    assert re.search(r"would change TP4 .* to TP1 .*: [\d.]+ s a step in place of [\d.]+ \([\d.]+ % faster\)", note)
    submitted = llmlaunch("submit", recipe, "--dry-run", "--replan")
    assert "train.lock.yaml is left aside: planning anew would change TP4" in submitted.stderr
    assert re.search(r"^ +layout +TP1 PP2", submitted.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("training.global_batch_size=256", "global_batch_size was 512 and is 256"),
        ("model.num_layers=16", "parameters was 8030261248 and is 4540469248; layers was 32 and is 16"),
        ("nodes=8", "nodes was 4 and is 8"),
        ("training.fp8=delayed", "precision was bf16 and is bf16+delayed"),
        ("layout={tensor: 8}", "layout.tensor was 1 and is pinned to 8"),
        ("layout={offload_optimizer: 1.0}", "layout.offload_optimizer was 0.0 and is 1.0"),
        ("training.gradient_dtype=bf16", "training.gradient_dtype was None and is bf16"),
    ],
)
def test_of_another_job_it_is_no_plan(
    llmlaunch: CommandLine, recipe: Path, lock: Path, change: str, difference: str
) -> None:
    error = llmlaunch("check", recipe, change, code=2).stderr
    assert f"train.lock.yaml: keeps a plan of another job: {difference}" in error
    assert "--lock; to leave the lock aside this once: --replan" in error


def test_what_is_not_the_layout_may_change(llmlaunch: CommandLine, recipe: Path, lock: Path) -> None:
    locked = llmlaunch.json("check", recipe)
    changed = llmlaunch.json("check", recipe, "training.learning_rate=0.0001", "training.steps=7", "layout={data: 16}")
    assert choice(changed) == choice(locked)


def test_a_lock_has_the_number_of_nodes_that_was_chosen(llmlaunch: CommandLine, recipe: Path) -> None:
    llmlaunch("plan", recipe, "nodes=auto", "--lock")
    kept = llmlaunch.json("check", recipe, "nodes=auto")
    assert kept["sizing"] is None
    assert "nodes: 1," in recipe.with_name("train.lock.yaml").read_text()


def test_a_plan_that_must_not_run_is_not_locked(llmlaunch: CommandLine, recipe: Path) -> None:
    recipe.write_text(asset("recipes", "quickstart.yaml").read_text())
    llmlaunch("plan", recipe, "memory.limit=0.01", "--lock", code=3)
    assert not recipe.with_name("train.lock.yaml").exists()


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("tensor: 1", "tensor: 3", "train.lock.yaml: the plan it keeps is not legal for this recipe"),
        ("tensor: 1", "tensor: many", "cannot be read by this version"),
        ("techniques:", "techniques:\n  weight_versions: 2", "weight_versions is nothing a plan chooses"),
        ("schema: 1", "schema: 2", "train.lock.yaml:3: schema"),
        ("schema: 1", "schema: !!python/name:os.system 1", "YAML tag"),
    ],
)
def test_a_damaged_lock_is_one_message(
    llmlaunch: CommandLine, recipe: Path, lock: Path, before: str, after: str, reason: str
) -> None:
    lock.write_text(lock.read_text().replace(before, after))
    assert reason in llmlaunch("check", recipe, code=2).stderr


def test_an_interval_between_saves_that_was_chosen_stays(llmlaunch: CommandLine, recipe: Path) -> None:
    saving = ("training.save_interval=auto", "training.checkpoint_path=/ckpt", "training.steps=100000")
    chosen = llmlaunch.json("check", recipe, *saving)["job"]["expected"]
    assert "Young and Daly" in chosen["save_interval_reason"]
    llmlaunch("plan", recipe, *saving, "--lock")
    changed = (*saving, "restart.save_seconds=1")
    kept = llmlaunch.json("check", recipe, *changed)["job"]["expected"]
    assert (kept["save_interval"], kept["save_interval_reason"]) == (chosen["save_interval"], None)
    llmlaunch("render", recipe, *changed, "-o", "run")
    assert f"--save-interval {chosen['save_interval']} " in " ".join(Path("run/command.txt").read_text().split())
    anew = llmlaunch.json("check", recipe, *changed, "--replan")["job"]["expected"]
    assert anew["save_interval"] < chosen["save_interval"]
    recipe_of_run, _ = rendered_job(Path("run"), rendered_recipe(Path("run")))
    assert recipe_of_run.training.save_interval == chosen["save_interval"]


def test_a_lock_holds_every_switch_and_an_older_one_leaves_them_to_the_recipe(
    llmlaunch: CommandLine, recipe: Path, lock: Path
) -> None:
    text = lock.read_text()
    held = yaml.safe_load(text)["techniques"]
    assert held["tp_comm_overlap"] in (True, False)
    asking = "layout={loss: native}"
    assert "layout.loss was None and is native" in llmlaunch("check", recipe, asking, code=2).stderr
    without = {**yaml.safe_load(text), "techniques": {}}
    lock.write_text(yaml.safe_dump(without))
    assert llmlaunch.json("check", recipe, asking)["techniques"] == {"loss": "native"}
    assert llmlaunch.json("check", recipe)["techniques"] == {}
