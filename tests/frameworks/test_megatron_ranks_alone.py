"""Single ranks of jobs of 512, run by themselves over torch's fake process group: real Megatron core (0.19.2), its
schedules, DDP and optimizers, on the CPU. Every micro-batch runs and every step counts, also of a stage in the middle.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass

import pytest
from cpu_training import CpuJob, TrainedJob, train_on_cpu
from trained_cases import recipe_for

from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.frameworks.megatron.trace import rank_alone
from llmlaunch.layout import Layout
from llmlaunch.trainers import RANK_ALONE
from support.soak import share

pytestmark = pytest.mark.frameworks

STEPS = 2
MICRO_BATCHES = 8
WORLD = 512


@dataclass(frozen=True)
class Alone:
    """One rank of a job of 512."""

    model: str
    layout: Layout
    pipeline_rank: int
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join((self.model, self.layout.describe(), f"rank {self.pipeline_rank}", *self.overrides))

    def job(self) -> CpuJob:
        assert self.layout.world_size == WORLD
        batch = MICRO_BATCHES * self.layout.micro_batch_size * self.layout.data
        recipe = recipe_for(self.model, (f"training.global_batch_size={batch}", *self.overrides))
        rendered = MegatronLM().render(recipe, self.layout)
        one = rank_alone(recipe, self.layout, rendered, self.pipeline_rank, STEPS)
        environment = {**rendered.environment, **one.environment, "CPU_STANDS_FOR": "9.0", "OMP_NUM_THREADS": "1"}
        return CpuJob(self.name, 1, tuple(map(str, one.program[2:])), environment)


PLAIN = Layout(tensor=2, pipeline=4, data=64, sequence_parallel=1, zero_stage=1)  # p2p in batches
TURNS = Layout(pipeline=4, virtual_pipeline=2, data=128, zero_stage=1)  # p2p overlapped, one by one
DEEP = ("model.num_layers=8",)
SHARED = ("layout.zero_stage=3",)
HALF = ("training.precision=fp16", "training.gradient_dtype=fp32")
# in each `make test`: a stage in the middle that takes turns, and experts
OFTEN = (
    Alone("llama", TURNS, 2, DEEP),
    Alone("mixture", Layout(pipeline=2, data=256, expert=2, zero_stage=1), 1),
)
SELDOM = (
    *(Alone("llama", PLAIN, rank) for rank in (0, 1, 3)),
    Alone("llama", Layout(data=WORLD, zero_stage=3), 0, SHARED),
    Alone("llama", TURNS, 3, DEEP),
    Alone("llama", TURNS, 1, (*DEEP, "backend.extra_args=[--no-overlap-p2p-communication]")),
    Alone("llama", Layout(pipeline=4, data=128, zero_stage=1), 3, HALF),
    Alone("gpt", Layout(pipeline=2, data=256), 1),
)
CASES = share((*OFTEN, *SELDOM), OFTEN)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainedJob]:
    jobs = [case.job() for case in CASES]
    return train_on_cpu(jobs, tmp_path_factory.mktemp("alone"), through=(RANK_ALONE,))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_rank_alone_does_all_that_it_would_among_its_peers(ran: dict[str, TrainedJob], case: Alone) -> None:
    one = ran[case.name]
    assert one.codes == (0,), one.complaint()
    (said,) = one.output
    counts = json.loads(next(line for line in said.splitlines() if line.startswith('{"')))
    expected = STEPS * MICRO_BATCHES * case.layout.virtual_pipeline
    assert (counts["forward"], counts["backward"]) == (expected, expected)
    assert counts["optimizer_steps"] >= STEPS  # a mixture has two optimizers
    assert counts["states"] > 0
    assert [step.step for step in one.steps] == list(range(1, STEPS + 1))
    assert re.findall(r"number of (\w+) iterations: +(\d+)", said) == [("skipped", "0"), ("nan", "0")] * STEPS
    norms = [float(norm) for norm in re.findall(r"grad norm: ([\w.+-]+)", said)]
    assert len(norms) == STEPS
    assert all(map(math.isfinite, norms))


def test_the_last_stage_computes_a_loss_of_what_it_is_sent(ran: dict[str, TrainedJob]) -> None:
    last = [case for case in CASES if case.pipeline_rank == case.layout.pipeline - 1]
    losses = {case.name: ran[case.name].losses for case in last}
    assert all(len(seen) == STEPS and all(3 < loss < 8 for loss in seen) for seen in losses.values()), losses
