#!/bin/bash
# Facts of NVIDIA/Megatron-LM examples/gpt3/train_gpt3_175b_distributed.sh at d98e8a64ddf3 (BSD-3-Clause)
GPUS_PER_NODE=8
NUM_NODES=16
CHECKPOINT_PATH=$1 #<Specify path>
DATA_PATH=$2
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr ${MASTER_ADDR:-localhost}
)
MODEL_ARGS=(
    --num-layers 96  # of 175 billion parameters
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
)
MODEL_ARGS+=(--micro-batch-size 1 --global-batch-size 1536 --train-iters 500000 --lr 6.0e-5 --fp16)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 \
    --data-path "$DATA_PATH" --tokenizer-type NullTokenizer --vocab-size 50257 \
    --save $CHECKPOINT_PATH
