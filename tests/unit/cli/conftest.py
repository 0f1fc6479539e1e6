from __future__ import annotations

import pytest

from llmlaunch.planner import hints
from support.plans import spend


@pytest.fixture(autouse=True)
def _no_hints(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check looks for ways to be faster, which takes as long as the plan: only tests marked `hints` let it."""
    if request.node.get_closest_marker("hints") is None:
        spend(monkeypatch, [(hints, "HINT_CANDIDATES")])
