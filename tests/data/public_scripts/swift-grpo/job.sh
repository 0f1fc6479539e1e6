CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
NPROC_PER_NODE=8 \
swift rlhf \
    --rlhf_type grpo \
    --model Qwen/Qwen2.5-7B-Instruct \
    --use_vllm true \
    --vllm_mode colocate \
    --num_generations 8 \
    --max_completion_length 2048 \
    --per_device_train_batch_size 1 \
    --output_dir output \
    --deepspeed zero3
