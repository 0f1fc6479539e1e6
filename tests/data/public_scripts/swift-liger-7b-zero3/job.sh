CUDA_VISIBLE_DEVICES=0,1,2,3 \
NPROC_PER_NODE=4 \
swift sft \
    --use_liger_kernel true --packing true --attn_impl flash_attn \
    --max_length 8192 --gradient_accumulation_steps 2 --per_device_train_batch_size 1 \
    --model Qwen/Qwen2.5-7B --tuner_type full --torch_dtype bfloat16 --deepspeed zero3 \
    --dataset 'texts/proofs#10000' --load_from_cache_file true --dataloader_num_workers 8 \
    --num_train_epochs 5 --learning_rate 1e-5 --warmup_ratio 0.05 \
    --save_only_model true --output_dir /scratch/fused
