from __future__ import annotations

import pytest

from llmlaunch.planner import hints
from support.plans import spend


@pytest.fixture(autouse=True)
def _few_hints(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check looks for ways to be faster, which takes as long as the plan: only tests with `all_hints` let it."""
    if "all_hints" not in request.fixturenames:
        spend(monkeypatch, [(hints, "HINT_CANDIDATES")])


@pytest.fixture
def all_hints() -> None:
    """The whole search for ways to be faster."""
