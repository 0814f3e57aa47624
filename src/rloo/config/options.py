"""All options: type, default, subject, one sentence of help. If TRL 1.16 or transformers has an
option, its name and default are the same here (`config.DEVIATIONS` lists the exceptions).
"""

# Over 400 lines: the dataclass of all options.
from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from rloo.config.fields import SHARED
from rloo.config.kwargs_options import MappingsAsValues

from rloo.config.option_groups import (  # isort: skip - one name a line is as long as a subject
    BATCHES, DATA, EVALUATION, HUB, KL, LOGGING, LORA, MACHINE, MEMORY, OBJECTIVE,
    OPTIMIZER, PROCESSES, QUANTISATION, REWARDS, SAMPLING, SAVING, TOOLS, VLLM,
)  # fmt: skip

# ruff: noqa: RUF009 - a subject's methods return dataclasses.field(...)
# The default batch sizes. Batch sizes at these values do not contradict num_prompts.
DEFAULT_BATCH, DEFAULT_GROUP = (8, 1), 2


@dataclass(init=False, repr=False, eq=False, kw_only=True)
class TrainingOptions(MappingsAsValues):
    """The fields of `rloo.config.config.RLOOConfig`."""

    # fmt: off
    model: str | None = DATA.from_ms_swift(None,
        "Model to train: a hub id, a folder, or `countdown`, the embedded model.", basic=True)
    dataset: str | None = DATA.from_ms_swift(None,
        "Prompts to train on: a hub id, a folder, a JSONL, Parquet or CSV file, `countdown`, or "
        "`gym:NAME`.", basic=True)
    dataset_config: str | None = DATA.rloo(None,
        "Configuration of a hub dataset with several configurations (GSM8K: main).")
    dataset_split: str = DATA.rloo("train", "Split of `dataset` to train on.")
    dataset_kwargs: dict[str, Any] | None = DATA.rloo(None,
        "Settings of a generated dataset (`gym:NAME`), by name.")
    eval_dataset: str | None = EVALUATION.rloo(None,
        "Prompts to evaluate on, specified like `dataset`; null: split `eval_split` of `dataset`.",
        basic=True)
    eval_split: str | None = EVALUATION.rloo(None,
        "Split to evaluate on, in `eval_dataset`, or in `dataset` if `eval_dataset` is null.")
    eval_size: int | None = EVALUATION.rloo(None,
        "Maximum number of prompts in an evaluation; null: all.")
    prompt_template: str | list[dict[str, Any]] | None = DATA.rloo(None,
        "Template of the prompt, a text or messages; {column} is replaced by the row's value in "
        "that column.", basic=True)
    reference: str | None = DATA.rloo(None, 
        "Column with the references, or a key in a column (column.key).")
    reward: list[str | dict[str, Any]] = REWARDS.rloo([],
        "Reward functions: built-in names, also with arguments (length(target_max=50)), "
        "package.module:function, file.py:function, or reward models by folder or hub id ({name: "
        "folder, normalize: true}).", basic=True)
    reward_weights: list[float] | None = REWARDS.shared(None,
        "Weight of each reward in the sum of rewards; null: 1 for each.", basic=True)
    reward_timeout: float | None = REWARDS.rloo(300.0,
        "Time limit in seconds for one call of a reward function; null or 0: no limit.")
    reward_on_error: Literal["raise", "missing"] = REWARDS.rloo("raise",
        "Effect of an error in a reward function: end the run (raise), or go without the rewards "
        "of that call (missing).", expert=True)
    reward_bias: float = REWARDS.rloo(0.0,
        "Number added to the weighted sum of rewards, before `reward_scaling`.", expert=True)
    reward_scaling: float = REWARDS.rloo(1.0,
        "Factor of the weighted sum of rewards, after `reward_bias`.", expert=True)
    missing_eos_penalty: float | None = REWARDS.rloo(None,
        "Penalty subtracted from the reward of completions that reach the length limit; null: "
        "none.")
    reward_clip_range: tuple[float, float] | None = REWARDS.from_trl(None,
        "Clip the weighted sum of rewards to [low, high], before KL penalty and baseline; null: "
        "off.")
    normalize_rewards: Literal["none", "batch", "running"] = REWARDS.rloo("none",
        "Standardise rewards with mean and deviation of the rollout (batch: biased) or of all "
        "earlier rollouts (running), or not at all (none).")
    chat_template: str | None = DATA.rloo(None,
        "Chat template (Jinja) that replaces the tokenizer's and is saved with the model; null: "
        "the tokenizer's.")
    chat_template_kwargs: dict[str, Any] | None = DATA.from_trl(None,
        "Arguments passed to the chat template, for prompts that are messages.")
    max_prompt_length: int | None = DATA.rloo(None,
        "Maximum length of a prompt in tokens; null: the most that the model's context allows.")
    overlong_prompts: Literal["error", "drop", "left"] = DATA.rloo("error",
        "Treatment of prompts longer than `max_prompt_length`: raise an error (error), drop them "
        "(drop), or cut them on the left (left).")
    shuffle_dataset: bool = DATA.from_trl(True,
        "Sample prompts in a new random order in each epoch; false: in the order of the dataset.")
    prompt_sampling: Literal["uniform", "variance"] = DATA.rloo("uniform",
        "Drawing of prompts: each once per epoch (uniform), or more often the more its rewards "
        "differ in earlier rollouts, with weights that keep the expected gradient (variance).")
    prompt_sampling_kwargs: dict[str, Any] | None = DATA.rloo(None,
        "Settings of `prompt_sampling` and `dynamic_sample`, by name.", expert=True)

    num_generations: int = SAMPLING.shared(DEFAULT_GROUP,
        "Number of completions per prompt (K); leave-one-out needs at least 2.", basic=True)
    max_completion_length: int = SAMPLING.shared(512,
        "Maximum length of a completion in tokens.", basic=True)
    temperature: float = SAMPLING.shared(1.0,
        "Sampling temperature; training computes log-probs at the same temperature.", basic=True)
    top_p: float = SAMPLING.shared(1.0,
        "Sample only from the most likely tokens with this total probability; values below 1 bias "
        "the gradient.")
    top_k: int = SAMPLING.shared(0,
        "Sample only from this number of most likely tokens; 0: from all; other values bias the "
        "gradient.")
    min_p: float | None = SAMPLING.from_trl(None,
        "Do not sample tokens below this share of the most likely token's probability; biases the "
        "gradient.", expert=True)
    repetition_penalty: float = SAMPLING.shared(1.0,
        "Penalty on tokens that occurred before; 1: none; other values bias the gradient.",
        expert=True)
    rollout_engine: Literal["auto", "native", "hf", "vllm", "vllm_server"] = SAMPLING.rloo("auto",
        "Engine that samples: native, hf (transformers' generate, slower), auto (native if the "
        "model is supported, else hf), vllm (vLLM servers that the run starts), or vllm_server "
        "(running vLLM servers).")
    rollout_dtype: Literal["float32", "bfloat16"] | None = SAMPLING.rloo(None,
        "Dtype of sampling (the metric mismatch/mean shows the effect); null: the dtype of "
        "training.")
    engine_kwargs: dict[str, Any] | None = SAMPLING.rloo(None,
        "Settings of the rollout engine and its servers, by name (--engine_kwargs.NAME VALUE).",
        expert=True)
    max_staleness: int = SAMPLING.rloo(0,
        "Number of rollouts by which the sampling weights may be older than the trained weights; "
        "above 0, sampling runs in parallel to training.")
    sampler_processes: int | None = SAMPLING.rloo(None,
        "Number of processes that sample, each with a copy of the weights; 0: the training process "
        "samples; null: 1 with `max_staleness` above 0, else 0.")
    async_kwargs: dict[str, Any] | None = SAMPLING.rloo(None,
        "Settings of sampling and scoring in other processes, by name.", expert=True)
    dynamic_sample: bool = SAMPLING.from_ms_swift(False,
        "Replace groups whose rewards are all equal by groups of further prompts.")
    generation_kwargs: dict[str, Any] | None = SAMPLING.from_trl(None,
        "Sampling options by their names in transformers' GenerationConfig; they override our "
        "options.", expert=True)
    stop_strings: list[str] | None = SAMPLING.rloo(None,
        "Texts that end a completion and remain part of the completion.")

    preset: str | None = OBJECTIVE.rloo(None,
        "Set the defaults of the objective's options as in a system or paper: paper, trl, areal, "
        "verl, grpo, ...", basic=True)
    estimator: str = OBJECTIVE.rloo("composed",
        "Function from rewards to advantages: composed (of the options for baseline and scale), "
        "rloo, grpo, reinforce_pp, length_weighted, shrinkage, regression, "
        "optimal_token, package.module:function or file.py:function.")
    estimator_kwargs: dict[str, Any] | None = OBJECTIVE.rloo(None,
        "Arguments of the estimator, by name (--estimator_kwargs.NAME VALUE).", expert=True)
    beta: float = KL.shared(0.05,
        "Weight of the KL penalty against the reference model; 0: no penalty, no reference model.",
        basic=True)
    kl_placement: Literal["reward", "reward_to_go", "loss"] = KL.rloo("reward",
        "Place of the KL penalty: the completion's reward (reward), each token's reward-to-go "
        "(reward_to_go), or the loss (loss).")
    kl_estimator: Literal["k1", "k2", "k3", "exact"] = KL.rloo("k1",
        "KL per token, as an estimate with x = log(policy / reference): k1 = x, k2 = x^2 / 2, k3 "
        "= exp(-x) - 1 + x; or over the vocabulary at each sampled position (exact).")
    use_bias_correction_kl: bool = KL.rloo(False,
        "Multiply a KL in the loss by the token's ratio, so that k1 and k3 have the gradient of "
        "the KL.", expert=True)
    kl_kwargs: dict[str, Any] | None = KL.rloo(None,
        "Settings that clip the KL penalty and adapt its weight, by name.", expert=True)
    sync_ref_model: bool = KL.shared(False,
        "Move the reference model towards the policy during training (needs `beta` above 0).")
    ref_model_mixup_alpha: float = KL.shared(0.6,
        "Weight alpha of the policy in a sync: reference = (1 - alpha) * reference + alpha * "
        "policy (with `sync_ref_model`).", expert=True)
    ref_model_sync_steps: int = KL.shared(512,
        "Number of optimizer steps between syncs of the reference (with `sync_ref_model`).",
        expert=True)
    epsilon: float = OBJECTIVE.shared(0.2,
        "Clip the ratio of new to old policy from below at 1 - epsilon; no effect in the first "
        "step on a rollout.")
    epsilon_high: float | None = OBJECTIVE.shared(None,
        "Clip the ratio of new to old policy from above at 1 + epsilon_high; null: `epsilon`.")
    delta: float | None = OBJECTIVE.from_ms_swift(None,
        "Upper bound of the ratio of new to old policy for negative advantages (dual clip); null: "
        "none.", expert=True)
    importance_sampling_level: Literal["sequence", "sequence_mean", "token"] = OBJECTIVE.rloo(
        "sequence",
        "Level of the ratio of new to old policy: per completion, as product (sequence) or "
        "geometric mean (sequence_mean) of its tokens' ratios, or per token (token).")
    rollout_importance_sampling_mode: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "off"
    ] | None = OBJECTIVE.rloo(None,
        "Weight the loss by the probability ratio of trainer to sampler, per token or per "
        "completion (sequence), truncated or masked, or not (off); null: truncated with "
        "`max_staleness` above 0, else off.")
    rollout_importance_sampling_threshold: float = OBJECTIVE.from_ms_swift(2.0,
        "Upper bound of the weights of `rollout_importance_sampling_mode`.", expert=True)
    rollout_importance_sampling_min: float | None = OBJECTIVE.rloo(None,
        "Lower bound of the weights of `rollout_importance_sampling_mode` (only mask modes); null: "
        "none.", expert=True)
    loss_aggregation: Literal[
        "sequence", "sequence_token_mean", "token_mean", "constant"
    ] = OBJECTIVE.rloo("sequence",
        "Aggregation of token losses: sum per completion (sequence: unbiased), mean per completion "
        "(sequence_token_mean), mean over all tokens (token_mean), or sum per completion divided "
        "by `loss_constant` (constant).")
    loss_constant: float | None = OBJECTIVE.rloo(None,
        "Divisor for `loss_aggregation` constant; null: `max_completion_length`.", expert=True)
    entropy_coef: float = OBJECTIVE.rloo(0.0,
        "Weight of an entropy bonus in the loss; 0: no bonus.")
    mean_level: Literal["group", "batch", "running", "none"] = OBJECTIVE.rloo("group",
        "Baseline: mean reward of the prompt's completions (group), of the rollout (batch), of "
        "past rollouts (running), or no baseline (none).")
    mean_leave1out: bool = OBJECTIVE.rloo(True, "Leave a completion out of its own baseline.")
    std_level: Literal["group", "batch", "none"] = OBJECTIVE.rloo("none",
        "Divide advantages by the standard deviation of the prompt's completions (group) or of the "
        "rollout (batch), or do not divide (none).")
    advantage_epsilon: float = OBJECTIVE.rloo(1e-4,
        "Number added to a standard deviation by which rewards or advantages are divided.",
        expert=True)
    normalize_advantages: bool = OBJECTIVE.from_trl(False,
        "Standardise advantages over the rollout, after all other steps.")
    mask_truncated_completions: bool = OBJECTIVE.from_trl(False,
        "Leave completions that reach the length limit out of the loss.")

    use_peft: bool = LORA.rloo(False,
        "Train a LoRA adapter and freeze the model's weights.", basic=True)
    lora_r: int = LORA.rloo(16, "Rank of the LoRA adapter.", basic=True)
    lora_alpha: int = LORA.from_ms_swift(32,
        "LoRA scaling: the update is multiplied by alpha / rank.")
    lora_dropout: float = LORA.from_ms_swift(0.05,
        "Dropout that is recorded with the adapter; no effect on training, where dropout is off.",
        expert=True)
    lora_target_modules: str | list[str] | None = LORA.rloo(None,
        "Layers with a LoRA adapter: names, a pattern, or all-linear; null: peft's choice.")
    lora_target_parameters: list[str] | None = LORA.rloo(None,
        "Parameters with a LoRA adapter in addition to layers, such as experts (needs "
        "`lora_dropout` 0).", expert=True)
    lora_modules_to_save: list[str] | None = LORA.rloo(None,
        "Layers that are trained and saved in full, in addition to the LoRA adapter.", expert=True)
    use_rslora: bool = LORA.from_ms_swift(False,
        "Multiply the LoRA update by alpha / sqrt(rank) instead of alpha / rank.", expert=True)
    load_in_4bit: bool = QUANTISATION.rloo(False,
        "Load the frozen base model of an adapter in 4 bits (bitsandbytes).")
    load_in_8bit: bool = QUANTISATION.rloo(False,
        "Load the frozen base model of an adapter in 8 bits (bitsandbytes).")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = QUANTISATION.from_ms_swift("nf4",
        "4-bit type of `load_in_4bit`: nf4 or fp4.", expert=True)
    use_bnb_nested_quant: bool = QUANTISATION.rloo(False,
        "Quantise the scales of the 4-bit weights, too (with `load_in_4bit`).", expert=True)
    use_dora: bool = LORA.from_ms_swift(False,
        "Use DoRA: train the magnitudes of the weights separately from their LoRA direction.",
        expert=True)

    num_prompts: int | None = BATCHES.rloo(None,
        "Number of prompts per optimizer step; set it instead of the batch sizes.", basic=True)
    per_device_train_batch_size: int = BATCHES.shared(DEFAULT_BATCH[0],
        "Number of completions per device in one accumulation step.")
    gradient_accumulation_steps: int = BATCHES.shared(DEFAULT_BATCH[1],
        "Number of accumulation steps per optimizer step.")
    generation_batch_size: int | None = BATCHES.shared(None,
        "Number of completions per rollout; null: derived from `steps_per_generation`.")
    steps_per_generation: int | None = BATCHES.shared(None,
        "Number of accumulation steps per rollout; null: those of one optimizer step.")
    num_iterations: int = BATCHES.shared(1, "Number of passes over each rollout.")
    max_steps: int = BATCHES.shared(-1,
        "Number of optimizer steps to train; -1: train for `num_train_epochs`.", basic=True)
    num_train_epochs: float = BATCHES.shared(3.0,
        "Number of passes over the dataset, if `max_steps` is -1.", basic=True)
    packing: bool | None = MEMORY.rloo(None,
        "Compute each prompt once for all of its completions; null: if the model supports it.",
        expert=True)
    max_tokens_per_micro_batch: int | None = MEMORY.rloo(None,
        "Maximum number of tokens in a micro-batch; null: as many as fit into memory.")
    router_aux_loss_coef: float | None = OBJECTIVE.from_trl(None,
        "Weight of the load-balancing loss of a mixture-of-experts model; null: the model's own "
        "weight.", expert=True)
    offload: list[Literal["optimizer", "params", "reference"]] = MEMORY.rloo([],
        "State in CPU memory: optimizer (optimizer state, between steps), reference (its layers, "
        "except the layer that computes), params (weights, gradients and optimizer state, with "
        "`parallel fsdp2`).")
    activation_offloading: bool = MEMORY.rloo(False,
        "Keep activations in CPU memory until the backward pass needs them.")

    learning_rate: float = OPTIMIZER.shared(1e-6, "Peak learning rate.", basic=True)
    weight_decay: float = OPTIMIZER.shared(0.0,
        "Decoupled weight decay, except on biases and norms.")
    adam_beta1: float = OPTIMIZER.shared(0.9, "Decay of Adam's first moment.", expert=True)
    adam_beta2: float = OPTIMIZER.shared(0.999, "Decay of Adam's second moment.", expert=True)
    adam_epsilon: float = OPTIMIZER.shared(1e-8, "Number added to Adam's denominator.", expert=True)
    max_grad_norm: float = OPTIMIZER.shared(1.0, "Clip the gradient to this norm; 0: no clipping.")
    lr_scheduler_type: str = OPTIMIZER.shared("linear",
        "Learning rate schedule, by its name in transformers.")
    lr_scheduler_kwargs: dict[str, Any] | None = OPTIMIZER.shared(None,
        "Arguments passed to the learning rate schedule.", expert=True)
    warmup_steps: float = OPTIMIZER.shared(0.0,
        "Number of optimizer steps of linear warm-up; below 1: a share of all steps.")
    optim: str = OPTIMIZER.shared("adamw_torch_fused", "Optimizer, by its name in transformers.")
    optim_args: str | None = OPTIMIZER.shared(None,
        "Arguments of the optimizer: name=value,name=value.", expert=True)

    model_init_kwargs: dict[str, Any] | None = DATA.from_trl(None,
        "Arguments passed to from_pretrained when the model is loaded.")
    allow_missing_weights: bool = DATA.rloo(False,
        "Allow files without some of the model's weights, such as a new head; missing weights are "
        "random.", expert=True)
    trust_remote_code: bool = DATA.from_trl(False,
        "Allow Python code that comes with a model to run.")
    bf16: bool | None = MACHINE.shared(None,
        "Compute in bfloat16, with float32 weights; null: true unless `fp16` is true.", basic=True)
    fp16: bool = MACHINE.shared(False, "Compute in float16 with loss scaling; needs a GPU.")
    gradient_checkpointing: bool = MEMORY.shared(True,
        "Recompute activations in the backward pass to save memory.")
    gradient_checkpointing_kwargs: dict[str, Any] | None = MEMORY.shared(None,
        "Arguments passed to gradient checkpointing.", expert=True)
    use_cpu: bool = MACHINE.shared(False, "Run on the CPU even if there is a GPU.")
    tf32: bool | None = MACHINE.shared(None,
        "Multiply float32 matrices in TF32 on a GPU; null: torch's setting.", expert=True)
    num_threads: int | None = MACHINE.rloo(None,
        "Number of CPU threads; null: the fastest number in a measurement.")
    cpu_kwargs: dict[str, Any] | None = MACHINE.rloo(None,
        "Settings of libraries and kernels on a CPU, by name.", expert=True)
    torch_compile: bool = MACHINE.shared(False,
        "Compile the operations between matrix products, on a GPU.", expert=True)
    seed: int = MACHINE.shared(42, "Seed of all random numbers.", basic=True)
    data_seed: int | None = MACHINE.shared(None,
        "Seed of the prompt order; null: `seed`.", expert=True)
    full_determinism: bool = MACHINE.shared(False,
        "Use only deterministic kernels: runs on a GPU are equal bit by bit, but slower.",
        expert=True)

    num_processes: int | None = PROCESSES.rloo(None,
        "Number of processes that train together; `rloo train` starts them unless a launcher did; "
        "null: as many as were started.")
    parallel: Literal["replicate", "fsdp2", "zero1", "zero2", "zero3"] = PROCESSES.rloo("replicate",
        "Sharding: none (replicate: each process has all weights), weights, gradients and "
        "optimizer state by torch's fully_shard (fsdp2), or by DeepSpeed: optimizer state (zero1), "
        "also gradients (zero2), also weights (zero3).")
    parallel_kwargs: dict[str, Any] | None = PROCESSES.rloo(None,
        "Groups of processes (HSDP, sequence and tensor parallelism), and the form of sharded "
        "checkpoints, by name.", expert=True)
    deepspeed: dict[str, Any] | str | None = PROCESSES.shared(None,
        "Configuration of DeepSpeed: a JSON file, or its content as a mapping; its stage sets "
        "`parallel`.")
    max_restarts: int = PROCESSES.rloo(0,
        "Number of times that `rloo train` restarts all its processes after a process died.")
    ddp_timeout: int = PROCESSES.shared(1800,
        "Time in seconds that a process waits for the other processes before the run ends, also at "
        "the start.", expert=True)

    eval_strategy: Literal["no", "steps", "epoch"] = EVALUATION.shared("no",
        "Evaluate never (no), every `eval_steps` optimizer steps (steps), or after each epoch "
        "(epoch).", basic=True)
    eval_steps: float | None = EVALUATION.shared(None,
        "Number of optimizer steps between evaluations; below 1: a share of all steps; null: "
        "`logging_steps`.")
    eval_on_start: bool = EVALUATION.shared(False, "Evaluate before the first step.")
    eval_delay: float = EVALUATION.shared(0.0,
        "Number of steps, or of epochs with `eval_strategy epoch`, before the first evaluation in "
        "training.", expert=True)
    num_generations_eval: int | None = EVALUATION.shared(None,
        "Number of completions per prompt in evaluation; null: `num_generations`.")
    eval_kwargs: dict[str, Any] | None = EVALUATION.rloo(None,
        "Settings of evaluations, by name: pass threshold, values of k for pass@k, and sampling "
        "options that differ from training.")
    eval_reward: list[str | dict[str, Any]] = EVALUATION.rloo([],
        "Reward functions for evaluations only: evaluations report their means, and how often "
        "completions score higher than those of the initial policy.")

    output_dir: str = field(default="rloo_output", kw_only=False, metadata=SAVING.about(
        "Folder for the model, metrics and checkpoints.", SHARED, basic=True))
    overwrite_output_dir: bool = SAVING.rloo(
        False,
        "Remove an earlier run in `output_dir`; false: move it to `earlier/N` in that folder.")
    resume_from_checkpoint: str | bool | None = SAVING.shared(None,
        "Checkpoint to resume from: a folder, true (the newest in `output_dir`), or auto (the "
        "newest in `output_dir`, if it is of an unfinished run with these options; without a run, "
        "start a new one).", basic=True)
    on_sigusr1: Literal["stop", "save"] = SAVING.rloo("stop",
        "Effect of SIGUSR1: save a checkpoint and stop the run (stop), or save and continue "
        "(save).", expert=True)
    save_strategy: Literal["no", "steps", "epoch", "best"] = SAVING.shared("steps",
        "Save checkpoints never (no), every `save_steps` optimizer steps (steps), after each epoch "
        "(epoch), or at a new best evaluation (best).")
    save_steps: float = SAVING.shared(500.0,
        "Number of optimizer steps between checkpoints; below 1: a share of all steps.", basic=True)
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = SAVING.rloo(None,
        "Dtype of the saved model; null: the dtype of the base model's files, or float32 for an "
        "adapter (checkpoints are always float32).")
    save_total_limit: int | None = SAVING.shared(None,
        "Maximum number of checkpoints to keep; null: all.")
    save_only_model: bool = SAVING.shared(False,
        "Save only the model in checkpoints; runs cannot resume from such checkpoints.",
        expert=True)
    load_best_model_at_end: bool = SAVING.shared(False,
        "Result of the run: the weights of the best evaluation (true), or of the last step "
        "(false).")
    metric_for_best_model: str | None = SAVING.shared(None,
        "Metric that decides which evaluation is the best; null: the mean reward.", expert=True)
    greater_is_better: bool | None = SAVING.shared(None,
        "Whether a higher `metric_for_best_model` is better; null: yes, unless its name ends in "
        "loss.", expert=True)
    logging_strategy: Literal["no", "steps", "epoch"] = LOGGING.shared("steps",
        "Log never (no), every `logging_steps` optimizer steps (steps), or after each epoch "
        "(epoch).", expert=True)
    logging_steps: float = LOGGING.shared(10.0,
        "Number of optimizer steps between logs; below 1: a share of all steps.", basic=True)
    logging_first_step: bool = LOGGING.shared(False, "Log the first step, too.", expert=True)
    log_completions: bool = LOGGING.shared(False,
        "Print and save sampled completions with every log.")
    num_completions_to_print: int | None = LOGGING.from_trl(None,
        "Maximum number of completions that `log_completions` prints; null: all.", expert=True)
    log_multimodal: bool = LOGGING.from_trl(True,
        "Save the images of logged completions.", expert=True)
    log_unique_prompts: bool = LOGGING.from_trl(False,
        "Print at most one completion per prompt with `log_completions`.", expert=True)
    push_to_hub: bool = HUB.shared(False, "Push the model to the hub at every save and at the end.")
    hub_model_id: str | None = HUB.shared(None,
        "Hub repository to push to; null: the name of `output_dir`.")
    hub_strategy: Literal[
        "end", "every_save", "checkpoint", "all_checkpoints"
    ] = HUB.shared("every_save",
        "Push to the hub at the end (end), at every save (every_save), or at every save with the "
        "newest checkpoint (checkpoint) or all checkpoints (all_checkpoints).", expert=True)
    hub_token: str | None = HUB.shared(None,
        "Access token for the hub, never written to disk; null: the token of `hf auth login`.",
        secret=True, expert=True)
    hub_private_repo: bool | None = HUB.shared(None,
        "Make the hub repository private.", expert=True)
    hub_revision: str | None = HUB.shared(None,
        "Branch of the hub repository to push to.", expert=True)
    report_to: str | list[str] = LOGGING.shared("none",
        "Loggers in addition to the run's files: tensorboard, wandb, trackio, mlflow, comet_ml.",
        basic=True)
    run_name: str | None = LOGGING.shared(None, "Name of the run in the loggers.")
    project: str = LOGGING.shared("huggingface", "Project of the run in the loggers.", expert=True)
    trackio_space_id: str | None = LOGGING.shared(None,
        "Hub space to which trackio writes.", expert=True)
    disable_tqdm: bool | None = LOGGING.shared(None,
        "Show no progress display, only one line per log; null: show the display on terminals.")
    profile: bool = LOGGING.rloo(False,
        "Write the time and memory use of the third rollout to `output_dir`.")

    tools: list[str] = TOOLS.rloo([],
        "Functions that the model may call: file.py:function or package.module:function.")
    environment_factory: str | None = TOOLS.rloo(None,
        "Environment class (file.py:Class) with one object per episode: `reset` starts the "
        "episode, public methods are tools, `get_reward` is a reward.")
    max_tool_calling_iterations: int | None = TOOLS.rloo(None,
        "Maximum number of times that an episode continues after tool calls; null: until a length "
        "limit.")
    tool_kwargs: dict[str, Any] | None = TOOLS.rloo(None,
        "Limits on the responses and the time of tools, by name.", expert=True)

    use_vllm: bool = VLLM.from_trl(False,
        "Sample with vLLM: `vllm_mode` selects `rollout_engine` vllm or vllm_server.")
    vllm_mode: Literal["colocate", "server"] = VLLM.from_trl("colocate",
        "Start vLLM servers (colocate) or use a running server (server), with `use_vllm`.")
    # TRL's default. It only names a server to connect to: `rloo vllm-serve` listens on the loopback
    # address unless the user sets a host.
    vllm_server_host: str = VLLM.from_trl("0.0.0.0",
        "Host of the running server, with `use_vllm` and `vllm_mode server`.")
    vllm_server_port: int = VLLM.from_trl(8000,
        "Port of the running server, with `use_vllm` and `vllm_mode server`.")
    vllm_server_base_url: list[str] | None = VLLM.from_trl(None,
        "Addresses of running servers (http://host:port), with `rollout_engine vllm_server`.")
    vllm_server_timeout: float = VLLM.from_trl(240.0,
        "Time in seconds that a vLLM server may take to start.", expert=True)
    vllm_tensor_parallel_size: int = VLLM.from_trl(1,
        "Number of GPUs per server (tensor parallelism); on the trainer's GPUs, one server for so "
        "many processes.")
    vllm_gpu_memory_utilization: float | None = VLLM.from_trl(None,
        "Share of a GPU's memory that a server reserves; null: 0.3 on the trainer's GPU and on a "
        "CPU, 0.9 on separate GPUs.")
    vllm_max_model_length: int | None = VLLM.from_trl(None,
        "Maximum number of tokens of prompt and completion together on a server; null: the model's "
        "maximum.", expert=True)
    vllm_model_impl: Literal["auto", "vllm", "transformers"] = VLLM.from_trl("vllm",
        "Implementation of the model on servers: vLLM's (vllm), transformers' (transformers), or "
        "auto.", expert=True)
    vllm_enable_sleep_mode: bool | None = VLLM.from_trl(None,
        "Let servers free their memory during training; null: if they run on the trainer's GPU.",
        expert=True)
    # fmt: on

    @property
    def samples_beside(self) -> bool:
        """Whether other processes sample and score the rollouts."""
        return self.max_staleness > 0 or bool(self.sampler_processes)

    @property
    def compares_evaluations(self) -> bool:
        """Whether the run needs to know its best evaluation."""
        return self.load_best_model_at_end or self.save_strategy == "best"


OPTIONS = fields(TrainingOptions)
