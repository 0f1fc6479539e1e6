"""Fixtures of the node side, shared with the other directory that breaks or watches it."""

from __future__ import annotations

from support.node_rig import (  # noqa: F401
    archive,
    cpu_node,
    gpu_node,
    nvml_library,
    old_gpu_node,
    old_nvml_library,
)
from support.terminal import terminal  # noqa: F401
