"""Which shipped cluster profile stands for the machine a record was measured on."""

from __future__ import annotations

from llmlaunch.cluster.load import load_cluster
from llmlaunch.cluster.profile import Cluster

__all__ = ["clusters_by_gpu"]

# The `gpu` of measured records -> the profile whose speeds give their step time. Cards without a profile have none.
PROFILES = {
    "A100": "a100-80gb-x8",
    "A100-SXM": "a100-80gb-x8",
    "A100-40GB": "a100-40gb-x8",
    "H100": "h100-80gb-x8",
    "H200": "h200-141gb-x8",
    "B200": "b200-x8",
    "B200-SXM": "b200-x8",
    "GB200": "gb200-nvl72",
}


def clusters_by_gpu() -> dict[str, Cluster]:
    """Loaded profiles by the name a record gives its card."""
    loaded = {name: load_cluster(name) for name in set(PROFILES.values())}
    return {gpu: loaded[name] for gpu, name in PROFILES.items()}
