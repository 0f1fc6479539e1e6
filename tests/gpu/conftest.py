"""What wants an NVIDIA GPU: `pytest -m gpu tests/gpu`. No test elsewhere does; none of these is part of `make test`."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "probe"), str(TESTS / "fake_nvml")]

from probe_rig import archive, fake_libcuda, probed  # noqa: E402, F401
