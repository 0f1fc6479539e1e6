"""An estimate that breaks a law of memory is a bug of llmlaunch: never safe, in no command, and the message says so.

Terms are broken on purpose, as a wrong formula would break them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmlaunch.accuracy.scoring import refuse_broken
from llmlaunch.calibration.records import read_records
from llmlaunch.columns import FloatColumn
from llmlaunch.effects import host_optimizer
from llmlaunch.errors import NothingSafe
from llmlaunch.frameworks.framework import backend_for
from llmlaunch.layout import RECOMPUTE_FULL, Layout, LayoutColumns
from llmlaunch.memory import moments, states
from llmlaunch.memory.effects import HostBytes
from llmlaunch.memory.estimator import estimate, worst_ranks
from llmlaunch.memory.guard import IMPOSSIBLE_BYTES
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.planner import smallest_change
from llmlaunch.planner.planning import make_plan, plan_of
from llmlaunch.planner.refusal import refuse
from llmlaunch.planner.search import search
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe
from support.command_line import CommandLine
from support.plans import setting_for
from support.soak import share
from validation.scoring import score

OUTCOMES = Path(__file__).parents[2] / "data" / "measurements" / "outcomes.jsonl"
PINNED = (
    "{tensor: 2, pipeline: 1, context: 1, micro_batch_size: 1, zero_stage: 1, recompute: none, "
    "offload_optimizer: 0.0, offload_layers: 0}"
)
RECIPE = """\
schema: 1
name: broken
model: {{base: llama3-8b, num_layers: 8}}
backend: megatron-lm
cluster: {{base: h100-80gb-x8, devices_per_node: 2}}
nodes: 1
budget: {{max_nodes: 1}}
training: {{sequence_length: 8192, global_batch_size: 8, steps: 10}}
data: {{mock: true}}
layout: {layout}
"""
Break = Callable[[pytest.MonkeyPatch], None]


def without_optimizer_states(patch: pytest.MonkeyPatch) -> None:
    """A term that was forgotten: nothing is negative, and there is too little of it all."""
    patch.setattr(states, "_optimizer", lambda job, rows, sharded, whole: np.zeros(len(rows)))
    # and activations no longer hide it
    patch.setattr(moments, "kept_activations", lambda job, rows: np.zeros(len(rows)))
    patch.setattr(moments, "logits", lambda job, rows: np.zeros(len(rows)))


def with_whole_weights_replaced(patch: pytest.MonkeyPatch) -> None:
    """What made a death safe: whole weights were taken from a shard."""
    resting = states._resting

    def replaced(job: Job, rows: RankColumns, *others: object) -> FloatColumn:
        return resting(job, rows, *others) - 3e10  # type: ignore[arg-type]

    patch.setattr(states, "_resting", replaced)


def with_negative_activations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(moments, "kept_activations", lambda job, rows: np.full(len(rows), -1e9))


BROKEN = {
    "a forgotten term": (without_optimizer_states, "parameters, gradients and optimizer states alone take"),
    "a negative state": (with_whole_weights_replaced, "parameters would take -"),
    "a negative activation": (with_negative_activations, "activations would take -0.93 GiB"),
}


def written(folder: Path, layout: str = PINNED) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(layout=layout))
    return path


def loaded(folder: Path, layout: str = PINNED) -> Recipe:
    return load_recipe(written(folder, layout))


@pytest.mark.parametrize(("breaks", "law"), BROKEN.values(), ids=list(BROKEN))
def test_a_broken_law_is_named_by_the_estimate_and_impossible_in_a_search(
    breaks: Break, law: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = loaded(tmp_path)
    job = Job(recipe.model, recipe.workload, backend_for(recipe).facts(recipe))
    layout = Layout(tensor=4, pipeline=2, data=2, zero_stage=1, sequence_parallel=1)
    assert estimate(job, layout).fault is None
    assert worst_ranks(job, LayoutColumns.of([layout])).device_bytes < IMPOSSIBLE_BYTES
    breaks(monkeypatch)
    fault = estimate(job, layout).fault
    assert fault is not None
    assert law in fault
    assert "pipeline rank" in fault
    assert worst_ranks(job, LayoutColumns.of([layout])).device_bytes == [IMPOSSIBLE_BYTES]


@pytest.fixture(autouse=True)
def _no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for a change that is safe, which finds none, looks at hardly anything."""
    for part in ("PIN_CANDIDATES", "TECHNIQUE_CANDIDATES", "NODE_CANDIDATES"):
        monkeypatch.setattr(smallest_change, part, 10)


@pytest.mark.parametrize("command", share(["check", "plan", "render", "submit"], ["check", "submit"]))
def test_no_command_calls_it_safe(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llmlaunch: CommandLine
) -> None:
    breaks, law = BROKEN["a negative state"]
    monkeypatch.chdir(tmp_path)
    options = {"render": ["-o", "run"], "submit": ["--dry-run"]}.get(command, ["--json"])
    breaks(monkeypatch)
    output = llmlaunch(command, written(tmp_path), *options, code=3)
    assert law in output.stderr
    assert "This is a bug of llmlaunch, not yours: please report it with the recipe" in output.stderr
    if options == ["--json"]:
        assert json.loads(output.stdout)["verdict"] == "unsafe"
    assert not (tmp_path / "run").exists()


def test_accuracy_does_not_believe_it(monkeypatch: pytest.MonkeyPatch, llmlaunch: CommandLine, tmp_path: Path) -> None:
    breaks, law = BROKEN["a negative activation"]
    records = (r for r in read_records(OUTCOMES) if r["family"] == "fujii-grid-A100-40GB" and r["peak_kind"] == "fits")
    record = next(r for r in records if score(r, {}).verdict == "safe" and score(r, {}).reason is None)
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps(record) + "\n")
    breaks(monkeypatch)
    result = score(record, {})
    assert result.verdict == "unsafe"
    assert result.reason is not None
    assert law.split(" -")[0] in result.reason
    with pytest.raises(NothingSafe, match="bug of llmlaunch"):
        refuse_broken([result])
    assert "This is a bug of llmlaunch" in llmlaunch("accuracy", file, code=3).stderr


def test_a_negative_term_of_host_memory_is_no_less_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_optimizer, "_optimizer", lambda job, rows: HostBytes(np.full(len(rows), -1e9)))
    recipe = loaded(tmp_path)
    plan = make_plan(setting_for(recipe))
    assert not plan.safe
    assert str(plan.estimate.fault).startswith("of a node's host memory, offloaded optimizer would take -1.86 GiB")
    with pytest.raises(NothingSafe, match="bug of llmlaunch"):
        refuse(plan)


def test_a_bug_of_some_layouts_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = moments.kept_activations

    def broken(job: Job, rows: RankColumns) -> FloatColumn:
        return np.where(rows.layouts.recompute == RECOMPUTE_FULL, -1e12, right(job, rows))

    recipe = loaded(tmp_path, "{tensor: 2, pipeline: 1, context: 1, offload_optimizer: 0.0, offload_modules: []}")
    before = make_plan(setting_for(recipe))
    monkeypatch.setattr(moments, "kept_activations", broken)
    setting = setting_for(recipe)
    plan = make_plan(setting)
    assert plan.safe
    assert plan.chosen == before.chosen
    assert plan.layout.recompute != RECOMPUTE_FULL
    plan = plan_of(setting, search(setting, whole=True), 0)
    assert plan.refused["broken_estimate"] > 0
    assert "bug of llmlaunch" in plan.refusal_sentences["broken_estimate"]
    assert sum(plan.refused.values()) <= plan.searched
