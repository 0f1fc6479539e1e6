"""Parameters that rest on the host and are streamed in (ZeRO 3)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmlaunch.memory.effects import Effect, HostBytes
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.states import sharded_parameters
from llmlaunch.memory.weights import added_parameters, rank_parameters
from llmlaunch.techniques.treatments import HostParameters


class HostParametersEffect(Effect):
    """ZeRO 3 keeps the shards on the host (ZeRO-Infinity, Rajbhandari et al. 2021, section 5.1)."""

    decides_moments = (HostParameters,)

    def shards_on_device(self, job: Job) -> bool:
        """Where they are not on the host."""
        return not job.techniques.offload_parameters

    def states_on_host(self, job: Job, rows: RankColumns) -> Mapping[str, HostBytes]:
        """The shards of all parameters, pinned."""
        none = np.zeros(len(rows))
        if not job.techniques.offload_parameters:
            return {"offloaded_parameters": HostBytes(none)}
        counts = rank_parameters(job, rows)
        more = sharded_parameters(job, rows, *added_parameters(job, rows))
        shards = sharded_parameters(job, rows, counts.dense, counts.expert) + more
        moved = np.where(rows.layouts.zero_stage >= 3, job.facts.host.parameter_bytes * shards, 0.0)
        return {"offloaded_parameters": HostBytes(none, ((moved, moved),))}
