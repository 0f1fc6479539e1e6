#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
if [[ -z $WORKSPACE ]]; then
    echo "Please set WORKSPACE for storing your model checkpoints."
    exit 1
fi
OPTIONS=" \
    --apply-layernorm-1p \
    --use-checkpoint-args \
    --use-distributed-optimizer \
    --transformer-impl transformer_engine \
    --normalization RMSNorm \
    --group-query-attention \
    --num-query-groups 8 \
    --num-layers 32 \
    --hidden-size 4096 \
    --num-attention-heads 32 \
    --seq-length 576 \
    --decoder-seq-length 1024 \
    --max-position-embeddings 4096 \
    --ffn-hidden-size 14336 \
    --micro-batch-size 32 \
    --global-batch-size 256 \
    --train-iters 20000 \
    --bf16"
torchrun --nproc_per_node 8 examples/multimodal/train.py ${OPTIONS}
