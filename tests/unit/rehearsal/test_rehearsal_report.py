"""What a person reads of a rehearsal: whose word every number is, and what to do."""

from __future__ import annotations

from llmlaunch.rehearsal.report import rehearsal_text
from llmlaunch.rehearsal.verdict import judge_plan, next_layout, unseen_by_a_trace
from llmlaunch.units import GIB
from support.rehearsed_plans import FOUR_STAGES, on_gpu, planned

JOB = planned(FOUR_STAGES)
PLAN = JOB.plan


def text(process_bytes: int, ran_out: bool = False) -> str:
    ran = on_gpu(JOB, process_bytes=process_bytes, ran_out=ran_out)
    judgement = judge_plan(
        PLAN, [ran], JOB.recipe.memory, unseen_by_a_trace(JOB.setting.job_of(JOB.recipe), PLAN.layout)
    )
    return rehearsal_text(PLAN, [ran], judgement, next_layout(JOB.setting, PLAN, judgement))


def test_a_process_on_a_gpu_is_put_beside_all_that_was_predicted_but_nccl() -> None:
    first, shown = PLAN.estimate.ranks[0], text(30 * GIB)
    (row,) = (line.split() for line in shown.splitlines() if line.strip().startswith("process "))
    assert float(row[1]) == round((first.device_bytes - first.terms["communicators"]) / GIB, 1)
    assert row[2] == "30.0"
    assert "communicators *" in shown
    assert "replay" not in shown, "a GPU's allocator is no replay"


def test_out_of_memory_is_said_with_what_had_been_reached_and_what_to_take_instead() -> None:
    shown = text(70 * GIB, ran_out=True)
    assert shown.splitlines()[0].startswith("llama3-8b: unsafe")
    for part in ("ran out of memory: the numbers are what it had reached", "Verdict: unsafe.", "Next layout: "):
        assert part in shown
