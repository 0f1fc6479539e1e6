NPROC_PER_NODE=8 \
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
megatron sft \
    --sequence_parallel true --tensor_model_parallel_size 4 --recompute_granularity selective \
    --dataset texts/proofs --packing true --max_length 8192 \
    --global_batch_size 16 --micro_batch_size 1 --train_iters 2000 --eval_iters 50 --eval_steps 500 \
    --attention_backend flash --cross_entropy_loss_fusion true \
    --lr 1e-5 --lr_warmup_fraction 0.05 --min_lr 1e-6 \
    --dataloader_num_workers 8 --dataset_num_proc 8 \
    --model Qwen/Qwen2.5-14B --finetune true --no_save_rng true --no_save_optim true \
    --output_dir /scratch/chat --save_steps 500
