"""Stories: what is short of work and long of waiting. All are begun at once, and each test asks how its own went."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

Story = Callable[..., None]


def by_name(*stories: Story) -> dict[str, Story]:
    return {story.__name__: story for story in stories}


def side_by_side(*stories: Story, tell: Story | None = None, sites: Sequence[str] = ()) -> Callable[..., None]:
    """Return the test that asks how each story went, at each of the sites; the fixture `stories` begins them. A story
    is told by `tell` where that is given, which gets the story first."""

    def anywhere(stories: Mapping[str, Future[None]], request: pytest.FixtureRequest, story: Story) -> None:
        stories[request.node.nodeid].result()

    def at_a_site(stories: Mapping[str, Future[None]], request: pytest.FixtureRequest, story: Story, site: str) -> None:
        stories[request.node.nodeid].result()

    told = [partial(tell, story) if tell else story for story in stories]
    names = [story.__name__ for story in stories]
    test = pytest.mark.parametrize("story", told, ids=names)(at_a_site if sites else anywhere)
    return pytest.mark.parametrize("site", sites)(test) if sites else test


def asked_for(request: pytest.FixtureRequest, parameter: str) -> dict[str, dict[str, Any]]:
    """Return the parameters of the tests that take `parameter`, by the tests' ids; in a fixture of a module, of its
    own tests alone."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    if request.scope == "module":
        tests = [item for item in tests if item.path == request.path]
    return {item.nodeid: item.callspec.params for item in tests if parameter in item.fixturenames}
