# four A100: 42 GB with both
NPROC_PER_NODE=4 \
CUDA_VISIBLE_DEVICES=0,1,2,3 \
swift sft \
    --model Qwen/Qwen2.5-7B \
    --tuner_type full \
    --dataset 'our/reasoning#10000' \
    --load_from_cache_file true \
    --torch_dtype bfloat16 \
    --per_device_train_batch_size 1 \
    --learning_rate 1e-5 \
    --num_train_epochs 5 \
    --gradient_accumulation_steps 2 \
    --max_length 8192 \
    --warmup_ratio 0.05 \
    --dataloader_num_workers 8 \
    --save_only_model true \
    --output_dir output \
    --deepspeed zero3 \
    --attn_impl flash_attn \
    --packing true \
    --use_liger_kernel true
