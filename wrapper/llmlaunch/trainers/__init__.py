"""Training scripts that are copied into run directories. Nothing here is imported by llmlaunch: only their path."""

from __future__ import annotations

from pathlib import Path

TRAINER = Path(__file__).with_name("deepspeed_llama.py")
