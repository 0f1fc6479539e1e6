#!/bin/bash
#SBATCH --gres=gpu:8
#SBATCH --ntasks-per-node=1
#SBATCH --nodes=2
export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
srun bash -c 'NNODES=$SLURM_NNODES NODE_RANK=$SLURM_NODEID MASTER_PORT=29411 FORCE_TORCHRUN=1 llamafactory-cli train whole.yaml'
