"""The tracer (llmlaunch/tracing/trace_ranks.py) beside a stand-in for the package of Muon, which is not installed."""

# ruff: noqa: E402 (the tracer lies in another folder)
from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "wrapper" / "llmlaunch" / "tracing"))

import muon_stand_in

import trace_ranks

if __name__ == "__main__":
    import fake_cuda

    fake_cuda.install()
    muon_stand_in.install()
    trace_ranks.main()
