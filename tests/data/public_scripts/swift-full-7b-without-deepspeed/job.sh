CUDA_VISIBLE_DEVICES=0 \
swift sft --tuner_type full --torch_dtype bfloat16 \
    --max_length 2048 --gradient_accumulation_steps 16 --per_device_train_batch_size 1 \
    --learning_rate 1e-5 --num_train_epochs 1 \
    --model Qwen/Qwen2.5-7B-Instruct \
    --dataset 'texts/german#500' 'texts/dutch#500' \
    --output_dir /scratch/whole
