"""Pricing again takes no new pages from the system (with glibc, which the project is run on)."""

from __future__ import annotations

import resource

from shapes import LLAMA3_8B

from llmlaunch.frameworks.megatron.facts import megatron_facts
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.estimator import worst_ranks
from llmlaunch.memory.job import Job
from llmlaunch.workload import Workload


def new_pages(job: Job, layouts: LayoutColumns) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    worst_ranks(job, layouts)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_columns_find_the_pages_of_those_before_them() -> None:
    layouts = LayoutColumns.of([Layout(tensor=2, pipeline=4, data=2**i) for i in range(6)] * 1000)
    job = Job(LLAMA3_8B, Workload(4096, 64), megatron_facts())
    assert min(new_pages(job, layouts) for _ in range(4)) < 100  # the first time it may take thousands
