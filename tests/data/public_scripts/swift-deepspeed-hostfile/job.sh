# to use a part of the GPUs of every node, try:
# --include="worker-0:0,1@worker-1:2,3"
deepspeed --hostfile=host.txt \
    swift/cli/sft.py \
    --model Qwen/Qwen2.5-7B-Instruct \
    --tuner_type lora \
    --torch_dtype bfloat16 \
    --dataset 'our/self#1000' \
    --num_train_epochs 1 \
    --lora_rank 8 \
    --lora_alpha 32 \
    --per_device_train_batch_size 2 \
    --max_length 4096 \
    --learning_rate 1e-4 \
    --gradient_accumulation_steps 16 \
    --eval_steps 100 \
    --save_steps 100 \
    --deepspeed zero2
