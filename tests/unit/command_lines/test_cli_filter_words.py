"""The filter of sbatch asks about every script that names a trainer of the table, and about none that starts none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TRAINERS = ROOT / "wrapper" / "llmlaunch" / "command_lines" / "trainers.json"
LAUNCHERS = ROOT / "wrapper" / "llmlaunch" / "command_lines" / "launchers.json"


def words_of_the_filter() -> list[str]:
    text = (ROOT / "slurm" / "cli_filter.lua").read_text("utf-8")
    table = re.search(r"local WORDS = \{(.*?)\n\}", text, re.DOTALL)
    assert table is not None
    return re.findall(r'"([^"]+)"', table[1])


def command_lines() -> Iterator[str]:
    """Yield command lines of all trainers and launchers, as a script would have them."""
    for trainer in json.loads(TRAINERS.read_text("utf-8"))["trainers"]:
        for program in filter(re.compile("[a-z]").search, trainer.get("programs", ())):
            yield f"\nsrun python /x/{program.replace('*', 'x')}.py"
        for command in trainer.get("commands", ()):
            yield f"\nsrun {' '.join(command)} x"
    for launcher in json.loads(LAUNCHERS.read_text("utf-8"))["launchers"].values():
        for command in launcher.get("commands", ()):
            yield f"\nsrun {' '.join(command)} x"


def test_every_trainer_and_launcher_of_the_tables_is_asked_about() -> None:
    words = words_of_the_filter()
    assert [line for line in command_lines() if not any(word in line.lower() for word in words)] == []


def test_programs_that_train_nothing_are_not_asked_about() -> None:
    for line in ("srun ./solver input.dat", "python analyse.py --input a.csv", "mpirun gmx_mpi mdrun"):
        assert not any(word in line for word in words_of_the_filter())
