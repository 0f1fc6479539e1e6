"""The efficiencies no data sheet gives, each with its source and what it was fitted on: `constants.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from llmlaunch.cluster.profile import Accelerator

# Per logit. Kernel by kernel the eager loss reads and writes 52 bytes (to fp32, maximum, difference, exponential, sum,
# quotient, gradient, to bf16), the compiled one 32 (megatron/core/tensor_parallel/cross_entropy.py,
# fusions/fused_cross_entropy.py, core 0.19); of the first 24 are counted, because parts stay in the cache.
EAGER_LOSS_BYTES = 24.0
NATIVE_LOSS_BYTES = EAGER_LOSS_BYTES * 32.0 / 52.0


@cache
def _table() -> dict[str, dict[str, float | str]]:
    table: dict[str, dict[str, float | str]] = json.loads(Path(__file__).with_name("constants.json").read_text("utf-8"))
    return table


def constant(name: str) -> float:
    """Return a constant by name, in the unit its name ends in. Raises KeyError for a name that is not in the file."""
    return float(_table()[name]["value"])


@contextmanager
def replaced(values: Mapping[str, float]) -> Iterator[None]:
    """Replace values inside a `with` block: to fit constants, or to measure their effect. Raises KeyError for a new
    name."""
    table = _table()
    before = {name: table[name] for name in values}
    table.update({name: {**before[name], "value": value} for name, value in values.items()})
    try:
        yield
    finally:
        table.update(before)


def of_generation(name: str, accelerator: Accelerator) -> float:
    """Return the constant of the accelerator by its name, else of its compute capability, else of its generation (the
    whole part of that), else the one of devices that were never measured, `<name>_other`."""
    capability = accelerator.compute_capability
    versions = () if capability is None else (str(capability), str(int(float(capability))))
    known = (f"{name}_{key}" for key in (accelerator.name, *versions))
    return constant(next((key for key in known if key in _table()), f"{name}_other"))
