"""Mixtures whose exchanges hide behind another micro-batch take about as much memory as without."""

from __future__ import annotations

from pathlib import Path

from llmlaunch.calibration.records import read_records
from llmlaunch.cluster.cards import machines
from validation.scoring import score

DATA = Path(__file__).parents[2] / "data"
GB = 1e9


def test_overlap_costs_what_it_cost_where_both_were_measured() -> None:
    """Qwen3 30B on 16 H100s, 61.35 GB without and 62.04 with (Megatron-Bridge, pull request 3880); a whole second
    micro-batch would be 20 more."""
    scores = {str(record["id"]): score(record, {}) for record in read_records(DATA / "overlap" / "qwen3_30b.jsonl")}
    without, overlapped = scores["h3-br3880-base-allocated"], scores["h3-br3880-overlap-allocated"]
    assert without.predicted_bytes
    assert overlapped.predicted_bytes
    assert 0 <= overlapped.predicted_bytes - without.predicted_bytes < GB
    assert all(0.92 < (s.predicted_bytes or 0) / (s.measured_bytes or 1) < 1.01 for s in scores.values())


def test_public_runs_that_fitted_with_overlap_and_no_pipeline_are_not_refused() -> None:
    clusters, refused, runs = machines(), [], 0
    for name in ("mixture_switches", "mixtures", "families"):
        for record in read_records(DATA / "measurements" / f"{name}.jsonl"):
            overlaps = (record.get("techniques") or {}).get("overlap_expert_communication")
            if overlaps and record["parallelism"]["pipeline"] == 1 and record["peak_kind"] == "fits":
                runs += 1
                refused += [record["id"]] if score(record, clusters).verdict == "unsafe" else []
    assert (runs, refused) == (16, [])
