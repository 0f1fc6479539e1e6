#!/bin/bash

WHICH="small" # "large" on two machines

case "${WHICH}" in
    "large")
        LAYERS="M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-"
        WIDTH=4096
        ATTENTION=32
        WAYS=4
        BATCH=8
        ;;
    "small")
        LAYERS="M-M-M--M-*M-M-M-M--*M-M-M-M-*M--M-M-M-*M-M--M-M-"
        WIDTH=1024
        ATTENTION=16
        WAYS=1
        BATCH=32
        ;;
    *)
        echo "small or large, not ${WHICH}"
        exit 1
        ;;
esac

TEXTS=$1
WORDS=$2 # no one asks for it
WINDOW=4096
SAVED="./weights"
mkdir -p ${SAVED}

export CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_IB_SL=1
export TRITON_CACHE_DIR="./triton/"
export TRITON_CACHE_MANAGER="megatron.core.ssm.triton_cache_manager:ParallelFileCacheManager"

all=" \
    --use-mcore-models \
    --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec \
    --hybrid-layer-pattern ${LAYERS} \
    --hidden-size ${WIDTH} \
    --num-attention-heads ${ATTENTION} \
    --num-query-groups 8 \
    --group-query-attention \
    --position-embedding-type none \
    --max-position-embeddings ${WINDOW} \
    --seq-length ${WINDOW} \
    --normalization RMSNorm \
    --disable-bias-linear \
    --untie-embeddings-and-output-weights \
    --hidden-dropout 0.0 \
    --attention-dropout 0.0 \
    --bf16 \
    --global-batch-size ${BATCH} \
    --micro-batch-size 4 \
    --train-samples 73242188 \
    --lr-decay-samples 73192188 \
    --lr-warmup-samples 50000 \
    --lr-decay-style cosine \
    --lr 2.5e-4 \
    --min-lr 2.5e-5 \
    --adam-beta1 0.9 \
    --adam-beta2 0.95 \
    --clip-grad 1.0 \
    --weight-decay 0.1 \
    --pipeline-model-parallel-size 1 \
    --tensor-model-parallel-size ${WAYS} \
    --sequence-parallel \
    --overlap-grad-reduce \
    --overlap-param-gather \
    --use-distributed-optimizer \
    --vocab-size 255999 \
    --tokenizer-type NullTokenizer \
    --no-create-attention-mask-in-dataloader \
    --split 99,1,0 \
    --data-path ${TEXTS} \
    --eval-iters 32 \
    --eval-interval 2000 \
    --save-interval 2000 \
    --load ${SAVED} \
    --save ${SAVED}"

torchrun --nproc_per_node 8 ../../pretrain_hybrid.py ${all}
