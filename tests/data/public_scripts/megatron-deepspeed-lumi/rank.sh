#!/bin/bash
export LOCAL_RANK=$SLURM_LOCALID RANK=$SLURM_PROCID
python -u "$@"
