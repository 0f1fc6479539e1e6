"""Writes runs into an experiment of MLflow, each once however often it is exported.

    llmlaunch runs --since 7d --export - | python to_mlflow.py URI

URI is a server, a database such as sqlite:////data/mlflow.db, or a folder. MLflow reads user and password of a server
from MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterable
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

EXPERIMENT = "llmlaunch"
STATUS = {
    "succeeded": "FINISHED",
    "running": "RUNNING",
    "pending": "SCHEDULED",
    "cancelled": "KILLED",
    "stopped": "KILLED",
}
WORDS = ("run_id", "recipe", "state", "why", "cause", "attempt", "launcher", "job_id", "cluster", "recipe_digest")
LONGEST_SETTING, LONGEST_WORD, MOST_AT_ONCE = 500, 5000, 100  # that MLflow takes


def write_runs(lines: Iterable[str], uri: str) -> None:
    """Write the runs of an export: settings as parameters, which never change, numbers as metrics, words as tags."""
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(EXPERIMENT)
    for line in lines:
        run = json.loads(line)
        there = found_or_created(client, experiment_id, run)
        now = int(1000 * time.time())
        params = [
            Param(name, str(value)[:LONGEST_SETTING])
            for name, value in run["settings"].items()
            if name not in there.data.params
        ]
        metrics = [
            Metric(name, value, now, 0)
            for name, value in run["numbers"].items()
            if there.data.metrics.get(name) != value
        ]
        tags = [RunTag(f"llmlaunch.{name}", run[name][:LONGEST_WORD]) for name in WORDS if run[name] is not None]
        batches: dict[str, list[Any]] = {"params": params, "metrics": metrics, "tags": tags}
        for kind, values in batches.items():
            for start in range(0, len(values), MOST_AT_ONCE):
                client.log_batch(there.info.run_id, **{kind: values[start : start + MOST_AT_ONCE]})
        status = STATUS.get(run["state"], "FAILED")
        if status in ("RUNNING", "SCHEDULED"):
            client.update_run(there.info.run_id, status=status)
        else:
            client.set_terminated(there.info.run_id, status, milliseconds(run["ended"]))


def found_or_created(client: MlflowClient, experiment_id: str, run: dict[str, Any]) -> Any:
    """Return the run of MLflow that has this run's key: its filters have no way to write every name."""
    key = hashlib.sha256(run["run_id"].encode()).hexdigest()
    found = client.search_runs([experiment_id], f"tags.`llmlaunch.key` = '{key}'")
    if found:
        return found[0]
    return client.create_run(experiment_id, milliseconds(run["began"]), {"llmlaunch.key": key}, run["run_id"])


def milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(1000 * seconds)


if __name__ == "__main__":
    write_runs(sys.stdin, sys.argv[1])
