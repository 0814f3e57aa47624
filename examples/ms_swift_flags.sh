# RLOO as ms-swift's command line sets it: the flags of its example for this algorithm.
#
#   rloo config --from ms-swift examples/ms_swift_flags.sh > clevr.yaml
#   rloo train clevr.yaml
#
# The first line writes the same run in our options, and lists every flag that has no counterpart.
# The reward external_r1v_acc is a class of ms-swift's plugin; it has to become a function.

CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
NPROC_PER_NODE=8 \
swift rlhf \
    --rlhf_type grpo \
    --advantage_estimator rloo \
    --kl_in_reward true \
    --beta 0.001 \
    --loss_type grpo \
    --epsilon 3e-4 \
    --epsilon_high 4e-4 \
    --overlong_filter false \
    --model Qwen/Qwen2.5-VL-3B-Instruct \
    --tuner_type lora \
    --torch_dtype bfloat16 \
    --attn_impl flash_attention_2 \
    --padding_free true \
    --dataset 'AI-ModelScope/clevr_cogen_a_train' \
    --system 'examples/train/grpo/prompt.txt' \
    --external_plugins examples/train/grpo/plugin/plugin.py \
    --reward_funcs external_r1v_acc format \
    --num_generations 16 \
    --temperature 1.0 \
    --max_completion_length 1024 \
    --use_vllm true \
    --vllm_mode colocate \
    --vllm_gpu_memory_utilization 0.4 \
    --vllm_tensor_parallel_size 1 \
    --vllm_max_model_len 16384 \
    --sleep_level 1 \
    --offload_model true \
    --offload_optimizer true \
    --async_generate false \
    --num_iterations 1 \
    --num_train_epochs 1 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 4 \
    --learning_rate 1e-6 \
    --deepspeed zero2 \
    --dataloader_num_workers 4 \
    --eval_steps 1000 \
    --save_steps 1000 \
    --save_total_limit 10 \
    --logging_steps 1 \
    --log_completions true \
    --report_to tensorboard swanlab
