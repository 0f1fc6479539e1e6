"""Runs whose true peaks differ from what was predicted, by a bias that nobody told the launcher: after `calibrate` the
prediction of a job that has not run is right. Everything is what a cluster runs, by the command line, but the driver.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.chain import RECIPE, Chain, until
from support.node_rig import build

MIB = 2**20
BIAS, NOISE = 1.12, 0.005  # true / predicted
LAYERS, SEQUENCES = (2, 3, 4, 5, 7), (1, 2)  # as many runs as calibrate needs
FRESH = (8, 1)  # the job that has not run

pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Chain]]:
    """One of each configuration, which share a store; over, and not collected yet."""
    place = tmp_path_factory.mktemp("loop")
    library = build(place / "library")
    chance = random.Random(7)
    truths = {(layers, many): chance.gauss(BIAS, NOISE) for layers in LAYERS for many in SEQUENCES}
    chains = []
    for layers, many in truths:
        own = place / f"{layers}-{many}"
        own.mkdir()
        chains.append(Chain(own, library, devices=1, store=str(place / "store.db")))
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(trained, chains, truths, truths.values()))
        yield chains
    finally:
        for run in chains:
            run.close()


def words(layers: int, many: int) -> tuple[str, ...]:
    return f"model.num_layers={layers}", f"layout.micro_batch_size={many}"


def trained(run: Chain, configuration: tuple[int, int], truth: float) -> None:
    """It holds `truth` times what is predicted, makes some steps and succeeds."""
    run.start(*words(*configuration))
    (predicted,) = json.loads((run.run / "run.json").read_text())["predicted_bytes"]
    run.train(round(predicted * truth / MIB) / 1024)
    until(lambda: any(step(path) >= 2 for path in run.run.glob("attempts/*/progress.json")), "two steps")
    run.stop()


def step(path: Path) -> int:
    return json.loads(path.read_text())["step"] or 0


def checked(run: Chain) -> tuple[int, dict[str, Any]]:
    """What `check` says of the job that has not run: the bytes of its device, and of its memory all it says."""
    done = run.llmlaunch("check", str(RECIPE), *run.words(), *words(*FRESH), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    memory: dict[str, Any] = json.loads(done.stdout)["memory"]
    return memory["ranks"][0]["device_bytes"], memory


def test_a_hidden_bias_is_learned_from_runs(runs: list[Chain]) -> None:
    run = runs[0]
    plain, memory = checked(run)
    assert memory["correction"] is None
    done = run.llmlaunch("calibrate", "--json")
    (answer,) = json.loads(done.stdout)["answers"]
    assert (answer["did"], answer["runs"]) == ("taken", len(runs)), json.dumps(answer, indent=1)
    learned, memory = checked(run)
    assert memory["evidence"]["runs"] == len(runs)
    assert learned == pytest.approx(BIAS * plain, rel=4 * NOISE)
    assert memory["evidence"]["calibration"] == answer["calibration"]["id"]
    unused = run.llmlaunch("calibrate", "use", "none", "--backend", "deepspeed", "--accelerator", "a100-80gb")
    assert unused.returncode == 0
    assert checked(run)[0] == plain
