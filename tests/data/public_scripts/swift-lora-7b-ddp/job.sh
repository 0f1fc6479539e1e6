cards=2

NPROC_PER_NODE=$cards \
CUDA_VISIBLE_DEVICES=0,1 \
swift sft \
    --gradient_checkpointing_kwargs '{"use_reentrant": false}' \
    --tuner_type lora --target_modules all-linear --lora_alpha 32 --lora_rank 8 \
    --gradient_accumulation_steps $(expr 16 / $cards) --per_device_train_batch_size 1 --max_length 2048 \
    --torch_dtype bfloat16 --learning_rate 1e-4 --num_train_epochs 1 \
    --model Qwen/Qwen2.5-7B-Instruct --dataset 'texts/questions#1000' \
    --output_dir /scratch/copies
