"""Real Megatron-LM that leaves out the batches which a rollback names: its training goes on past them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cpu_training import TrainOnCpu
from trained_cases import ALONE, long_job

from llmlaunch.frameworks.checkpoints import SKIP_FLAGS

pytestmark = pytest.mark.frameworks


def test_megatron_leaves_out_the_steps_it_is_told_and_goes_on_with_the_batches_after_them(
    train_megatron: TrainOnCpu, tmp_path: Path
) -> None:
    whole, other = (long_job(name, tmp_path / name, ALONE) for name in ("whole", "skipping"))
    skipping = replace(other, rendered=(*other.rendered, SKIP_FLAGS["megatron-lm"], "3", "4"))
    trained = train_megatron([whole, skipping])
    assert {job.codes for job in trained.values()} == {(0,)}, trained["skipping"].complaint()
    steps = [step.step for step in trained["skipping"].steps]
    assert steps == [step.step for step in trained["whole"].steps if step.step not in (3, 4)]
    consumed = 16 * int(trained["whole"].output[-1].partition("consumed samples:")[2].split("|")[0])
    assert f"consumed samples: {consumed:12d} |" in trained["skipping"].output[-1]
