"""broken_ranks.py BREAK ...: traces one tiny rank again and again, each time with another part of its training step
left out on purpose.

stdout: a JSON line for each, {"name", "trace"} or {"name", "failure"}, as the tracer writes it.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import stand_ins  # noqa: F401 (first: it lets the next be found)

# isort: split
import megatron_rank  # the first to import torch

# isort: split
import torch._dynamo  # noqa: F401 (every optimizer imports it, which takes a second)
from megatron.core.optimizer import optimizer as optimizers
from megatron.core.pipeline_parallel import schedules

import trace_checks
import trace_ranks

WORDS = """--num-layers 1 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 64
--max-position-embeddings 64 --position-embedding-type rope --swiglu --disable-bias-linear --normalization RMSNorm
--use-distributed-optimizer --micro-batch-size 1 --global-batch-size 4 --train-iters 1 --lr 1e-4 --bf16 --eval-iters 0
--eval-interval 1 --tokenizer-type NullTokenizer --vocab-size 128 --no-create-attention-mask-in-dataloader"""
RANK = WORDS.split()
SECONDS = 300


def nothing(*args: Any, **options: Any) -> None: ...


def one_micro_batch_fewer() -> None:
    own = megatron_rank.get_forward_backward_func

    def chosen() -> Callable[..., Any]:
        run = own()
        return lambda *, num_microbatches, **rest: run(num_microbatches=max(num_microbatches - 1, 1), **rest)

    megatron_rank.get_forward_backward_func = chosen


def no_backward_pass() -> None:
    schedules.backward_step = nothing


def an_optimizer_that_does_nothing() -> None:
    optimizers.MixedPrecisionOptimizer.step_with_ready_grads = lambda self: True


def an_overflow() -> None:
    optimizers.MixedPrecisionOptimizer.prepare_grads = lambda self: True


def a_step_that_is_not_taken() -> None:
    own = megatron_rank.training.train_step

    def once(*args: Any) -> Any:
        return own(*args) if args[-1] == 0 else None

    megatron_rank.training.train_step = once


def an_argument_of_nobody() -> None:
    RANK.extend(("--no-such-flag", "1"))


def numbers_of_fp16() -> None:
    """Which leaves nothing out, but for the overflow that an invented number would be."""
    RANK[RANK.index("--bf16")] = "--fp16"


BREAKS: dict[str, Callable[[], None]] = {
    one.__name__: one
    for one in (
        numbers_of_fp16,
        one_micro_batch_fewer,
        no_backward_pass,
        an_optimizer_that_does_nothing,
        an_overflow,
        a_step_that_is_not_taken,
        an_argument_of_nobody,
    )
}


def traced(job: dict[str, Any]) -> dict[str, Any]:
    BREAKS[job["name"]]()
    complaints = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(complaints):
            return {"name": job["name"], "trace": megatron_rank.trace(RANK, 1, 0)}
    except (Exception, SystemExit) as error:
        return {"name": job["name"], "failure": trace_checks.failure_of(error, complaints.getvalue())}


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for answer in trace_ranks.answers_of([{"name": name} for name in sys.argv[1:]], traced, 2, SECONDS):
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
