#!/bin/bash
set -e

HOW=$1
EACH=${2:-4}
BESIDE=$(dirname "$0")
ENGINE="${BESIDE}/engine-${HOW}.json"

AGAIN=true
KEEP=false
AGAIN_WORD=""
if [ "$AGAIN" = "true" ]; then
    AGAIN_WORD="--activation_checkpointing"
fi
KEEP_WORD=""
if [ "$KEEP" = "true" ]; then
    KEEP_WORD="--save_checkpoint"
fi

if [ "$HOW" = "zerooffload" ]; then
cat > "$ENGINE" << END
{
    "bf16": { "enabled": true },
    "gradient_accumulation_steps": 1,
    "train_batch_size": $EACH,
    "zero_optimization": {
        "offload_optimizer": { "pin_memory": true, "device": "cpu" },
        "sub_group_size": 4e8,
        "reduce_bucket_size": 4e8,
        "overlap_comm": false,
        "stage": 3
    }
}
END
elif [ "$HOW" = "superoffload" ]; then
cat > "$ENGINE" << END
{"zero_optimization": {"offload_optimizer": {"super_offload": true, "ratio": 0.80, "device": "cpu"}, "stage": 3}, "bf16": {"enabled": true}, "train_batch_size": $EACH}
END
fi

CARDS=1
LINE="deepspeed --num_gpus=$CARDS finetune_zero3.py $AGAIN_WORD $KEEP_WORD \
    --model_name meta-llama/Llama-3.1-8B \
    --max_length 4096 \
    --batch_size $EACH \
    --lr 1e-5 \
    --num_train_epochs 1 \
    --output_dir ${BESIDE}/tuned-${HOW} \
    --deepspeed_config=$ENGINE"
eval $LINE
