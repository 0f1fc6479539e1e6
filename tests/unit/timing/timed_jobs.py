"""Jobs and machines that several tests time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from llmlaunch.cluster.load import load_cluster
from llmlaunch.cluster.profile import Cluster
from llmlaunch.families.hub_ids import load_preset
from llmlaunch.frameworks.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.job import Job
from llmlaunch.models.shape import ModelShape, MoeShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.timing.step import StepTime, step_time
from llmlaunch.workload import Workload

FACTS = megatron_facts(MegatronOptions())
H100 = load_cluster("h100-80gb-x8")
RACK = load_cluster("gb200-nvl72")
LLAMA = load_preset("llama3-8b")
MIXTRAL = load_preset("mixtral-8x7b")
WORK = Workload(8192, 512)
BASE = Layout(2, 2, data=8, sequence_parallel=1, zero_stage=1)


def alternating(every: int = 2) -> ModelShape:
    """Llama 3 8B with a mixture in every other layer."""
    pattern = tuple(int(i % every == every - 1) for i in range(LLAMA.num_layers))
    return replace(LLAMA, moe=MoeShape(8, 2, 4096, 0, pattern))


def job(shape: ModelShape = LLAMA, work: Workload = WORK, techniques: Techniques = NO_TECHNIQUES) -> Job:
    return Job(shape, work, FACTS, techniques=techniques)


def time_of(layout: Layout, of: Job | None = None, cluster: Cluster = H100) -> StepTime:
    return step_time(of or job(), cluster, LayoutColumns.of([layout]))


def total(layout: Layout, of: Job | None = None, cluster: Cluster = H100) -> float:
    return float(time_of(layout, of, cluster).total[0])


def term(name: str, layout: Layout, of: Job | None = None, cluster: Cluster = H100) -> float:
    return float(time_of(layout, of, cluster).terms.get(name, np.zeros(1))[0])
