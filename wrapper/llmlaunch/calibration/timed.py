"""A measured record as the step-time model needs it: the machine it ran on, and flags its table leaves out.

Only what differs from a shipped profile or from the record is said here, as data with its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmlaunch.calibration.records import Case
from llmlaunch.cluster.profile import Cluster, Link
from llmlaunch.memory.job import Job

__all__ = ["timed"]

Record = Mapping[str, Any]

# Bytes a second that each device has of its node's adapters, by family. Said of ABCI's A nodes: four HDR adapters of
# 200 Gb/s for eight A100s. Not confirmed by a page of the site or a measurement; the profile's figure is for one each.
FABRICS = {"fujii-grid-A100-40GB": 12.5e9}
# Cards without a profile: the one they resemble, and dense peaks that differ. NVIDIA GB300 NVL72 data sheet, divided by
# 72: as GB200 but for 15 PFLOP/s in four bits.
RESEMBLES = {"GB300": ("GB200", {"fp4": 15e15})}
# Trainers whose loader makes an s x s attention mask for every sample, by version: this fork's launch scripts say
# --reset-attention-mask and do not turn the mask off (megatron/core/datasets/gpt_dataset.py).
MASKS = ("okoge-kaz/Megatron-LM fork, Oct 2024",)
# Megatron-Bridge's performance recipes overlap tensor parallelism wherever it is used, but not with this format
# (src/megatron/bridge/perf_recipes/llama/*/llama3*.py, 2026-08); NVIDIA's tables do not say so.
NOT_OVERLAPPED = "nvfp4"


def timed(record: Record, case: Case, clusters: Mapping[str, Cluster]) -> tuple[Job, Cluster] | None:
    """The job and the cluster to time; None where the record's card has no profile."""
    gpu = record["gpu"]
    like, peaks = RESEMBLES.get(gpu, (gpu, {}))
    cluster = clusters.get(like)
    if cluster is None:
        return None
    if peaks:
        device = cluster.accelerator
        known = {**device.flops_per_second, **peaks}
        cluster = replace(cluster, accelerator=replace(device, name=gpu.lower(), flops_per_second=known))
    fabric = FABRICS.get(record["family"])
    if fabric is not None:
        cluster = replace(cluster, fabric_link=Link(fabric, cluster.fabric_link.latency_seconds))
    return _job(record, case), cluster


def _job(record: Record, case: Case) -> Job:
    facts = case.job.facts
    if record.get("backend_version") in MASKS:
        facts = replace(facts, host=replace(facts.host, loader_mask=True))
    unsaid = record["implementation"].get("tp_comm_overlap") is None
    if record["backend"] == "megatron-bridge" and unsaid and case.layout.tensor > 1:
        overlapped = (record["precision"] or {}).get("fp8_recipe") != NOT_OVERLAPPED
        facts = replace(facts, user_buffers=int(overlapped))
    return replace(case.job, facts=facts)
