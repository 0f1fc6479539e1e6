"""The modules of the tracer that need no framework, which it imports by bare names."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from llmlaunch.tracing import TRACER

__all__ = ["tracer_module"]


def tracer_module(name: str) -> ModuleType:
    if str(TRACER.parent) not in sys.path:
        sys.path.append(str(TRACER.parent))
    return importlib.import_module(name)
