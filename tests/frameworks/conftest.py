"""The processes of the real frameworks that several test modules share: each is started once in a run."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from judges import TRACED, DeepSpeedJudge, MegatronJudge, deepspeed_judge, megatron_judge, megatron_python
from trainer_runner import Train, trainer_process


@pytest.fixture(scope="session")
def megatron() -> Iterator[MegatronJudge]:
    with megatron_judge() as judge:
        yield judge


@pytest.fixture(scope="session")
def deepspeed() -> Iterator[DeepSpeedJudge]:
    with deepspeed_judge() as judge:
        yield judge


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """The shipped DeepSpeed script."""
    with trainer_process(tmp_path_factory.mktemp("trainer") / "errors") as run:
        yield run


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An indexed dataset as Megatron core itself writes it, by its prefix: 300 documents of tokens below 1000."""
    prefix = tmp_path_factory.mktemp("dataset") / "tokens"
    command = [megatron_python(), TRACED / "dataset_ranks.py", "make", prefix]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return prefix
