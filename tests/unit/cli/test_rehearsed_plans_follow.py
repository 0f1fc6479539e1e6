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
from llmlaunch.layout import Layout
from llmlaunch.planner.search import OUTPACED
from support.command_line import CommandLine
from support.hidden_bias import BIAS, runs
from support.json_schemas import validate
from support.recipes import recipe_of
from support.rehearsed_plans import PINS, Planned, on_gpu, planned, records, traced

RECIPE = str(asset("recipes", "llama3-8b.yaml"))
SCHEMA = json.loads((Path(__file__).resolve().parents[3] / "docs" / "schemas" / "plan.schema.json").read_text())
FEW = (*PINS, "layout.recompute=none")  # some hundred layouts


@pytest.fixture(autouse=True)
def megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_PATH", str(tmp_path))


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
    for command in ("check", "plan"):
        plan = llmlaunch.json(command, RECIPE, *FEW)
        validate(plan, SCHEMA)
        rehearsed = plan["memory"]["rehearsed"]
        assert (plan["verdict"], rehearsed["verdict"]) == ("safe", "safe")
        assert [measured["pipeline_rank"] for measured in rehearsed["ranks"]] == [rank]
        text = " ".join(llmlaunch(command, RECIPE, *FEW, "-v").stdout.split())
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


def test_where_all_that_is_safe_was_refuted_nothing_is(llmlaunch: CommandLine) -> None:
    """Each check chooses a layout that was not refuted yet, until there is none."""
    overrides = (*FEW, "layout.layers_by_stage=even")
    first = planned(*overrides).plan
    refuted: list[Layout] = []
    while (shape := checked(*overrides)).plan.safe:
        assert shape.plan.layout not in refuted
        refuted.append(shape.plan.layout)
        import_trace(llmlaunch, shape, 5.0)
    assert len(refuted) > 1
    out, err = llmlaunch("check", RECIPE, *overrides, "--json", code=3)
    assert "no layout is safe" in err
    assert "which the estimate lets pass; but rehearsed 2025-10-09" in err
    plan = json.loads(out)
    assert plan["memory"]["rehearsed"]["verdict"] == "unsafe"
    illegal = sum(count for key, count in first.refused.items() if key != OUTPACED)
    assert plan["refused"]["rehearsed"] == first.searched - illegal  # all that is legal is safe by its estimate


def test_a_rank_that_ran_out_of_memory_refutes_its_layout(llmlaunch: CommandLine) -> None:
    shape = planned(*FEW)
    llmlaunch.import_records(records(shape, on_gpu(shape, 2, ran_out=True)))
    plan = llmlaunch.json("check", RECIPE, *FEW)
    before = shape.plan.chosen
    assert (plan["layout"], plan["techniques"]) != (before.layout.as_json(), before.techniques.as_json())
    assert "pipeline rank 2 ran out of memory" in plan["refusal_sentences"]["rehearsed"]


def test_what_the_estimate_refuses_and_a_gpu_shows_to_fit_is_safe(llmlaunch: CommandLine) -> None:
    overrides = (*FEW, "memory.limit=0.4")
    shape = planned(*overrides, "layout.micro_batch_size=4")
    assert not shape.plan.safe
    llmlaunch("check", RECIPE, *overrides, "layout.micro_batch_size=4", code=3)
    ranks = range(shape.plan.layout.pipeline)
    llmlaunch.import_records([record for rank in ranks for record in records(shape, on_gpu(shape, rank, 0.3))])
    plan = llmlaunch.json("check", RECIPE, *overrides, "layout.micro_batch_size=4")
    assert (plan["verdict"], plan["layout"]) == ("safe", shape.plan.layout.as_json())
    assert "the estimate alone said tight" in plan["memory"]["rehearsed"]["sentence"]


@pytest.mark.parametrize(
    "change", ["training.sequence_length=4096", 'backend.version="0.16"', "cluster=h200-141gb-x8", "nodes=8"]
)
def test_of_a_changed_recipe_it_says_nothing(llmlaunch: CommandLine, change: str) -> None:
    before = llmlaunch.json("check", RECIPE, *FEW, change)
    import_trace(llmlaunch, planned(*FEW), 3.0)
    assert llmlaunch.json("check", RECIPE, *FEW, change) == before


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
    overrides = (*FEW, "nodes=auto", "layout.layers_by_stage=even", "layout.sequence_parallel=true")
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


MANY = [(*PINS, f"training.sequence_length={1024 * n}") for n in range(1, 13)]


@pytest.fixture(scope="module")
def rehearsals() -> list[dict[str, Any]]:
    """A dozen shapes, rehearsed at twice of what is predicted, some of them until they ran out of memory."""
    rehearsed = []
    for number, overrides in enumerate(MANY):
        shape = planned(*overrides)
        ranks = [traced(shape, 0, 2.0), on_gpu(shape, 1, 2.0), on_gpu(shape, 0, 2.0, ran_out=number % 3 == 0)]
        rehearsed += records(shape, *ranks)
    return rehearsed


def test_no_reader_takes_one_for_a_run_or_a_death(rehearsals: list[dict[str, Any]]) -> None:
    assert {exclusion_reason(record) for record in rehearsals} == {"rehearsed"}
    assert gather(rehearsals) == ([], {"rehearsed": len(rehearsals)})
    assert scores_of_records(rehearsals, machines(), "megatron", "h100-80gb") == []
    filled = {"run_state": "failed", "peak_bytes": rehearsals[-1]["gpu_memory_bytes"]}  # as a run that filled its card
    assert exclusion_reason({**rehearsals[-1], **filled}) == "rehearsed"


def test_a_store_full_of_them_calibrates_as_an_empty_one(
    llmlaunch: CommandLine, rehearsals: list[dict[str, Any]]
) -> None:
    llmlaunch.import_records(rehearsals)
    answer = llmlaunch.json("calibrate")
    assert answer["answers"] == []
    assert answer["left_out"] == {"rehearsed": len(rehearsals)}


def test_a_calibration_and_a_margin_are_the_same_with_them_and_without(
    llmlaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rehearsals: list[dict[str, Any]]
) -> None:
    """A plan at a risk, before anything is learned from 30 runs, of which so many died that they bound nothing, and
    after."""
    plans = []
    for name, more in (("without", []), ("with", rehearsals)):
        monkeypatch.setenv("LLMLAUNCH_STORE", str(tmp_path / f"{name}.db"))
        llmlaunch.import_records([*more, *[record for run in runs(3, BIAS, 30) for record in run]])
        before = llmlaunch.json("check", RECIPE, "memory.risk=0.1")
        (answer,) = llmlaunch.json("calibrate")["answers"]
        learned = {key: value for key, value in answer["calibration"].items() if key not in ("id", "made_at")}
        after = llmlaunch.json("check", RECIPE, "memory.risk=0.1")
        plans.append((before["memory"], learned, _unnamed(after["memory"])))
    assert plans[0] == plans[1]
    assert plans[0][0]["runs"] > 30, "the shipped runs join them"


def _unnamed(memory: dict[str, Any]) -> dict[str, Any]:
    """A calibration is called after the second it was made in."""
    learned = {name: value for name, value in memory["correction"].items() if name != "calibration_id"}
    text = {name: value for name, value in memory.items() if name not in ("evidence", "margin")}
    return text | {"correction": learned}
