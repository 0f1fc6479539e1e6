"""The store counts the device-hours of its runs and the stops that nobody planned; the planner's rate follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.calibration.lessons import PUBLISHED_RATE, StopRate
from llmlaunch.rundir.summary import AttemptSummary
from llmlaunch.store.collect import collect
from llmlaunch.store.database import Store
from llmlaunch.store.location import where
from llmlaunch.store.reading import stop_rate
from llmlaunch.store.run_outcome import AttemptCauses, AttemptOutcome, stop_columns
from support.store_run_dirs import STARTED, RunDir

RUN = {"measurement": {"gpu": "H100", "world_size": 16}}


def attempt(
    number: int, state: str, began: float, ended: float | None, rank_ended: float | None = None
) -> AttemptOutcome:
    rank = {"rank": 0, "started_at": STARTED + began, "ended_at": None if rank_ended is None else STARTED + rank_ended}
    at = None if ended is None else STARTED + ended
    return AttemptOutcome(f"77.{number}", (rank,), state, over=True, ended_at=at)


def counted(attempts: list[AttemptOutcome], kinds: dict[str, str], stepped: int | None = None) -> tuple[float, int]:
    """Return hours of sixteen devices and stops; `kinds` are the causes by attempt, `stepped` how many made steps."""
    summaries = [AttemptSummary(entry.name, steps_run=9) for entry in attempts[:stepped]]
    causes = {name: AttemptCauses(name, {"kind": kind}, ()) for name, kind in kinds.items()}
    row = stop_columns(RUN, attempts, summaries, causes)
    assert row["accelerator"]
    return row["device_hours"], row["unplanned_stops"]


def test_hours_of_all_attempts_count_and_what_nobody_planned_is_a_stop() -> None:
    attempts = [attempt(0, "failed", 0, 3600), attempt(1, "stopped", 4000, 7600), attempt(2, "failed", 8000, 11600)]
    assert counted(attempts, {"77.0": "nccl", "77.2": "ecc"}) == (48.0, 2)
    assert counted(attempts, {"77.0": "time_limit", "77.2": "oom"}) == (48.0, 0)


def test_attempts_that_made_no_step_count_for_neither() -> None:
    attempts = [attempt(0, "failed", 0, 3600), attempt(1, "failed", 4000, 7600)]
    assert counted(attempts, {"77.0": "nccl", "77.1": "crash"}, stepped=1) == (16.0, 1)


def test_an_attempt_without_a_verdict_ended_with_its_last_rank_or_before_the_next_began() -> None:
    lost, after = attempt(0, "failed", 0, None, rank_ended=1800), attempt(1, "succeeded", 3600, 7200)
    assert counted([lost, after], {"77.0": "node_fail"}) == (24.0, 1)
    assert counted([attempt(0, "failed", 0, None), after], {"77.0": "node_fail"}) == (32.0, 1)
    assert counted([attempt(0, "failed", 0, None)], {"77.0": "node_fail"}) == (0.0, 1)


def test_a_run_that_does_not_say_its_devices_is_not_counted() -> None:
    assert stop_columns({}, [], [], {}) == {"accelerator": None, "device_hours": None, "unplanned_stops": None}


@pytest.fixture
def stopped_run(tmp_path: Path) -> RunDir:
    """Two CPU ranks that made steps for 100 s, until the second crashed."""
    run = RunDir(tmp_path / "run")
    run.run["progress"] = {"step_patterns": [r"step (?P<step>\d+)"], "steps": 10}
    run.write("run.json", run.run)
    run.rank(0)
    run.rank(1, exit_code=1)
    run.write("attempts/77.0/progress.json", {"schema": 1, "step": 5, "steps": 10})
    cause = {"schema": 1, "kind": "hung", "node": "n0", "line": "no step", "source": "watchdog", "numbers": {}}
    run.status(state="failed", exit_code=1, cause=cause)
    return run


def test_collect_writes_them_and_the_rate_follows(store: Store, tmp_path: Path, stopped_run: RunDir) -> None:
    location = where({"LLMLAUNCH_STORE": str(tmp_path / "store.db")})
    assert stop_rate(location, "cpu") == PUBLISHED_RATE
    collect(store, [stopped_run.path])
    assert stop_rate(location, "cpu") == StopRate(1, pytest.approx(2 * 101 / 3600))
    assert stop_rate(location, "h100-80gb") == PUBLISHED_RATE
