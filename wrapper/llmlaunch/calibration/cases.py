"""Measurement records as inputs of the estimator, and its predictions of them. A record of a run holds the part of its
recipe that decides bytes and seconds, and its layout; both are priced as `check` prices them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from llmlaunch.calibration.evidence import JobClass, job_class
from llmlaunch.calibration.records import CPU, Record, recorded_machine
from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import FloatColumn
from llmlaunch.frameworks.argument import ALLOCATOR_NAMES
from llmlaunch.frameworks.framework import backend_for
from llmlaunch.frameworks.priced_job import job_of
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.job import Job, all_ranks
from llmlaunch.memory.peak import rank_terms
from llmlaunch.models.sections import section_from
from llmlaunch.models.shape import ModelShape
from llmlaunch.recipe.datasets import Data
from llmlaunch.recipe.digest import plain_content
from llmlaunch.recipe.training import Training
from llmlaunch.recipe.types import BackendChoice, Recipe
from llmlaunch.techniques import Techniques

NO_RECORD = "a field is missing, or its value is of another type than measurements have"
NO_SIZES = "its sizes make no layout: a parallel size or the micro-batch size is below 1, or not of a job that runs"
NO_RECIPE = "it names no recipe and no layout, so what ran is not known"
NO_MACHINE = "the machine it ran on is not known"
RANKS_AT_ONCE = 20_000  # a rank has some hundred columns of eight bytes
SIZES = (
    *("tensor", "pipeline", "context", "data", "expert", "expert_tensor"),
    *("virtual_pipeline", "micro_batch_size"),
)
# What of these sections decides bytes or seconds.
OF_TRAINING = (
    *("sequence_length", "global_batch_size", "precision", "fp8", "fp8_parameters", "fp4", "optimizer"),
    *("gradient_dtype", "async_save", "start_from"),
)
OF_BACKEND = ("name", "script", "script_kind", "script_args", "extra_args", "ds_config", "libraries")


class Unsupported(Exception):
    """A record cannot be priced; the message is the reason."""


@dataclass(frozen=True)
class Case:
    """One record, ready to be priced. `job_class` says which measured runs it is compared with, and `cluster` is the
    machine that its step is timed on, None where it is not known. Of public runs (validation/) the step may be timed
    as another job, the batch may not be known, and values may be assumed."""

    job: Job
    layout: Layout
    num_microbatches: int
    job_class: JobClass
    cluster: Cluster | None
    timed_job: Job | None = None
    batch_known: bool = True
    assumed: Mapping[str, Any] = field(default_factory=dict)


def recorded_job(recipe: Recipe, layout: Layout) -> dict[str, Any]:
    """Return what a record says of the job that ran: the part of its recipe that decides bytes and seconds, what has
    its default left out, and the layout. `recipe` has the techniques that were chosen."""
    training = {name: getattr(recipe.training, name) for name in OF_TRAINING}
    backend = {name: getattr(recipe.backend, name) for name in OF_BACKEND}
    for section, name in ((training, "start_from"), (backend, "script")):
        section[name] = None if section[name] is None else Path(section[name]).name
    content = {
        "model": plain_content(recipe.model),
        "backend": plain_content(BackendChoice(**backend)),
        "training": plain_content(Training(**training)),
        "techniques": recipe.techniques.as_json(),
        "environment": {name: text for name, text in recipe.environment.items() if name in ALLOCATOR_NAMES},
    }
    if recipe.data.attention_masks:
        content["data"] = {"attention_masks": True}
    stated = {name: values for name, values in content.items() if values}
    return {"recipe": stated, "layout": layout.as_json()}


def case_of(record: Record, clusters: Mapping[str, Cluster]) -> Case:
    """Return the estimator's inputs for a record. `clusters` are the machines of known accelerators
    (`cluster.cards.machines`). Raises Unsupported with the reason if it cannot be priced."""
    content = record.get("recipe")
    if not isinstance(content, Mapping) or not isinstance(record.get("layout"), Mapping):
        raise Unsupported(NO_RECIPE)
    layout = Layout.from_json(record["layout"])
    if min(getattr(layout, name) for name in SIZES) < 1:
        raise Unsupported(NO_SIZES)
    cluster = recorded_machine(record, clusters)
    if cluster is None:
        raise Unsupported(NO_MACHINE)
    recipe = Recipe(
        name=str(record.get("id")),
        model=section_from(ModelShape, content["model"]),
        backend=section_from(BackendChoice, {**content["backend"], "version": record.get("backend_version")}),
        cluster=cluster,
        nodes=max(layout.world_size // cluster.devices_per_node, 1),
        training=section_from(Training, content["training"]),
        data=section_from(Data, content.get("data") or {}),
        techniques=Techniques.from_json(content.get("techniques") or {}),
        environment=content.get("environment") or {},
        pins={"zero_stage": layout.zero_stage},
    )
    job = job_of(recipe, backend_for(recipe), record.get("baseline_bytes") if record["gpu"] == CPU else None)
    microbatches = layout.num_microbatches(recipe.workload.global_batch_size)
    return Case(job, layout, microbatches, job_class(recipe), cluster)


def model_text(shape: ModelShape) -> str:
    """Return a text that is equal for runs of one model, however they are split."""
    return f"{shape.name} {shape.num_layers}x{shape.hidden_size}"


@dataclass(frozen=True)
class Prediction:
    """Predicted bytes of one configuration by pipeline rank, without any correction."""

    shape: ModelShape
    allocated: FloatColumn
    reserved: FloatColumn
    outside: FloatColumn  # of torch


def predict(cases: Sequence[Case | str]) -> list[Prediction | str]:
    """Return for each case its prediction, or why there is none. Equal jobs are priced together."""
    predictions: list[Prediction | str] = [case if isinstance(case, str) else "" for case in cases]
    by_job: dict[Job, list[tuple[int, Case]]] = {}
    for index, case in enumerate(cases):
        if isinstance(case, Case):
            by_job.setdefault(case.job, []).append((index, case))
    for job, members in by_job.items():
        for piece in _pieces(members):
            for (index, _), prediction in zip(piece, _predict_job(job, [case for _, case in piece]), strict=True):
                predictions[index] = prediction
    return predictions


def _pieces(members: Sequence[tuple[int, Case]]) -> Iterator[Sequence[tuple[int, Case]]]:
    ranks = np.cumsum([case.layout.pipeline for _, case in members])
    cuts = np.flatnonzero(np.diff(ranks // RANKS_AT_ONCE)) + 1
    return (members[start:stop] for start, stop in pairwise([0, *cuts.tolist(), len(members)]))


def _predict_job(job: Job, cases: Sequence[Case]) -> list[Prediction | str]:
    """Return all predictions at once, or each by itself if one case holds numbers that cannot be priced."""
    try:
        return list(_priced_ranks(job, cases))
    except (ArithmeticError, IndexError, TypeError, ValueError):
        if len(cases) == 1:
            return [NO_SIZES]
        return [prediction for case in cases for prediction in _predict_job(job, [case])]


def _priced_ranks(job: Job, cases: Sequence[Case]) -> Iterator[Prediction]:
    microbatches = np.array([case.num_microbatches for case in cases])
    rows = all_ranks(job, LayoutColumns.of([case.layout for case in cases]), microbatches)
    terms = rank_terms(job, rows)
    allocated, reserved, outside = terms.allocated, terms.reserved, terms.device - terms.reserved
    ends = np.cumsum([case.layout.pipeline for case in cases])
    for start, stop in pairwise([0, *ends.tolist()]):
        yield Prediction(job.shape, allocated[start:stop], reserved[start:stop], outside[start:stop])
