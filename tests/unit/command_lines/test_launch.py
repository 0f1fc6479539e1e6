"""The training in a command or a script: whatever stands before it is taken off, and what it says is kept."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from llmlaunch.command_lines.command import TrainerCommand
from llmlaunch.command_lines.launch import trainer_command, trainer_commands
from llmlaunch.command_lines.shell import read_script

SCRIPTS = Path(__file__).parents[2] / "data" / "command_lines" / "scripts"
TRAIN = "train.py --lr 1"


def read(line: str, folder: Path = Path("/job")) -> TrainerCommand:
    command = trainer_command(shlex.split(line), folder=folder)
    assert command is not None
    return command


def described(command: TrainerCommand) -> dict[str, object]:
    """A command as the expectations have it."""
    words = " ".join((command.trainer, *command.arguments)).replace(str(SCRIPTS), "HERE")
    return {
        "place": command.place,
        "launcher": command.launcher,
        "nodes": command.nodes,
        "devices_per_node": command.devices_per_node,
        "words": words,
        "unset": {unset.name: unset.line for unset in command.unset},
        "environment": dict(command.environment),
        "files": {path: text for path, text in command.files.items() if str(SCRIPTS) not in path},
    }


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.s*")), ids=lambda path: path.name)
def test_the_trainings_of_public_scripts(path: Path) -> None:
    expected = json.loads((SCRIPTS / "expected.json").read_text())
    script = read_script(path.read_text(), path.name, SCRIPTS)
    assert [described(command) for command in trainer_commands(script)] == expected[path.name]


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "nohup",
        "env -u X A=1",
        "B=1",
        "time -p",
        "numactl --cpunodebind=0 -m 0",
        "nsys profile -o out --trace=cuda,nvtx -t cuda",
        "timeout -k 5 3600",
        "srun -N 2 --ntasks-per-node=1 -l --mpi=pmix --container-image=a.sqsh",
        "srun --kill-on-bad-exit --exclusive -u apptainer exec --nv -B /data:/data image.sif",
        "singularity run --nv image.sif",
        "llmlaunch observe --",
        "python /opt/node.pyz observe --name x --",
        "conda run -n env --no-capture-output",
        "uv run --with x",
        "mpirun -np 16 -x PATH --map-by node -mca btl tcp",
        "exec",
    ],
)
def test_what_stands_before_a_launcher_is_taken_off(prefix: str) -> None:
    command = read(f"{prefix} torchrun --nproc_per_node 8 {TRAIN}")
    assert (command.launcher, command.trainer, command.arguments) == ("torchrun", "train.py", ("--lr", "1"))
    assert command.devices_per_node == 8
    assert command.nodes == 1


@pytest.mark.parametrize(
    ("line", "launcher", "nodes", "devices", "trainer"),
    [
        (f"torchrun --nnodes=1:4 --nproc-per-node=8 --standalone {TRAIN}", "torchrun", 1, 8, "train.py"),
        (f"torchrun --nnodes 4 --nproc_per_node gpu {TRAIN}", "torchrun", 4, None, "train.py"),
        ("torchrun --nproc_per_node 2 -m package.train --lr 1", "torchrun", 1, 2, "package.train"),
        (f"torchrun --no-python --nnodes 2 python -u {TRAIN}", "torchrun", 2, 1, "train.py"),
        (f"python3 -m torch.distributed.launch --use_env --nproc_per_node=4 {TRAIN}", "torchrun", 1, 4, "train.py"),
        (f"deepspeed --num_nodes 2 --num_gpus=4 --no_ssh --hostfile h {TRAIN}", "deepspeed", 2, 4, "train.py"),
        (f"deepspeed -i a:0,1@b:0,1 {TRAIN}", "deepspeed", 2, 2, "train.py"),
        (f"accelerate launch --multi_gpu --num_processes 16 --num_machines=2 {TRAIN}", "accelerate", 2, 8, "train.py"),
        (f"srun -N 4 --ntasks-per-node=8 python -u {TRAIN}", "srun", 4, 8, "train.py"),
        (f"srun -N4 -n32 bash -c 'cd /x && python {TRAIN}'", "srun", 4, 8, "train.py"),
        ("python -m package.train --lr 1", "python", 1, 1, "package.train"),
        ("llamafactory-cli train sft.yaml", "torchrun", 1, None, "llamafactory-cli"),
    ],
)
def test_launchers_say_nodes_and_devices(
    line: str, launcher: str, nodes: int | None, devices: int | None, trainer: str
) -> None:
    command = read(line)
    assert (command.launcher, command.nodes, command.devices_per_node, command.trainer) == (
        launcher, nodes, devices, trainer,
    )  # fmt: skip


@pytest.mark.parametrize(
    "line", ["ls -l", "python tools/preprocess_data.py --input x", "srun hostname", "bash gone.sh"]
)
def test_what_trains_nothing_is_no_training(line: str, tmp_path: Path) -> None:
    assert trainer_command(line.split(), folder=tmp_path) is None


def test_files_beside_the_command_say_sizes(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\n")
    (tmp_path / "accelerate.yaml").write_text("num_machines: 2\nnum_processes: 8\n")
    (tmp_path / "inner.sh").write_text("torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 train.py --lr $1\n")
    hosts = read(f"deepspeed --hostfile hosts {TRAIN}", tmp_path)
    assert (hosts.nodes, hosts.devices_per_node) == (2, 4)
    defaults = read(f"accelerate launch --config_file accelerate.yaml {TRAIN}", tmp_path)
    assert (defaults.nodes, defaults.devices_per_node) == (2, 4)
    inner = read("srun -N 3 bash ./inner.sh 5", tmp_path)
    assert (inner.nodes, inner.devices_per_node, inner.arguments) == (3, 8, ("--lr", "5"))


def test_options_of_a_launcher_have_long_names_with_underscores() -> None:
    command = read(f"deepspeed -H hosts --master-port 1 --no_ssh {TRAIN}")
    assert command.launcher_options == {"hostfile": "hosts", "master_port": "1", "no_ssh": True}
