"""Runs in MLflow: one of its runs for each, found again by a tag."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag, ViewType

from llmlaunch.sinks.figures import Figures, Mark, unlike

__all__ = ["Mlflow"]

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


class Mlflow:
    """The experiment is that of MLFLOW_EXPERIMENT_NAME, else `llmlaunch`."""

    def __init__(self, uri: str) -> None:
        self._client = MlflowClient(tracking_uri=uri)
        self._experiment = self._experiment_id(os.environ.get("MLFLOW_EXPERIMENT_NAME") or "llmlaunch")
        self._runs = dict(self._there())

    def due(self, marks: Sequence[Mark]) -> list[str]:
        return unlike(marks, {run_id: run.data.tags.get(_MARK, "") for run_id, run in self._runs.items()})

    def send(self, run: Figures, mark: str) -> None:
        """The mark comes last: what was interrupted is sent again."""
        known = self._runs.get(run.run_id) or self._made(run)
        mlflow_id = known.info.run_id
        now = int(1000 * time.time())
        metrics = [
            Metric(name, value, now, 0) for name, value in run.numbers.items() if known.data.metrics.get(name) != value
        ]
        settings = [
            Param(name, str(value)[:_LONGEST_PARAM])
            for name, value in run.settings.items()
            if name not in known.data.params  # MLflow refuses another value, and these never change
        ]
        words = {f"llmlaunch.{name}": word[:_LONGEST_TAG] for name, word in run.words.items()}
        tags = [RunTag(name, word) for name, word in words.items() if known.data.tags.get(name) != word]
        for some in _chunks(settings):
            self._client.log_batch(mlflow_id, params=some)
        for some in _chunks(metrics):
            self._client.log_batch(mlflow_id, metrics=some)
        for some in _chunks(tags):
            self._client.log_batch(mlflow_id, tags=some)
        status = _STATUS.get(run.state, "FAILED")
        if known.info.status != status:
            ended = None if run.ended is None else int(1000 * run.ended)
            if status in ("RUNNING", "SCHEDULED"):
                self._client.update_run(mlflow_id, status=status)
            else:
                self._client.set_terminated(mlflow_id, status, ended)
        self._client.set_tag(mlflow_id, _MARK, mark)

    def finish(self) -> None:
        pass

    def _experiment_id(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _there(self) -> Iterator[tuple[str, Any]]:
        """Of our runs that are there."""
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

    def _made(self, run: Figures) -> Any:
        """A new one; where another program made one at the same time, both take the same one and the other goes."""
        key = hashlib.sha256(run.run_id.encode()).hexdigest()  # its filters have no way to write every name
        began = None if run.began is None else int(1000 * run.began)
        self._client.create_run(self._experiment, began, {_RUN: run.run_id, _KEY: key}, run.run_id)
        same = self._client.search_runs([self._experiment], f"tags.`{_KEY}` = '{key}'")
        first, *others = sorted(same, key=lambda one: one.info.run_id)
        for other in others:
            self._client.delete_run(other.info.run_id)
        return first


def _chunks(values: Sequence[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(values), _MOST_AT_ONCE):
        yield list(values[start : start + _MOST_AT_ONCE])
