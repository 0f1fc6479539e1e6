"""The planner's choices among measured layouts, and how far step times are off measured ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.accuracy.scoring import ScoredRecord
from llmlaunch.accuracy.summary import measured_step_seconds, rank_correlation, throughput
from llmlaunch.calibration.evidence import JobClass
from llmlaunch.calibration.margins import margin_by_evidence
from llmlaunch.cluster.cards import machines
from llmlaunch.report.accuracy_text import accuracy_json, accuracy_text
from llmlaunch.timing.products import constant, replaced
from support.regret import Choice, MeasuredLayout, choose, measured_layouts, predicted, preferred, rule_of_thumb
from support.soak import share
from validation.cases import case_of
from validation.scoring import score

DATA = Path(__file__).parents[2] / "data" / "measurements"
GRID, RELEASED_GRID, TABLES = "fujii-grid-A100-40GB", "fujii-grid-H100-94GB", "nvidia-perf-dense"
HUGGING_FACE = ("qwen-finetune", "stas00-steps", "flagperf-steps", "atorch-steps")


@cache
def records(family: str) -> tuple[dict[str, Any], ...]:
    name = "released_outcomes.jsonl" if family == RELEASED_GRID else "outcomes.jsonl"
    return tuple(record for record in _read(name) if record["family"] == family)


@cache
def public_steps() -> tuple[ScoredRecord, ...]:
    """Step times of Hugging Face and DeepSpeed runs in READMEs and blogs."""
    clusters = machines()
    return tuple(score(record, clusters) for record in _read("step_times.jsonl"))


def _read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


@cache
def grid(family: str = GRID) -> tuple[MeasuredLayout, ...]:
    return tuple(measured_layouts(records(family), machines()))


def limits(family: str = GRID) -> dict[str, float]:
    """Return how far each device may be filled, by the margin without the grid's own runs."""
    margins = {}
    for device in {run.cluster.accelerator.name: run.cluster.accelerator for run in grid(family)}.values():
        job = JobClass("megatron", mixture=False, narrow=False, capability=device.compute_capability)
        margin = margin_by_evidence(job, device.memory_bytes, without_source=family)
        assert margin is not None
        margins[device.name] = float(margin.limit_bytes)
    return margins


def regrets(choices: dict[Any, Choice]) -> list[float]:
    assert not any(choice.dead for choice in choices.values())
    return [choice.regret for choice in choices.values() if choice.regret is not None]


def small_regrets(
    family: str = GRID, order: Callable[[Sequence[MeasuredLayout]], Any] = predicted, mean: float = 0.01
) -> list[float]:
    """At most a share `mean` of the best measured speed on average, five times that in any group, and nothing died."""
    choices = choose(grid(family), order(grid(family)), limits(family))
    losses = regrets(choices)
    assert len(losses) == len(choices) == {GRID: 6, RELEASED_GRID: 11}[family]
    assert sum(losses) / len(losses) <= mean
    assert max(losses) <= 5 * mean
    return losses


@pytest.mark.parametrize("order", [predicted, preferred], ids=["by time", "with the preference"])
@pytest.mark.parametrize("family", [GRID, RELEASED_GRID])
def test_the_choice_among_all_that_ran_loses_next_to_nothing_and_never_died(
    family: str, order: Callable[[Sequence[MeasuredLayout]], Any]
) -> None:
    """8B on 8 to 256 A100s of 40 GB, and on 4 to 128 H100s of 94 GB with 8k and 16k tokens."""
    assert max(small_regrets(family, order, mean=0.005)) <= 0.03


def test_a_rule_of_thumb_loses_more() -> None:
    assert sum(small_regrets()) < sum(regrets(choose(grid(), rule_of_thumb(grid()), limits())))


VARIED = {
    "matrix_efficiency_8": (0.74, 0.82),
    "mask_entry_seconds": (5.5e-9, 7e-9),
    "fabric_efficiency": (0.6, 0.9),
    "overlap_cost": (0.1, 0.4),
    "straggler_spread": (0.0, 0.02),
}


@pytest.mark.parametrize("name", share(VARIED, ["fabric_efficiency"]))
def test_the_choice_does_not_hang_on_one_constant(name: str) -> None:
    for value in VARIED[name]:
        with replaced({name: value}):
            small_regrets()


@pytest.mark.parametrize(("family", "mape", "order"), [(GRID, 0.08, 0.90), (TABLES, 0.06, 0.98)])
def test_step_times_are_near_measured_ones_and_in_their_order(family: str, mape: float, order: float) -> None:
    clusters = machines()
    accuracy = throughput([score(record, clusters) for record in records(family)])
    assert accuracy["mape"] < mape
    assert accuracy["rank_correlation"] > order


@pytest.mark.parametrize("of", ["model", "gpu", "precision"])
def test_no_model_card_or_number_format_of_nvidias_tables_is_biased(of: str) -> None:
    clusters = machines()
    groups: dict[str, list[ScoredRecord]] = {}
    for record in records(TABLES):
        key = {"model": record["model"]["name"], "gpu": record["gpu"], "precision": record["precision"]["fp8_recipe"]}
        groups.setdefault(str(key[of]), []).append(score(record, clusters))
    assert len(groups) >= 3
    assert all(abs(throughput(group)["bias"]) < 0.08 for group in groups.values())


def test_step_times_of_public_hugging_face_and_deepspeed_runs_are_near() -> None:
    """Half of each family was fitted on."""
    steps = public_steps()
    assert all(scored.supported and scored.predicted_step_seconds for scored in steps)
    parts = {"all": steps, **{family: [s for s in steps if s.record["family"] == family] for family in HUGGING_FACE}}
    parts["without Megatron's fork"] = [s for s in steps if s.record["family"] in HUGGING_FACE]
    parts["not fitted"] = [s for s in steps if s.record["split"] == "test"]
    for accuracy in map(throughput, parts.values()):
        assert accuracy["mape"] < 0.17
        assert accuracy["rank_correlation"] > 0.8
    assert throughput(parts["all"])["mape"] < 0.12
    assert throughput(parts["not fitted"])["mape"] < 0.12
    assert throughput(parts["without Megatron's fork"])["records"] >= 50


def test_the_table_for_a_person_has_step_times() -> None:
    clusters = machines()
    answer = accuracy_json([score(record, clusters) for record in records(TABLES)])
    lines = accuracy_text(answer).splitlines()
    start = lines.index("Predicted against measured step times (- is too fast)")
    family = f"{TABLES}/fits"
    assert lines[start + 2].split()[:2] == [family, str(answer["families"][family]["throughput"]["records"])]


def test_constants_are_put_back() -> None:
    before = constant("overlap_cost")
    with replaced({"overlap_cost": 0.9}):
        assert constant("overlap_cost") == 0.9
    assert constant("overlap_cost") == before
    with pytest.raises(KeyError), replaced({"no_such_constant": 1.0}):
        pass


def test_a_measured_speed_becomes_seconds_by_its_own_formula() -> None:
    """The grid counts attention as if it were not causal: 442 TFLOP and more for a sequence of 8192 tokens."""
    record = records(GRID)[0]
    case = case_of(record)
    assert measured_step_seconds(record, case) == pytest.approx(
        474.47e12 * 1024 / 8 / (record["tflops_per_gpu"] * 1e12), rel=1e-3
    )
    assert measured_step_seconds({**record, "family": "another"}, case) is None
    assert measured_step_seconds({**record, "step_seconds": 3.5}, case) == 3.5
    tokens = {**record, "tokens_per_second_per_gpu": 2000.0}
    assert measured_step_seconds(tokens, case) == pytest.approx(1024 * 8192 / 8 / 2000)


def test_ranks_correlate_as_spearman_says() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 900]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2, 3], [1, 1, 2, 3]) == pytest.approx(1)
    assert rank_correlation([1, 2], [1, 2]) is None
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None


def test_nothing_safe_is_no_choice() -> None:
    (choice, *_) = choose(grid(), predicted(grid()), dict.fromkeys(limits(), 0.0)).values()
    assert (choice.chosen, choice.regret, choice.of_time_alone) == (None, None, None)
    assert not choice.dead
