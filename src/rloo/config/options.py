"""All options: type, default, subject, one sentence of help. Names and defaults are those of TRL
1.16 and transformers if they have the option (`config.DEVIATIONS` lists the exceptions).
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
# The default batch sizes: they do not contradict num_prompts.
DEFAULT_BATCH, DEFAULT_GROUP = (8, 1), 2


@dataclass(init=False, repr=False, eq=False, kw_only=True)
class TrainingOptions(MappingsAsValues):
    """The fields of `rloo.config.config.RLOOConfig`."""

    # fmt: off
    model: str | None = DATA.from_ms_swift(None,
        "Model to train: a hub id, a folder, or `countdown`, the embedded one.", basic=True)
    dataset: str | None = DATA.from_ms_swift(None,
        "Prompts to train on: hub id, folder, JSONL, Parquet or CSV file, `countdown`, `gym:NAME`.",
        basic=True)
    dataset_config: str | None = DATA.rloo(None,
        "Configuration of a hub dataset that has several (GSM8K: main).")
    dataset_split: str = DATA.rloo("train", "Split of `dataset` to train on.")
    dataset_kwargs: dict[str, Any] | None = DATA.rloo(None,
        "Settings of a dataset that is made (`gym:NAME`), by name.")
    eval_dataset: str | None = EVALUATION.rloo(None,
        "Prompts to evaluate on, specified like `dataset`; null takes `eval_split` of `dataset`.",
        basic=True)
    eval_split: str | None = EVALUATION.rloo(None,
        "Split to evaluate on, of `eval_dataset` or, if that is null, of `dataset`.")
    eval_size: int | None = EVALUATION.rloo(None,
        "Evaluate on at most this many prompts; null takes all.")
    prompt_template: str | list[dict[str, Any]] | None = DATA.rloo(None,
        "Text or messages that make the prompt from a row, with {column} for a column's value.",
        basic=True)
    reference: str | None = DATA.rloo(None, 
        "Column, or keys in one (a.b), that has the references.")
    reward: list[str | dict[str, Any]] = REWARDS.rloo([],
        "Rewards: built-in names (with options: length(target_max=50)), package.module:function, "
        "file.py:function, or reward models by folder or hub id "
        "({name: folder, normalize: true}).", basic=True)
    reward_weights: list[float] | None = REWARDS.shared(None,
        "Weight of each reward in their sum; null weights each by 1.", basic=True)
    reward_timeout: float | None = REWARDS.rloo(300.0,
        "Seconds that a call of a reward function may take; null or 0 sets no deadline.")
    reward_on_error: Literal["raise", "missing"] = REWARDS.rloo("raise",
        "A reward function that fails ends the run (raise) or gives no rewards (missing).",
        expert=True)
    reward_bias: float = REWARDS.rloo(0.0,
        "Added to the weighted sum of rewards, before `reward_scaling`.", expert=True)
    reward_scaling: float = REWARDS.rloo(1.0,
        "Multiplies the weighted sum of rewards, after `reward_bias`.", expert=True)
    missing_eos_penalty: float | None = REWARDS.rloo(None,
        "Subtracted from the reward of completions that hit the length limit.")
    reward_clip_range: tuple[float, float] | None = REWARDS.from_trl(None,
        "Clip the weighted sum of rewards to [low, high], before KL penalty and baseline.")
    normalize_rewards: Literal["none", "batch", "running"] = REWARDS.rloo("none",
        "Standardise rewards by the rollout (batch: biased) or by all earlier rollouts (running).")
    chat_template: str | None = DATA.rloo(None,
        "Chat template (Jinja) in place of the tokenizer's; it is saved with the model.")
    chat_template_kwargs: dict[str, Any] | None = DATA.from_trl(None,
        "Arguments for the chat template when prompts are messages.")
    max_prompt_length: int | None = DATA.rloo(None,
        "Longest prompt in tokens; null is what the model's context allows.")
    overlong_prompts: Literal["error", "drop", "left"] = DATA.rloo("error",
        "Prompts over `max_prompt_length`: stop (error), drop them, or cut them on the left.")
    shuffle_dataset: bool = DATA.from_trl(True,
        "Draw the prompts in a new random order each epoch.")

    num_generations: int = SAMPLING.shared(DEFAULT_GROUP,
        "Completions sampled per prompt (K); leave-one-out needs at least 2.", basic=True)
    max_completion_length: int = SAMPLING.shared(512, "Longest completion in tokens.", basic=True)
    temperature: float = SAMPLING.shared(1.0,
        "Sampling temperature, also applied to the log-probabilities of training.", basic=True)
    top_p: float = SAMPLING.shared(1.0,
        "Sample from the likeliest tokens of this total probability; below 1 biases the gradient.")
    top_k: int = SAMPLING.shared(0,
        "Sample from this many likeliest tokens; 0 takes all, any other biases the gradient.")
    min_p: float | None = SAMPLING.from_trl(None,
        "Drop tokens below this share of the likeliest one's probability; biases the gradient.",
        expert=True)
    repetition_penalty: float = SAMPLING.shared(1.0,
        "Penalty on tokens that occurred before; any value but 1 biases the gradient.", expert=True)
    rollout_engine: Literal["auto", "native", "hf", "vllm", "vllm_server"] = SAMPLING.rloo("auto",
        "What samples: native, hf (transformers' generate, slower), auto (native if possible), "
        "vLLM's servers that a run starts (vllm) or is given (vllm_server).")
    rollout_dtype: Literal["float32", "bfloat16"] | None = SAMPLING.rloo(None,
        "Precision of sampling (see the metric mismatch/mean); null is that of training.")
    engine_kwargs: dict[str, Any] | None = SAMPLING.rloo(None,
        "Settings of the engine and its servers, by name (--engine_kwargs.NAME VALUE).",
        expert=True)
    max_staleness: int = SAMPLING.rloo(0,
        "Rollouts by which the weights that sample may be older; above 0 it goes beside training.")
    sampler_processes: int | None = SAMPLING.rloo(None,
        "Processes that sample, each with a copy of the weights; 0: the run's own does; null is 1 "
        "with `max_staleness` above 0, else 0.")
    async_kwargs: dict[str, Any] | None = SAMPLING.rloo(None,
        "Settings of sampling and scoring in other processes, by name.", expert=True)
    dynamic_sample: bool = SAMPLING.from_ms_swift(False,
        "Replace groups without signal (equal rewards) by groups of further prompts.")
    max_resample_times: int = SAMPLING.from_ms_swift(3,
        "Additional rollouts that `dynamic_sample` may draw for each one.", expert=True)
    generation_kwargs: dict[str, Any] | None = SAMPLING.from_trl(None,
        "Sampling options under transformers' names; they override ours.", expert=True)
    stop_strings: list[str] | None = SAMPLING.rloo(None,
        "Texts that end a completion and stay part of it.")

    preset: str | None = OBJECTIVE.rloo(None,
        "Take the objective's defaults from a system or paper: paper, trl, areal, verl, grpo, ...",
        basic=True)
    estimator: str = OBJECTIVE.rloo("composed",
        "What makes advantages of rewards: composed (by the options of baseline and scale), rloo, "
        "grpo, reinforce_pp, package.module:function or file.py:function.")
    estimator_kwargs: dict[str, Any] | None = OBJECTIVE.rloo(None,
        "Arguments of the estimator, by name (--estimator_kwargs.NAME VALUE).", expert=True)
    beta: float = KL.shared(0.05,
        "Weight of the KL penalty against the reference model; 0 needs no reference.", basic=True)
    kl_placement: Literal["reward", "reward_to_go", "loss"] = KL.rloo("reward",
        "KL penalty in the completion's reward, in each token's reward to come, or in the loss.")
    kl_estimator: Literal["k1", "k2", "k3"] = KL.rloo("k1",
        "KL per token, with x = log(policy / reference): k1 = x, k2 = x^2 / 2, "
        "k3 = exp(-x) - 1 + x.")
    use_bias_correction_kl: bool = KL.rloo(False,
        "Multiply a KL in the loss by the token's ratio: k1 and k3 get the gradient of a KL.",
        expert=True)
    kl_kwargs: dict[str, Any] | None = KL.rloo(None,
        "Bound on the KL penalty and control of its weight, by name.", expert=True)
    sync_ref_model: bool = KL.shared(False,
        "Let the reference model follow the policy (needs `beta` above 0).")
    ref_model_mixup_alpha: float = KL.shared(0.6,
        "Reference at each sync: (1 - alpha) * reference + alpha * policy (with `sync_ref_model`).",
        expert=True)
    ref_model_sync_steps: int = KL.shared(512,
        "Optimizer steps between syncs of the reference (with `sync_ref_model`).", expert=True)
    epsilon: float = OBJECTIVE.shared(0.2,
        "Clip the ratio of new to old policy below 1 - epsilon; no effect on a rollout's 1st step.")
    epsilon_high: float | None = OBJECTIVE.shared(None,
        "Clip the ratio of new to old policy above 1 + epsilon_high; null takes `epsilon`.")
    delta: float | None = OBJECTIVE.from_ms_swift(None,
        "Bound on the ratio of new to old policy for negative advantages (dual clip).", expert=True)
    importance_sampling_level: Literal["sequence", "sequence_mean", "token"] = OBJECTIVE.rloo(
        "sequence",
        "Ratio of new to old policy per completion (product or mean of its tokens') or per token.")
    rollout_importance_sampling_mode: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "off"
    ] | None = OBJECTIVE.rloo(None,
        "Weight the loss by trainer / sampler per token or sequence, truncated or masked; null is "
        "off, and truncated with `max_staleness` above 0.")
    rollout_importance_sampling_threshold: float = OBJECTIVE.from_ms_swift(2.0,
        "Upper bound on the weights of `rollout_importance_sampling_mode`.", expert=True)
    rollout_importance_sampling_min: float | None = OBJECTIVE.rloo(None,
        "Lower bound on the weights of `rollout_importance_sampling_mode` (mask modes only).",
        expert=True)
    loss_aggregation: Literal[
        "sequence", "sequence_token_mean", "token_mean", "constant"
    ] = OBJECTIVE.rloo("sequence",
        "Token losses: sum per completion (unbiased), mean per completion, mean over all tokens, "
        "or sum per completion divided by `loss_constant`.")
    loss_constant: float | None = OBJECTIVE.rloo(None,
        "Divisor for `loss_aggregation` constant; null is `max_completion_length`.", expert=True)
    entropy_coef: float = OBJECTIVE.rloo(0.0, "Weight of an entropy bonus in the loss.")
    mean_level: Literal["group", "batch", "running", "none"] = OBJECTIVE.rloo("group",
        "Baseline: mean reward of the prompt's completions, of the rollout, of the past, or none.")
    mean_leave1out: bool = OBJECTIVE.rloo(True, "Leave a completion out of its own baseline.")
    std_level: Literal["group", "batch", "none"] = OBJECTIVE.rloo("none",
        "Divide advantages by the standard deviation of the prompt's completions or the rollout.")
    advantage_epsilon: float = OBJECTIVE.rloo(1e-4,
        "Added to a standard deviation before rewards or advantages are divided by it.",
        expert=True)
    normalize_advantages: bool = OBJECTIVE.from_trl(False,
        "Standardise advantages over the whole rollout, as the last step.")
    mask_truncated_completions: bool = OBJECTIVE.from_trl(False,
        "Leave completions that hit the length limit out of the loss.")

    use_peft: bool = LORA.rloo(False,
        "Train a LoRA adapter and freeze the model's own weights.", basic=True)
    lora_r: int = LORA.rloo(16, "Rank of the LoRA adapter.", basic=True)
    lora_alpha: int = LORA.from_ms_swift(32,
        "LoRA scaling: the update is multiplied by alpha / rank.")
    lora_dropout: float = LORA.from_ms_swift(0.05,
        "No effect on training, where dropout is off; recorded with the adapter.", expert=True)
    lora_target_modules: str | list[str] | None = LORA.rloo(None,
        "Layers that get LoRA: names, a pattern, or all-linear; null is peft's choice.")
    lora_target_parameters: list[str] | None = LORA.rloo(None,
        "Parameters that get LoRA besides layers, such as experts (needs `lora_dropout` 0).",
        expert=True)
    lora_modules_to_save: list[str] | None = LORA.rloo(None,
        "Layers trained and saved in full alongside the LoRA adapter.", expert=True)
    use_rslora: bool = LORA.from_ms_swift(False,
        "Multiply the LoRA update by alpha / sqrt(rank).", expert=True)
    load_in_4bit: bool = QUANTISATION.rloo(False,
        "Load the frozen base of an adapter in 4 bits (bitsandbytes).")
    load_in_8bit: bool = QUANTISATION.rloo(False,
        "Load the frozen base of an adapter in 8 bits (bitsandbytes).")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = QUANTISATION.from_ms_swift("nf4",
        "4-bit type of `load_in_4bit`: nf4 or fp4.", expert=True)
    use_bnb_nested_quant: bool = QUANTISATION.rloo(False,
        "Quantise the scales of `load_in_4bit` as well.", expert=True)
    use_dora: bool = LORA.from_ms_swift(False,
        "Use DoRA: train the weights' magnitudes apart from their LoRA direction.", expert=True)

    num_prompts: int | None = BATCHES.rloo(None,
        "Prompts per optimizer step; give it instead of batch sizes.", basic=True)
    per_device_train_batch_size: int = BATCHES.shared(DEFAULT_BATCH[0],
        "Completions per accumulation step and device.")
    gradient_accumulation_steps: int = BATCHES.shared(DEFAULT_BATCH[1],
        "Accumulation steps per optimizer step.")
    generation_batch_size: int | None = BATCHES.shared(None,
        "Completions sampled per rollout; null derives it from `steps_per_generation`.")
    steps_per_generation: int | None = BATCHES.shared(None,
        "Accumulation steps fed by one rollout; null means those of one optimizer step.")
    num_iterations: int = BATCHES.shared(1, "Passes over each rollout.")
    max_steps: int = BATCHES.shared(-1,
        "Optimizer steps to train for; -1 trains for `num_train_epochs`.", basic=True)
    num_train_epochs: float = BATCHES.shared(3.0,
        "Passes over the dataset if `max_steps` is -1.", basic=True)
    packing: bool | None = MEMORY.rloo(None,
        "Compute each prompt once for all its completions; null does so wherever the model can.",
        expert=True)
    max_tokens_per_micro_batch: int | None = MEMORY.rloo(None,
        "Most tokens in a micro-batch; null chooses what fits into memory.")
    router_aux_loss_coef: float | None = OBJECTIVE.from_trl(None,
        "Weight of the loss that balances a mixture's experts; null is the model's own.",
        expert=True)
    offload: list[Literal["optimizer", "params", "reference"]] = MEMORY.rloo([],
        "State that is kept in CPU memory: the optimizer's between steps, the reference's layers "
        "but for the one that computes, params (weights, gradients, optimizer) with fsdp2.")
    activation_offloading: bool = MEMORY.rloo(False, "Keep activations in CPU memory till needed.")

    learning_rate: float = OPTIMIZER.shared(1e-6, "Peak learning rate.", basic=True)
    weight_decay: float = OPTIMIZER.shared(0.0,
        "Decoupled weight decay, except on biases and norms.")
    adam_beta1: float = OPTIMIZER.shared(0.9, "Decay of Adam's first moment.", expert=True)
    adam_beta2: float = OPTIMIZER.shared(0.999, "Decay of Adam's second moment.", expert=True)
    adam_epsilon: float = OPTIMIZER.shared(1e-8, "Added to Adam's denominator.", expert=True)
    max_grad_norm: float = OPTIMIZER.shared(1.0, "Clip the gradient to this norm; 0 does not clip.")
    lr_scheduler_type: str = OPTIMIZER.shared("linear",
        "Learning rate schedule, by its name in transformers.")
    lr_scheduler_kwargs: dict[str, Any] | None = OPTIMIZER.shared(None,
        "Arguments passed to the learning rate schedule.", expert=True)
    warmup_steps: float = OPTIMIZER.shared(0.0,
        "Optimizer steps of linear warm-up; below 1 a share of all steps.")
    optim: str = OPTIMIZER.shared("adamw_torch_fused", "Optimizer, by its name in transformers.")
    optim_args: str | None = OPTIMIZER.shared(None,
        "Arguments of the optimizer: name=value,name=value.", expert=True)

    model_init_kwargs: dict[str, Any] | None = DATA.from_trl(None,
        "Arguments passed to from_pretrained when the model is loaded.")
    allow_missing_weights: bool = DATA.rloo(False,
        "Train a model whose files lack weights, such as those of a new head: they are random.",
        expert=True)
    trust_remote_code: bool = DATA.from_trl(False, "Run Python code that comes with a model.")
    bf16: bool | None = MACHINE.shared(None,
        "Compute in bfloat16 with float32 weights; null does so unless `fp16` is on.", basic=True)
    fp16: bool = MACHINE.shared(False, "Compute in float16 with loss scaling; needs a GPU.")
    gradient_checkpointing: bool = MEMORY.shared(True,
        "Recompute activations in the backward pass to save memory.")
    gradient_checkpointing_kwargs: dict[str, Any] | None = MEMORY.shared(None,
        "Arguments passed to gradient checkpointing.", expert=True)
    use_cpu: bool = MACHINE.shared(False, "Run on the CPU even where there is a GPU.")
    tf32: bool | None = MACHINE.shared(None,
        "Let a GPU multiply float32 matrices in TF32; null leaves it to torch.", expert=True)
    num_threads: int | None = MACHINE.rloo(None, "CPU threads; null measures what is fastest.")
    cpu_kwargs: dict[str, Any] | None = MACHINE.rloo(None,
        "Libraries that compute on a CPU, by name.", expert=True)
    torch_compile: bool = MACHINE.shared(False,
        "Compile what stands between products, on a GPU.", expert=True)
    seed: int = MACHINE.shared(42, "Seed of everything random.", basic=True)
    data_seed: int | None = MACHINE.shared(None,
        "Seed of the prompt order; null takes `seed`.", expert=True)
    full_determinism: bool = MACHINE.shared(False,
        "Use deterministic kernels only: equal bits on a GPU too, where that takes time.",
        expert=True)

    num_processes: int | None = PROCESSES.rloo(None,
        "Processes that train together: `rloo train` starts them unless a launcher has; null takes "
        "as many as were started.")
    parallel: Literal["replicate", "fsdp2", "zero1", "zero2", "zero3"] = PROCESSES.rloo("replicate",
        "Each process has all weights (replicate), or they are divided (fsdp2: torch's "
        "fully_shard); or DeepSpeed divides the optimizer's state (zero1), gradients too (zero2), "
        "and weights too (zero3).")
    deepspeed: dict[str, Any] | str | None = PROCESSES.shared(None,
        "DeepSpeed's JSON file, or what it would contain; its stage sets `parallel`.")
    state_dict_type: Literal["full", "sharded"] = PROCESSES.rloo("full",
        "Checkpoints hold whole tensors, or what is divided as every process writes its part.",
        expert=True)
    max_restarts: int = PROCESSES.rloo(0,
        "How often `rloo train` starts all its processes again after one has died.")
    ddp_timeout: int = PROCESSES.shared(1800,
        "Seconds that a process waits for the others, at the start too, before the run ends.",
        expert=True)

    eval_strategy: Literal["no", "steps", "epoch"] = EVALUATION.shared("no",
        "Evaluate never (no), every `eval_steps` (steps), or after every epoch.", basic=True)
    eval_steps: float | None = EVALUATION.shared(None,
        "Optimizer steps between evaluations, below 1 a share of all; null is `logging_steps`.")
    eval_on_start: bool = EVALUATION.shared(False, "Evaluate before the first step.")
    eval_delay: float = EVALUATION.shared(0.0,
        "Steps, or epochs with `eval_strategy epoch`, before the first evaluation while training.",
        expert=True)
    num_generations_eval: int | None = EVALUATION.shared(None,
        "Completions per prompt in evaluation; null takes `num_generations`.")
    eval_kwargs: dict[str, Any] | None = EVALUATION.rloo(None,
        "Sampling and passing in evaluation, by name, where it differs from training.")
    eval_reward: list[str | dict[str, Any]] = EVALUATION.rloo([],
        "Rewards that only judge: measured in evaluations, with how often they find completions "
        "better than those of the starting policy, and never trained.")
    eval_pass_k: list[int] = EVALUATION.rloo([1], 
        "Values of k for which evaluation reports pass@k.")

    output_dir: str = field(default="rloo_output", kw_only=False, metadata=SAVING.about(
        "Folder for the model, metrics and checkpoints.", SHARED, basic=True))
    overwrite_output_dir: bool = SAVING.rloo(
        False, "Remove another run in `output_dir`; else it moves to `earlier/N` there."
    )
    resume_from_checkpoint: str | bool | None = SAVING.shared(None,
        "Checkpoint folder to continue from; true takes the newest in `output_dir`, auto too if it "
        "is of an unfinished run with these options, and starts if there is no run.", basic=True)
    on_sigusr1: Literal["stop", "save"] = SAVING.rloo("stop",
        "SIGUSR1 saves a checkpoint and stops the run, or saves and goes on (save).", expert=True)
    save_strategy: Literal["no", "steps", "epoch", "best"] = SAVING.shared("steps",
        "Save checkpoints never (no), every `save_steps` (steps), each epoch, or at a new best.")
    save_steps: float = SAVING.shared(500.0,
        "Optimizer steps between checkpoints; below 1 a share of all steps.", basic=True)
    save_dtype: Literal["float32", "bfloat16", "float16"] | None = SAVING.rloo(None,
        "Precision of the weights in the result; null is that of the base's files (an adapter's "
        "stay float32, as checkpoints always do).")
    save_total_limit: int | None = SAVING.shared(None,
        "Keep at most this many checkpoints; null keeps all.")
    save_only_model: bool = SAVING.shared(False,
        "Checkpoints hold the model alone, which no run goes on from.", expert=True)
    load_best_model_at_end: bool = SAVING.shared(False,
        "End with the checkpoint of the best evaluation instead of the last step's weights.")
    metric_for_best_model: str | None = SAVING.shared(None,
        "Metric that decides which evaluation is the best; null is the mean reward.", expert=True)
    greater_is_better: bool | None = SAVING.shared(None,
        "Whether a higher `metric_for_best_model` is better; null: unless it ends in loss.",
        expert=True)
    logging_strategy: Literal["no", "steps", "epoch"] = LOGGING.shared("steps",
        "Log never (no), every `logging_steps` (steps), or after every epoch.", expert=True)
    logging_steps: float = LOGGING.shared(10.0,
        "Optimizer steps between log lines; below 1 a share of all steps.", basic=True)
    logging_first_step: bool = LOGGING.shared(False, "Log the first step too.", expert=True)
    log_completions: bool = LOGGING.shared(False,
        "Print and save sampled completions with every log line.")
    num_completions_to_print: int | None = LOGGING.from_trl(None,
        "Most completions that `log_completions` prints; null prints all.", expert=True)
    log_multimodal: bool = LOGGING.from_trl(True,
        "Keep the images of logged completions.", expert=True)
    log_unique_prompts: bool = LOGGING.from_trl(False,
        "Let `log_completions` print at most one completion per prompt.", expert=True)
    push_to_hub: bool = HUB.shared(False, "Push the model to the hub at every save and at the end.")
    hub_model_id: str | None = HUB.shared(None,
        "Hub repository to push to; null is the name of `output_dir`.")
    hub_strategy: Literal[
        "end", "every_save", "checkpoint", "all_checkpoints"
    ] = HUB.shared("every_save",
        "Push to the hub at the end, at every save, or then with the newest checkpoint or all.",
        expert=True)
    hub_token: str | None = HUB.shared(None,
        "Access token for the hub, never written to disk; null uses that of `hf auth login`.",
        secret=True, expert=True)
    hub_private_repo: bool | None = HUB.shared(None,
        "Make the hub repository private.", expert=True)
    hub_revision: str | None = HUB.shared(None,
        "Branch of the hub repository to push to.", expert=True)
    report_to: str | list[str] = LOGGING.shared("none",
        "Loggers to report to besides the files: tensorboard, wandb, trackio.", basic=True)
    run_name: str | None = LOGGING.shared(None, "Name of the run in the loggers.")
    project: str = LOGGING.shared("huggingface", "Project of the run in the loggers.", expert=True)
    trackio_space_id: str | None = LOGGING.shared(None,
        "Hub space that trackio writes to.", expert=True)
    disable_tqdm: bool | None = LOGGING.shared(None,
        "Show no view of progress, only the line of each log; null shows it on terminals.")
    profile: bool = LOGGING.rloo(False,
        "Write the time and memory use of the third rollout to `output_dir`.")

    tools: list[str] = TOOLS.rloo([],
        "Functions that the model may call: file.py:function or package.module:function.")
    environment_factory: str | None = TOOLS.rloo(None,
        "Class (file.py:Class) of which each episode has an object: `reset` begins it, public "
        "methods are tools, `get_reward` is a reward.")
    max_tool_calling_iterations: int | None = TOOLS.rloo(None,
        "Number of times that an episode may go on after calls of tools; null: while there is "
        "room.")
    tool_kwargs: dict[str, Any] | None = TOOLS.rloo(None,
        "Limits on what tools return and take, by name.", expert=True)

    use_vllm: bool = VLLM.from_trl(False,
        "Sample with vLLM: `rollout_engine` vllm or vllm_server, by `vllm_mode`.")
    vllm_mode: Literal["colocate", "server"] = VLLM.from_trl("colocate",
        "With `use_vllm`, start servers of vLLM (colocate) or use a running one (server).")
    vllm_server_host: str = VLLM.from_trl("0.0.0.0",
        "Host of the running server, with `use_vllm` and `vllm_mode server`.")
    vllm_server_port: int = VLLM.from_trl(8000,
        "Port of the running server, with `use_vllm` and `vllm_mode server`.")
    vllm_server_base_url: list[str] | None = VLLM.from_trl(None,
        "Addresses of running servers (http://host:port), with `rollout_engine vllm_server`.")
    vllm_server_timeout: float = VLLM.from_trl(240.0,
        "Seconds that a server of vLLM may take to start.", expert=True)
    vllm_tensor_parallel_size: int = VLLM.from_trl(1, "GPUs that compute one server's model.")
    vllm_gpu_memory_utilization: float = VLLM.from_trl(0.3,
        "Share of a GPU's memory that a server takes.")
    vllm_max_model_length: int | None = VLLM.from_trl(None,
        "Longest prompt and completion together on a server; null is what the model allows.",
        expert=True)
    vllm_model_impl: Literal["auto", "vllm", "transformers"] = VLLM.from_trl("vllm",
        "Whose code of the model a server runs.", expert=True)
    vllm_enable_sleep_mode: bool | None = VLLM.from_trl(None,
        "Let servers give their memory back while training; null does so on the trainer's GPU.",
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
