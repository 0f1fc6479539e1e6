torchrun --master_port=20001 --nproc_per_node=8 fastchat/train/train_mem.py \
    --fsdp_transformer_layer_cls_to_wrap 'LlamaDecoderLayer' --fsdp "full_shard auto_wrap offload" \
    --tf32 True --bf16 True --gradient_checkpointing True \
    --gradient_accumulation_steps 4 --per_device_train_batch_size 4 \
    --model_max_length 2048 --lazy_preprocess True --data_path ~/talks.json \
    --num_train_epochs 3 --weight_decay 0. --learning_rate 2e-5 \
    --model_name_or_path huggyllama/llama-13b --output_dir /scratch/13b
