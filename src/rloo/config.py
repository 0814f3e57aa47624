"""RLOOConfig: every option, its default, its help, and the batch arithmetic that follows from it.

Names and defaults are those of TRL 1.16 and transformers where they have the option (`DEVIATIONS`
lists the exceptions). Knows nothing of tensors: importing it needs neither torch nor transformers.
"""

from __future__ import annotations

import math
import typing
from copy import deepcopy
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from rloo.aliases import resolve
from rloo.config_checks import ADAPTER_OPTIONS, check
from rloo.options import from_trl, own, shared, suggest
from rloo.unsupported import REFUSED

# ruff: noqa: RUF009 - own, shared and from_trl return dataclasses.field(...)

# Shared options whose default is not TRL's: name -> (TRL's, ours, reason).
DEVIATIONS: dict[str, tuple[Any, Any, str]] = {
    "output_dir": (
        None,
        "rloo_output",
        "TRL resolves null to trainer_output; ours says what made it",
    ),
}

# The batch sizes nobody asked for: they do not contradict num_prompts.
DEFAULT_BATCH = (8, 1)


@dataclass(frozen=True, init=False)
class RLOOConfig:
    """The options of a run. Takes every field by keyword, and every alias (`rloo.aliases`).

    Raises ValueError for an unknown option, a value of the wrong type or out of range, options
    that contradict each other, and an option of TRL or transformers that this version does not
    implement, set to anything but its default. Change one with `dataclasses.replace`.
    """

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
        "Built-in names (with options: length(target_max=50)), module:function, file.py:function.",
    )
    reward_weights: list[float] | None = shared(None, "One per reward; null weighs each 1.")
    reward_clip_range: tuple[float, float] | None = from_trl(
        None, "Clip the weighted reward to [low, high], before KL and baseline."
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
    rollout_dtype: Literal["float32", "bfloat16"] | None = own(
        None, "Of the native sampler's matrix products; null: as in training. See mismatch/mean."
    )

    # Objective
    beta: float = shared(0.05, "Weight of the KL penalty in the reward; 0 needs no reference.")
    epsilon: float = shared(
        0.2, "Ratio is clipped below 1 - epsilon; idle on a rollout's 1st step."
    )
    epsilon_high: float | None = shared(None, "Ratio is clipped above 1 + this; null: `epsilon`.")
    importance_sampling_level: Literal["sequence", "token"] = own(
        "sequence", "One ratio per completion (unbiased), or one per token.", ms_swift=True
    )
    loss_aggregation: Literal["sequence", "sequence_token_mean", "token_mean", "constant"] = own(
        "sequence",
        "Token losses: sum per completion (unbiased), mean per completion, mean over all tokens, "
        "or sum per completion divided by `loss_constant`.",
    )
    loss_constant: float | None = own(None, "Divisor; with loss_aggregation constant only.")
    mean_level: Literal["group", "batch", "none"] = own(
        "group", "Baseline: mean reward of the prompt's completions, of the batch, or none."
    )
    mean_leave1out: bool = own(
        True, "Leave out the answer itself from its baseline (AReaL's adv_norm: one token)."
    )
    std_level: Literal["group", "batch", "none"] = own(
        "none", "Divide by the standard deviation over the group's answers, the batch's, or not."
    )
    advantage_epsilon: float = own(1e-4, "Added to a standard deviation before dividing by it.")
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
    eval_strategy: Literal["no", "steps"] = shared("no", "Never, or every `eval_steps`.")
    eval_steps: float | None = shared(
        None, "Steps between evaluations, below 1 a share of all; null takes `logging_steps`."
    )
    eval_on_start: bool = shared(False, "Evaluate before the first step.")
    num_generations_eval: int | None = shared(None, "Per prompt; null takes `num_generations`.")
    eval_pass_k: list[int] = own([1], "The k of each pass@k to report.")
    pass_threshold: float = own(1.0, "Score of the first reward from which a completion passes.")

    # Output
    output_dir: str = shared("rloo_output", "Folder for the model, metrics and checkpoints.")
    overwrite_output_dir: bool = own(False, "Replace another run in `output_dir`.")
    resume_from_checkpoint: str | bool | None = shared(
        None, "Checkpoint folder to go on from; true is the newest in `output_dir`."
    )
    save_strategy: Literal["no", "steps"] = shared("steps", "Never, or every `save_steps`.")
    save_steps: float = shared(500.0, "Steps between checkpoints; below 1 a share of all steps.")
    save_total_limit: int | None = shared(None, "Keep at most this many checkpoints.")
    logging_steps: float = shared(10.0, "Steps between log lines; below 1 a share of all steps.")
    logging_first_step: bool = shared(False, "Log the first step too.")
    log_completions: bool = shared(False, "Print and save sampled completions at every log.")
    num_completions_to_print: int | None = from_trl(None, "At most this many; null prints all.")
    report_to: str | list[str] = shared("none", "Further loggers: tensorboard, wandb, trackio.")
    run_name: str | None = shared(None, "Name of the run in the loggers.")
    project: str = shared("huggingface", "Project of the run in the loggers.")
    trackio_space_id: str | None = shared(None, "Hub space that trackio writes to.")
    disable_tqdm: bool | None = shared(None, "No progress line; null shows it on a terminal.")
    profile: bool = own(False, "Write where the third rollout's time and memory went.")

    def __init__(self, output_dir: str | None = None, **options: Any) -> None:
        if output_dir is not None:
            options["output_dir"] = output_dir
        values = resolve(options, option_types())
        for field in fields(self):
            default = field.default if field.default_factory is MISSING else field.default_factory()
            object.__setattr__(self, field.name, values.get(field.name, default))
        if self.bf16 is None:
            object.__setattr__(self, "bf16", not self.fp16)
        if self.eval_strategy == "steps" and self.eval_steps is None:
            object.__setattr__(self, "eval_steps", self.logging_steps)
        check(self)

    if not TYPE_CHECKING:  # a type checker shall still find misspelt options

        def __getattr__(self, name: str) -> Any:
            # Scripts written for TRL read options that are refused here (`if args.push_to_hub:`).
            if name in REFUSED and REFUSED[name][0]:
                return REFUSED[name][0][0]
            raise AttributeError(f"RLOOConfig has no option {name}{suggest(name, option_types())}")

    def completions_per_step(self, world_size: int = 1) -> int:
        """Completions that one optimizer step learns from, over all processes."""
        per_device = self.per_device_train_batch_size
        accumulation = self.gradient_accumulation_steps
        by_batch_size = per_device * accumulation * world_size
        if self.num_prompts is None:
            return by_batch_size
        by_prompts = self.num_prompts * self.num_generations
        untouched = (per_device, accumulation) == DEFAULT_BATCH
        if not untouched and by_batch_size != by_prompts:
            raise ValueError(
                f"num_prompts {self.num_prompts} * num_generations {self.num_generations} is "
                f"{by_prompts} completions per step, but per_device_train_batch_size {per_device} "
                f"* gradient_accumulation_steps {accumulation} * {world_size} process(es) is "
                f"{by_batch_size}; leave the batch sizes out when num_prompts is given"
            )
        return by_prompts

    def completions_per_rollout(self, world_size: int = 1) -> int:
        """Completions sampled at once, over all processes: TRL's generation batch.

        Feeds whole optimizer steps: TRL's rarer cases, where a step begins in one pass over the
        rollout and ends in the next, are refused.
        """
        step = self.completions_per_step(world_size)
        accumulation = self.gradient_accumulation_steps
        if self.generation_batch_size is None:
            micro_steps = self.steps_per_generation or accumulation
            if micro_steps % accumulation:
                raise ValueError(
                    f"steps_per_generation is {micro_steps}, not a multiple of "
                    f"gradient_accumulation_steps {accumulation}; a rollout feeds whole optimizer "
                    "steps"
                )
            return step * (micro_steps // accumulation)
        if self.generation_batch_size % step:
            raise ValueError(
                f"generation_batch_size is {self.generation_batch_size}, not a multiple of the "
                f"{step} completions of an optimizer step; a rollout feeds whole optimizer steps "
                "(num_prompts, steps_per_generation)"
            )
        return self.generation_batch_size

    def prompts_per_rollout(self, world_size: int = 1) -> int:
        """Prompts drawn for one rollout; each gets `num_generations` completions."""
        completions = self.completions_per_rollout(world_size)
        if completions % self.num_generations:
            raise ValueError(
                f"a rollout has {completions} completions (per_device_train_batch_size "
                f"{self.per_device_train_batch_size}), not a multiple of num_generations "
                f"{self.num_generations}; set num_prompts (prompts per optimizer step) and leave "
                "the batch sizes out"
            )
        return completions // self.num_generations

    def steps_per_rollout(self, world_size: int = 1) -> int:
        """Optimizer steps that one rollout serves: num_iterations * steps_per_generation /
        gradient_accumulation_steps."""
        rollout = self.completions_per_rollout(world_size)
        return self.num_iterations * (rollout // self.completions_per_step(world_size))

    def to_dict(self) -> dict[str, Any]:
        """The resolved options as JSON types; `RLOOConfig(**config.to_dict()) == config`."""
        return {
            field.name: list(value) if isinstance(value, tuple) else deepcopy(value)
            for field in fields(self)
            for value in [getattr(self, field.name)]
        }


@cache
def option_types() -> dict[str, Any]:
    """Our option names and their annotations, in the order of declaration."""
    return typing.get_type_hints(RLOOConfig)


def without_adapter(config: RLOOConfig) -> RLOOConfig:
    """`config` with every option about adapters at its default: none is added."""
    defaults: dict[str, Any] = {
        field.name: field.default for field in fields(config) if field.name in ADAPTER_OPTIONS
    }
    return replace(config, **defaults)


def resolve_interval(steps: float, total_steps: int) -> int:
    """Optimizer steps between two events: `steps`, or that share of `total_steps` when below 1."""
    return int(steps) if steps >= 1 else max(1, math.ceil(steps * total_steps))
