NPROC_PER_NODE=8 \
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
swift sft \
    --deepspeed zero3 --use_liger_kernel true --attn_impl flash_attn \
    --model Qwen/Qwen2.5-32B --tuner_type full --torch_dtype bfloat16 \
    --dataset texts/proofs --streaming true --packing true --dataloader_num_workers 8 \
    --max_steps 2000 --max_length 8192 \
    --gradient_accumulation_steps 2 \
    --per_device_train_batch_size 1 --per_device_eval_batch_size 1 --eval_steps 200 \
    --learning_rate 1e-5 --warmup_ratio 0.05 \
    --output_dir /scratch/qwen-32b --save_steps 200 --save_only_model true
