"""Traces of single ranks: those recorded, and those that the tracer makes in this run and that must equal them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from subprocess import PIPE
from typing import Any

from support.recorded import Recorded

Trace = dict[str, Any]
FIELDS = (
    *("parallel", "microbatches", "microbatches_run", "calls", "chunks", "state"),
    *("peak_bytes", "peak_phase", "peak_by_phase"),
)
COLUMNS = ("phase", "site", "module", "role", "until", "dtype", "shape")


@contextmanager
def traces_of(
    jobs: Mapping[str, str], tracer: Sequence[str | Path], record: Recorded, errors: Path
) -> Iterator[Callable[[str], Trace]]:
    """Return traces by name; `jobs` are lines that the tracer reads. Those that this run asks for are traced side by
    side, and a test waits for its own."""
    asked = [job for name, job in jobs.items() if record.asks(job, name)]
    answers: dict[str, Any] = {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        lines: Iterator[str] = iter(())
        if asked:
            file = stack.enter_context(errors.open("w"))
            started = subprocess.Popen(tracer, stdin=PIPE, stdout=PIPE, stderr=file, text=True, env=environment)
            process = stack.enter_context(started)
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):  # a tracer that ended early says why below
                process.stdin.write("\n".join(asked))
                process.stdin.close()
            lines = iter(process.stdout)

        def ask(name: str) -> Trace:
            while name not in answers:
                line = next(lines, "")
                assert line, f"the tracer ended early: {errors.read_text()[-3000:]}"
                answer = json.loads(line)
                answers[answer["name"]] = answer
            failure = answers[name].get("failure")
            assert failure is None, f"{failure['what']}\n{failure['detail']}"
            return compact(answers[name]["trace"])

        yield lambda name: expanded(record.answer(jobs[name], lambda: ask(name), name))


def compact(trace: Trace) -> Trace:
    """Return what tests read of a trace. Storages at the peak that differ in nothing that decides their term are one
    row. Of a shape it says whether it has several dimensions and the last size, and of a site neither the line nor the
    comprehension, which later versions of Python do not name."""
    rows: Counter[tuple[Any, ...]] = Counter()
    for group in trace["at_peak"]:
        site, shape = re.sub(r":\d+(?= )|\.<locals>\.<\w+>", "", group["site"]), group["shape"]
        seen = {**group, "site": site, "shape": (*((0,) if len(shape) > 1 else ()), *shape[-1:])}
        rows[tuple(seen[column] for column in COLUMNS)] += group["bytes"]
    return {
        **{field: trace[field] for field in FIELDS if field in trace},
        "lasting_tensors": sum(group["count"] for group in trace["lasting"]),
        "at_peak": [[count, *row] for row, count in sorted(rows.items(), key=lambda item: (-item[1], item[0]))],
    }


def expanded(trace: Trace) -> Trace:
    """Return a recorded trace as the tracer's readers take it."""
    return {**trace, "at_peak": [dict(zip(("bytes", *COLUMNS), row, strict=True)) for row in trace["at_peak"]]}
