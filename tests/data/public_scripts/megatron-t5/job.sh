#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8
CHECKPOINT_PATH=$1 #<Specify path>
VOCAB_FILE=$2
DATA_PATH=$3
DISTRIBUTED_ARGS="
    --nproc_per_node $GPUS \
    --nnodes 1 \
    --node_rank 0 \
    --master_addr localhost \
    --master_port 29500
"
T5_ARGS="
    --encoder-num-layers 12 \
    --decoder-num-layers 12 \
    --hidden-size 768 \
    --num-attention-heads 12 \
    --kv-channels 64 \
    --ffn-hidden-size 3072 \
    --encoder-seq-length 512 \
    --decoder-seq-length 128 \
    --max-position-embeddings 512 \
    --micro-batch-size 64 \
    --global-batch-size 512 \
    --lr 0.0001 \
    --train-iters 1000000 \
    --bf16 \
    --tensor-model-parallel-size 1 \
    --pipeline-model-parallel-size 1
"
torchrun $DISTRIBUTED_ARGS pretrain_t5.py \
    $T5_ARGS \
    --data-path $DATA_PATH --vocab-file $VOCAB_FILE --tokenizer-type BertWordPieceCase \
    --save $CHECKPOINT_PATH
