"""Converts AReaL's experiment files (GRPOConfig of AReaL 1.0.4) to our options.

Settings of the objective that a file does not set have the defaults of AReaL's classes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rloo.addons.importers.areal_objective import read_objective
from rloo.addons.importers.known_keys import AREAL
from rloo.addons.importers.settings_reader import (
    ENGINES,
    PROCESSES,
    ImportResult,
    SettingsReader,
    follow_references,
    greedy,
)
from rloo.addons.importers.source_file import read_settings

_MARK = re.compile(r"(?!--).*\.py")

# AReaL's key -> AReaL's default, for keys with the same meaning as one of our options.
_SAME: dict[str, Any] = {
    "actor.path": None, "train_dataset.path": None, "train_dataset.split": "train",
    "train_dataset.shuffle": True, "seed": 1, "total_train_epochs": 1.0, "total_train_steps": None,
    "gconfig.n_samples": 1, "gconfig.max_new_tokens": 16384, "gconfig.temperature": 1.0,
    "gconfig.top_p": 1.0, "gconfig.stop": None, "eval_gconfig.n_samples": None,
    "eval_gconfig.max_new_tokens": None, "eval_gconfig.temperature": None,
    "eval_gconfig.top_p": None, "actor.eps_clip": 0.2, "actor.eps_clip_higher": None,
    "actor.c_clip": None, "actor.reward_bias": 0.0, "actor.reward_scaling": 1.0,
    "actor.gradient_checkpointing": False,
    "actor.mb_spec.max_tokens_per_mb": None, "actor.optimizer.lr": 1e-3,
    "actor.optimizer.weight_decay": 0.01, "actor.optimizer.beta1": 0.9,
    "actor.optimizer.beta2": 0.999, "actor.optimizer.eps": 1e-8,
    "actor.optimizer.gradient_clipping": 1.0, "actor.optimizer.warmup_steps_proportion": 0.001,
    "evaluator.eval_before_train": False,
}  # fmt: skip
# AReaL's key -> our option, for keys that are no aliases of our options.
_NAMES = {
    "train_dataset.split": "dataset_split", "gconfig.stop": "stop_strings",
    "eval_gconfig.n_samples": "num_generations_eval",
    "eval_gconfig.max_new_tokens": "eval_kwargs.max_completion_length",
    "eval_gconfig.temperature": "eval_kwargs.temperature",
    "eval_gconfig.top_p": "eval_kwargs.top_p",
    "evaluator.eval_before_train": "eval_on_start",
    "actor.mb_spec.max_tokens_per_mb": "max_tokens_per_micro_batch",
    "actor.lora_rank": "lora_r", "actor.lora_alpha": "lora_alpha",
}  # fmt: skip
# key -> (the value without effect, the reason why other values are not converted)
_ONLY: dict[str, tuple[Any, str]] = {
    "actor.discount": (1.0, "a token's reward to come is not discounted here"),
    "actor.gae_lambda": (1.0, "there is no value model (gae_lambda)"),
    "actor.overlong_reward_penalty": (False, "the reward soft_overlong does it (reward)"),
    "actor.use_sapo_loss": (False, "the SAPO loss is not part of this version"),
    "actor.m2_threshold": (None, "the M2PO loss is not part of this version"),
    "actor.init_from_scratch": (False, "a model starts from its weights"),
    "actor.mask_no_eos_with_zero": (
        False,
        "the nearest is mask_truncated_completions, which leaves them out of the loss",
    ),
    "gconfig.greedy": (False, "training samples from the policy"),
    "gconfig.min_new_tokens": (0, "completions end when the policy ends them"),
    "gconfig.frequency_penalty": (0.0, "not a sampling option here (repetition_penalty)"),
    "gconfig.stop_token_ids": ([], "tokens that end a completion are the model's"),
    "gconfig.ignore_eos": (False, "completions end when the policy ends them"),
    "gconfig.use_beam_search": (False, "training samples from the policy"),
    "eval_gconfig.greedy": (False, "evaluation is sampled and greedy, both"),
    "train_dataset.type": ("rl", "training is by reinforcement"),
    "train_dataset.drop_last": (False, "no row is left out at the end of an epoch"),
    "valid_dataset.type": ("rl", "evaluation is by the rewards"),
    "valid_dataset.shuffle": (False, "evaluation takes all rows in their order"),
    "dynamic_bs": (False, "not the same as dynamic_sample, which refills groups"),
    "recover.mode": ("disabled", "say so at the start (resume_from_checkpoint)"),
    "enable_offload": (False, "memory is saved by offload and activation_offloading"),
}
# reason -> the prefixes of keys without a counterpart
_REASONS: dict[str, tuple[str, ...]] = {
    "the run's files go to output_dir": ("cluster.fileroot",),
    PROCESSES: (
        "cluster.", "scheduler.", "launcher.", "allocation_mode.", "actor.backend.",
        "actor.scheduling", "actor.fsdp.", "actor.megatron.", "actor.archon.",
    ),
    ENGINES: ("rollout.", "sglang.", "vllm.", "gconfig."),
    "the reference is the model before training; nothing has to be said of it": ("ref.",),
    "leave-one-out needs no value model": ("critic.",),
    "distillation is not part of this version": ("teacher.",),
    "micro-batches follow from memory (max_tokens_per_micro_batch)": ("actor.mb_spec.",),
    "no effect: dropout is off in every pass here": ("actor.disable_dropout",),
    "attention follows from the model (packing)": ("actor.attn_impl",),
    "the reward soft_overlong does it (reward)": ("actor.overlong",),
    "evaluation samples as much at once as memory allows": ("valid_dataset.batch_size",),
    "no effect: prompts are tokenised once, without loader workers": (
        "train_dataset.", "valid_dataset.",
    ),
    "checkpoints go to output_dir, by steps or epochs (save_strategy)": ("saver.",),
    "a checkpoint holds all that resuming needs (resume_from_checkpoint)": ("recover.",),
    "evaluation goes by steps or epochs (eval_strategy)": ("evaluator.",),
    "loggers are named by report_to; files go to output_dir": ("stats_logger.",),
    "the option here is profile": ("perf_tracer.", "memory_profiler."),
    "the tokenizer is the model's": ("tokenizer_path.",),
}  # fmt: skip


def import_areal(path: str, overrides: Sequence[str] = ()) -> ImportResult:
    """Import AReaL's YAML file or script at `path`, or a command line, with `overrides` after it.
    Raises ValueError for an unreadable source or value."""
    given = read_settings(path, overrides, _MARK, "with --config FILE")
    source = SettingsReader(follow_references(given.values), _NAMES)
    source.notes += given.notes
    source.leave_unread(given.unread)
    options = source.take_same(_SAME)
    if options.get("eval_kwargs.temperature") == 0:
        options["eval_kwargs.temperature"] = None
        greedy(source, "eval_gconfig.temperature")
    source.expect_all(_ONLY)
    options |= _read_run(source, options) | _read_data(source, options) | _read_batches(source)
    options |= _read_optimizer(source) | _read_adapter(source) | read_objective(source, options)
    return source.finish(options, _REASONS, AREAL)


def _read_run(source: SettingsReader, options: dict[str, Any]) -> dict[str, Any]:
    names = [source.take(key, str) for key in ("experiment_name", "trial_name")]
    for part in ("actor", "rollout", "ref", "saver", "recover", "evaluator", "stats_logger"):
        source.expect(f"{part}.experiment_name", names[0], "the run has one name (run_name)")
        source.expect(f"{part}.trial_name", names[1], "the run has one name (run_name)")
    another = "the reference is the model before training, never another one"
    source.expect("ref.path", options.get("model"), another)
    source.expect("tokenizer_path", options.get("model"), "the tokenizer is the model's")
    read: dict[str, Any] = {"run_name": "-".join(filter(None, names)) or None}
    read |= _read_timer(source, "saver", "save")
    if source.has("valid_dataset.path"):
        read |= _read_timer(source, "evaluator", "eval")
    loggers = [
        name
        for name in ("wandb", "swanlab", "trackio")
        if source.take(f"stats_logger.{name}.mode", str, "disabled") != "disabled"
    ]
    ahead = source.take("rollout.max_head_offpolicyness", int, 0)
    read["max_staleness"] = ahead if source.take("async_training", bool, True) else 0
    dtype = source.take("actor.dtype", str, "bfloat16")
    read |= {"bf16": dtype == "bfloat16", "fp16": dtype == "float16"}
    return read | {"report_to": loggers or "none"}


def _read_timer(source: SettingsReader, name: str, ours: str) -> dict[str, Any]:
    """The frequency of the action `name`, as our strategy and steps."""
    if steps := source.take(f"{name}.freq_steps", int):
        return {f"{ours}_strategy": "steps", f"{ours}_steps": steps}
    source.expect(f"{name}.freq_secs", None, "not by the clock, but by steps or epochs")
    epochs = f"{name}.freq_epochs"
    if source.values.get(epochs) == 1:
        source.take(epochs)
        return {f"{ours}_strategy": "epoch"}
    source.expect(epochs, None, "after every epoch, or every so many steps")
    return {f"{ours}_strategy": "no"}


def _read_data(source: SettingsReader, options: dict[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = {}
    if (longest := source.take("train_dataset.max_length", int)) is not None:
        read |= {"max_prompt_length": longest, "overlong_prompts": "drop"}
    for key, ours in (("gconfig.top_k", "top_k"), ("eval_gconfig.top_k", "eval_kwargs.top_k")):
        if (kept := source.take(key, int)) is not None:
            read[ours] = 0 if kept >= 10**8 else kept
    if source.has("valid_dataset.path"):
        read["eval_dataset"] = source.take("valid_dataset.path", str)
        read["eval_split"] = source.take("valid_dataset.split", str, "test")
    if str(options.get("dataset", "")).rstrip("/").endswith("gsm8k"):
        asked = "{question}\nPlease put your final answer within \\boxed{}."
        template = [{"role": "user", "content": asked}]
        read |= {"dataset_config": "main", "prompt_template": template, "reward": ["gsm8k"]}
        source.notes.append(
            "dataset_config, prompt_template and reward are what AReaL's gsm8k loader and script "
            "do; the reward compares numbers exactly, where theirs asks math-verify (reward math)"
        )
    else:
        source.notes.append(
            "AReaL's dataset loader and script make prompts and rewards: say so here with "
            "prompt_template and reward"
        )
    return read


def _read_batches(source: SettingsReader) -> dict[str, Any]:
    prompts = source.take("train_dataset.batch_size", int, 1)
    parts = source.take_count("actor.ppo_n_minibatches", 4)
    if prompts % parts:
        reason = f"{prompts} prompts (train_dataset.batch_size) cannot be parted into {parts}"
        source.give_back("actor.ppo_n_minibatches", parts, reason)
        source.notes.append(f"{reason}: each rollout serves one optimizer step")
        return {"num_prompts": prompts}
    read = {"num_prompts": prompts // parts}
    return read | ({"steps_per_generation": parts} if parts > 1 else {})


def _read_optimizer(source: SettingsReader) -> dict[str, Any]:
    key = "actor.optimizer.type"
    kind = source.take(key, str, "adam")
    optimizers = {"adam": "adamw_torch_fused", "sgd": "sgd"}
    if kind not in optimizers:
        source.give_back(key, kind, "nearest: adamw_8bit keeps its state in 8 bits (optim)")
    schedule = source.take("actor.optimizer.lr_scheduler_type", str, "constant")
    least = source.take("actor.optimizer.min_lr_ratio", float, 0.0)
    # AReaL's constant schedule also has a warm-up.
    named = "constant_with_warmup" if schedule == "constant" else schedule
    read: dict[str, Any] = {"optim": optimizers.get(kind, "adamw_torch_fused")}
    if least and schedule == "cosine":
        named = "cosine_with_min_lr"
        read["lr_scheduler_kwargs"] = {"min_lr_rate": least}
    elif least and schedule != "constant":
        source.give_back("actor.optimizer.min_lr_ratio", least, f"{schedule} ends at 0 here")
    return read | {"lr_scheduler_type": named}


def _read_adapter(source: SettingsReader) -> dict[str, Any]:
    if not source.take("actor.use_lora", bool, False):
        return {}
    source.expect("actor.peft_type", "lora", "adapters are LoRA (use_peft)")
    sizes = source.take_same({"actor.lora_rank": 32, "actor.lora_alpha": 16})
    targets = source.take("actor.target_modules", list[str]) or None
    return sizes | {"use_peft": True, "lora_dropout": 0.0, "lora_target_modules": targets}
