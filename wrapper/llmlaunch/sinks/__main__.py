"""One sink in a process of its own: `python -m llmlaunch.sinks NAME`, to which `delivery.py` speaks in lines of JSON.

    {"place", "marks": [[run id, mark] ...]}  ->  {"due": [run ids]}
    {"run": as store.stored_run, "mark"}      ->  {"sent": run id}         for each that is due
    {}                                        ->  {"done": true}

Anything that goes wrong is {"error": a sentence}, of one run or, at the first line, of all.
"""

from __future__ import annotations

import json
import os
import sys
from typing import IO, Any

from llmlaunch.sinks.figures import Sink, figures_of


def main(name: str) -> int:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        first = json.loads(sys.stdin.readline())
        sink = _opened(name, str(first["place"]))
        due = sink.due(dict(first["marks"]))
    except Exception as error:
        _answer(answers, {"error": _one_line(error)})
        return 1
    _answer(answers, {"due": due})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "run" not in request:
                sink.finish()
                _answer(answers, {"done": True})
                return 0
            sink.send(figures_of(request["run"]), request["mark"])
            _answer(answers, {"sent": request["run"]["run_id"]})
        except Exception as error:
            _answer(answers, {"error": _one_line(error)})
    return 1


def _opened(name: str, place: str) -> Sink:
    if name == "prometheus":
        from llmlaunch.sinks.to_prometheus import Prometheus

        return Prometheus(place)
    if name == "mlflow":
        from llmlaunch.sinks.to_mlflow import Mlflow

        return Mlflow(place)
    from llmlaunch.sinks.to_wandb import Wandb

    return Wandb(place)


def _one_line(error: Exception) -> str:
    message = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _answer(stream: IO[str], value: dict[str, Any]) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
