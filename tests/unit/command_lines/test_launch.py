"""The training in a command or a script: whatever stands before it is taken off, and what it says is kept."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from llmlaunch.command_lines.command import ScriptContainer, TrainerCommand
from llmlaunch.command_lines.launch import assumptions, on_devices, trainer_command, trainer_commands
from llmlaunch.command_lines.shell import read_script
from llmlaunch.errors import UserError

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
        "place": command.place, "launcher": command.launcher, "nodes": command.nodes,
        "devices_per_node": command.devices_per_node, "words": words,
        "unset": {unset.name: unset.line for unset in command.unset}, "environment": dict(command.environment),
        "files": {path: text for path, text in command.files.items() if str(SCRIPTS) not in path},
    }  # fmt: skip


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.s*")), ids=lambda path: path.name)
def test_the_trainings_of_public_scripts(path: Path) -> None:
    expected = json.loads((SCRIPTS / "expected.json").read_text())
    script = read_script(path.read_text(), path.name, SCRIPTS)
    assert [described(command) for command in trainer_commands(script)] == expected[path.name]


@pytest.mark.parametrize(
    "prefix",
    [
        "", "env -u X A=1", "B=1", "numactl --cpunodebind=0 -m 0", "nsys profile -o out --trace=cuda,nvtx -t cuda",
        "timeout -k 5 3600",
        "srun -N 2 --ntasks-per-node=1 -l --mpi=pmix --container-image=a.sqsh",
        "srun --kill-on-bad-exit --exclusive -u apptainer exec --nv -B /data:/data image.sif",
        "llmlaunch observe --", "python /opt/node.pyz observe --name x --", "uv run --with x",
        "mpirun -np 16 -x PATH --map-by node -mca btl tcp", "exec",
    ],
)  # fmt: skip
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


def test_a_loop_that_writes_a_file_of_hosts_writes_all_nodes_of_the_job(tmp_path: Path) -> None:
    loop = 'for h in $(scontrol show hostnames $SLURM_JOB_NODELIST); do echo "$h slots=4" >> hosts.$SLURM_JOB_ID; done'
    text = f"#!/bin/bash\n#SBATCH -N 3\n{loop}\ndeepspeed --hostfile hosts.$SLURM_JOB_ID {TRAIN}\n"
    (training,) = trainer_commands(read_script(text, "job.sbatch", tmp_path))
    assert (training.nodes, training.devices_per_node, training.launch_problems) == (3, 4, ())


def test_options_of_a_launcher_have_long_names_with_underscores() -> None:
    command = read(f"deepspeed -H hosts --master-port 1 --no_ssh {TRAIN}")
    assert command.launcher_options == {"hostfile": "hosts", "master_port": "1", "no_ssh": True}


@pytest.mark.parametrize(
    ("prefix", "container"),
    [
        ("srun --container-image=a.sqsh --container-mounts=/a:/a,/b:/c:ro", ("a.sqsh", ("/a:/a", "/b:/c:ro"), "pyxis")),
        ("srun apptainer exec --nv -B /a -B /b:/c,/d --env X=1 i.sif", ("i.sif", ("/a", "/b:/c", "/d"), "apptainer")),
        ("SINGULARITY_BIND=/a,/b:/c singularity run i.sif", ("i.sif", ("/a", "/b:/c"), "singularity")),
        ("apptainer exec --mount type=bind,source=/a,target=/b i.sif", ("i.sif", ("/a:/b",), "apptainer")),
        ("docker run --rm -it --gpus all --shm-size 1g -v /a:/a --mount type=bind,src=/x,dst=/y i:1",
         ("i:1", ("/a:/a", "/x:/y"), "docker")),
        ("podman run --device nvidia.com/gpu=all --security-opt=label=disable -e A=1 i:1", ("i:1", (), "docker")),
        ("enroot start --rw -m /a:/b -e A=1 i", ("i", ("/a:/b",), "enroot")),
    ],
)  # fmt: skip
def test_the_container_of_a_training_is_kept(prefix: str, container: tuple[str, tuple[str, ...], str]) -> None:
    command = read(f"{prefix} torchrun --nproc_per_node 8 {TRAIN}")
    assert command.container == ScriptContainer(*container)
    assert (command.trainer, command.devices_per_node) == ("train.py", 8)


def test_the_container_of_a_job_is_that_of_its_sbatch_options() -> None:
    text = f"#!/bin/bash\n#SBATCH --container-image=a.sqsh\nsrun torchrun --nproc_per_node 8 {TRAIN}\n"
    (command,) = trainer_commands(read_script(text, "job.sh", Path("/job")))
    assert command.container == ScriptContainer("a.sqsh", (), "pyxis")


@pytest.mark.parametrize(
    ("line", "launcher", "trainer"),
    [
        ("./launch_gone.sh pretrain_gpt.py --num-layers 2", "other", "pretrain_gpt.py"),
        ("srun ./bind.sh python -u pretrain_gpt.py --num-layers 2", "other", "pretrain_gpt.py"),
        ("srun ./gone.sh torchrun --nproc_per_node 8 train.py --lr 1", "torchrun", "train.py"),
        ("unheard_of --gpus 8 -x y train.py --per_device_train_batch_size 1", "other", "train.py"),
        ("python wrap.py --nodes 2 -- accelerate launch --num_processes 8 sft.py --lr 1", "accelerate", "sft.py"),
        ("torchrun --nproc_per_node 8 numa.py train.py --lr 1", "torchrun", "train.py"),
        ("torchrun --no_python --nproc_per_node 8 ./bind.sh python train.py --lr 1", "torchrun", "train.py"),
        ("ray job submit --address x -- python train.py --lr 1", "other", "train.py"),
        ("pdsh -w n[1-2] 'cd /x && torchrun --nproc_per_node 8 train.py --lr 1'", "torchrun", "train.py"),
        ("mpirun -np 16 --weird 5 python pretrain_gpt.py --num-layers 2", "mpirun", "pretrain_gpt.py"),
        ("python train.py --strategy deepspeed --lr 1", "python", "train.py"),
        ("accelerate launch --num_processes 8 train.py --backend torchrun --lr 1", "accelerate", "train.py"),
        ("torchrun $ARGS train.py --lr 1", "torchrun", "train.py"),
        ("python src/train.py --config sft.yaml", "python", "src/train.py"),
        ("aprun -n 16 -N 8 python train.py --lr 1", "mpirun", "train.py"),
    ],
)
def test_the_trainer_is_found_behind_what_is_not_known(line: str, launcher: str, trainer: str, tmp_path: Path) -> None:
    text = f"#!/bin/bash\n{line}\n"
    (command,) = trainer_commands(read_script(text, "job.sh", tmp_path))
    assert (command.launcher, command.trainer) == (launcher, trainer)


def test_a_script_that_only_hands_its_arguments_on_is_a_wrapper(tmp_path: Path) -> None:
    (tmp_path / "bind.sh").write_text('export LOCAL_RANK=$SLURM_LOCALID\nexec "$@"\n')
    command = read("srun -N 2 --ntasks-per-node=4 ./bind.sh python train.py --lr 1", tmp_path)
    assert (command.launcher, command.trainer, command.nodes, command.devices_per_node) == ("srun", "train.py", 2, 4)


@pytest.mark.parametrize(
    "line",
    [
        "pip install deepspeed transformers", "pkill -9 -f pretrain_gpt.py", "cp train.py /tmp/train.py",
        "which torchrun", "git clone https://x/train.py", "python setup.py install",
        "python train_tokenizer.py --config x.yaml", "pip install -e . --lr",
    ],
)  # fmt: skip
def test_a_program_that_only_names_a_launcher_or_a_trainer_is_no_training(line: str) -> None:
    assert trainer_command(shlex.split(line)) is None


@pytest.mark.parametrize(
    ("line", "nodes", "devices"),
    [
        ("mpirun -np 16 python train.py --lr 1", 2, 8),
        ("mpirun -np 4 python train.py --lr 1", 1, 4),
        ("mpiexec.hydra -n 16 -ppn 4 -genv A 1 python train.py --lr 1", 4, 4),
        ("mpirun --map-by ppr:8:node -np 32 -x A=1 -mca pml ucx python train.py --lr 1", 4, 8),
        ("srun -n 16 python train.py --lr 1", 2, 8),
        ("deepspeed train.py --lr 1", 1, 8),
        ("torchrun --nproc_per_node gpu train.py --lr 1", 1, 8),
        ("accelerate launch train.py --lr 1", 1, 8),
        ("CUDA_VISIBLE_DEVICES=0,1 deepspeed train.py --lr 1", 1, 2),
        ("torchrun --nproc_per_node 4 train.py --lr 1", 1, 4),
        ("python train.py --lr 1", 1, 1),
        ("./gone.sh train.py --lr 1", 1, 8),
        ("srun -N 2 --ntasks-per-node=1 ./gone.sh train.py --lr 1", 2, 8),
        ("srun -N 2 --ntasks-per-node=8 ./gone.sh train.py --lr 1", 2, 8),
        ("swift sft --model m", 1, 1),
        ("python mason.py --num_nodes 4 --gpus 8 -- accelerate launch --num_processes 8 train.py --lr 1", 4, 8),
        ("python wrap.py --num_nodes 4 -- accelerate launch --num_processes 8 train.py --lr 1", 1, 8),
        ("NPROC_PER_NODE=4 swift sft --model m", 1, 4),
        ("NNODES=2 NPROC_PER_NODE=8 megatron sft --model m", 2, 8),
        ("llamafactory-cli train x.yaml", 1, 8),
        ("axolotl train x.yaml", 1, 8),
        ("srun -N 2 --ntasks-per-node=8 torchrun --nnodes 16 --nproc_per_node 1 --rdzv_id 1 train.py --lr 1", 2, 8),
    ],
)  # fmt: skip
def test_the_cluster_says_what_the_script_does_not(line: str, nodes: int, devices: int) -> None:
    command = on_devices(read(line), 8)
    assert (command.nodes, command.devices_per_node) == (nodes, devices)


def test_a_job_without_a_number_of_nodes_has_one_and_that_is_said() -> None:
    text = f"#!/bin/bash\n#SBATCH --gres=gpu:8\nsrun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 {TRAIN}\n"
    (command,) = trainer_commands(read_script(text, "job.sh", Path("/job")))
    assert command.nodes == 1
    assert assumptions(command) == (
        "job.sh:3: the job does not say how many nodes it has, which is one for sbatch; --nodes says it",
    )


def test_a_script_that_submits_another_is_read_with_its_options(tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text(
        f"#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gres=gpu:8\nsrun torchrun --nnodes $N --nproc_per_node 8 {TRAIN}\n"
    )
    text = "export N=4\nsbatch --nodes=4 --partition=big job.sbatch\n"
    (command,) = trainer_commands(read_script(text, "submit.sh", tmp_path))
    assert (command.nodes, command.devices_per_node, command.slurm["partition"]) == (4, 8, "big")


def test_an_environment_that_a_command_runs_in_becomes_setup_lines() -> None:
    command = read(f"conda run -n env --no-capture-output python {TRAIN}")
    assert command.setup == ('eval "$(conda shell.bash hook)"', "conda activate env")


def test_a_number_of_ranks_that_is_a_variable_is_asked_for() -> None:
    (command,) = trainer_commands(read_script(f"mpirun -np $NP python {TRAIN}\n", "job.sh", Path("/job")))
    assert (command.nodes, [variable.name for variable in command.unset]) == (None, ["NP"])


def test_options_of_sbatch_with_a_command_in_quotes_are_those_of_the_job() -> None:
    command = read('sbatch -N 2 --gpus-per-node=8 --wrap "srun torchrun --nproc_per_node 8 train.py --lr 1"')
    assert command.slurm == {"nodes": 2, "gpus-per-node": "8"}


def test_jobs_that_a_script_submits_share_its_budget(tmp_path: Path) -> None:
    text = "for i in {1..20}; do sbatch --wrap 'for j in {1..2000}; do :; done'; done"
    with pytest.raises(UserError, match="takes more than 20,000 commands to read"):
        trainer_commands(read_script(text, "train.sh", tmp_path))
