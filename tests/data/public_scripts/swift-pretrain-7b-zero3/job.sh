cards=4

CUDA_VISIBLE_DEVICES=0,1,2,3 \
NPROC_PER_NODE=$cards \
swift pt \
    --max_steps 10000 --learning_rate 1e-5 --warmup_ratio 0.05 \
    --dataset texts/web --streaming true --packing true --max_length 8192 \
    --gradient_accumulation_steps $(expr 64 / $cards) \
    --per_device_eval_batch_size 1 --per_device_train_batch_size 1 \
    --dataset_num_proc 8 --dataloader_num_workers 4 \
    --attn_impl flash_attn --torch_dtype bfloat16 --deepspeed zero3 \
    --tuner_type full --model Qwen/Qwen2.5-7B \
    --output_dir /scratch/web --save_only_model true --save_steps 500
