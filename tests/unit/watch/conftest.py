"""Fixtures of the node side, shared with the other directory that breaks or watches it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fake_nvml"))

from node_rig import (  # noqa: F401
    archive,
    cpu_node,
    gpu_node,
    nvml_library,
    old_gpu_node,
    old_nvml_library,
)
from terminal import terminal  # noqa: F401
