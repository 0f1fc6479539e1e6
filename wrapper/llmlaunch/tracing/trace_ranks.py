"""Traces ranks of Megatron jobs, several at a time, without a GPU.

    echo '{"name": "first", "world_size": 512, "pipeline_rank": 0, "arguments": ["--num-layers", "32", ...]}' |
        .venv-frameworks/bin/python trace_ranks.py --processes 2

One job a line in; one line out for each as it is done: {"name", "trace"}, or {"name", "failure": {"kind", "what",
"detail"}}: one sentence, and the traceback. `arguments` are those of Megatron's `pretrain_gpt.py`. A job may have
"environment", variables by name, and "all_microbatches": true, which runs those that show nothing new, too. Frameworks
are imported once, then each job has a process of its own, because Megatron keeps its state in the process.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import sys
import warnings

from apart import Answer, Job, ReaderLeft, answers_of, end_on_signals
from failures import failure_of

__all__ = ["main"]

LONGEST_SECONDS = 900


def _traced(job: Job) -> Answer:
    import megatron_rank

    complaints = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(complaints):
            os.environ.update(job.get("environment") or {})
            trace = megatron_rank.trace(
                job["arguments"], job["world_size"], job["pipeline_rank"], fewer=not job.get("all_microbatches")
            )
        return {"name": job["name"], "trace": trace}
    except (Exception, SystemExit) as error:  # Megatron's parser exits where it refuses an argument
        return {"name": job["name"], "failure": failure_of(error, complaints.getvalue())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="ranks traced at a time")
    parser.add_argument("--seconds", type=float, default=LONGEST_SECONDS, help="the longest that one may take")
    options = parser.parse_args()
    end_on_signals()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import megatron_rank  # noqa: F401 (once for all ranks, and quietly)

    jobs = [json.loads(line) for line in sys.stdin if line.strip()]
    answers = answers_of(jobs, _traced, options.processes, options.seconds, sys.stdout.fileno())
    try:
        with contextlib.closing(answers):  # which ends what still runs
            for answer in answers:
                print(json.dumps(answer), flush=True)
    except (ReaderLeft, BrokenPipeError):
        os._exit(1)  # closing stdout would complain once more
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
