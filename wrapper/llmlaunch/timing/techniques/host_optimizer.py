"""Optimizer states in host memory, where the optimizer then steps."""

from __future__ import annotations

import numpy as np

from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import FloatColumn
from llmlaunch.layers.columns import Size
from llmlaunch.memory.job import Job
from llmlaunch.timing.constants import constant
from llmlaunch.timing.effects import TimeEffect
from llmlaunch.timing.network import host_link, host_link_bytes_per_second

__all__ = ["HostOptimizerTime"]

# Read and written for every parameter: fp32 master, two moments and gradient are read, the first three written.
UPDATED_BYTES = 28.0


class HostOptimizerTime(TimeEffect):
    """A share of the parameters, or all, is updated on the host, by all devices of a node at once (ZeRO-Offload, Ren et
    al. 2021, section 4)."""

    def on(self, job: Job) -> bool:
        """Where any share is there."""
        return job.techniques.offload_optimizer > 0

    def update(self, job: Job, cluster: Cluster, parameters: FloatColumn) -> Size:
        """That of the share, whose gradients and parameters cross the link between."""
        rate = constant("host_optimizer_efficiency") * host_link(cluster).memory_bytes_per_second
        host = cluster.host_seconds_factor * UPDATED_BYTES / rate
        states = job.facts.states
        link = (states.gradient_bytes + states.parameter_bytes) / host_link_bytes_per_second(cluster)
        return np.asarray(job.techniques.offload_optimizer * (host + link) * parameters)
