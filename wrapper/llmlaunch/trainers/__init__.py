"""Scripts for the training environment: nothing here is imported by llmlaunch, only their paths are known."""

from __future__ import annotations

from pathlib import Path

TRAINER = Path(__file__).parent / "deepspeed/train.py"
TRAINER_MODULES = tuple(sorted(TRAINER.parent.glob("*.py")))  # copied into run directories together
NETWORK_BANDWIDTH = Path(__file__).with_name("network_bandwidth.py")
HOOK = Path(__file__).with_name("hook.py")  # copied as hook/sitecustomize.py
MEMORY_PROBE = Path(__file__).with_name("memory_probe.py")  # copied beside it as llmlaunch_memory_probe.py
PREFLIGHT = Path(__file__).with_name("preflight.py")
FRAMEWORK_VERSIONS = Path(__file__).with_name("framework_versions.py")
MEGATRON_CHECK = Path(__file__).with_name("megatron_check.py")
MEGATRON_BRIDGE = Path(__file__).with_name("megatron_bridge.py")
MEGATRON_DATASET = Path(__file__).with_name("megatron_dataset.py")
RANK_ALONE = Path(__file__).with_name("rank_alone.py")  # copied into the run directories of rehearsals
