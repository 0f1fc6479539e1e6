"""The processes of the real frameworks that several test modules share: each is started once in a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from judges import DeepSpeedJudge, MegatronJudge, MegatronScripts, deepspeed_judge, megatron_judge, megatron_scripts
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
