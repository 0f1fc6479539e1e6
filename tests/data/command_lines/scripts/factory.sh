#!/bin/bash
# Facts of hiyouga/LLaMA-Factory examples/full_multi_gpu/multi_node.sh at 035f65718d89 (Apache-2.0)

python -m torch.distributed.run \
    --nproc_per_node $NPROC_PER_NODE \
    --nnodes $NNODES \
    --node_rank $RANK \
    --master_addr $MASTER_ADDR \
    --master_port $MASTER_PORT \
    ../../src/train_bash.py \
    --deepspeed ds_z3_config.json \
    --do_train \
    --model_name_or_path meta-llama/Llama-2-7b-hf \
    --per_device_train_batch_size 1 \
    --learning_rate 5e-5 \
    --fp16
