#!/bin/bash
ARGS=" --retro-project-dir $1 --retro-add-retriever --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 \
  --max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 128 --train-samples 100000 --lr 1e-4 --bf16"
torchrun --nproc_per_node 8 --nnodes 1 pretrain_retro.py ${ARGS}
