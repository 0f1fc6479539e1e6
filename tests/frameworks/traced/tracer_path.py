"""Puts the tracer's modules where they are found: they lie beside each other in the package, and import one another by
their bare names. The first import of every program here that asks more of them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "wrapper" / "llmlaunch" / "tracing"))
