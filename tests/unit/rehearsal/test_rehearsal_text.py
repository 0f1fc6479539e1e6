"""What a person reads of a rehearsal: whose word every number is, and what to do."""

from __future__ import annotations

from pathlib import Path

from llmlaunch.backends.registry import backend_for
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.setting import setting_of
from llmlaunch.recipe.load import load_recipe
from llmlaunch.rehearsal.ranks import ON_GPU, RehearsedRank
from llmlaunch.rehearsal.report import rehearsal_text
from llmlaunch.rehearsal.verdict import judge_plan, next_layout, unseen_by_a_trace
from llmlaunch.units import GIB

RECIPE = load_recipe(
    str(Path(__file__).parents[3] / "recipes" / "llama3-8b.yaml"),
    ("layout={tensor: 4, pipeline: 4, virtual_pipeline: 1, context: 1}",),
)
SETTING = setting_of(RECIPE, backend_for(RECIPE))
PLAN = make_plan(setting_of(RECIPE, backend_for(RECIPE)))


def text(process: int, ran_out: bool = False) -> str:
    first = PLAN.estimate.ranks[0]
    ran = RehearsedRank(0, ON_GPU, first, process - GIB, process - GIB // 2, process, ran_out, stands_for=(0,))
    unseen = unseen_by_a_trace(SETTING.job_of(RECIPE), PLAN.layout)
    found = judge_plan(PLAN, [ran], RECIPE.memory, unseen)
    return rehearsal_text(PLAN, [ran], found, next_layout(SETTING, PLAN, found))


def row(shown: str, name: str) -> list[str]:
    line = next(line for line in shown.splitlines() if line.strip().startswith(f"{name} "))
    return line.strip().removeprefix(name).split()


def test_a_process_on_a_gpu_is_put_beside_all_that_was_predicted_but_nccl() -> None:
    first = PLAN.estimate.ranks[0]
    shown = text(30 * GIB)
    predicted, seen, _ = row(shown, "process")
    assert float(predicted) == round((first.device_bytes - first.terms["communicators"]) / GIB, 1)
    assert seen == "30.0"
    assert "communicators *" in shown
    assert "replay" not in shown, "a GPU's allocator is no replay"


def test_out_of_memory_is_said_with_what_had_been_reached_and_what_to_take_instead() -> None:
    shown = text(70 * GIB, ran_out=True)
    assert shown.splitlines()[0].startswith("llama3-8b: unsafe")
    for part in ("ran out of memory: the numbers are what it had reached", "Verdict: unsafe.", "Next layout: "):
        assert part in shown
