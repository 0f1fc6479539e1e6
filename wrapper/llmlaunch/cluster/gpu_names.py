"""Names that sites give to GPUs, with our accelerator and the shipped profile to start from."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class NamedGpu:
    """A type of GPU: the pattern of its names at sites, our accelerator, the shipped profile to start from, and what to
    check."""

    pattern: str
    accelerator: str
    base: str
    note: str = ""


# The first entry that matches counts. MIG slices, and boards with other memory or speed than those listed, match none.
GPUS = (
    NamedGpu(r"gb300", "gb300", "gb300-nvl72"),
    NamedGpu(r"gb200", "gb200", "gb200-nvl72"),
    NamedGpu(r"\dg\.\d|nvl|pcie|gh200|(64|94|96)gb", "", ""),
    NamedGpu(r"b300", "b300", "b300-x8"),
    NamedGpu(r"b200", "b200", "b200-x8"),
    NamedGpu(r"h200", "h200-141gb", "h200-141gb-x8"),
    NamedGpu(r"h100", "h100-80gb", "h100-80gb-x8", "SXM, as in DGX and HGX; the PCIe and NVL boards are other ones"),
    NamedGpu(r"h800", "h800-80gb", "h100-80gb-x8", "NVLink of the H800 is slower than the H100's: set links.node"),
    NamedGpu(r"h20(?!0)", "h20-96gb", "h100-80gb-x8", "96 GB; the H20 of 141 GB is another one"),
    NamedGpu(r"a800", "a800-80gb", "a100-80gb-x8", "NVLink of the A800 is slower than the A100's: set links.node"),
    NamedGpu(r"a100.*80", "a100-80gb", "a100-80gb-x8"),
    NamedGpu(r"a100.*40", "a100-40gb", "a100-40gb-x8"),
    NamedGpu(r"a100", "a100-40gb", "a100-40gb-x8", "SLURM does not say 40 or 80 GB: a100-80gb where nvidia-smi does"),
)


def gpu_named(name: str) -> NamedGpu | None:
    """Return the GPU for a site's name such as `h100`, or None if it is unknown."""
    gpu = next((entry for entry in GPUS if re.search(entry.pattern, name.lower())), None)
    return gpu if gpu is not None and gpu.accelerator else None


def profile_of_gpu(name: str) -> str | None:
    """Return the shipped profile for nodes with the GPU that a site names so, or None if there is none."""
    gpu = gpu_named(name)
    return None if gpu is None else gpu.base
