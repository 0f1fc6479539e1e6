CUDA_VISIBLE_DEVICES=0,1,2,3 NPROC_PER_NODE=4 \
swift rlhf --model Qwen/Qwen2.5-7B-Instruct --dataset texts/preferred \
    --rlhf_type dpo --rpo_alpha 0.1 \
    --deepspeed zero3 --tuner_type full --torch_dtype bfloat16 \
    --max_length 8192 --padding_free true --per_device_train_batch_size 4 \
    --learning_rate 1e-5 --num_train_epochs 1 \
    --output_dir /scratch/preferred
