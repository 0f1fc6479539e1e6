"""Megatron's training step with a part of it left out on purpose: its trace fails, and says which."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from traced_runs import PYTHON

pytestmark = pytest.mark.frameworks

BROKEN = Path(__file__).with_name("traced") / "broken_ranks.py"
SECONDS = 600


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    if not (PYTHON.parent.parent / ".installed").exists():
        pytest.fail(f"{PYTHON.parent.parent} is missing: `make install-frameworks` makes it")
    done = subprocess.run([PYTHON, BROKEN], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {answer["name"]: answer for answer in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", ["nothing", "numbers_of_fp16"])
def test_a_whole_step_is_traced(name: str, answers: dict[str, dict[str, Any]]) -> None:
    assert answers[name]["trace"]["state"]["optimizer_state_count"] > 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("one_micro_batch_fewer", "3 of 4 forward passes ran through model chunk 0"),
        ("no_backward_pass", "0 of 4 backward passes ran through model chunk 0"),
        ("an_optimizer_that_does_nothing", "the optimizer keeps no state of 8 of the tensors that it steps"),
        ("an_overflow", "the optimizer skipped 2 of 2 steps, as after an overflow"),
        ("a_step_that_is_not_taken", "the optimizer stepped 1 times in 2 iterations"),
        ("no_parameters", "the rank has no parameters"),
    ],
)
def test_a_step_without_a_part_of_it_is_not(name: str, said: str, answers: dict[str, dict[str, Any]]) -> None:
    failure = answers[name]["failure"]
    assert failure["kind"] == "dishonest", failure["detail"]
    assert said in failure["what"]
