"""Kernels that CUDA graphs hold."""

from __future__ import annotations

from llmlaunch.memory.job import Job
from llmlaunch.memory.techniques.cuda_graphs import captured_kernels
from llmlaunch.timing.effects import Kernels, TimeEffect

__all__ = ["CudaGraphsTime"]


class CudaGraphsTime(TimeEffect):
    """One launch starts all kernels of a graph."""

    def on(self, job: Job) -> bool:
        """Where anything is captured."""
        return bool(job.techniques.cuda_graphs)

    def captured(self, job: Job, mixture: bool) -> Kernels | None:
        """Those of the captured scopes."""
        return captured_kernels(job.techniques, mixture)
