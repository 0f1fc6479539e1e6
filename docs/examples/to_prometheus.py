"""Writes runs as one file for node_exporter's textfile collector.

    llmlaunch runs --limit 20 --export - | python to_prometheus.py FOLDER

FOLDER is what `node_exporter --collector.textfile.directory` names. Each call replaces `llmlaunch.prom` there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

RUN = ("run", "recipe", "attempt")
OF_STAGES = {
    "peak_bytes": "Most memory measured in the newest attempt, of the worst rank of a stage or of a node (host).",
    "predicted_bytes": "Memory predicted, of the ranks of a stage or of a node (host).",
}
OF_RUNS = {
    "limit_bytes": "What the plan was allowed to use of a device.",
    "step_seconds": "Median seconds of a step.",
    "predicted_step_seconds": "Seconds of a step as planned.",
    "tokens_per_second": "Tokens a second of the whole job.",
}


def write_runs(lines: Iterable[str], folder: Path) -> None:
    """Write the runs of an export. node_exporter, which is another user, may read the file."""
    registry = CollectorRegistry()
    states = Gauge("llmlaunch_run_info", "1 for each run.", (*RUN, "state"), registry=registry)
    by_stage = {
        name: Gauge(f"llmlaunch_{name}", text, (*RUN, "kind", "stage"), registry=registry)
        for name, text in OF_STAGES.items()
    }
    by_run = {name: Gauge(f"llmlaunch_{name}", text, RUN, registry=registry) for name, text in OF_RUNS.items()}
    for line in lines:
        run = json.loads(line)
        labels = [run["run_id"], run["recipe"] or "", run["attempt"] or ""]
        states.labels(*labels, run["state"]).set(1)
        for name, value in run["numbers"].items():
            what, _, where = name.partition("/")  # peak_bytes/device/stage0, or step_seconds
            kind, _, stage = where.partition("/stage")
            if where and what in by_stage:
                by_stage[what].labels(*labels, kind, stage).set(value)
            elif name in by_run:
                by_run[name].labels(*labels).set(value)
    path = folder / "llmlaunch.prom"
    write_to_textfile(str(path), registry)  # whole or not at all
    path.chmod(0o644)


if __name__ == "__main__":
    write_runs(sys.stdin, Path(sys.argv[1]))
