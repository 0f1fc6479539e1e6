CUDA_VISIBLE_DEVICES=0 \
swift sft \
    --torch_dtype bfloat16 --max_length 2048 \
    --gradient_accumulation_steps 16 --per_device_train_batch_size 1 --per_device_eval_batch_size 1 \
    --lora_rank 8 --lora_alpha 32 --target_modules all-linear --tuner_type lora \
    --dataset 'texts/german#500' \
              'texts/dutch#500' \
    --system 'Answer in one sentence.' --model_name parrot --model_author them \
    --num_train_epochs 1 --warmup_ratio 0.05 --learning_rate 1e-4 \
    --output_dir /scratch/parrot --logging_steps 5 --save_total_limit 2 --save_steps 100 --eval_steps 100 \
    --model Qwen/Qwen2.5-7B-Instruct
