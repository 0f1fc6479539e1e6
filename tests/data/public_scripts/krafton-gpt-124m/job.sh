#!/bin/bash
# 124M: TP=2, PP=1, CP=1 (8 GPUs, DP=4)
#   TP_SIZE=4 bash run.sh
#   CP_SIZE=2 bash run.sh  # turns TE on
set -e

export CUDA_DEVICE_MAX_CONNECTIONS=1
NGPUS=${NGPUS:-8}
MASTER_PORT=${MASTER_PORT:-29500}
TP_SIZE=${TP_SIZE:-2}
PP_SIZE=${PP_SIZE:-1}
CP_SIZE=${CP_SIZE:-1}
USE_TE=${USE_TE:-1}

# CP requires TE
if [ "$CP_SIZE" -gt 1 ]; then
    USE_TE=1
fi

if [ "$USE_TE" = "1" ]; then
    IMPL="transformer_engine"
else
    IMPL="local"
fi

DATA_PATH="data/web10B/train"
CHECKPOINT_DIR="checkpoints/adam"
mkdir -p ${CHECKPOINT_DIR}

echo "TP=${TP_SIZE}, PP=${PP_SIZE}, CP=${CP_SIZE}, DP=$((NGPUS / (TP_SIZE * PP_SIZE * CP_SIZE)))"

torchrun --nproc_per_node=${NGPUS} --master_port=${MASTER_PORT} pretrain_gpt.py \
    --tensor-model-parallel-size ${TP_SIZE} \
    --pipeline-model-parallel-size ${PP_SIZE} \
    --context-parallel-size ${CP_SIZE} \
    --num-layers 12 \
    --hidden-size 768 \
    --num-attention-heads 6 \
    --seq-length 1024 \
    --max-position-embeddings 1024 \
    --micro-batch-size 64 \
    --global-batch-size 512 \
    --train-iters 19531 \
    --lr 0.02 \
    --min-lr 0.0 \
    --lr-warmup-iters 195 \
    --lr-decay-style WSD \
    --lr-wsd-decay-style linear \
    --lr-wsd-decay-iters 3906 \
    --weight-decay 0.01 \
    --clip-grad 1.0 \
    --optimizer adam \
    --adam-beta1 0.9 \
    --adam-beta2 0.95 \
    --adam-eps 1e-8 \
    --use-distributed-optimizer \
    --overlap-grad-reduce \
    --overlap-param-gather \
    --position-embedding-type rope \
    --normalization RMSNorm \
    --norm-epsilon 1e-5 \
    --squared-relu \
    --qk-layernorm \
    --disable-bias-linear \
    --hidden-dropout 0.0 \
    --attention-dropout 0.0 \
    --use-flash-attn \
    --transformer-impl ${IMPL} \
    --data-path ${DATA_PATH} \
    --split 100,0,0 \
    --tokenizer-type HuggingFaceTokenizer \
    --tokenizer-model gpt2 \
    --bf16 \
    --log-interval 10 \
    --eval-interval 250 \
    --eval-iters 0 \
    --save-interval 500 \
    --save ${CHECKPOINT_DIR} \
    --log-timers-to-tensorboard \
    --log-memory-to-tensorboard \
    --no-one-logger \
    "$@"
