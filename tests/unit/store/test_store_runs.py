"""A submitted run is remembered with its recipe and plan before it has begun."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llmlaunch.errors import UserError
from llmlaunch.recipe.types import Recipe
from llmlaunch.store.collect import collect
from llmlaunch.store.database import Store
from llmlaunch.store.runs import list_runs, record_submission
from support.store_run_dirs import RUN_ID, STARTED, RunDir

SUBMISSION = {"launcher": "slurm", "job_id": 42, "submitted_at": STARTED, "cluster": "alpha"}


def recipe(digest: str = "d1") -> Recipe:
    """The five values of a recipe that the store keeps."""
    values: Any = SimpleNamespace(name="tiny", digest=digest, text="name: tiny\n", overrides=("nodes=2",), secrets=())
    return cast(Recipe, values)


def rows(store: Store, table: str) -> list[Any]:
    with store.read() as connection:
        return list(connection.exec_driver_sql(f"SELECT * FROM {table}"))


def test_it_is_listed_at_once(store: Store, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert record_submission(store, recipe(), {"verdict": "safe"}, run.path, SUBMISSION) == RUN_ID
    (listed,) = list_runs(store)
    assert (listed.state, listed.launcher, listed.job_id, listed.cluster) == ("submitted", "slurm", "42", "alpha")
    assert (listed.recipe, listed.recipe_digest, listed.submitted_at) == ("tiny", "d1", STARTED)
    assert [json.loads(row.content) for row in rows(store, "plans")] == [{"verdict": "safe"}]
    assert [(row.text, row.overrides) for row in rows(store, "recipes")] == [("name: tiny\n", '["nodes=2"]')]


def test_recording_again_changes_nothing(store: Store, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    for _ in range(2):
        record_submission(store, recipe(), {"verdict": "safe"}, run.path, SUBMISSION)
    assert [len(rows(store, table)) for table in ("recipes", "plans", "runs")] == [1, 1, 1]


def test_it_is_collected_when_it_has_finished(store: Store, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    record_submission(store, recipe(), {"verdict": "safe"}, run.path, SUBMISSION)
    assert [outcome.did for outcome in collect(store)] == ["waiting"]
    run.ranks()
    run.status()
    assert [outcome.did for outcome in collect(store)] == ["collected"]
    (listed,) = list_runs(store)
    assert (listed.state, listed.submitted_at) == ("succeeded", STARTED)


def test_a_time_may_be_iso_text(store: Store, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    record_submission(store, recipe(), {}, run.path, {**SUBMISSION, "submitted_at": "2025-10-09T08:53:20Z"})
    assert list_runs(store)[0].submitted_at == 1_760_000_000.0


def test_a_run_without_an_id_is_one_message(store: Store, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    (run.path / "run.id").unlink()
    with pytest.raises(UserError, match=r"holds no run\.id"):
        record_submission(store, recipe(), {}, run.path, SUBMISSION)
    assert rows(store, "recipes") == []
