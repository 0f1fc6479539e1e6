NPROC_PER_NODE=8 \
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
megatron sft \
    --recompute_num_layers 1 --recompute_granularity full --recompute_method uniform \
    --dataset texts/proofs --load_from_cache_file true --split_dataset_ratio 0.01 --dataloader_num_workers 8 \
    --max_length 8192 --packing true --global_batch_size 16 --micro_batch_size 1 \
    --tensor_model_parallel_size 8 --sequence_parallel true \
    --lr_warmup_fraction 0.05 --min_lr 1e-6 --lr 1e-5 --num_train_epochs 5 \
    --attention_backend flash --cross_entropy_loss_fusion true \
    --output_dir /scratch/qwen3-32b --save_safetensors true --save_steps 500 --no_save_optim true --no_save_rng true \
    --model Qwen/Qwen3-32B --finetune true
