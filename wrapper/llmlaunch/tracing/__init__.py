"""Programs for an environment of their own, which holds real Megatron core or DeepSpeed beside a CPU build of
torch: nothing here is imported by llmlaunch, only their paths are known. They import one another by bare names."""

from __future__ import annotations

from pathlib import Path

TRACER = Path(__file__).with_name("trace_ranks.py")
FAKE_CUDA = Path(__file__).with_name("fake_cuda.py")
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
REQUIREMENTS_NO_DEPS = Path(__file__).with_name("requirements-no-deps.txt")
