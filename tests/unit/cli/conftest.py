from __future__ import annotations

import pytest

from support.plans import ADVICE_LIMITS, spend


@pytest.fixture(autouse=True)
def _little_advice(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check looks for ways to be faster or safe, which takes longer than the plan: only tests with `all_advice`
    let it."""
    if "all_advice" not in request.fixturenames:
        spend(monkeypatch, ADVICE_LIMITS)


@pytest.fixture
def all_advice() -> None:
    """The whole search for what is faster or safe."""
