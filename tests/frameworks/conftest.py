"""The processes of the real frameworks that several test modules share: each is started once in a run."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from threading import Thread

import pytest

pytest.register_assert_rewrite("traced_runs")  # an imported check shows its numbers as a test would

from judges import DeepSpeedJudge, MegatronJudge, deepspeed_judge, megatron_judge  # noqa: E402
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


@pytest.fixture(scope="session")
def megatron() -> Iterator[MegatronJudge]:
    with megatron_judge() as judge:
        yield judge


@pytest.fixture(scope="session")
def deepspeed() -> Iterator[DeepSpeedJudge]:
    with deepspeed_judge() as judge:
        yield judge
