"""Every option: type, default, one sentence of help. What follows from them is in `config.py`.

Names and defaults are those of TRL 1.16 and transformers where they have the option
(`config.DEVIATIONS` lists the exceptions). Needs neither torch nor transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rloo.config.reading import from_trl, own, shared

# ruff: noqa: RUF009 - own, shared and from_trl return dataclasses.field(...)

# The batch sizes nobody asked for: they do not contradict num_prompts.
DEFAULT_BATCH = (8, 1)


@dataclass(init=False)
class Options:
    """The fields of `rloo.config.config.RLOOConfig`."""

    # What is trained on what
    model: str | None = own(None, "Hub id or folder (countdown: the embedded one).", ms_swift=True)
    dataset: str | None = own(
        None, "Hub id, folder, JSONL, Parquet or CSV (countdown: embedded).", ms_swift=True
    )
    dataset_config: str | None = own(None, "Configuration name of a hub dataset (GSM8K: main).")
    dataset_split: str = own("train", "Split of `dataset` to train on.")
    eval_dataset: str | None = own(None, "As `dataset`; null takes `eval_split` of `dataset`.")
    eval_split: str | None = own(None, "Split of `eval_dataset`, or else of `dataset`.")
    eval_size: int | None = own(None, "Evaluate on at most this many prompts; null takes all.")
    prompt_template: str | list[dict[str, Any]] | None = own(
        None, "Makes the prompt: text, or messages, with {column} for a column's value."
    )
    reward: list[str | dict[str, Any]] = own(
        [],
        "Built-in names (with options: length(target_max=50)), module:function, file.py:function; "
        "reward models: folder or hub id ({name: folder, normalize: true}).",
    )
    reward_weights: list[float] | None = shared(None, "One per reward; null weighs each 1.")
    reward_bias: float = own(0.0, "Added to the weighted reward, before `reward_scaling`.")
    reward_scaling: float = own(1.0, "Times the weighted reward, after `reward_bias`.")
    missing_eos_penalty: float | None = own(
        None, "Taken off the reward of completions that hit the length limit."
    )
    reward_clip_range: tuple[float, float] | None = from_trl(
        None, "Clip the weighted reward to [low, high], before KL and baseline."
    )
    normalize_rewards: Literal["none", "batch", "running"] = own(
        "none", "Standardise rewards over the rollout (biased), or by all rollouts before it."
    )
    chat_template_kwargs: dict[str, Any] | None = from_trl(
        None, "Passed to the chat template when prompts are messages."
    )
    max_prompt_length: int | None = own(None, "In tokens; null is what the model's context allows.")
    overlong_prompts: Literal["error", "drop", "left"] = own(
        "error", "Longer prompts: stop, drop them, or keep their last tokens (left is cut)."
    )
    shuffle_dataset: bool = from_trl(True, "Draw the prompts in a new random order each epoch.")

    # Sampling
    num_generations: int = shared(2, "Completions per prompt, the K of the baseline; 2 or more.")
    max_completion_length: int = shared(512, "Longest completion in tokens.")
    temperature: float = shared(1.0, "Of sampling; every log-probability is taken at it.")
    top_p: float = shared(1.0, "Keep the likeliest tokens of this probability; below 1 is biased.")
    top_k: int = shared(0, "Keep this many likeliest tokens; 0 keeps all, any other is biased.")
    min_p: float | None = from_trl(None, "Keep tokens above this share of the likeliest; biased.")
    repetition_penalty: float = shared(1.0, "Penalty on tokens seen before; not 1 is biased.")
    rollout_engine: Literal["auto", "native", "hf"] = own(
        "auto", "What samples: native, hf (generate, slow), or native wherever it can."
    )
    rollout_copy: bool | None = own(
        None, "Let the native sampler keep a copy of the weights; null: but of quantised ones."
    )
    rollout_dtype: Literal["float32", "bfloat16"] | None = own(
        None, "Of the native sampler's matrix products; null: as in training. See mismatch/mean."
    )

    dynamic_sample: bool = own(
        False, "Draw further prompts in place of groups without signal.", ms_swift=True
    )
    max_resample_times: int = own(3, "Rollouts that `dynamic_sample` may add.", ms_swift=True)
    generation_kwargs: dict[str, Any] | None = from_trl(
        None, "Sampling options under transformers' names; they win over those above."
    )
    stop_strings: list[str] | None = own(None, "Texts that end a completion, kept in it.")

    # Objective
    preset: str | None = own(
        None, "Defaults of the objective as a system or paper has them: paper, trl, verl, ..."
    )
    estimator: str = own(
        "composed",
        "What makes advantages of rewards: composed (as the options of baseline and scale say), "
        "rloo, grpo, reinforce_pp, module:function or file.py:function.",
    )
    estimator_kwargs: dict[str, Any] | None = own(
        None, "Arguments of the estimator, by name (--estimator_kwargs.NAME VALUE)."
    )
    beta: float = shared(0.05, "Weight of the KL penalty in the reward; 0 needs no reference.")
    kl_placement: Literal["reward", "reward_to_go", "loss"] = own(
        "reward", "KL in the completion's reward, in each token's reward to come, or in the loss."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = own(
        "k1", "Of log(policy / reference): itself, half its square, or exp(-x) - 1 + x."
    )
    use_bias_correction_kl: bool = own(
        False,
        "Weigh a KL in the loss by the token's ratio, so that sampling has its gradient.",
    )
    kl_clip: float | None = own(None, "Bound of a token's estimate, on both sides.")
    kl_target: float | None = own(None, "Adapt `beta` so that the KL per token comes near this.")
    kl_horizon: int = own(10000, "Completions over which `kl_target` adapts `beta`.")
    sync_ref_model: bool = shared(False, "Let the reference follow the policy (beta above 0).")
    ref_model_mixup_alpha: float = shared(0.6, "Share of the policy in each such step.")
    ref_model_sync_steps: int = shared(512, "Optimizer steps between them.")
    epsilon: float = shared(
        0.2, "Ratio is clipped below 1 - epsilon; idle on a rollout's 1st step."
    )
    epsilon_high: float | None = shared(None, "Ratio is clipped above 1 + this; null: `epsilon`.")
    delta: float | None = own(
        None, "Dual clip: bound of the ratio where the advantage is negative.", ms_swift=True
    )
    importance_sampling_level: Literal["sequence", "sequence_mean", "token"] = own(
        "sequence", "One ratio per completion (its product or its mean), or one per token."
    )
    rollout_importance_sampling_mode: (
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None
    ) = own(None, "Weigh by trainer over sampler, cut or dropped beyond the bounds.")
    rollout_importance_sampling_threshold: float = own(
        2.0, "Upper bound of such a weight.", ms_swift=True
    )
    rollout_importance_sampling_min: float | None = own(None, "Lower bound; masking modes only.")
    loss_aggregation: Literal["sequence", "sequence_token_mean", "token_mean", "constant"] = own(
        "sequence",
        "Token losses: sum per completion (unbiased), mean per completion, mean over all tokens, "
        "or sum per completion divided by `loss_constant`.",
    )
    loss_constant: float | None = own(
        None, "Divisor of loss_aggregation constant; null is `max_completion_length`."
    )
    entropy_coef: float = own(0.0, "Weight of an entropy bonus in the loss.")
    mean_level: Literal["group", "batch", "running", "none"] = own(
        "group", "Baseline: mean reward of the prompt's completions, the batch, the past, or none."
    )
    running_decay: float = own(0.95, "Of the past's mean, with mean_level running.")
    mean_leave1out: bool = own(True, "Leave out the answer itself from its baseline.")
    std_level: Literal["group", "batch", "none"] = own(
        "none", "Divide by the standard deviation over the group's answers, the batch's, or not."
    )
    advantage_epsilon: float = own(1e-4, "Added to a standard deviation before dividing by it.")
    advantage_clip_range: tuple[float, float] | None = own(
        None, "Clip advantages to [low, high]; a KL outside the baseline comes after."
    )
    normalize_advantages: bool = from_trl(False, "In the end standardise over the whole rollout.")
    mask_truncated_completions: bool = from_trl(
        False, "Leave completions that hit the length limit out of the loss."
    )
    disable_dropout: bool = from_trl(False, "No effect: dropout is off in every pass here.")

    # Adapters
    use_peft: bool = own(False, "Train a LoRA adapter, the model's own weights frozen.")
    lora_r: int = own(16, "Rank of the adapter.")
    lora_alpha: int = own(32, "Its weight: it is added alpha / rank times.", ms_swift=True)
    lora_dropout: float = own(
        0.05, "No effect but to be written down: dropout is off in every pass here.", ms_swift=True
    )
    lora_target_modules: str | list[str] | None = own(
        None, "Layers that get it: names, a pattern, or all-linear; null is peft's choice."
    )
    lora_target_parameters: list[str] | None = own(
        None, "Parameters that get it beside layers: experts (needs lora_dropout 0)."
    )
    lora_modules_to_save: list[str] | None = own(None, "Layers trained and saved as a whole.")
    use_rslora: bool = own(False, "Add it alpha / sqrt(rank) times instead.", ms_swift=True)
    load_in_4bit: bool = own(False, "Load the frozen base in 4 bits (bitsandbytes).")
    load_in_8bit: bool = own(False, "Load the frozen base in 8 bits (bitsandbytes).")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = own("nf4", "Of the 4 bits.", ms_swift=True)
    use_bnb_nested_quant: bool = own(False, "Quantise the constants of the 4 bits as well.")
    use_dora: bool = own(False, "Learn the weights' magnitudes apart from it.", ms_swift=True)

    # Batches and steps
    num_prompts: int | None = own(None, "Prompts per optimizer step; instead of batch sizes.")
    per_device_train_batch_size: int = shared(
        DEFAULT_BATCH[0], "Completions per accumulation step and device."
    )
    gradient_accumulation_steps: int = shared(
        DEFAULT_BATCH[1], "Accumulation steps per optimizer step."
    )
    generation_batch_size: int | None = shared(None, "Completions per rollout; null: see next.")
    steps_per_generation: int | None = shared(
        None, "Accumulation steps that a rollout feeds; null is those of one optimizer step."
    )
    num_iterations: int = shared(1, "Passes over each rollout.")
    max_steps: int = shared(-1, "Optimizer steps; -1 goes by `num_train_epochs`.")
    num_train_epochs: float = shared(3.0, "Passes over the dataset when `max_steps` is -1.")
    packing: bool | None = own(
        None, "One pass over a prompt for all its completions; null is wherever the model can."
    )
    max_tokens_per_micro_batch: int | None = own(None, "Token budget; null follows from memory.")

    router_aux_loss_coef: float | None = from_trl(
        None, "Weight of a mixture of experts' balancing loss; null is the model's own."
    )
    offload_optimizer: bool = own(
        False, "Keep optimizer state on the CPU between steps.", ms_swift=True
    )
    activation_offloading: bool = own(False, "Keep activations on the CPU until the backward.")

    # Optimizer
    learning_rate: float = shared(1e-6, "Peak learning rate.")
    weight_decay: float = shared(0.0, "Decoupled; not on biases and norms.")
    adam_beta1: float = shared(0.9, "Decay of Adam's first moment.")
    adam_beta2: float = shared(0.999, "Decay of Adam's second moment.")
    adam_epsilon: float = shared(1e-8, "Added to Adam's denominator.")
    max_grad_norm: float = shared(1.0, "Clip the gradient to this norm; 0 does not clip.")
    lr_scheduler_type: str = shared("linear", "Schedule, by its name in transformers.")
    lr_scheduler_kwargs: dict[str, Any] | None = shared(None, "Arguments of the schedule.")
    warmup_steps: float = shared(0.0, "Steps of linear warm-up; below 1 a share of all steps.")
    optim: str = shared("adamw_torch_fused", "Optimizer, by its name in transformers.")
    optim_args: str | None = shared(None, "Its arguments: name=value,name=value.")

    # Model, precision, machine
    model_init_kwargs: dict[str, Any] | None = from_trl(None, "Passed to from_pretrained.")
    trust_remote_code: bool = from_trl(False, "Run Python code that comes with a model.")
    bf16: bool | None = shared(None, "Compute in bfloat16, weights float32; null: unless fp16.")
    fp16: bool = shared(False, "Compute in float16 with loss scaling; needs a GPU.")
    gradient_checkpointing: bool = shared(True, "Recompute activations to save memory.")
    gradient_checkpointing_kwargs: dict[str, Any] | None = shared(None, "Its arguments.")
    use_cpu: bool = shared(False, "Run on the CPU even where there is a GPU.")
    num_threads: int | None = own(None, "CPU threads; null measures which number is fastest.")
    seed: int = shared(42, "Seed of everything random.")
    data_seed: int | None = shared(None, "Seed of the prompt order; null takes `seed`.")

    # Evaluation
    eval_strategy: Literal["no", "steps", "epoch"] = shared(
        "no", "Never, every `eval_steps`, or after every pass over the dataset."
    )
    eval_steps: float | None = shared(
        None, "Steps between evaluations, below 1 a share of all; null takes `logging_steps`."
    )
    eval_on_start: bool = shared(False, "Evaluate before the first step.")
    num_generations_eval: int | None = shared(None, "Per prompt; null takes `num_generations`.")
    eval_temperature: float | None = own(None, "As `temperature`; null takes that.")
    eval_top_p: float | None = own(None, "As `top_p`; null takes that.")
    eval_top_k: int | None = own(None, "As `top_k`; null takes that.")
    eval_max_completion_length: int | None = own(None, "In tokens; null: as in training.")
    eval_pass_k: list[int] = own([1], "The k of each pass@k to report.")
    pass_threshold: float = own(1.0, "Score of the first reward from which a completion passes.")

    # Output
    output_dir: str = shared("rloo_output", "Folder for the model, metrics and checkpoints.")
    overwrite_output_dir: bool = own(False, "Replace another run in `output_dir`.")
    resume_from_checkpoint: str | bool | None = shared(
        None, "Checkpoint folder to go on from; true is the newest in `output_dir`."
    )
    save_strategy: Literal["no", "steps", "epoch", "best"] = shared(
        "steps", "Never, every `save_steps`, after every epoch, or at the best evaluation so far."
    )
    save_steps: float = shared(500.0, "Steps between checkpoints; below 1 a share of all steps.")
    save_total_limit: int | None = shared(None, "Keep at most this many checkpoints.")
    load_best_model_at_end: bool = shared(
        False, "End with the checkpoint of the best evaluation instead of the last step."
    )
    metric_for_best_model: str | None = shared(
        None, "By this metric of the evaluation; null is the mean reward."
    )
    greater_is_better: bool | None = shared(None, "Null: unless the metric's name ends in loss.")
    logging_steps: float = shared(10.0, "Steps between log lines; below 1 a share of all steps.")
    logging_first_step: bool = shared(False, "Log the first step too.")
    log_completions: bool = shared(False, "Print and save sampled completions at every log.")
    num_completions_to_print: int | None = from_trl(None, "At most this many; null prints all.")
    log_multimodal: bool = from_trl(True, "Keep the images of logged completions.")
    log_unique_prompts: bool = from_trl(False, "Print at most one completion per prompt.")
    push_to_hub: bool = shared(False, "Push the model to the hub at every save and at the end.")
    hub_model_id: str | None = shared(None, "Its repository; null is the name of `output_dir`.")
    hub_strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] = shared(
        "every_save", "When to push, and whether with checkpoints."
    )
    hub_token: str | None = shared(
        None, "Of the hub, written nowhere; null is that of `hf auth login`.", secret=True
    )
    hub_private_repo: bool | None = shared(None, "Make the repository private.")
    hub_revision: str | None = shared(None, "Branch to push to.")
    report_to: str | list[str] = shared("none", "Further loggers: tensorboard, wandb, trackio.")
    run_name: str | None = shared(None, "Name of the run in the loggers.")
    project: str = shared("huggingface", "Project of the run in the loggers.")
    trackio_space_id: str | None = shared(None, "Hub space that trackio writes to.")
    disable_tqdm: bool | None = shared(None, "No progress line; null shows it on a terminal.")
    profile: bool = own(False, "Write where the third rollout's time and memory went.")
