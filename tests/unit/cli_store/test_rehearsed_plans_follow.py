"""A plan of the very shape that was rehearsed follows the rehearsal; what it refuted is never chosen again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from calibrating import BIAS, RECIPE, Cli

from llmlaunch.app.planned_run import plan_loaded
from llmlaunch.calibration.learning import scores_of_records
from llmlaunch.calibration.pool import gather
from llmlaunch.calibration.records import clusters_by_gpu, exclusion_reason
from llmlaunch.recipe.load import load_recipe
from support.hidden_bias import runs
from support.rehearsed_plans import PINS, Planned, on_gpu, planned, records, traced

SCHEMA = json.loads((Path(__file__).resolve().parents[3] / "docs" / "schemas" / "plan.schema.json").read_text())
FEW = (*PINS, "layout.recompute=none")  # some hundred layouts


def worst(one: Planned) -> int:
    return one.plan.estimate.worst.pipeline_rank


def checked(*words: str) -> Planned:
    """As `check` plans it, with the store."""
    found = plan_loaded(load_recipe(RECIPE, words))
    return Planned(found.recipe, found.plan, found.backend.render(found.recipe, found.plan.layout))


def chosen(said: dict[str, Any]) -> tuple[Any, ...]:
    return said["layout"], said["techniques"], said["gradient_dtype"]


def test_nobody_rehearsed_it(cli: Cli) -> None:
    assert cli.said("check", RECIPE, *FEW)["memory"]["rehearsed"] is None


@pytest.mark.parametrize("command", ["check", "plan"])
def test_the_very_shape_says_when_where_and_by_how_much(cli: Cli, command: str) -> None:
    one = planned(*FEW)
    cli.imports("r", records(one, traced(one, worst(one), 1.02)))
    said = cli.said(command, RECIPE, *FEW)
    jsonschema.validate(said, SCHEMA)
    told = said["memory"]["rehearsed"]
    assert (said["verdict"], told["verdict"]) == ("safe", "safe")
    assert [rank["pipeline_rank"] for rank in told["ranks"]] == [worst(one)]
    (line,) = [line for line in cli.run(command, RECIPE, *FEW)[0].splitlines() if "rehearsed" in line]
    assert "rehearsed 2025-10-09" in line
    assert "as a trace of megatron-core 0.19.2" in line
    assert f"at most +2.0% from the estimate (rank {worst(one)}: " in line
    assert "safe by it" in line


def test_what_a_rehearsal_refuted_is_not_chosen_again_and_the_next_best_is(cli: Cli) -> None:
    before = cli.said("plan", RECIPE, *FEW)
    one = checked(*FEW)
    cli.imports("r", records(one, traced(one, worst(one), 3.0)))
    after = cli.said("plan", RECIPE, *FEW)
    jsonschema.validate(after, SCHEMA)
    assert after["verdict"] == "safe"
    assert chosen(after) == chosen(before["alternatives"][0])
    assert after["memory"]["rehearsed"] is None
    assert chosen(before) not in [chosen(other) for other in after["alternatives"]]
    assert after["refused"]["rehearsed"] == 1
    assert after["searched"] == before["searched"]
    assert "rehearsed 2025-10-09" in after["refusal_sentences"]["rehearsed"]
    assert "unsafe by it" in after["refusal_sentences"]["rehearsed"]
    assert "the estimate alone said safe" in after["refusal_sentences"]["rehearsed"]
    assert "1  rehearsed: TP2 PP4" in cli.run("plan", RECIPE, *FEW)[0]


def test_where_all_that_is_safe_was_refuted_nothing_is(cli: Cli) -> None:
    """Each check chooses a layout that was not refuted yet, until there is none."""
    words = (*FEW, "layout.layers_by_stage=even", "layout.sequence_parallel=true")
    seen: list[str] = []
    while (one := checked(*words)).plan.safe:
        assert one.plan.chosen.describe() not in seen
        seen.append(one.plan.chosen.describe())
        cli.imports("r", records(one, traced(one, worst(one), 5.0)))
    assert len(seen) == planned(*words).plan.searched - 2  # that many are legal and safe
    out, err = cli.run("check", RECIPE, *words, "--json", code=3)
    assert "no layout is safe" in err
    assert "which the estimate lets pass; but rehearsed 2025-10-09" in err
    said = json.loads(out)
    assert said["memory"]["rehearsed"]["verdict"] == "unsafe"
    assert said["refused"]["rehearsed"] == len(seen)


def test_a_rank_that_ran_out_of_memory_refutes_its_layout(cli: Cli) -> None:
    one = planned(*FEW)
    cli.imports("r", records(one, on_gpu(one, 2, ran_out=True)))
    said = cli.said("check", RECIPE, *FEW)
    assert said["layout"] != one.plan.layout.as_json()
    assert "pipeline rank 2 ran out of memory" in said["refusal_sentences"]["rehearsed"]


def test_what_the_estimate_refuses_and_a_gpu_shows_to_fit_is_safe(cli: Cli) -> None:
    words = (*FEW, "memory.limit=0.4")
    one = planned(*words, "layout.micro_batch_size=4")
    assert not one.plan.safe
    cli.run("check", RECIPE, *words, "layout.micro_batch_size=4", code=3)
    ranks = range(one.plan.layout.pipeline)
    cli.imports("r", [record for rank in ranks for record in records(one, on_gpu(one, rank, 0.3))])
    said = cli.said("check", RECIPE, *words, "layout.micro_batch_size=4")
    assert (said["verdict"], said["layout"]) == ("safe", one.plan.layout.as_json())
    assert "the estimate alone said unsafe" in said["memory"]["rehearsed"]["sentence"]


@pytest.mark.parametrize(
    "change", ["training.sequence_length=4096", 'backend.version="0.16"', "cluster=h200-141gb-x8", "nodes=8"]
)
def test_of_a_changed_recipe_it_says_nothing(cli: Cli, change: str) -> None:
    before = cli.said("check", RECIPE, *FEW, change)
    one = planned(*FEW)
    cli.imports("r", records(one, traced(one, worst(one), 3.0)))
    assert cli.said("check", RECIPE, *FEW, change) == before


def test_a_neighbour_that_was_refuted_says_so(cli: Cli) -> None:
    """Seen from another layout, the one that a rehearsal refuted is refused for that."""
    words = ("layout.layers_by_stage=even", *FEW)
    two = planned(*words, "layout.micro_batch_size=2")
    cli.imports("r", records(two, traced(two, worst(two), 3.0)))
    said = cli.said("plan", RECIPE, *words)
    jsonschema.validate({name: value for name, value in said.items() if name != "neighbours"}, SCHEMA)
    (near,) = [one for one in said["neighbours"] if (one["field"], one["to"]) == ("micro_batch_size", 2)]
    assert near["layout"] == two.plan.layout.as_json()
    assert near["refused"] == "rehearsed"
    assert "rehearsed 2025-10-09" in near["reason"]


def test_submit_says_it_and_refuses_by_it(cli: Cli) -> None:
    one = planned(*FEW)
    cli.imports("r", records(one, traced(one, worst(one), 1.02)))
    _, err = cli.run("submit", RECIPE, *FEW, "--dry-run")
    assert "rehearsed 2025-10-09" in err


def test_more_nodes_are_taken_where_fewer_were_refuted(cli: Cli) -> None:
    words = (*FEW, "nodes=auto", "layout.layers_by_stage=even", "layout.sequence_parallel=true")
    before = cli.said("check", RECIPE, *words)
    assert before["sizing"]["nodes"] == 1
    while (one := checked(*words)).recipe.nodes == 1:
        cli.imports("r", records(one, traced(one, worst(one), 5.0)))
    after = cli.said("check", RECIPE, *words)
    jsonschema.validate(after, SCHEMA)
    first, *_ = after["sizing"]["tried"]
    assert (first["nodes"], first["refused"]) == (1, "rehearsed")
    assert "rehearsed 2025-10-09" in first["reason"]


def test_a_recipe_that_takes_no_calibration_takes_no_rehearsal(cli: Cli) -> None:
    one = planned(*FEW)
    cli.imports("r", records(one, traced(one, worst(one), 3.0)))
    said = cli.said("check", RECIPE, *FEW, "memory.calibration=none")
    assert (said["layout"], said["memory"]["rehearsed"]) == (one.plan.layout.as_json(), None)


def test_a_store_that_cannot_be_read_keeps_nobody_from_planning(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "store.db").write_bytes(b"no database at all, and longer than a header" * 50)
    out, err = cli.run("check", RECIPE, *FEW, "--json")
    assert json.loads(out)["memory"]["rehearsed"] is None
    assert "rehearsals are not used" in err


MANY = [(*PINS, f"training.sequence_length={1024 * n}") for n in range(1, 13)]


def rehearsed() -> list[dict[str, Any]]:
    """A dozen shapes, rehearsed at twice of what is predicted, some of them until they ran out of memory."""
    found = []
    for number, words in enumerate(MANY):
        one = planned(*words)
        ranks = [traced(one, 0, 2.0), on_gpu(one, 1, 2.0), on_gpu(one, 0, 2.0, ran_out=number % 3 == 0)]
        found += records(one, *ranks)
    return found


@pytest.fixture(scope="module")
def kept() -> list[dict[str, Any]]:
    return rehearsed()


def test_no_reader_takes_one_for_a_run(kept: list[dict[str, Any]]) -> None:
    assert {exclusion_reason(record) for record in kept} == {"rehearsed"}
    assert gather(kept).configurations == []
    assert gather(kept).left_out == {"rehearsed": len(kept)}
    assert scores_of_records(kept, clusters_by_gpu(), "megatron", "h100-80gb") == []


def test_a_full_card_of_one_is_no_death_either(kept: list[dict[str, Any]]) -> None:
    """Not even with the words of a cluster run that filled its card and failed."""
    record = {**kept[-1], "run_state": "failed", "peak_bytes": kept[-1]["gpu_memory_bytes"]}
    assert exclusion_reason(record) == "rehearsed"


def test_a_store_full_of_them_calibrates_as_an_empty_one(cli: Cli, kept: list[dict[str, Any]]) -> None:
    cli.imports("rehearsed", kept)
    said = cli.said("calibrate")
    assert said["answers"] == []
    assert said["left_out"] == {"rehearsed": len(kept)}


def test_a_calibration_and_a_margin_are_the_same_with_them_and_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kept: list[dict[str, Any]]
) -> None:
    """A plan at a risk, before anything is learned from 30 runs (then they bound it themselves) and after."""
    told = []
    for name, more in (("without", []), ("with", kept)):
        (tmp_path / name).mkdir()
        cli = Cli(tmp_path / name, capsys, monkeypatch)
        cli.imports("all", [*more, *[record for run in runs(1, BIAS, 30) for record in run]])
        before = cli.said("check", RECIPE, "memory.risk=0.1")
        (answer,) = cli.said("calibrate")["answers"]
        learned = {key: value for key, value in answer["calibration"].items() if key not in ("id", "made_at")}
        after = cli.said("check", RECIPE, "memory.risk=0.1")
        told.append((before["memory"], learned, _unnamed(after["memory"])))
    assert told[0] == told[1]
    assert told[0][0]["runs"] == 30


def _unnamed(memory: dict[str, Any]) -> dict[str, Any]:
    """A calibration is called after the second it was made in."""
    learned = {name: value for name, value in memory["correction"].items() if name != "calibration_id"}
    text = {name: value for name, value in memory.items() if name not in ("evidence", "margin")}
    return text | {"correction": learned}
