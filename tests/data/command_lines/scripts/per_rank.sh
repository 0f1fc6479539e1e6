#!/bin/bash
# Facts of microsoft/Megatron-DeepSpeed examples/pretrain_gpt3_175B.sh at 4efb479d5317 (MIT)
#SBATCH --nodes=128 --exclusive --ntasks-per-node=8 --job-name=megatron_gpt3_175b
DIR=`pwd`
DATETIME=`date +'date_%y-%m-%d_time_%H-%M-%S'`
mkdir -p $DIR/logs
options=" \
	--tensor-model-parallel-size 8 \
	--num-layers 96 \
        --micro-batch-size 1 \
	--fp16 "
run_cmd="python -u ${DIR}/pretrain_gpt.py $@ ${options}"
srun -l \
     --container-image "nvcr.io/nvidia/pytorch:20.12-py3" \
     --container-mounts "/data:/data" \
     --output=$DIR/logs/%x_%j_$DATETIME.log sh -c "${run_cmd}"
set +x
