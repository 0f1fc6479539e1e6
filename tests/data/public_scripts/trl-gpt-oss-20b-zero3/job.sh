pip install --upgrade kernels
accelerate launch --config_file zero3.yaml examples/scripts/sft_gpt_oss.py \
    --attn_implementation kernels-community/vllm-flash-attn3 --dtype bfloat16 \
    --max_length 4096 --packing --per_device_train_batch_size 2 \
    --lr_scheduler_kwargs '{"min_lr_rate": 0.1}' --lr_scheduler_type cosine_with_min_lr --warmup_steps 0.03 \
    --seed 42 --num_train_epochs 1 --logging_steps 1 --report_to trackio --run_name thoughts \
    --dataset_name texts/thoughts --dataset_num_proc 12 \
    --model_name_or_path openai/gpt-oss-20b --output_dir /scratch/thoughts
