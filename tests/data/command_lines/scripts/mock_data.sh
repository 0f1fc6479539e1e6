#!/bin/bash
# Facts of NVIDIA/Megatron-LM examples/llama/train_llama3_8b_h100_fp8.sh at d98e8a64ddf3 (BSD-3-Clause)
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
TOKENIZER_ARG=${1:-"MOCK"}
DTYPE="${2:-bf16}"
PRETRAIN_SCRIPT_PATH="$(dirname "$0")/pretrain_gpt.py"
TRAINING_ARGS=(--micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr 0.00015)
if [[ "$DTYPE" == "fp8" ]]; then
    TRAINING_ARGS+=("--fp8-format hybrid")
else
    TRAINING_ARGS+=(--bf16)
fi
DATA_ARGS=()
if [[ "$TOKENIZER_ARG" == "MOCK" ]] || [[ -z "$TOKENIZER_ARG" ]]; then
    DATA_ARGS+=("--mock-data" "--tokenizer-type NullTokenizer" "--vocab-size 128256")
fi
if [ ! -f "/nowhere/$PRETRAIN_SCRIPT_PATH" ]; then
    echo "no script"; exit 1
fi
torchrun --nproc_per_node 8 --nnodes ${NUM_NODES:-1} --node_rank ${NODE_RANK:-0} "$PRETRAIN_SCRIPT_PATH" \
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length $((8 * 1024)) ${TRAINING_ARGS[@]} ${DATA_ARGS[@]}
