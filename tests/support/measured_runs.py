"""Measured runs made up for tests: records of llmlaunch's own, with the peak put at a chosen multiple of the
prediction."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

from llmlaunch.calibration.cases import Prediction, predict, recorded_job
from llmlaunch.calibration.pool import case_or_reason
from llmlaunch.cluster.cards import machines
from llmlaunch.cluster.profile import Cluster
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe
from support.recipes import recipe_of

CARD = 80 * 2**30


@cache
def clusters() -> dict[str, Cluster]:
    return machines()


def predictions(records: list[dict[str, Any]]) -> list[Prediction | str]:
    """What is predicted of each record, or why nothing is."""
    return predict([case_or_reason(record, clusters()) for record in records])


def recorded(recipe: Recipe, layout: Layout) -> dict[str, Any]:
    """A record of a run of Megatron-LM without a peak, on a card of 80 GiB."""
    workload = recipe.workload
    return {
        "family": "llmlaunch",
        "peak_kind": "device",
        "peak_bytes": None,
        "backend": "megatron-lm",
        "backend_version": None,
        "gpu": "H100",
        "gpu_memory_bytes": CARD,
        "world_size": layout.world_size,
        "sequence_length": workload.sequence_length,
        "micro_batch_size": layout.micro_batch_size,
        "global_batch_size": workload.global_batch_size,
        **recorded_job(recipe, layout),
    }


@cache
def _numbered(number: int) -> dict[str, Any]:
    recipe = recipe_of("llama3-8b")
    recipe = replace(recipe, training=replace(recipe.training, sequence_length=1024 + number))
    return recorded(recipe, Layout(tensor=8, sequence_parallel=1, zero_stage=1))


def run(number: int, ratio: float | None, kind: str = "device", **changed: Any) -> dict[str, Any]:
    """Run `number`, a configuration of its own, that peaked at `ratio` times its prediction; None: it died."""
    record = copy.deepcopy(_numbered(number)) | {"id": f"run-{number}", **changed}
    record["peak_kind"] = "oom" if ratio is None else kind
    if ratio is not None:
        (one,) = predictions([record])
        assert isinstance(one, Prediction), one
        by_kind = {"allocated": one.allocated, "reserved": one.reserved}
        record["peak_bytes"] = round(round(float(by_kind.get(kind, one.reserved + one.outside).max())) * ratio)
    return record
