#!/bin/bash
# one process of the job, inside the container
export RANK=$SLURM_PROCID
export LOCAL_RANK=$SLURM_LOCALID
export ROCR_VISIBLE_DEVICES=$SLURM_LOCALID
python3 -u "$@"
