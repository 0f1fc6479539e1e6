"""`accuracy --json`: the stable shape, with what was added since beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmlaunch.accuracy.anchors import ANCHORS, anchor_bytes, anchor_summary
from llmlaunch.accuracy.coverage import comparable_runs, coverage
from llmlaunch.accuracy.scoring import ScoredRecord
from llmlaunch.accuracy.summary import families, grouped, throughput
from llmlaunch.cluster.profile import Cluster

__all__ = ["accuracy_json"]


def accuracy_json(
    found: Sequence[ScoredRecord], clusters: Mapping[str, Cluster], anchors: bool = False
) -> dict[str, Any]:
    """`records` in input order, `families` by "family/kind", `margins` by backend, accelerator and kind. With
    `anchors` the published formulas stand beside each record and family, and `anchors` says what each ignores."""
    answer: dict[str, Any] = {
        "records": [one.as_json() for one in found],
        "families": families(found),
        "margins": coverage(comparable_runs(found, clusters)),
    }
    for name, group in grouped(found).items():
        if speeds := throughput(group):
            answer["families"][name]["throughput"] = speeds
    if anchors:
        for one, record in zip(found, answer["records"], strict=True):
            record["anchors"] = anchor_bytes(one)
        for name, group in grouped(found).items():
            answer["families"][name]["anchors"] = {anchor: anchor_summary(group, anchor) for anchor in ANCHORS}
        answer["anchors"] = {name: {"title": a.title, "ignores": a.ignores} for name, a in ANCHORS.items()}
    return answer
