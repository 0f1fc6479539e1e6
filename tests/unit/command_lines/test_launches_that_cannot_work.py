"""A launch that cannot work is named with its line and its fix, and a launch that works is never refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.command_lines.command import LaunchProblem, TrainerCommand
from llmlaunch.command_lines.launch import trainer_commands
from llmlaunch.command_lines.shell import read_script

HEAD = "$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
RDZV = f"--rdzv_id 1 --rdzv_backend c10d --rdzv_endpoint {HEAD}:29500"
RUN = "torchrun --nnodes 2 --nproc_per_node 8"
JOB = "--nodes=2 --gpus-per-node=8"
TRAIN = "train.py --model_name_or_path m --per_device_train_batch_size 1 --output_dir o"
GPT = "pretrain_gpt.py --num-layers 2 --micro-batch-size 1"


def trainings(options: str, body: str, folder: Path = Path("/nowhere")) -> tuple[TrainerCommand, ...]:
    """Return the trainings of a batch script with these options; without any it is a plain script."""
    head = "#!/bin/bash\n" + "".join(f"#SBATCH {option}\n" for option in options.split())
    return trainer_commands(read_script(f"{head}{body}\n", "job.sbatch", folder))


def problems(options: str, body: str, folder: Path = Path("/nowhere")) -> tuple[LaunchProblem, ...]:
    return trainings(options, body, folder)[-1].launch_problems


BROKEN = {
    "two nodes without srun": (JOB, f"{RUN} {RDZV} {TRAIN}", "no srun before it"),
    "more nodes than the job has": (
        "--nodes=1 --gpus-per-node=8", f"srun {RUN} {RDZV} {TRAIN}", "waits for 2 nodes",
    ),
    "one task on two nodes": (
        JOB, f"srun --ntasks=1 {RUN} {RDZV} {TRAIN}", "srun starts torchrun once",
    ),
    "accelerate on two nodes without srun": (
        JOB,
        f"accelerate launch --num_machines 2 --num_processes 16 --machine_rank 0 --main_process_ip n1 {TRAIN}",
        "accelerate starts on one node",
    ),
    "deepspeed on two nodes without a file of hosts": (
        JOB, f"deepspeed --num_nodes 2 --num_gpus 8 {TRAIN}", "by a file of hosts",
    ),
    "no rendezvous": (
        JOB, f"srun bash -c '{RUN} --node_rank $SLURM_NODEID {TRAIN}'",
        "--master_addr is not given",
    ),
    "MASTER_ADDR exported and not handed on": (
        JOB,
        f"export MASTER_ADDR=$(hostname)\nsrun bash -c '{RUN} --node_rank $SLURM_NODEID "
        f"{TRAIN}'", "--master_addr is not given",
    ),
    "c10d with the address of the static rendezvous": (
        JOB, f"srun {RUN} --rdzv_backend c10d --master_addr n1 {TRAIN}",
        "--rdzv_endpoint is not given",
    ),
    "a rendezvous at each node's own address": (
        JOB, f"srun {RUN} --rdzv_backend=c10d --rdzv_endpoint=localhost:29500 {TRAIN}",
        "--rdzv_endpoint is localhost:29500",
    ),
    "accelerate's main process at each node's own address": (
        JOB,
        "srun bash -c 'accelerate launch --num_machines 2 --num_processes 16 --machine_rank $SLURM_NODEID "
        f"--main_process_ip 127.0.0.1 {TRAIN}'", "--main_process_ip is 127.0.0.1",
    ),
    "each task names its own host": (
        JOB,
        f"srun bash -c 'export MASTER_ADDR=$(hostname); {RUN} --node_rank $SLURM_NODEID "
        f"--master_addr $MASTER_ADDR {TRAIN}'", "each task names its own host",
    ),
    "the host that submitted the job": (
        JOB, f"srun {RUN} --rdzv_backend c10d --rdzv_endpoint $SLURM_SUBMIT_HOST:1 {TRAIN}",
        "the host that submitted the job",
    ),
    "a host that sbatch is to hand on": (
        f"{JOB} --export=ALL,MASTER_ADDR=$(hostname)",
        f"srun {RUN} --rdzv_backend c10d --rdzv_endpoint $MASTER_ADDR:1 {TRAIN}", "the host that submitted the job",
    ),
    "the variables of a command that starts torchrun": (
        JOB, "export MASTER_ADDR=n1 NNODES=2 NODE_RANK=$SLURM_NODEID\nsrun llamafactory-cli train x.yaml",
        "every node gets --node_rank 0",
    ),
    "the batch script expands SLURM_NODEID": (
        JOB, f"srun {RUN} --node_rank $SLURM_NODEID --master_addr n1 {TRAIN}",
        "every node gets --node_rank 0",
    ),
    "double quotes let the batch script expand SLURM_PROCID": (
        JOB, f'srun bash -c "{RUN} --node_rank $SLURM_PROCID --master_addr n1 {TRAIN}"',
        "every node gets --node_rank 0",
    ),
    "no node rank in a static rendezvous": (
        JOB, f"srun {RUN} --master_addr n1 {TRAIN}", "--node_rank is not given",
    ),
    "the batch script expands the machine's rank": (
        JOB,
        "srun accelerate launch --num_machines 2 --num_processes 16 --machine_rank $SLURM_NODEID --main_process_ip n1 "
        f"{TRAIN}", "every node gets --machine_rank 0",
    ),
    "the batch script expands the rank of each task": (
        f"{JOB} --ntasks-per-node=8", f"export RANK=$SLURM_PROCID\nsrun python {GPT}", "every task gets RANK=0",
    ),
    "all ranks of a node on its first GPU": (
        f"{JOB} --ntasks-per-node=8", f"export LOCAL_RANK=$SLURM_LOCALID\nsrun python {GPT}", "gets LOCAL_RANK=0",
    ),
    "more ranks than GPUs": (
        "--nodes=1 --gres=gpu:4", f"torchrun --nproc_per_node 8 {TRAIN}", "where the job has 4 GPUs (--gres=gpu:4)",
    ),
    "more tasks than GPUs": (
        "--nodes=1 --gres=gpu:a100:4 --ntasks-per-node=8", f"srun python {GPT}", "where the job has 4 GPUs",
    ),
    "more ranks than visible GPUs": (
        "", f"CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 4 {TRAIN}", "has 2 GPUs (CUDA_VISIBLE_DEVICES)",
    ),
    "more ranks than GPUs by accelerate": (
        "--nodes=1 --gpus-per-node=4", f"accelerate launch --num_processes 8 {TRAIN}", "where the job has 4 GPUs",
    ),
    "several agents a node": (
        f"{JOB} --ntasks-per-node=8", f"srun {RUN} {RDZV} {TRAIN}", "and 2 can join",
    ),
    "several agents on one node": (
        "--nodes=1 --ntasks-per-node=4 --gres=gpu:4", f"srun torchrun --standalone --nproc_per_node 4 {TRAIN}",
        "and 1 can join",
    ),
    "several times deepspeed": (
        "--nodes=1 --ntasks=8 --gres=gpu:8", f"srun deepspeed --num_gpus 8 {TRAIN}", "deepspeed starts 8 times",
    ),
    "one GPU for each task": (
        "--nodes=2 --ntasks-per-node=1 --gpus-per-task=1", f"srun {RUN} {RDZV} {TRAIN}",
        "--gpus-per-task=1 shows 1 GPU to each task",
    ),
    "one GPU bound to each task": (
        f"{JOB} --ntasks-per-node=1",
        f"srun --gpu-bind=single:1 {RUN} {RDZV} {TRAIN}", "--gpu-bind=single:1 shows 1 GPU",
    ),
    "one visible GPU and ranks that count on": (
        "--nodes=1 --ntasks-per-node=8 --gpus-per-task=1",
        f"srun bash -c 'export LOCAL_RANK=$SLURM_LOCALID RANK=$SLURM_PROCID; python {GPT}'",
        "--gpus-per-task=1 shows 1 GPU to each task, and LOCAL_RANK",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "body", "words"), BROKEN.values(), ids=BROKEN)
def test_a_launch_that_cannot_work_is_named(options: str, body: str, words: str) -> None:
    found = [problem for problem in problems(options, body) if problem.fatal]
    assert any(words in problem.problem for problem in found), found
    line = 2 + len(options.split()) + body.count("\n")
    assert all(problem.line == line and problem.fix for problem in found)


WORKS = {
    "c10d at the first node": (JOB, f"srun {RUN} {RDZV} {TRAIN}"),
    "c10d by a variable": (
        JOB, f"HEAD={HEAD}\nsrun torchrun --nnodes=$SLURM_NNODES --nproc_per_node 8 --rdzv_backend c10d "
        f"--rdzv_endpoint $HEAD:29500 {TRAIN}",
    ),
    "c10d needs no node rank, whatever it is": (
        JOB, f"srun torchrun --nnodes 2 --node_rank $SLURM_NODEID --nproc_per_node 8 {RDZV} {TRAIN}",
    ),
    "static with the rank of each task": (
        JOB, f"export MASTER_ADDR=$(hostname)\nsrun bash -c '{RUN} --node_rank "
        f"$SLURM_PROCID --master_addr $MASTER_ADDR {TRAIN}'",
    ),
    "static with an escaped variable": (
        JOB, f'srun bash -c "{RUN} --node_rank \\$SLURM_NODEID --master_addr n1 {TRAIN}"',
    ),
    "the address that srun was started at": (
        JOB, f"srun bash -c '{RUN} --rdzv_backend=c10d "
        f"--rdzv_endpoint=${{SLURM_LAUNCH_NODE_IPADDR:-localhost}}:15213 {TRAIN}'",
    ),
    "one task on each node in spite of the job's": (
        f"{JOB} --ntasks-per-node=8",
        f"srun --ntasks-per-node=1 {RUN} {RDZV} {TRAIN}",
    ),
    "as many tasks as nodes in spite of the job's": (
        f"{JOB} --ntasks-per-node=8",
        f"srun --ntasks=$SLURM_NNODES {RUN} {RDZV} {TRAIN}",
    ),
    "an agent for each GPU": (
        f"{JOB} --ntasks-per-node=8", f"srun torchrun --nnodes 16 --nproc_per_node 1 {RDZV} {TRAIN}",
    ),
    "torchrun in the batch script of a job with several tasks": (
        "--nodes=1 --ntasks-per-node=8 --gres=gpu:8", f"torchrun --standalone --nproc_per_node 8 {TRAIN}",
    ),
    "a task for each rank": (f"{JOB} --ntasks-per-node=8", f"srun python {GPT}"),
    "a task for each rank, with its rank": (
        f"{JOB} --ntasks-per-node=8", f"srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID python {GPT}'",
    ),
    "one GPU for each rank, which is its first": (
        "--nodes=1 --ntasks-per-node=8 --gpus-per-task=1",
        f"srun bash -c 'export LOCAL_RANK=0 RANK=$SLURM_PROCID; python {GPT}'",
    ),
    "one GPU for each rank, by its own variable": (
        f"{JOB} --ntasks-per-node=8",
        f"srun bash -c 'export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID LOCAL_RANK=0 RANK=$SLURM_PROCID; python {GPT}'",
    ),
    "the variables of a command that starts torchrun": (
        JOB, "export MASTER_ADDR=n1 NNODES=2\nsrun bash -c 'NODE_RANK=$SLURM_NODEID llamafactory-cli train x.yaml'",
    ),
    "a variable that the platform sets for each machine": ("", "NNODES=2 NODE_RANK=0 megatron sft --model m"),
    "the first of two machines, typed by hand": ("", f"{RUN} --node_rank=0 --master_addr=127.0.0.1 {TRAIN}"),
    "torchrun's options in its environment": (
        JOB, "export PET_MASTER_ADDR=n1 PET_NNODES=2 PET_NPROC_PER_NODE=8\n"
        f"srun bash -c 'PET_NODE_RANK=$SLURM_NODEID torchrun --master_port 1 {TRAIN}'",
    ),
    "all GPUs visible to each rank": (
        "--nodes=1 --ntasks-per-node=8 --gpus-per-task=1",
        f"srun --gpu-bind=none bash -c 'export LOCAL_RANK=$SLURM_LOCALID RANK=$SLURM_PROCID; python {GPT}'",
    ),
    "eight GPUs for each task": (
        "--nodes=2 --ntasks-per-node=1 --gpus-per-task=8", f"srun {RUN} {RDZV} {TRAIN}",
    ),
    "ssh to each node": (
        JOB, "for n in $(scontrol show hostnames $SLURM_JOB_NODELIST); do\n"
        f"ssh $n \"{RUN} --node_rank $i --master_addr n1 {TRAIN}\" & done",
    ),
    "pdsh on all nodes": (
        JOB, f"pdsh -w n1,n2 '{RUN} --node_rank $R --master_addr n1 {TRAIN}'",
    ),
    "srun once for each node": (
        JOB, f"for i in 0 1; do\nsrun --nodes=1 --ntasks=1 -w ${{nodes[$i]}} {RUN} "
        f"--node_rank $i --master_addr n1 {TRAIN} &\ndone",
    ),
    "one agent in the batch script and one by srun": (
        JOB, f"srun -N1 -n1 -x n1 {RUN} {RDZV} {TRAIN} &\n"
        f"{RUN} {RDZV} {TRAIN}",
    ),
    "a loop over nodes whose names only the run knows": (
        JOB, f"for node in $(scontrol show hostnames $SLURM_JOB_NODELIST); do srun -N1 -n1 -w $node {RUN} {RDZV} "
        f"{TRAIN} &\ndone",
    ),
    "a script that is run by hand on each node": (
        "", f"{RUN} --node_rank ${{NODE_RANK:-0}} --master_addr n1 {TRAIN}",
    ),
    "options that are not known": (JOB, f"srun torchrun $DISTRIBUTED_ARGS {TRAIN}"),
    "a number of nodes that is not known": (JOB, f"torchrun --nnodes $N --nproc_per_node 8 {TRAIN}"),
    "deepspeed with a file of hosts": (JOB, f"deepspeed --hostfile hosts --num_nodes 2 --num_gpus 8 {TRAIN}"),
    "accelerate with the rank of each task": (
        JOB, "srun bash -c 'accelerate launch --num_machines 2 --num_processes 16 --machine_rank $SLURM_PROCID "
        f"--main_process_ip n1 {TRAIN}'",
    ),
    "accelerate that reaches the nodes by DeepSpeed": (
        JOB, "accelerate launch --use_deepspeed --num_machines 2 --num_processes 16 --deepspeed_hostfile hosts "
        f"--main_process_ip n1 --machine_rank 0 {TRAIN}",
    ),
    "accelerate whose file is not here": (
        JOB, f"accelerate launch --config_file gone.yaml --num_machines 2 --num_processes 16 {TRAIN}",
    ),
    "mpirun on all nodes": (JOB, f"mpirun -np 16 --map-by ppr:8:node python {GPT}"),
    "a job that says nothing of its GPUs": ("--nodes=1 --exclusive", f"torchrun --nproc_per_node 8 {TRAIN}"),
    "GPUs in all": ("--nodes=2 --gpus=16", f"srun {RUN} {RDZV} {TRAIN}"),
    "one process for each GPU by the plugin": (
        "--nodes=2 --ntasks-per-gpu=1 --gpus=16", f"srun python {GPT}",
    ),
    "a task of each node that starts the launcher": (
        f"{JOB} --ntasks-per-node=8", f"srun bash -c 'if [ $SLURM_LOCALID = 0 ]; then {RUN} {RDZV} {TRAIN}; fi'",
    ),
    "a node rank that a branch decides": (
        JOB, f"srun bash -c 'R=1; [ $SLURM_NODEID = 0 ] && R=0; {RUN} --node_rank 0 --master_addr n1 {TRAIN}'",
    ),
    "a part of the training in a script that is not here": (
        JOB, f"srun -N1 -w n2 bash worker.sh &\n{RUN} --node_rank 0 --master_addr n1 {TRAIN}",
    ),
    "a part of the training in a script of another host": (
        JOB, f"ssh n2 bash worker.sh &\n{RUN} --node_rank 0 --master_addr n1 {TRAIN}",
    ),
    "a range of nodes": ("--nodes=2-4 --gpus-per-node=8", f"srun {RUN} {RDZV} {TRAIN}"),
    "GPUs of an open number of nodes": ("--gpus=16 --ntasks=2", f"srun {RUN} {RDZV} {TRAIN}"),
    "one node": ("--nodes=1 --gpus-per-node=8", f"torchrun --nproc_per_node 8 {TRAIN}"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "body"), WORKS.values(), ids=WORKS)
def test_a_launch_that_works_is_never_refused(options: str, body: str) -> None:
    for training in trainings(options, body):
        assert training.launch_problems == ()


WARNED = {
    "fewer nodes than the job has": (
        "--nodes=4 --gpus-per-node=8", f"srun {RUN} {RDZV} {TRAIN}",
        "2 of 4 nodes stay idle, and what srun starts there exits 1 at the end, so SLURM calls the job failed", 2,
    ),
    "only some nodes of the job are used": (
        "--nodes=4 --gpus-per-node=8", f"srun -N 2 {RUN} {RDZV} {TRAIN}",
        "2 of 4 nodes stay idle", 2,
    ),
    "deepspeed without a file of hosts": (JOB, f"deepspeed {TRAIN}", "1 of 2 nodes stay idle", 1),
    "each node trains by itself": (
        JOB, f"srun torchrun --nproc_per_node 8 {TRAIN}",
        "each of 2 nodes trains by itself: torchrun waits for one node", 1,
    ),
    "fewer ranks than GPUs": (
        "--nodes=1 --gres=gpu:8", f"torchrun --nproc_per_node 4 {TRAIN}",
        "4 of 8 GPUs of a node stay idle: 4 ranks start there", 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "body", "problem", "nodes"), WARNED.values(), ids=WARNED)
def test_what_stays_idle_is_a_warning(options: str, body: str, problem: str, nodes: int) -> None:
    training = trainings(options, body)[-1]
    assert [(each.problem, each.fatal) for each in training.launch_problems] == [(problem, False)]
    assert training.nodes == nodes
