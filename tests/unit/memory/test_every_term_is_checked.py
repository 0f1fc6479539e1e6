"""No term of the memory formula can be lost or turned round unnoticed: whichever is left out or gets the other sign, a
sum done by hand, a law, a trace or the guard fails. A new term without any such check fails here.

The checks are the other tests of this folder that need no random numbers. A function whose terms were all noticed is
recorded by its source (tests/data/noticed_functions.json). `make test` tries those that are not recorded, so what is
new or changed, and a share of the others; `make soak` tries all.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from cProfile import Profile
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from pkgutil import iter_modules
from types import CodeType
from typing import Any

import numpy as np
import pytest

import llmlaunch
from llmlaunch import effects
from support.soak import RECORDING, SOAK
from support.term_mutants import Formula, formulas_of

MEMORY = (
    "activations",
    "host",
    "job",
    "layer_wise",
    "loss",
    "moments",
    "peak",
    "priced_layers",
    "schedule",
    "states",
    "tokens",
    "vision",
    "weights",
    "workspace",
)
TECHNIQUES = tuple(sorted(module.name for module in iter_modules(effects.__path__)))
LAYERS = (
    "attention",
    "block",
    "columns",
    "delta_net",
    "encoder",
    "latent_attention",
    "layer",
    "mamba",
    "matrix",
    "mixture",
    "mlp",
    "model",
    "pooled_attention",
    "short_convolution",
    "sparse_attention",
)
# of blocks, for seconds and operations alone: tests of `timing` hold them
OF_TIME = frozenset(
    {
        *("sequence_work", "_unfused_work", "memory_work", "cast_elements", "context_traffic", "kernels"),
        *("matrix_reads", "up_projections", "collective_pairs", "activation_gates", "activation_columns"),
        *("busiest_copies", "experts_on_device", "expert_rows", "_pooled_keys", "attended_keys", "attended_elements"),
        *("token_elements", "recurrent_flops", "per_tensor", "share"),
        *("beside_another_microbatch", "_spilled_share", "_full_share", "_of_modules"),
    }
)
FORMULA = (
    *(f"memory.{name}" for name in MEMORY),
    *(f"effects.{name}" for name in TECHNIQUES),
    *(f"layers.{name}" for name in LAYERS),
)
BY_HAND = (
    "test_tensors_by_hand",
    "test_layers_by_hand",
    "test_attention_backward",
    "test_compressed_by_hand",
    "test_short_convolution",
    "test_multipliers",
    "test_mixers",
    "test_kinds_by_hand",
    "test_vision_by_hand",
    "test_moments_by_hand",
    "test_terms_by_hand",
    "test_graphs",
    "test_exchange",
    "test_heads_before_loss",
    "test_batch_masks",
    "test_overlapped_passes",
    "test_layer_matrices",
    "test_paged_stash",
    "test_memory_laws",
    "test_deepspeed_moments",
    "test_deepspeed_by_hand",
    "test_quantized_base",
    "test_full_sharding",
    "test_memory_host",
    "test_layer_wise",
    "test_schedule",
    "test_states",
    "test_traced_ranks",
    "test_correction",
    "test_grouped_pricing",
    "test_plainest_bound",
)
EVERYTHING = SOAK or RECORDING
ONE_IN = 24  # functions of `make test` that were noticed before
ROOMS = tuple(f"{Path(llmlaunch.__file__).parent}/{room}/" for room in ("memory", "effects", "layers"))


@dataclass(eq=False)
class Check:
    name: str
    run: Callable[[], object]
    seconds: float = 0.0

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


@cache
def checks_by_function() -> dict[CodeType, list[Check]]:
    """Map the code of every function to the checks that run it."""
    by_function: dict[CodeType, list[Check]] = {}
    for check in (check for name in BY_HAND for check in checks_of(name)):
        forget_answers()
        start = time.perf_counter()
        functions = _functions_run(check)
        check.seconds = time.perf_counter() - start
        for code in functions:
            by_function.setdefault(code, []).append(check)
    return by_function


def _functions_run(check: Check) -> set[CodeType]:
    with Profile(subcalls=False, builtins=False) as profile:
        check.run()
    codes = (entry.code for entry in profile.getstats())
    return {code for code in codes if isinstance(code, CodeType) and code.co_filename.startswith(ROOMS)}


# What may be left out unnoticed, and why that is no slip.
HARMLESS = {
    "loss.py logits: without alive": "a loss fused with the head has no logits beside what it adds",
    "schedule.py _by_chunk: without -first % g": "a fuller moment is among the others",
    "schedule.py _by_chunk: without turn * g": "a fuller moment is among the others",
    "schedule.py _by_chunk: without 1": "the key that tells rows apart has room to spare",
    "states.py least_state_bytes: without ROUNDING_BYTES * max(factor, 1.0)": "eight bytes of a floor",
    **dict.fromkeys(
        (
            "job.py _same_stages: minus column",
            "job.py _same_stages: minus code * (int(column.max(initial=0)) + 1)",
            "schedule.py _by_chunk: minus column[which]",
            "schedule.py _by_chunk: minus int(column.max())",
            "schedule.py _by_chunk: minus key * (int(column.max()) + 1)",
        ),
        "any key does that tells rows apart",
    ),
    "job.py _stage_range: minus 2": "keeps the index of stages that do not exist within the table",
    "peak.py StateSums.of: without least_torch_bytes(job, rows)": "the guard sleeps while nothing is wrong",
    "priced_layers.py PricedLayers._freed_behind: minus place": "no block of a second branch asks what is behind it",
    "block.py Parameters.__add__: without self.expert": "a mixture is the last block of its layer",
    "mamba.py Mamba2.backward: without behind.later()": "a layer with a state space has one branch",
    **dict.fromkeys(
        (
            "delta_net.py DeltaNet.backward: without behind.last_layer",
            "pooled_attention.py PooledAttention.backward: without behind.last_layer",
            "sparse_attention.py SparseAttention.backward: without behind.last_layer",
        ),
        "layers with these have two branches",
    ),
}


# What is of no device: counts of a whole model, which published ones hold (tests/unit/models), and the order of ZeRO 3.
OF_MODELS = ("elements", "biases", "total_parameters", "modules")


def forget_answers() -> None:
    """A function that keeps its answers would give those of the formula, or of the mutant before. So would the layers
    of a model, which keep what their matrices have."""
    for name in FORMULA:
        for function in vars(importlib.import_module(f"llmlaunch.{name}")).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


def likeliest_first(checks: Sequence[Check], noticed: Counter[Check]) -> list[Check]:
    """First those that noticed most mutants for the time they take."""
    return sorted(checks, key=lambda check: -(noticed[check] + 0.1) / check.seconds)


NOTICED = Counter[Check]()  # how many mutants each check noticed first


NOTICED_FUNCTIONS = Path(__file__).parents[2] / "data" / "noticed_functions.json"


def digest(formula: Formula) -> str:
    return hashlib.sha256(formula.source.encode()).hexdigest()[:12]


def formulas_to_check(module_name: str) -> list[Formula]:
    """Functions that are not known to have each term checked as they are written today, and a fixed share of the
    others; in `make soak` all."""
    known = set(json.loads(NOTICED_FUNCTIONS.read_text("utf-8")).get(module_name, []))
    formulas = formulas_of(importlib.import_module(f"llmlaunch.{module_name}"))
    chosen = (
        each for each in formulas if EVERYTHING or digest(each) not in known or not int(digest(each), 16) % ONE_IN
    )
    return [each for each in chosen if not (is_of_time(each) or each.function.__name__ in OF_MODELS)]


def is_of_time(formula: Formula) -> bool:
    function = formula.function
    return function.__name__ in OF_TIME or function.__qualname__.partition(".")[0].endswith("Time")


def remember(module_name: str, formulas: Sequence[Formula]) -> None:
    noticed = json.loads(NOTICED_FUNCTIONS.read_text("utf-8"))
    noticed[module_name] = sorted(map(digest, formulas))
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(noticed[name])}" for name in FORMULA if noticed.get(name))
    NOTICED_FUNCTIONS.write_text(f"{{\n{text}\n}}\n", "utf-8")


@pytest.mark.parametrize("module_name", FORMULA)
def test_a_term_that_is_lost_or_turned_round_is_noticed(module_name: str) -> None:
    unnoticed, harmless = [], set[str]()
    formulas = formulas_to_check(module_name)
    for formula in formulas:
        last: Check | None = None  # by which check the last mutant of the function was noticed
        checks = checks_by_function().get(formula.function.__code__, [])
        for mutant in formula.mutants():
            excused = {str(mutant), str(mutant).replace(": minus ", ": without ")} & set(HARMLESS)
            harmless |= excused
            if excused:
                continue
            forget_answers()
            likeliest = [*([last] if last else []), *likeliest_first(checks, NOTICED)]
            with np.errstate(all="ignore"), mutant.in_place():
                last = next((check for check in likeliest if check.fails()), None)
            if last is None:
                unnoticed.append(str(mutant))
            else:
                NOTICED[last] += 1
    forget_answers()
    assert not unnoticed, "no check fails:\n" + "\n".join(sorted(unnoticed))
    names = tuple(f"{formula.module}.py {formula.function.__qualname__}: " for formula in formulas)
    assert harmless == {name for name in HARMLESS if name.startswith(names)}
    if RECORDING:
        remember(module_name, formulas)


def test_what_is_harmless_exists() -> None:
    """A function that HARMLESS names and that no longer exists would be looked for nowhere."""
    modules = (importlib.import_module(f"llmlaunch.{name}") for name in FORMULA)
    exist = {f"{each.module}.py {each.function.__qualname__}" for module in modules for each in formulas_of(module)}
    assert {name.partition(":")[0] for name in HARMLESS} <= exist
