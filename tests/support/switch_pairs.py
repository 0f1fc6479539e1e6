"""Public runs of a mixture that differ in switches (and where they do, in sizes), two by two: what they changed as
measured, and as predicted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from llmlaunch.cluster.cards import machines
from validation.scoring import score

MEASUREMENTS = Path(__file__).resolve().parents[1] / "data" / "measurements"
MIXTURES, SWITCHES = MEASUREMENTS / "mixtures.jsonl", MEASUREMENTS / "mixture_switches.jsonl"
TABLES = "nvidia-perf-mixture-"  # rows of NVIDIA's tables, by number
PAIRS = (
    ("072", "057", "DeepEP for all-to-all"),
    ("044", "029", "HybridEP for all-to-all"),
    ("066", "054", "HybridEP for all-to-all, graphs of attention, MBS 4 for 1"),
    ("036", "021", "PP8 EP32 for PP16 EP8; DeepEP for HybridEP, overlap, graphs"),
    ("035", "020", "PP8 for PP16, MBS 2 for 1; graphs"),
    ("019", "009", "overlap, fused experts, one graph"),
    ("018", "007", "MBS 1 for 2; overlap, fused experts, 8-bit attention, one graph"),
    ("028", "016", "overlap, fused experts, 8-bit attention, one graph"),
    ("027", "015", "overlap, fused experts, 8-bit attention, one graph"),
    ("024", "013", "overlap, fused experts, 8-bit attention, one graph"),
    ("023", "012", "overlap, fused experts, 8-bit attention, one graph"),
    ("022", "011", "overlap, fused experts, 8-bit attention, one graph"),
    ("041", "067", "PP2 VPP12 EP8 for PP1 EP16; DeepEP for HybridEP, overlap"),
    ("044", "070", "VPP4 for 1, MBS 1 for 2; overlap"),
    ("zoo-qwen3-235b-h100-plain", "zoo-qwen3-235b-h100-overlap", "overlap"),
    ("zoo-qwen3-235b-h100-overlap", "report-qwen3-235b-h100", "graphs of router and preprocessing"),
    ("bridge-qwen3-30b-h100-alltoall", "bridge-qwen3-30b-h100-hybridep", "HybridEP for all-to-all, graphs"),
    ("bridge-qwen3-30b-h100-hybridep", "bridge-qwen3-30b-h100-hybridep-overlap", "overlap"),
    ("bridge-qwen3-30b-h100-alltoall", "bridge-qwen3-30b-h100-alltoall-overlap", "overlap"),
    (
        "bridge-qwen3-30b-h100-alltoall-overlap",
        "bridge-qwen3-30b-h100-alltoall-overlap-delay",
        "weight gradients delayed",
    ),
)


@dataclass(frozen=True)
class SwitchPair:
    """Two public runs of one model on one card; both ratios are the step time of the second over that of the first."""

    model: str
    card: str
    change: str
    measured: float
    predicted: float


@cache
def switch_records() -> Mapping[str, Mapping[str, Any]]:
    """Return the public runs of mixtures by their name."""
    lines = [line for path in (MIXTURES, SWITCHES) for line in path.read_text("utf-8").splitlines()]
    return {record["id"].removeprefix(TABLES): record for record in map(json.loads, lines)}


def measured_seconds(record: Mapping[str, Any]) -> float:
    """Return the seconds of a step, of as many tokens as the record's batch has."""
    tokens = record["global_batch_size"] * record["sequence_length"]
    return float(tokens / (record["tokens_per_second_per_gpu"] * record["world_size"]))


def switch_pairs() -> list[SwitchPair]:
    """Return all pairs with what is measured and predicted."""
    records, clusters = switch_records(), machines()
    pairs = []
    for names in PAIRS:
        first, second = (records[name] for name in names[:2])
        predicted = [score(record, clusters).predicted_step_seconds for record in (first, second)]
        assert predicted[0] is not None
        assert predicted[1] is not None
        measured = measured_seconds(second) / measured_seconds(first)
        model = str(first["model"]["name"])
        pairs.append(SwitchPair(model, str(first["gpu"]), names[2], measured, predicted[1] / predicted[0]))
    return pairs
