set -x
n=4
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=rloo \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_penalty=kl \
    algorithm.kl_ctrl.kl_coef=0.001 \
    actor_rollout_ref.rollout.n=$n \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.model.path=org/model \
    actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=3 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    data.train_files=train.parquet \
    data.val_files=test.parquet \
    data.train_batch_size=64 \
    data.max_response_length=256 \
    data.truncation='left' \
    trainer.logger='["console","wandb"]' \
    trainer.n_gpus_per_node=8 \
    trainer.test_freq=5 \
    trainer.save_freq=10 \
    trainer.total_training_steps=30 $@
