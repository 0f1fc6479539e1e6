NPROC_PER_NODE=4 \
CUDA_VISIBLE_DEVICES=0,1,2,3 \
swift sft --deepspeed zero2 --torch_dtype bfloat16 \
    --enable_dft_loss true --learning_rate 5e-5 --warmup_ratio 0.1 --num_train_epochs 1 \
    --gradient_accumulation_steps 32 --per_device_train_batch_size 8 --max_length 2048 \
    --dataset texts/sums#100000 --load_from_cache_file true --dataloader_num_workers 4 \
    --tuner_type full --model Qwen/Qwen2.5-Math-1.5B \
    --output_dir /scratch/sums
