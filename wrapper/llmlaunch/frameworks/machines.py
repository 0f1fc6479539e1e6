"""Machines that are priced, and for which no job is written, whatever the backend."""

from __future__ import annotations

from llmlaunch.frameworks.base import Requirement

MACHINE_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "no-rocm",
        "cluster.accelerator",
        "no job of llmlaunch has run on an AMD GPU: memory and time are formulas alone, with the workspace of Hopper, "
        "and jobs, monitor and environment are written for CUDA; launch with an NVIDIA accelerator",
        "node.pyz reads NVML, which ROCm does not have",
        lambda r: r.cluster.accelerator.platform == "rocm",
        priced=True,
    ),
)
