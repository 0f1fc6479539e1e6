#!/bin/bash

OUT=${1:-"out/eight"}
TEXTS=${2:-"NONE"}     # prefix of the .bin file
WORDS=${3:-"NONE"}     # tokenizer's folder
MAIN="pretrain_gpt.py"
WHOLE=${WHOLE:-1}
LEVEL=${LEVEL:-"optim_grads_params"}
TIMELINE=${TIMELINE:-0}
FROM_UV=${FROM_UV:-1}

if [ ! -f "$MAIN" ]; then
    echo "run it beside $MAIN"
    exit 1
fi
if [ "${FROM_UV}" = 1 ]; then
    START="uv run"
else
    START=""
fi

HOSTS=(
    --nnodes 1
    --nproc_per_node 8
    --node_rank ${NODE_RANK:-0}
    --master_port ${MASTER_PORT:-29500}
    --master_addr ${MASTER_ADDR:-localhost}
)

STEP=(
    --bf16
    --global-batch-size 128
    --micro-batch-size 1
    --train-samples 1953125000
    --lr-warmup-samples 3906252
    --lr-decay-samples 1949218748
    --lr-decay-style cosine
    --lr 0.00015
    --min-lr 0.00001
    --decoupled-lr 5.0e-4
    --decoupled-min-lr 4.5e-5
    --adam-beta1 0.9
    --adam-beta2 0.95
    --weight-decay 0.1
    --clip-grad 1.0
    --empty-unused-memory-level 1
    --cross-entropy-loss-fusion
)
if [ "${WHOLE}" = 1 ]; then
    unset CUDA_DEVICE_MAX_CONNECTIONS
    STEP=(
        --data-parallel-sharding-strategy ${LEVEL}
        --use-megatron-fsdp
        --init-model-with-meta-device
        --calculate-per-token-loss
        --no-gradient-accumulation-fusion
        --ckpt-format fsdp_dtensor
        "${STEP[@]}"
    )
fi
STEP+=(--overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer)

if [ "${TIMELINE}" = 1 ]; then
    WATCH=(nsys profile -x true -f true)
    STEP+=(--profile-ranks 0 --profile)
else
    WATCH=()
fi

LLAMA=(
    --hidden-size 4096
    --num-layers 32
    --num-attention-heads 32
    --kv-channels 128
    --num-query-groups 8
    --group-query-attention
    --ffn-hidden-size 14336
    --swiglu
    --normalization RMSNorm
    --apply-layernorm-1p
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --rotary-base 1000000
    --rotary-percent 1.0
    --position-embedding-type rope
    --max-position-embeddings 8192
    --seq-length 8192
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --attention-backend fused
    --use-mcore-models
    --sequence-parallel
    --context-parallel-size 1
    --tensor-model-parallel-size 1
)

INPUT=()
if [[ -z "$WORDS" ]] || [[ "$TEXTS" == "NONE" ]] || [[ "$WORDS" == "NONE" ]]; then
    INPUT+=(
        "--vocab-size 128256"
        "--tokenizer-type NullTokenizer"
        "--tiktoken-pattern v2"
        "--mock-data"
        "--no-create-attention-mask-in-dataloader"
        "--split '99,1,0'"
        "--num-workers 1"
    )
else
    INPUT+=(
        "--vocab-size 128256"
        "--tokenizer-model $WORDS"
        "--tokenizer-type HuggingFaceTokenizer"
        "--data-path $TEXTS"
    )
fi

$START "${WATCH[@]}" python -m torch.distributed.run ${HOSTS[@]} "$MAIN" ${LLAMA[@]} ${STEP[@]} ${INPUT[@]} \
    --load "$OUT" --save "$OUT" --save-interval 1000 \
    --eval-interval 100 --eval-iters 32
