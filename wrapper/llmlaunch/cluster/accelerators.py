"""The accelerators llmlaunch knows, from `accelerators.json`, where every figure has its source."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from llmlaunch.cluster.profile import Accelerator, HostLink
from llmlaunch.documents.validate import known_and_nearest
from llmlaunch.errors import UserError

__all__ = ["accelerator_names", "find_accelerator"]

_TABLE = Path(__file__).with_name("accelerators.json")


def accelerator_names() -> tuple[str, ...]:
    """The known accelerators, in the order of the table."""
    return tuple(_table())


def find_accelerator(name: str) -> Accelerator:
    """One accelerator by name. Raises `UserError` naming the known ones.

    `flops_per_second` has the dense peaks of "bf16", "fp16", "fp8", "tf32" and "fp32" (without tensor cores),
    as far as the device has them.
    """
    try:
        row = _table()[name]
    except KeyError:
        near = known_and_nearest(name, accelerator_names())
        raise UserError(f"unknown accelerator {name!r}; {near} (or describe it: base, memory_gib ...)") from None
    return Accelerator(
        name=name,
        kind=row["kind"],
        memory_bytes=row["memory_bytes"],
        memory_source=row["memory_source"],
        flops_per_second=row["flops_per_second"],
        memory_bytes_per_second=row["memory_bytes_per_second"],
        compute_capability=row["compute_capability"],
        host_link=HostLink(**row["host_link"]) if "host_link" in row else None,
    )


@cache
def _table() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = json.loads(_TABLE.read_text(encoding="utf-8"))
    return table
