"""The shipped margin: an honest table, a bound that holds at its risk, wider where runs are few, none without any."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.calibration import evidence
from llmlaunch.calibration.evidence import DIED, FITTED, LIVED, TABLE, EvidenceRun, JobClass, shipped_runs, unit_bytes
from llmlaunch.calibration.margins import Margin, margin_by_evidence
from llmlaunch.calibration.ratios import DEATH, Score, own_runs
from llmlaunch.cluster.cards import machines
from llmlaunch.units import GIB
from support.evidence_table import configuration_key, evidence_records, evidence_runs, evidence_table, row_of
from support.soak import SOAK, examples, share
from validation.scoring import scores_of

DENSE = JobClass("megatron", mixture=False, narrow=False, capability="9.0")
CARD = 80 * GIB


def run_of(shortfall_gib: float, outcome: str = LIVED, job: JobClass = DENSE, source: str = "a") -> EvidenceRun:
    predicted = 60 * GIB
    return EvidenceRun("run", source, job, outcome, predicted, round(shortfall_gib * GIB))


def units(margin: Margin) -> float:
    """Return how many units of shortfall the margin keeps free."""
    assert margin.evidence is not None
    assert margin.risk is not None
    return margin.evidence.units_at(margin.risk)


def widened(margin: Margin) -> bool:
    assert margin.evidence is not None
    return margin.evidence.widened


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> list[EvidenceRun]:
    """The shipped runs, replaced by those a test appends."""
    runs: list[EvidenceRun] = []
    monkeypatch.setattr(evidence, "shipped_runs", lambda: tuple(runs))
    return runs


def test_the_shipped_table_is_what_the_formula_of_today_predicts_of_the_measured_runs() -> None:
    """In make test of every sixteenth configuration."""
    records = share(evidence_records(), lambda record: zlib.crc32(configuration_key(record).encode()) % 16 == 0)
    names = {record["id"] for record in records}
    shipped = [row_of(run) for run in shipped_runs() if run.id in names]
    assert len(shipped) > 20
    fresh = evidence_runs(scores_of(records, machines()))
    assert shipped == [row_of(run) for run in fresh], "run `make evidence-table`"
    assert not SOAK or TABLE.read_text(encoding="utf-8") == evidence_table(), "run `make evidence-table`"


def test_every_shipped_run_has_a_source_and_says_something_of_a_full_card() -> None:
    assert len(shipped_runs()) > 400
    for run in shipped_runs():
        assert run.outcome in (LIVED, DIED, FITTED)
        assert run.predicted_bytes + (run.shortfall_bytes if run.outcome == LIVED else 0) > 6 * GIB


@examples(20, 2000)
@given(
    shortfalls=st.lists(st.floats(-20, 20), min_size=40, max_size=120),
    outcomes=st.randoms(use_true_random=False),
    risk=st.sampled_from([0.05, 0.1, 0.2]),
)
def test_the_summed_loss_of_the_runs_behind_a_margin_keeps_to_its_risk(
    shortfalls: list[float], outcomes: random.Random, risk: float
) -> None:
    runs = [
        run_of(size, outcomes.choice([LIVED, LIVED, DIED, FITTED]), source="ab"[index % 2])
        for index, size in enumerate(shortfalls)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence, "shipped_runs", lambda: tuple(runs))
        margin = margin_by_evidence(DENSE, CARD, risk)
    assert margin is not None
    lost = sum(run.outcome != FITTED and run.units >= units(margin) for run in runs)
    assert lost + 1 <= Fraction(str(risk)) * (len(runs) + 1)
    assert margin.limit_bytes <= CARD
    assert margin.limit_bytes + units(margin) * unit_bytes(margin.limit_bytes) == pytest.approx(CARD, abs=4)
    assert margin.risk_of(margin.limit_bytes - GIB) <= risk


def test_a_death_that_the_margin_would_have_called_safe_raises_it(table: list[EvidenceRun]) -> None:
    table += [run_of(0.0, source="ab"[index % 2]) for index in range(40)]
    before = margin_by_evidence(DENSE, CARD, 0.05)
    table += [run_of(8.0, DIED), run_of(8.0, DIED)]
    after = margin_by_evidence(DENSE, CARD, 0.05)
    assert before is not None
    assert after is not None
    assert after.limit_bytes < before.limit_bytes
    assert 60 * GIB + units(after) * unit_bytes(60 * GIB) >= 68 * GIB, "what died is not safe on its card"


def test_too_few_runs_of_a_class_are_pooled_wider_and_said(table: list[EvidenceRun]) -> None:
    table += [run_of(1.0, source="ab"[index % 2]) for index in range(40)]
    table += [run_of(3.0, job=replace(DENSE, narrow=True)) for _ in range(40)]
    own = margin_by_evidence(DENSE, CARD, 0.05)
    wider = margin_by_evidence(replace(DENSE, narrow=True), CARD, 0.05)  # its runs are of one source
    assert own is not None
    assert wider is not None
    assert (widened(own), own.runs) == (False, 40)
    assert (widened(wider), wider.runs) == (True, 80)
    assert "dense models" in wider.reason
    assert "its own class has too few" in wider.reason


def test_no_bound_without_runs_on_such_cards_nor_at_a_risk_too_small(table: list[EvidenceRun]) -> None:
    table += [run_of(1.0, source="ab"[index % 2]) for index in range(40)]
    assert margin_by_evidence(replace(DENSE, capability="7.0"), CARD, 0.05) is None
    assert margin_by_evidence(DENSE, CARD, 0.01) is None
    assert margin_by_evidence(DENSE, CARD, 0.05, without_source="a") is None, "the rest are too few"


def test_a_family_never_decides_over_itself() -> None:
    for source in {run.source for run in shipped_runs()}:
        with_it = [run for run in shipped_runs() if run.source != source]
        margin = margin_by_evidence(DENSE, CARD, without_source=source)
        assert margin is not None
        assert margin.runs <= len(with_it)


def test_the_stores_runs_join_the_shipped_ones() -> None:
    scores = [Score(1.2, "device", "dense gated", None, 0.9)] * 30 + [Score(DEATH, "device", "dense gated", None, 0.9)]
    runs = own_runs(scores, DENSE, CARD)
    assert runs[0].shortfall_bytes == pytest.approx(0.2 * 0.9 * 0.8 * CARD, abs=1)
    assert runs[-1].shortfall_bytes == pytest.approx(CARD * (1 - 0.72), abs=1)
    alone, joined = margin_by_evidence(DENSE, CARD), margin_by_evidence(DENSE, CARD, own_runs=runs)
    assert alone is not None
    assert joined is not None
    assert joined.runs == alone.runs + 31
    assert joined.limit_bytes < alone.limit_bytes


def test_a_larger_prediction_never_has_a_smaller_stated_risk() -> None:
    margin = margin_by_evidence(DENSE, CARD)
    assert margin is not None
    risks = [margin.risk_of(round(share / 100 * CARD)) for share in range(40, 111)]
    assert risks == sorted(risks)
    assert risks[0] < 0.05 < 0.1 < risks[-1]


def test_a_large_card_keeps_more_free_than_a_small_one_and_a_smaller_share() -> None:
    small, large = margin_by_evidence(DENSE, CARD), margin_by_evidence(DENSE, 270 * GIB)
    assert small is not None
    assert large is not None
    assert CARD - small.limit_bytes < 270 * GIB - large.limit_bytes
    assert small.limit_bytes / CARD < large.limit_bytes / (270 * GIB)
