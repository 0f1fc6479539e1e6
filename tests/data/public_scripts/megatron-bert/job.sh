#!/bin/bash
GPUS=8
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS --nnodes 1 --master_addr localhost --master_port 6000)
BERT_MODEL_ARGS=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 512
    --max-position-embeddings 512
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_bert.py ${BERT_MODEL_ARGS[@]} --micro-batch-size 4 --global-batch-size 32 \
    --train-iters 1000000 --lr 0.0001 --fp16 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 \
    --data-path $1 --vocab-file $2 --split 949,50,1
