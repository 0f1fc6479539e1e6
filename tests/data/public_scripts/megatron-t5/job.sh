#!/bin/bash
cards=8
weights=$1 #a folder
pieces=$2
texts=$3
meet="
    --nnodes 1 --node_rank 0 \
    --nproc_per_node $cards \
    --master_port 29411 --master_addr localhost
"
export CUDA_DEVICE_MAX_CONNECTIONS=1
both_halves="
    --decoder-num-layers 12 --decoder-seq-length 128 \
    --encoder-num-layers 12 --encoder-seq-length 512 \
    --max-position-embeddings 512 --ffn-hidden-size 3072 --hidden-size 768 \
    --kv-channels 64 --num-attention-heads 12
"
steps="
    --global-batch-size 512 --micro-batch-size 64 --bf16 \
    --train-iters 1000000 --lr 0.0001 \
    --pipeline-model-parallel-size 1 --tensor-model-parallel-size 1
"
torchrun $meet pretrain_t5.py $both_halves $steps \
    --tokenizer-type BertWordPieceCase --vocab-file $pieces --data-path $texts --save $weights
