#!/bin/bash
# WAYS=4 bash job.sh --lr 0.01
set -e

CARDS=${CARDS:-8}
WAYS=${WAYS:-2}
STAGES=${STAGES:-1}
PIECES=${PIECES:-1}
FUSED=${FUSED:-1}
if [ "$PIECES" -gt 1 ]; then
    FUSED=1   # attention over pieces is in the fused layers alone
fi
if [ "$FUSED" = "1" ]; then
    LAYERS="transformer_engine"
else
    LAYERS="local"
fi
export CUDA_DEVICE_MAX_CONNECTIONS=1
echo "$((CARDS / (WAYS * STAGES * PIECES))) copies"

torchrun --master_port=${MASTER_PORT:-29500} --nproc_per_node=${CARDS} pretrain_gpt.py \
    --transformer-impl ${LAYERS} \
    --hidden-size 768 \
    --num-layers 12 \
    --num-attention-heads 6 \
    --qk-layernorm \
    --squared-relu \
    --disable-bias-linear \
    --norm-epsilon 1e-5 \
    --normalization RMSNorm \
    --position-embedding-type rope \
    --max-position-embeddings 1024 \
    --seq-length 1024 \
    --use-flash-attn \
    --attention-dropout 0.0 \
    --hidden-dropout 0.0 \
    --bf16 \
    --train-iters 19531 \
    --global-batch-size 512 \
    --micro-batch-size 64 \
    --context-parallel-size ${PIECES} \
    --pipeline-model-parallel-size ${STAGES} \
    --tensor-model-parallel-size ${WAYS} \
    --overlap-param-gather \
    --overlap-grad-reduce \
    --use-distributed-optimizer \
    --optimizer adam \
    --adam-eps 1e-8 \
    --adam-beta1 0.9 \
    --adam-beta2 0.95 \
    --clip-grad 1.0 \
    --weight-decay 0.01 \
    --lr-decay-style WSD \
    --lr-wsd-decay-style linear \
    --lr-wsd-decay-iters 3906 \
    --lr-warmup-iters 195 \
    --lr 0.02 \
    --min-lr 0.0 \
    --tokenizer-model gpt2 \
    --tokenizer-type HuggingFaceTokenizer \
    --data-path texts/web \
    --split 100,0,0 \
    --eval-iters 0 \
    --eval-interval 250 \
    --save weights \
    --save-interval 500 \
    --no-one-logger \
    "$@"
