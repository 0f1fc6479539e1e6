export PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True'
words=(
    --finetune true --model Qwen/Qwen3-14B --dataset texts/proofs --output_dir /scratch/moments
    --exp_avg_sq_dtype bf16 --exp_avg_dtype bf16 --use_precision_aware_optimizer true
    --tensor_model_parallel_size 4 --sequence_parallel true --recompute_granularity selective
    --cross_entropy_fusion_impl native --cross_entropy_loss_fusion true --attention_backend flash
    --packing true --max_length 8192 --global_batch_size 16 --micro_batch_size 1 --num_train_epochs 1
)
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 NPROC_PER_NODE=8 megatron sft "${words[@]}"
