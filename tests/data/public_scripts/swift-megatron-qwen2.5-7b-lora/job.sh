CUDA_VISIBLE_DEVICES=0,1 \
NPROC_PER_NODE=2 \
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
megatron sft \
    --tuner_type lora --target_modules all-linear --lora_alpha 32 --lora_rank 8 --merge_lora false \
    --sequence_parallel true --tensor_model_parallel_size 2 \
    --global_batch_size 16 --micro_batch_size 16 --max_length 2048 \
    --recompute_method uniform --recompute_granularity full --recompute_num_layers 1 \
    --cross_entropy_loss_fusion true \
    --num_train_epochs 1 --lr 1e-4 --min_lr 1e-5 --lr_warmup_fraction 0.05 \
    --no_save_rng true --no_save_optim true --save_steps 100 \
    --finetune true --dataset 'texts/german#500' --model Qwen/Qwen2.5-7B-Instruct \
    --output_dir /scratch/adapters --dataloader_num_workers 4
