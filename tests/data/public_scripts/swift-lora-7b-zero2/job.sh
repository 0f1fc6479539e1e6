cards=2

NPROC_PER_NODE=$cards \
CUDA_VISIBLE_DEVICES=0,1 \
swift sft --deepspeed zero2 \
    --model Qwen/Qwen2.5-7B-Instruct --torch_dtype bfloat16 \
    --tuner_type lora --target_modules all-linear --lora_alpha 32 --lora_rank 8 \
    --dataset 'texts/questions#1000' --system 'Answer in one sentence.' --max_length 2048 \
    --per_device_eval_batch_size 1 --per_device_train_batch_size 1 \
    --gradient_accumulation_steps $(expr 16 / $cards) \
    --learning_rate 1e-4 --warmup_ratio 0.05 --num_train_epochs 1 \
    --output_dir /scratch/zero2 --save_steps 100 --dataloader_num_workers 4
