"""Stories: what is short of work and long of waiting. All are begun at once, and each test asks how its own went."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Story = Callable[..., None]


def by_name(*stories: Story) -> dict[str, Story]:
    return {story.__name__: story for story in stories}


def asked_for(request: pytest.FixtureRequest, parameter: str) -> dict[str, dict[str, Any]]:
    """Return the parameters of the tests that take `parameter`, by the tests' ids; in a fixture of a module, of its
    own tests alone."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    if request.scope == "module":
        tests = [item for item in tests if item.path == request.path]
    return {item.nodeid: item.callspec.params for item in tests if parameter in item.fixturenames}
