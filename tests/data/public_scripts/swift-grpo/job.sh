NPROC_PER_NODE=8 \
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
swift rlhf --model Qwen/Qwen2.5-7B-Instruct --deepspeed zero3 \
    --rlhf_type grpo --num_generations 8 --max_completion_length 2048 \
    --vllm_mode colocate --use_vllm true \
    --per_device_train_batch_size 1 \
    --output_dir /scratch/sampled
