"""Pricing again takes no new pages from the system."""

from __future__ import annotations

import platform
import resource

import pytest
from shapes import LLAMA3_8B

from llmlaunch.backends.facts.megatron import megatron_facts
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.estimator import worst_ranks
from llmlaunch.memory.job import Job
from llmlaunch.workload import Workload


def new_pages(job: Job, layouts: LayoutColumns) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    worst_ranks(job, layouts)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have rules of their own")
def test_columns_find_the_pages_of_those_before_them() -> None:
    layouts = LayoutColumns.of([Layout(tensor=2, pipeline=4, data=2**i) for i in range(6)] * 1000)
    job = Job(LLAMA3_8B, Workload(4096, 64), megatron_facts())
    assert min(new_pages(job, layouts) for _ in range(4)) < 100  # the first time it may take thousands
