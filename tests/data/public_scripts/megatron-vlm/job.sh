#!/bin/bash
if [[ -z $PLACE ]]; then echo "no PLACE"; exit 1; fi
export CUDA_DEVICE_MAX_CONNECTIONS=1
words=" \
    --bf16 --train-iters 20000 --global-batch-size 256 --micro-batch-size 32 \
    --seq-length 576 --decoder-seq-length 1024 --max-position-embeddings 4096 \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \
    --num-attention-heads 32 --num-query-groups 8 --group-query-attention \
    --normalization RMSNorm --apply-layernorm-1p --transformer-impl transformer_engine \
    --use-distributed-optimizer --use-checkpoint-args"
torchrun --nproc_per_node 8 examples/multimodal/train.py ${words}
