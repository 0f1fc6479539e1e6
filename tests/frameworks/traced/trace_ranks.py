"""Traces ranks of Megatron jobs, several at a time, without a GPU.

    echo '{"name": "first", "world_size": 512, "pipeline_rank": 0, "arguments": ["--num-layers", "32", ...]}' |
        .venv-frameworks/bin/python trace_ranks.py --processes 2

One job a line in; one line out for each as it is done: {"name", "trace"}, or {"name", "failure"} with the traceback.
`arguments` are those of Megatron's `pretrain_gpt.py`. Frameworks are imported once, then each job has a process of its
own, because Megatron keeps its state in the process.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import multiprocessing
import os
import sys
import traceback
import warnings
from typing import Any

import megatron_rank

__all__ = ["main"]

Job = dict[str, Any]


def _traced(job: Job) -> Job:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            trace = megatron_rank.trace(job["arguments"], job["world_size"], job["pipeline_rank"])
        return {"name": job["name"], "trace": trace}
    except (Exception, SystemExit):  # Megatron's parser exits where it refuses an argument
        return {"name": job["name"], "failure": traceback.format_exc()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    jobs = [json.loads(line) for line in sys.stdin if line.strip()]
    with multiprocessing.get_context("fork").Pool(options.processes, maxtasksperchild=1) as pool:
        for answer in pool.imap_unordered(_traced, jobs, chunksize=1):
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
