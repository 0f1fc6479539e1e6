"""Runs a script that calls Megatron's `pretrain` on this machine's CPU, up to its datasets.

    dataset_ranks.py make PREFIX                            a small dataset, PREFIX.bin and PREFIX.idx
    dataset_ranks.py build megatron_dataset.py WORDS ...    the script that builds indexes, as a run directory has it
    dataset_ranks.py train pretrain_gpt.py WORDS ...        as each rank of the training would, over gloo
    dataset_ranks.py serve                                  each of these in a fork, Megatron core imported once: a line
                                                            {"words", "environment", "output", "errors"} is answered by
                                                            its process, a line with a process by its exit code

Stands in for what Megatron core imports and this machine has not: triton, and a GPU.
"""

# ruff: noqa: E402 (torch is imported after its CUDA is pretended)
from __future__ import annotations

import json
import logging
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import stand_ins

stand_ins.install()

import torch


def train_up_to_the_datasets(config: Any, provider: Any, *words: Any, **named: Any) -> None:
    """In place of `pretrain`: ranks that differ in data parallelism alone build their datasets."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.training import training

    dist.init_process_group("gloo")
    parallel_state.set_tensor_model_parallel_rank(0)
    parallel_state.set_pipeline_model_parallel_rank(0)
    parallel_state.set_pipeline_model_parallel_world_size(1)
    train, _, _ = provider(training.get_train_valid_test_num_samples())
    print(f"rank {dist.get_rank()}: {len(train)} samples, the last {train[len(train) - 1]['tokens'].tolist()[:8]}")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def make(prefix: str) -> None:
    import numpy
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder, random = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32), numpy.random.RandomState(0)
    for _ in range(300):
        builder.add_item(torch.from_numpy(random.randint(0, 1000, size=random.randint(20, 400)).astype(numpy.int32)))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


class OutputOfNow:
    """Where Megatron's log goes that was set up before a fork: a script may redirect what it says."""

    def write(self, text: str) -> None:
        sys.stdout.write(text)

    def flush(self) -> None:
        sys.stdout.flush()


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # an import may print
    os.environ["NO_VCS_VERSION"] = "1"  # as megatron_check.py imports it
    import megatron.training  # noqa: F401

    for handler in logging.getLogger().handlers:
        handler.setStream(OutputOfNow())
    sys.stdout.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        started = isinstance(asked, dict)
        answer = run_in_a_fork(**asked) if started else os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1])
        print(answer, file=answers, flush=True)


def run_in_a_fork(words: list[str], environment: dict[str, str], output: str, errors: str) -> int:
    """A process with these variables alone, which writes to these files, as one that had been started would be."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        for number, path in enumerate((os.devnull, output, errors)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), number)
        run(words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else bool(end.code)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(words: list[str]) -> None:
    what, script, *words = words
    if what == "make":
        make(script)
        return
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).resolve().parent))
    if what == "train":
        import megatron.training

        megatron.training.pretrain = train_up_to_the_datasets
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        run(sys.argv[1:])
