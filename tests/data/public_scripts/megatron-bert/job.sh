#!/bin/bash
cards=8
meet=(--nnodes 1 --nproc_per_node $cards --master_port 29411 --master_addr localhost)
encoder=(
    --max-position-embeddings 512 --seq-length 512
    --num-attention-heads 16 --hidden-size 1024 --num-layers 24
)
torchrun ${meet[@]} pretrain_bert.py --vocab-file $2 --data-path $1 --split 949,50,1 \
    --pipeline-model-parallel-size 1 --tensor-model-parallel-size 8 --global-batch-size 32 --micro-batch-size 4 \
    --fp16 --lr 0.0001 --train-iters 1000000 ${encoder[@]}
