"""The processes of the real frameworks that several test modules share: each is started once in a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cpu_training import TrainOnCpu, cpu_trainer
from judges import (
    TRACED,
    DeepSpeedJudge,
    MegatronJudge,
    MegatronScripts,
    Say,
    as_recorded,
    deepspeed_judge,
    line_for_line,
    megatron_python,
    megatron_scripts,
    megatron_versions,
)
from trainer_runner import Train, trainer_process

from support.recorded import recorded


@pytest.fixture(scope="session")
def say_to_megatron() -> Iterator[Say]:
    with line_for_line(megatron_python(), TRACED / "megatron_judge.py") as say:
        yield say


@pytest.fixture(scope="session")
def megatron(say_to_megatron: Say) -> MegatronJudge:
    """Asked whatever it is told."""
    return MegatronJudge(say_to_megatron)


@pytest.fixture(scope="module")
def recorded_megatron(request: pytest.FixtureRequest, say_to_megatron: Say) -> Iterator[MegatronJudge]:
    """For questions that are always the same: asked a share of them, the others are answered as recorded."""
    with recorded(request.module.__name__.removeprefix("test_"), megatron_versions()) as record:
        yield MegatronJudge(as_recorded(record, say_to_megatron))


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
def train_megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainOnCpu]:
    """Trains Megatron jobs one after the other, by processes that share one import of Megatron."""
    with cpu_trainer(tmp_path_factory.mktemp("logs")) as train:
        yield train


@pytest.fixture(scope="session")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MegatronScripts]:
    with megatron_scripts(tmp_path_factory.mktemp("scripts")) as scripts:
        yield scripts


@pytest.fixture(scope="session")
def dataset(scripts: MegatronScripts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An indexed dataset as Megatron core itself writes it, by its prefix: 300 documents of tokens below 1000."""
    prefix = tmp_path_factory.mktemp("dataset") / "tokens"
    code, said = scripts.start("make", str(prefix)).end()
    assert code == 0, said
    return prefix
