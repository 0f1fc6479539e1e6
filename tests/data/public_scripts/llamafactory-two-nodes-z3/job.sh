#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
srun bash -c 'FORCE_TORCHRUN=1 NNODES=$SLURM_NNODES NODE_RANK=$SLURM_NODEID MASTER_PORT=29500 llamafactory-cli train cfg.yaml'
