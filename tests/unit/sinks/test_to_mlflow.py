"""MLflow itself, written by its process and read back with its own client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from collected_runs import GIB, RUN_ID, STARTED, collected, finished, written

from llmlaunch.sinks.delivery import chosen_sinks, pass_on
from llmlaunch.sinks.figures import figures_of
from llmlaunch.sinks.to_mlflow import Mlflow
from llmlaunch.store.database import Store, open_store
from llmlaunch.store.history import run_marks, stored_run
from llmlaunch.store.location import where


@pytest.fixture(autouse=True)
def files_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # for the client that reads back


def client_of(uri: str) -> Any:
    from mlflow import MlflowClient  # late: all who collect the tests import this module, and MLflow takes a second

    return MlflowClient(tracking_uri=uri)


def there(uri: str) -> list[Any]:
    client = client_of(uri)
    experiment = client.get_experiment_by_name("llmlaunch")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def send(store: Store, uri: str) -> int:
    """In this process: starting MLflow takes seconds."""
    sink = Mlflow(uri)
    mark_of = {entry.run_id: entry.mark for entry in run_marks(store)}
    due = sink.due(mark_of)
    for run_id in due:
        sink.send(figures_of(stored_run(store, run_id) or {}), mark_of[run_id])
    sink.finish()
    return len(due)


def send_by_its_process(store: Store, uri: str) -> int:
    (passed,) = pass_on(store, chosen_sinks([f"mlflow={uri}"]))
    assert passed.why is None, passed
    return passed.sent


def test_a_run_is_one_run_of_mlflow_however_often_and_from_wherever_it_is_collected(
    store: Store, tmp_path: Path
) -> None:
    uri = str(tmp_path / "mlruns")
    directory = finished(tmp_path / "run")
    collected(store, directory)
    assert (send(store, uri), send(store, uri)) == (1, 0)
    (run,) = there(uri)
    assert (run.info.run_name, run.info.status) == (RUN_ID, "FINISHED")
    assert (run.info.start_time, run.info.end_time) == (1000 * STARTED, 1000 * (STARTED + 101))
    assert run.data.params["layout.pipeline"] == "2"
    assert run.data.params["recipe"] == "tiny"
    assert run.data.metrics["peak_bytes/device/stage1"] == 30 * GIB
    assert run.data.metrics["predicted_bytes/device/stage1"] == 11 * GIB
    assert run.data.metrics["step_seconds"] == 2.0
    assert run.data.tags["llmlaunch.run_id"] == RUN_ID
    assert run.data.tags["llmlaunch.state"] == "succeeded"

    with open_store(where({"LLMLAUNCH_STORE": str(tmp_path / "another.db")})) as another:  # another machine
        collected(another, directory)
        send(another, uri)
        (same,) = there(uri)
        assert (same.info.run_id, same.data.metrics, same.data.params) == (
            run.info.run_id,
            run.data.metrics,
            run.data.params,
        )
        history = client_of(uri).get_metric_history(run.info.run_id, "peak_bytes/worst")
        assert [metric.value for metric in history] == [30 * GIB]

    written(directory, (20, 35))
    collected(store, directory)
    assert send(store, uri) == 1
    (grown,) = there(uri)
    assert grown.info.run_id == run.info.run_id
    assert grown.data.metrics["peak_bytes/worst"] == 35 * GIB
    assert grown.data.metrics["predicted_bytes/device/stage1"] == 11 * GIB


def test_a_database_of_its_own_and_runs_that_failed(store: Store, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    collected(
        store,
        finished(tmp_path / "one"),
        finished(tmp_path / "two", run_id="another:run@2+x", state="failed", exit_code=1),
    )
    assert send_by_its_process(store, uri) == 2
    runs = {run.info.run_name: run for run in there(uri)}
    assert runs["another:run@2+x"].info.status == "FAILED"
    assert runs["another:run@2+x"].data.tags["llmlaunch.why"] == "as told"
    assert runs[RUN_ID].info.status == "FINISHED"
