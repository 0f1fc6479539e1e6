"""No term of the memory formula can be lost or turned round unnoticed: whichever is left out or gets the other sign, a
sum done by hand, a law, a trace or the guard fails. A new term without any such check fails here.

The checks are the other tests of this folder that need no random numbers, and the laws on a few fixed jobs.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from laws import LAWS
from random_jobs import TRAINERS, RandomJob, random_jobs

from support.term_mutants import mutants_of

FORMULA = (
    "activations",
    "host",
    "job",
    "loss",
    "moments",
    "peak",
    "saved",
    "schedule",
    "states",
    "weights",
    "workspace",
)
BY_HAND = (
    "test_tensors_by_hand",
    "test_layers_by_hand",
    "test_moments_by_hand",
    "test_terms_by_hand",
    "test_memory_laws",
    "test_deepspeed_moments",
    "test_full_sharding",
    "test_memory_host",
    "test_schedule",
    "test_states",
    "test_traced_ranks",
    "test_correction",
    "test_grouped_pricing",
    "test_plainest_bound",
)
JOBS_OF_EACH_TRAINER = 2
SIGNS = (
    settings().max_examples > 100
)  # `make soak` turns the signs round, too: a lost term is noticed by the same checks


@dataclass(frozen=True)
class Check:
    name: str
    run: Callable[[], object]

    def fails(self) -> bool:
        try:
            self.run()
        except Exception:  # a formula that breaks off is noticed, too
            return True
        return False


def checks_of(module_name: str) -> Iterator[Check]:
    """Yield the tests of a module for each of their parameters, but those that need a fixture or random numbers."""
    module = importlib.import_module(module_name)
    for name, test in vars(module).items():
        if name.startswith("test_") and test.__module__ == module_name and not hasattr(test, "hypothesis"):
            for arguments in _parameters(test):
                if set(inspect.signature(test).parameters) == set(arguments):
                    yield Check(f"{module_name}.{name}", partial(test, **arguments))


def _parameters(test: Any) -> Iterator[dict[str, Any]]:
    columns: list[list[dict[str, Any]]] = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names, values = mark.args[0], mark.args[1]
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
            columns.append([dict(zip(names, row if len(names) > 1 else (row,), strict=True)) for row in values])
    for rows in itertools.product(*columns):
        yield {name: value for row in rows for name, value in row.items()}


def laws_on_fixed_jobs() -> Iterator[Check]:
    for name in TRAINERS:
        for drawn, law in itertools.product(fixed_jobs(name), LAWS):
            yield Check(f"{law.__name__} of {name}", partial(law, drawn))


def fixed_jobs(name: str) -> Sequence[RandomJob]:
    jobs: list[RandomJob] = []

    @settings(
        derandomize=True,
        max_examples=8,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(random_jobs(name))
    def collect(drawn: RandomJob) -> None:
        jobs.append(drawn)

    collect()
    return jobs[-JOBS_OF_EACH_TRAINER:]


@cache
def checks_by_function() -> dict[CodeType, list[Check]]:
    """Map the code of every function to the checks that run it, the fastest first."""
    timed = []
    for check in (*(check for name in BY_HAND for check in checks_of(name)), *laws_on_fixed_jobs()):
        start = time.perf_counter()
        functions = _functions_run(check)
        timed.append((time.perf_counter() - start, check, functions))
    by_function: dict[CodeType, list[Check]] = {}
    for _, check, functions in sorted(timed, key=lambda each: each[0]):
        for code in functions:
            by_function.setdefault(code, []).append(check)
    return by_function


def _functions_run(check: Check) -> set[CodeType]:
    functions: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "/llmlaunch/memory/" in frame.f_code.co_filename:
            functions.add(frame.f_code)

    sys.setprofile(note)
    try:
        check.run()
    finally:
        sys.setprofile(None)
    return functions


# What may be left out unnoticed, and why that is no slip.
HARMLESS = {
    "loss.py logits: without alive": "a loss fused with the head has no logits beside what it adds",
    "schedule.py _by_chunk: without -first % g": "a fuller moment is among the others",
    "schedule.py _by_chunk: without turn * g": "a fuller moment is among the others",
    "schedule.py _by_chunk: without 1": "the key that tells rows apart has room to spare",
    "states.py least_state_bytes: without ROUNDING_BYTES * max(factor, 1.0)": "eight bytes of a floor",
    "peak.py StateSums.of: without least_torch_bytes(job, rows)": "the guard sleeps while nothing is wrong",
}
# Terms that no check by hand tells from their absence yet. The list may only grow shorter.
UNCHECKED = {
    # held by traced DeepSpeed jobs (tests/frameworks)
    "loss.py earlier_tiles: without head",
    "loss.py earlier_tiles: without hidden",
    "loss.py earlier_tiles: without np.where(rows.last, hidden + head, 0.0)",
    "moments.py transient_terms: without earlier_tiles(job, rows)",
    "states.py _gathered: without np.where(rows.first & ~np.asarray(job.shape.tied_embeddings), tables(job, rows)[0",
    "states.py _zero_buckets: without facts.widened_bucket_bytes * np.maximum(largest, lasting / width)",
    "states.py gradients: without transfer",
    "states.py states: without _largest_trained(job, rows)",
    "states.py states: without by_stage(facts.touched_gradient_bytes, rows) * np.maximum(_largest_trained(job, rows",
    "states.py states: without by_stage(facts.touched_gradient_bytes, rows) * np.maximum(sharded, _largest_trained(",
    "workspace.py _unfused_norm_backward: without facts.norm_backward_bytes * n * job.shape.hidden_size / sequence_",
    "workspace.py _unfused_norm_backward: without np.asarray(facts.norm_backward_bytes * n * job.shape.hidden_size ",
    "workspace.py _unfused_norm_backward: without saved",
    # held by traced Megatron ranks (tests/frameworks), or small
    "states.py _resting: without expert",
    "moments.py transient_terms: without embedded",
    "moments.py transient_terms: without gone",
    "moments.py transient_terms: without heads",
    "moments.py transient_terms: without sum(first.values())",
    "workspace.py _freed_by_first_chunk: without (v - 1) * g",
    "workspace.py _freed_by_first_chunk: without alive.mixture",
    "workspace.py _freed_by_first_chunk: without chunks",
    "workspace.py _freed_by_first_chunk: without np.maximum(chunks - replaced, 0.0) / chunks",
    "workspace.py _freed_by_first_chunk: without v",
}


@pytest.mark.parametrize("module_name", FORMULA)
def test_a_term_that_is_lost_or_turned_round_is_noticed(module_name: str) -> None:
    unnoticed = []
    with np.errstate(all="ignore"):
        for mutant in mutants_of(importlib.import_module(f"llmlaunch.memory.{module_name}"), SIGNS):
            checks = checks_by_function().get(mutant.function.__code__, [])
            with mutant.in_place():
                first = next((check for check in checks if check.fails()), None)
            if first is None:
                unnoticed.append(str(mutant))
            else:  # what noticed this one is likely to notice the next
                checks.remove(first)
                checks.insert(0, first)
    surprises = sorted({each.replace(": minus ", ": without ") for each in unnoticed} - set(HARMLESS) - UNCHECKED)
    assert not surprises, "no check fails:\n" + "\n".join(surprises)
