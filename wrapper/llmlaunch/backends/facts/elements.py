"""Element sizes every fact table uses."""

from __future__ import annotations

__all__ = ["ELEMENT_BYTES"]

ELEMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
