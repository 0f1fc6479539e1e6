"""The fixtures of this folder."""

from __future__ import annotations

from support.probe_rig import archive, fake_libcuda, probed, small_torch  # noqa: F401
