"""MLflow itself, written by the example and read back with its own client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from example_scripts import example

from llmlaunch.store.database import Store
from support.collected_runs import GIB, RUN_ID, STARTED, exported, finished, written


@pytest.fixture(autouse=True)
def files_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def client_of(uri: str) -> Any:
    from mlflow import MlflowClient  # late: all who collect the tests import this module, and MLflow takes a second

    return MlflowClient(tracking_uri=uri)


def there(uri: str) -> list[Any]:
    client = client_of(uri)
    experiment = client.get_experiment_by_name("llmlaunch")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def test_a_run_is_one_run_of_mlflow_however_often_it_is_exported(store: Store, tmp_path: Path) -> None:
    uri = str(tmp_path / "mlruns")
    directory = finished(tmp_path / "run")
    lines = exported(store, directory)
    to_mlflow = example("to_mlflow")
    to_mlflow.write_runs(lines, uri)
    to_mlflow.write_runs(lines, uri)
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
    history = client_of(uri).get_metric_history(run.info.run_id, "peak_bytes/worst")
    assert [metric.value for metric in history] == [30 * GIB]

    written(directory, (20, 35))
    to_mlflow.write_runs(exported(store, directory), uri)
    (grown,) = there(uri)
    assert grown.info.run_id == run.info.run_id
    assert grown.data.metrics["peak_bytes/worst"] == 35 * GIB


def test_a_database_of_its_own_and_runs_that_failed(store: Store, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    failed = finished(tmp_path / "two", run_id="another:run@2+x", state="failed", exit_code=1)
    example("to_mlflow").write_runs(exported(store, finished(tmp_path / "one"), failed), uri)
    runs = {run.info.run_name: run for run in there(uri)}
    assert runs["another:run@2+x"].info.status == "FAILED"
    assert runs["another:run@2+x"].data.tags["llmlaunch.why"] == "as told"
    assert runs[RUN_ID].info.status == "FINISHED"
