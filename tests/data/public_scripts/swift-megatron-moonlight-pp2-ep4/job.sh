CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
NPROC_PER_NODE=8 \
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
megatron sft \
    --expert_model_parallel_size 4 --sequence_parallel true \
    --decoder_last_pipeline_num_layers 13 --pipeline_model_parallel_size 2 \
    --moe_aux_loss_coeff 1e-3 --moe_shared_expert_overlap true --moe_grouped_gemm true --moe_permute_fusion true \
    --attention_backend flash --cross_entropy_loss_fusion true \
    --recompute_num_layers 1 --recompute_method uniform --recompute_granularity full \
    --max_length 8192 --packing true --global_batch_size 16 --micro_batch_size 1 \
    --lr 1e-5 --min_lr 1e-6 --lr_warmup_fraction 0.05 --num_train_epochs 1 \
    --dataset texts/proofs --split_dataset_ratio 0.01 --eval_steps 500 \
    --output_dir /scratch/moonlight --save_safetensors true --save_steps 500 --no_save_rng true --no_save_optim true \
    --finetune true --model moonshotai/Moonlight-16B-A3B-Instruct \
    --dataloader_num_workers 8
