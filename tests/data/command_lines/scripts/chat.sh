#!/bin/bash
# Facts of deepspeedai/DeepSpeedExamples applications/DeepSpeed-Chat/training/step1_supervised_finetuning/
# training_scripts/llama2/run_llama2_7b_lora.sh at 3b8976c89afb (Apache-2.0)
OUTPUT=$1
ZERO_STAGE=$2
if [ "$OUTPUT" == "" ]; then
    OUTPUT=./output
fi
if [ "$ZERO_STAGE" == "" ]; then
    ZERO_STAGE=3
fi
CUDA_VISIBLE_DEVICES=0 deepspeed --master_port=29600 --num_gpus 1 main.py \
    --offload_optimizer_device nvme \
    --model_name_or_path meta-llama/Llama-2-7b-hf \
    --per_device_train_batch_size 4 \
    --zero_stage $ZERO_STAGE \
    --lora_module_name "layers." \
    --output_dir $OUTPUT \
   &> $OUTPUT/training.log
