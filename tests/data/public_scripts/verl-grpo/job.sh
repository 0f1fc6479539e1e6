python3 -m verl.trainer.main_ppo \
    trainer.nnodes=1 trainer.n_gpus_per_node=8 algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 actor_rollout_ref.actor.optim.lr=1e-6 \
    data.max_prompt_length=512 data.train_batch_size=1024 data.train_files=$HOME/sums.parquet $@
