#!/bin/bash
words=" --bf16 --lr 1e-4 --train-samples 100000 --global-batch-size 128 --micro-batch-size 2 \
  --num-attention-heads 16 --hidden-size 2048 --num-layers 24 --max-position-embeddings 2048 --seq-length 2048 \
  --retro-add-retriever --retro-project-dir $1"
torchrun --nnodes 1 --nproc_per_node 8 pretrain_retro.py ${words}
