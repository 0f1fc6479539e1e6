"""`accuracy --json`: the stable shape, with what was added since beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmlaunch.calibration.accuracy import Scored
from llmlaunch.calibration.anchors import anchor_summary, anchored
from llmlaunch.calibration.comparable import runs_of
from llmlaunch.calibration.coverage import coverage
from llmlaunch.calibration.references import ANCHORS
from llmlaunch.calibration.summary import families, grouped
from llmlaunch.calibration.throughput import throughput
from llmlaunch.cluster.profile import Cluster

__all__ = ["accuracy_json"]


def accuracy_json(found: Sequence[Scored], clusters: Mapping[str, Cluster], anchors: bool = False) -> dict[str, Any]:
    """`records` in input order, `families` by "family/kind", `margins` by backend, accelerator and kind. With
    `anchors` the published formulas stand beside each record and family, and `anchors` says what each ignores."""
    answer: dict[str, Any] = {
        "records": [one.result.as_json() for one in found],
        "families": families(found),
        "margins": coverage(runs_of(found, clusters)),
    }
    for name, group in grouped(found).items():
        if speeds := throughput(group):
            answer["families"][name]["throughput"] = speeds
    if anchors:
        for one, record in zip(found, answer["records"], strict=True):
            record["anchors"] = anchored(one)
        for name, group in grouped(found).items():
            answer["families"][name]["anchors"] = {anchor: anchor_summary(group, anchor) for anchor in ANCHORS}
        answer["anchors"] = {name: {"title": a.title, "ignores": a.ignores} for name, a in ANCHORS.items()}
    return answer
