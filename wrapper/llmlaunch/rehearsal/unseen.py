"""What a trace cannot see of a rank's memory, by the estimate: it is added before anything is judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llmlaunch.layout import Layout
from llmlaunch.memory.constants import constant
from llmlaunch.memory.correction import NO_CORRECTION
from llmlaunch.memory.estimate import RankEstimate
from llmlaunch.memory.estimator import estimate
from llmlaunch.memory.job import Job

__all__ = ["RESIDUAL_OF_RUNS", "ROUTING", "WORKSPACE", "unseen_by_a_trace"]

WORKSPACE, ROUTING, RESIDUAL_OF_RUNS = "workspace of kernel libraries", "uneven routing", "measured residual"


def unseen_by_a_trace(job: Job, layout: Layout) -> tuple[Mapping[str, int], ...]:
    """Bytes by what they are for, of every pipeline rank in order.

    A trace sees no workspace inside a kernel library (cuBLAS and the like) and routes tokens evenly between experts. It
    says nothing of what measured runs allocate beyond every formula either; where they allocate less, nothing is taken
    off.
    """
    plain = replace(job, correction=NO_CORRECTION)
    facts = replace(job.facts, workspace_bytes=max(job.facts.workspace_bytes - constant("workspace_bytes"), 0.0))
    bare = replace(plain, facts=facts)
    even = replace(bare, facts=replace(facts, expert_imbalance=1.0))
    steps = [estimate(one, layout).ranks for one in (even, bare, plain, job)]
    return tuple(_between(*ranks) for ranks in zip(*steps, strict=True))


def _between(even: RankEstimate, bare: RankEstimate, plain: RankEstimate, whole: RankEstimate) -> dict[str, int]:
    found = {
        WORKSPACE: plain.allocated_bytes - bare.allocated_bytes,
        ROUTING: bare.allocated_bytes - even.allocated_bytes,
        RESIDUAL_OF_RUNS: whole.allocated_bytes - plain.allocated_bytes,
    }
    return {name: count for name, count in found.items() if count > 0}
