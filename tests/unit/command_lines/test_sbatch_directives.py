"""Options of sbatch and srun are read as SLURM's own parsers read them."""

from __future__ import annotations

import pytest

from llmlaunch.command_lines.sbatch import sbatch_options, srun_options


def options_of(text: str) -> dict[str, str | int | bool]:
    return sbatch_options(text, lambda: None)[0]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("#SBATCH --err=x --gpus-per-n 8 --job=y", {"error": "x", "gpus-per-node": "8", "job-name": "y"}),
        ("#SBATCH --mem=4G --nodes 2 --time 1:00", {"mem": "4G", "nodes": 2, "time": "1:00"}),  # exact names win
        ("#SBATCH --mem-per=1", {"mem-per": "1"}),  # short for two options
        ("#SBATCH --wait --hold -N 2", {"wait": True, "hold": True, "nodes": 2}),
        ("#SBATCH -vHN2 -n4 -pgpu -J=name", {"verbose": True, "hold": True, "nodes": 2, "ntasks": 4, "partition": "gpu",
                                             "job-name": "name"}),
        ('#SBATCH --comment="a b"\'c d\'\\ e -J $NAME', {"comment": "a bc d e", "job-name": "$NAME"}),
        ("#SBATCH -N 2 # -n 4\n#SBATCH -p a#b", {"nodes": 2, "partition": "a"}),
        ("#SBATCH --comment\n#SBATCH --exclusive", {"comment": "--exclusive"}),  # one command line
        ("\n  # a comment\n#SBATCH -N 2\n\t\n#SBATCH -n 4\necho\n#SBATCH -p late", {"nodes": 2, "ntasks": 4}),
        ("#SBATCH -N 2\r\n#SBATCH -n 4\r\n", {"nodes": 2, "ntasks": 4}),
        ("#SBATCH -N 2 tasks -n 4", {"nodes": 2, "ntasks": 4}),
        ("#SBATCH -N 2\n#SBATCH hetjob\n#SBATCH -N 4", {"nodes": 2}),  # of the first component
        ("##SBATCH -N 2\n #SBATCH -n 4\n#sbatch -p x", {}),
    ],
)  # fmt: skip
def test_directives(text: str, options: dict[str, str | int | bool]) -> None:
    assert options_of(text) == options


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("--wait 60", {"wait": "60"}),
        ("--wait=60", {"wait": "60"}),
        ("-W 60", {"wait": "60"}),
        ("-K --kill-on-bad-exit=1", {"kill-on-bad-exit": "1"}),
        ("-K0 -lu", {"kill-on-bad-exit": "0", "label": True, "unbuffered": True}),
        ("--cpu-bind none --mpi pmix", {"cpu-bind": "none", "mpi": "pmix"}),
        ("--container-im x --container-mount-home", {"container-image": "x", "container-mount-home": True}),
        ("--exact --overlap --pty", {"exact": True, "overlap": True, "pty": True}),
        ("--unbuf --lab", {"unbuffered": True, "label": True}),
        ("-N $NODES --", {"nodes": "$NODES"}),
        ("--treewidth 4 --het-group=0 -r 1 -X -E", {"treewidth": "4", "het-group": "0", "relative": "1",
                                                    "disable-status": True, "preserve-env": True}),
    ],
)  # fmt: skip
def test_options_of_srun_leave_the_program(words: str, options: dict[str, str | int | bool]) -> None:
    assert srun_options([*words.split(), "python", "-u", "train.py"]) == (options, ["python", "-u", "train.py"])
