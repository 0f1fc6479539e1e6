"""What several modules of these tests ask for once."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Thread

import pytest

pytest.register_assert_rewrite("traced_checks")  # an imported check shows its numbers as a test would

from traced_cases import Case  # noqa: E402
from traced_runs import PYTHON, Trace, run_tracer  # noqa: E402


@pytest.fixture(scope="session")
def traces(request: pytest.FixtureRequest) -> dict[str, Future[Trace]]:
    """Every case that a test of this run asks for, traced side by side; a test waits for its own."""
    if not (PYTHON.parent.parent / ".installed").exists():
        pytest.fail(f"{PYTHON.parent.parent} is missing: `make install-frameworks` makes it")
    asked = [
        value
        for item in request.session.items
        if "traces" in getattr(item, "fixturenames", ())
        for value in item.callspec.params.values()
        if isinstance(value, Case)
    ]
    cases = list({case.name: case for case in asked}.values())
    answers: dict[str, Future[Trace]] = {case.name: Future() for case in cases}
    Thread(target=run_tracer, args=(cases, answers), daemon=True).start()
    return answers
