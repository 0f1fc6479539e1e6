"""Whole rendered scripts that get signals in quick succession: in an Apptainer container each signal arrives twice."""

from __future__ import annotations

import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from run_samples import deepspeed_cpu, outside_slurm, train_variables, write_program

from llmlaunch.rendering.run_directory import render_run

AT_ONCE, ROUNDS, PAIRS, SAVE_SECONDS = 10, 2, 10, 1
"""A loop that trusts a variable set by the trap loses one of six to one of two trainings."""

PYTHON = """\
#!/bin/bash
case "$*" in
  *node.pyz\\ begin*) echo "run ." ;;
  *node.pyz\\ finish*) echo "next end"; exit "$(sed 's/.*--code \\([0-9]*\\).*/\\1/' <<<"$*")" ;;
  *torch.distributed.run*)
    mkdir -p "$LLMLAUNCH_RUN_DIR/attempts/$LLMLAUNCH_ATTEMPT" && cd "$_" && : >training
    until [[ -e release || SECONDS -gt 600 ]]; do sleep 0.1; done
    ;;
esac
"""
"""Stands for the interpreter: its torchrun is deaf to signals, trains until it is released or nobody is left to do so,
and ends well."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signals")
    recipe, plan, rendered = deepspeed_cpu()
    render_run(recipe, plan, {"recipe": recipe.name}, rendered, folder / "run")
    write_program(folder / "python", PYTHON)
    return folder / "run"


@pytest.mark.parametrize("script", ["train.sh", "job.sbatch"])
def test_a_script_waits_for_its_training_however_often_it_is_signalled(run: Path, script: str) -> None:
    codes: Counter[int] = Counter()
    for _ in range(ROUNDS):
        processes = [start(run, script) for _ in range(AT_ONCE)]
        attempts = [attempt_of(run, process) for process in processes]
        for _ in range(PAIRS):
            for process in processes:
                process.send_signal(signal.SIGUSR1)
                time.sleep(0)  # two at the very same moment would be one
                process.send_signal(signal.SIGUSR1)
            time.sleep(0.05)
        for process, attempt in zip(processes, attempts, strict=True):
            wait_until(lambda: process.poll() is not None or (attempt / "told").exists())  # noqa: B023
        time.sleep(SAVE_SECONDS)  # bash 5.2 also forgets the code of a child that ends while traps are run
        for attempt in attempts:
            (attempt / "release").touch()
        codes.update(process.wait(timeout=120) for process in processes)
    assert codes == {0: AT_ONCE * ROUNDS}


def start(run: Path, script: str) -> subprocess.Popen[bytes]:
    """`bash SCRIPT`; train.sh gets what job.sbatch sets."""
    environment = outside_slurm(**train_variables(run, run.parent / "python"))
    (run / "logs").mkdir(exist_ok=True)
    # Its process id names the attempt, as job.sbatch itself does; which makes the folder itself, too.
    script_of_attempt = 'export LLMLAUNCH_ATTEMPT=local-0-$$.0; exec bash "$0"'
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        ["bash", "-c", script_of_attempt, str(run / script)], env=environment, stdin=quiet, stdout=quiet, stderr=quiet
    )


def attempt_of(run: Path, process: subprocess.Popen[bytes]) -> Path:
    """The folder of the attempt this process began, once its training runs."""
    training: list[Path] = []

    def begun() -> bool:
        training.extend(run.glob(f"attempts/local-*-{process.pid}.0/training"))
        return bool(training)

    wait_until(begun)
    return training[0].parent


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)
