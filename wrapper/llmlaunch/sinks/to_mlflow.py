"""Runs in MLflow: one of its runs for each, found again by a tag."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag, ViewType

from llmlaunch.sinks.figures import Figures, Sink, changed_runs

_RUN, _KEY, _MARK = "llmlaunch.run_id", "llmlaunch.key", "llmlaunch.mark"
_STATUS = {
    "succeeded": "FINISHED",
    "running": "RUNNING",
    "submitted": "SCHEDULED",
    "cancelled": "KILLED",
    "stopped": "KILLED",
}
_PAGE = 1000
_LONGEST_TAG, _LONGEST_PARAM = 5000, 500
_MOST_AT_ONCE = 100
"""Parameters or tags in one request; of metrics MLflow takes 1,000."""


class Mlflow(Sink):
    """The experiment is that of MLFLOW_EXPERIMENT_NAME, else `llmlaunch`."""

    def __init__(self, uri: str) -> None:
        self._client = MlflowClient(tracking_uri=uri)
        self._experiment = self._experiment_id(os.environ.get("MLFLOW_EXPERIMENT_NAME") or "llmlaunch")
        self._runs = dict(self._existing_runs())

    def due(self, marks: Mapping[str, str]) -> list[str]:
        return changed_runs(marks, {run_id: run.data.tags.get(_MARK, "") for run_id, run in self._runs.items()})

    def send(self, run: Figures, mark: str) -> None:
        """Set the mark last, so that an interrupted run is sent again."""
        existing = self._runs.get(run.run_id) or self._new_run(run)
        mlflow_id = existing.info.run_id
        now = int(1000 * time.time())
        metrics = [
            Metric(name, value, now, 0)
            for name, value in run.numbers.items()
            if existing.data.metrics.get(name) != value
        ]
        settings = [
            Param(name, str(value)[:_LONGEST_PARAM])
            for name, value in run.settings.items()
            if name not in existing.data.params  # MLflow refuses another value, and these never change
        ]
        texts = {f"llmlaunch.{name}": text[:_LONGEST_TAG] for name, text in run.texts.items()}
        tags = [RunTag(name, text) for name, text in texts.items() if existing.data.tags.get(name) != text]
        batches: dict[str, list[Any]] = {"params": settings, "metrics": metrics, "tags": tags}
        for kind, values in batches.items():
            for start in range(0, len(values), _MOST_AT_ONCE):
                self._client.log_batch(mlflow_id, **{kind: values[start : start + _MOST_AT_ONCE]})
        status = _STATUS.get(run.state, "FAILED")
        if existing.info.status != status:
            ended = None if run.ended is None else int(1000 * run.ended)
            if status in ("RUNNING", "SCHEDULED"):
                self._client.update_run(mlflow_id, status=status)
            else:
                self._client.set_terminated(mlflow_id, status, ended)
        self._client.set_tag(mlflow_id, _MARK, mark)

    def _experiment_id(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment else self._client.create_experiment(name))

    def _existing_runs(self) -> Iterator[tuple[str, Any]]:
        token = None
        while True:
            page = self._client.search_runs(
                [self._experiment], f"tags.`{_RUN}` != ''", ViewType.ACTIVE_ONLY, _PAGE, page_token=token
            )
            for run in page:
                yield run.data.tags[_RUN], run
            token = page.token
            if not token:
                return

    def _new_run(self, run: Figures) -> Any:
        """Create a run. If another program created one at the same time, both use the same one and the other is
        deleted."""
        key = hashlib.sha256(run.run_id.encode()).hexdigest()  # its filters have no way to write every name
        began = None if run.began is None else int(1000 * run.began)
        self._client.create_run(self._experiment, began, {_RUN: run.run_id, _KEY: key}, run.run_id)
        same = self._client.search_runs([self._experiment], f"tags.`{_KEY}` = '{key}'")
        first, *others = sorted(same, key=lambda same: same.info.run_id)
        for other in others:
            self._client.delete_run(other.info.run_id)
        return first
