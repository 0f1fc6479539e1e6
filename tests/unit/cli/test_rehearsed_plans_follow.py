"""A plan of the very shape that was rehearsed follows the rehearsal; what it refuted is never chosen again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.app.planned_run import plan_loaded
from llmlaunch.assets import asset
from llmlaunch.calibration.peaks import scores_of_records
from llmlaunch.calibration.pool import gather
from llmlaunch.calibration.records import exclusion_reason
from llmlaunch.cluster.cards import machines
from support.command_line import CommandLine
from support.json_schemas import validate
from support.recipes import recipe_of
from support.rehearsed_plans import PINS, Planned, on_gpu, planned, records, traced

RECIPE = str(asset("recipes", "llama3-8b.yaml"))
SCHEMA = json.loads((Path(__file__).resolve().parents[3] / "docs" / "schemas" / "plan.schema.json").read_text())
FEW = (*PINS, "layout.recompute=none", "layout.techniques=asked")  # some dozen layouts


@pytest.fixture(autouse=True)
def megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_PATH", str(tmp_path))


ONE_A_SIZE = (
    *("layout.layers_by_stage=even", "layout.sequence_parallel=true", "layout.offload_modules=[]"),
    *("layout.offload_layers=0", "layout.offload_optimizer=0"),
)


def worst(rehearsed: Planned) -> int:
    return rehearsed.plan.estimate.worst.pipeline_rank


def checked(*overrides: str) -> Planned:
    """As `check` plans it, with the store."""
    run = plan_loaded(recipe_of("llama3-8b", *overrides))
    return Planned(run.recipe, run.plan, run.backend.render(run.recipe, run.plan.layout), run.setting)


def chosen(plan: dict[str, Any]) -> tuple[Any, ...]:
    return plan["layout"], plan["techniques"], plan["gradient_dtype"]


def import_trace(llmlaunch: CommandLine, shape: Planned, ratio: float) -> Planned:
    """Store a trace of the plan's worst rank that peaked at `ratio` times its estimate."""
    llmlaunch.import_records(records(shape, traced(shape, worst(shape), ratio)))
    return shape


def test_the_very_shape_says_when_where_and_by_how_much(llmlaunch: CommandLine) -> None:
    rank = worst(import_trace(llmlaunch, planned(*FEW), 1.02))
    plan = llmlaunch.json("check", RECIPE, *FEW)
    validate(plan, SCHEMA)
    rehearsed = plan["memory"]["rehearsed"]
    assert (plan["verdict"], rehearsed["verdict"]) == ("safe", "safe")
    assert [measured["pipeline_rank"] for measured in rehearsed["ranks"]] == [rank]
    text = " ".join(llmlaunch("check", RECIPE, *FEW, "-v").stdout.split())
    assert "rehearsed 2025-10-09" in text
    assert "as a trace of megatron-core 0.19.2" in text
    assert f"at most +2.0% from the estimate (rank {rank}: " in text
    assert "safe by it" in text
    assert "rehearsed 2025-10-09" in llmlaunch("submit", RECIPE, *FEW, "--dry-run").stderr


def test_what_a_rehearsal_refuted_is_not_chosen_again_and_the_next_best_is(llmlaunch: CommandLine) -> None:
    before = llmlaunch.json("plan", RECIPE, *FEW)
    assert before["memory"]["rehearsed"] is None
    import_trace(llmlaunch, checked(*FEW), 3.0)
    after = llmlaunch.json("plan", RECIPE, *FEW)
    validate(after, SCHEMA)
    assert after["verdict"] == "safe"
    assert chosen(after) == chosen(next(a for a in before["alternatives"] if a["layout"] != before["layout"]))
    assert after["memory"]["rehearsed"] is None
    assert chosen(before) not in [chosen(other) for other in after["alternatives"]]
    assert all(other["layout"] != before["layout"] for other in after["alternatives"])
    assert after["searched"] == before["searched"]
    assert "rehearsed 2025-10-09" in after["refusal_sentences"]["rehearsed"]
    assert "unsafe by it" in after["refusal_sentences"]["rehearsed"]
    assert "the estimate alone said safe" in after["refusal_sentences"]["rehearsed"]
    refused = after["refused"]["rehearsed"]  # with the layout's other techniques, which are taken to be off by as much
    assert refused > 1
    assert f"{refused}  rehearsed: TP2 PP4" in llmlaunch("plan", RECIPE, *FEW, "-v").stdout


@pytest.mark.usefixtures("all_advice")
def test_a_neighbour_that_was_refuted_says_so(llmlaunch: CommandLine) -> None:
    """Seen from another layout, the one that a rehearsal refuted is refused for that."""
    overrides = ("layout.layers_by_stage=even", *FEW)
    refuted = import_trace(llmlaunch, planned(*overrides, "layout.micro_batch_size=2"), 3.0)
    plan = llmlaunch.json("plan", RECIPE, *overrides)
    validate({name: value for name, value in plan.items() if name != "neighbours"}, SCHEMA)
    (near,) = [other for other in plan["neighbours"] if (other["field"], other["to"]) == ("micro_batch_size", 2)]
    assert near["layout"] == refuted.plan.layout.as_json()
    assert near["refused"] == "rehearsed"
    assert "rehearsed 2025-10-09" in near["reason"]


def test_more_nodes_are_taken_where_fewer_were_refuted(llmlaunch: CommandLine) -> None:
    overrides = (*FEW, *ONE_A_SIZE, "nodes=auto")
    before = llmlaunch.json("check", RECIPE, *overrides)
    assert before["sizing"]["nodes"] == 1
    while (shape := checked(*overrides)).recipe.nodes == 1:
        import_trace(llmlaunch, shape, 5.0)
    after = llmlaunch.json("check", RECIPE, *overrides)
    validate(after, SCHEMA)
    first, *_ = after["sizing"]["tried"]
    assert (first["nodes"], first["refused"]) == (1, "rehearsed")
    assert "rehearsed 2025-10-09" in first["reason"]


def test_a_recipe_that_takes_no_calibration_takes_no_rehearsal(llmlaunch: CommandLine) -> None:
    shape = import_trace(llmlaunch, planned(*FEW), 3.0)
    plan = llmlaunch.json("check", RECIPE, *FEW, "memory.calibration=none")
    assert (plan["layout"], plan["memory"]["rehearsed"]) == (shape.plan.layout.as_json(), None)


MANY = [(*FEW, f"training.sequence_length={1024 * n}") for n in (1, 2)]


@pytest.fixture(scope="module")
def rehearsals() -> list[dict[str, Any]]:
    """Two shapes, rehearsed at twice of what is predicted, one of them until it ran out of memory."""
    rehearsed = []
    for number, overrides in enumerate(MANY):
        shape = planned(*overrides)
        ranks = [traced(shape, 0, 2.0), on_gpu(shape, 1, 2.0), on_gpu(shape, 0, 2.0, ran_out=number == 0)]
        rehearsed += records(shape, *ranks)
    return rehearsed


def test_no_reader_takes_one_for_a_run_or_a_death(rehearsals: list[dict[str, Any]]) -> None:
    assert {exclusion_reason(record) for record in rehearsals} == {"rehearsed"}
    assert gather(rehearsals) == ([], {"rehearsed": len(rehearsals)})
    assert scores_of_records(rehearsals, machines(), "megatron", "h100-80gb") == []
    filled = {"run_state": "failed", "peak_bytes": rehearsals[-1]["gpu_memory_bytes"]}  # as a run that filled its card
    assert exclusion_reason({**rehearsals[-1], **filled}) == "rehearsed"
