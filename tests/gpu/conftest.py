"""What wants an NVIDIA GPU: `pytest -m gpu tests/gpu`. No test elsewhere does; none of these is part of `make test`."""

from __future__ import annotations

from support.probe_rig import archive, fake_libcuda, probed  # noqa: F401
