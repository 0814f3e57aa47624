"""Converts OpenRLHF's `python -m openrlhf.cli.train_ppo_ray` (0.11) to our options. The flag names
from before 0.10 are accepted too.

Flags that the command does not set have OpenRLHF's defaults. A step of OpenRLHF is a rollout, so
counts of steps are converted to optimizer steps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rloo.addons.importers.openrlhf_names import FORMERLY, KNOWN
from rloo.addons.importers.openrlhf_objective import read_objective
from rloo.addons.importers.settings_reader import (
    ENGINES,
    IN_MEMORY,
    PROCESSES,
    ImportResult,
    SettingsReader,
    greedy,
    one_of,
    read_batches,
    steps_between,
)
from rloo.addons.importers.shared_optimizer import read_betas, read_schedule
from rloo.addons.importers.shell import read_flags
from rloo.addons.importers.source_file import read_launch

_MARK = re.compile(r"openrlhf\.cli\.train_(?:ppo|grpo)\w*|(?:.*/)?train_ppo_ray\w*\.py")
_PROGRAM = "openrlhf.cli.train_ppo_ray"
_SETTING = re.compile(
    r"--(?:actor\.|algo\.|rollout\.|micro_rollout_batch|advantage_est|init_kl)\w*"
)

# OpenRLHF's flag -> OpenRLHF's default, for flags with the same meaning as one of our options.
_SAME: dict[str, Any] = {
    "actor.model_name_or_path": None, "rollout.n_samples_per_prompt": 1,
    "rollout.temperature": 1.0, "rollout.top_p": 1.0, "data.prompt_dataset": None,
    "data.prompt_split": "train", "train.max_epochs": 1, "train.num_episodes": 1.0,
    "train.seed": 42, "actor.adam.lr": 1e-6, "actor.adam.eps": 1e-8,
    "actor.adam.weight_decay": 0.0, "actor.max_norm": 1.0, "actor.lr_warmup_ratio": 0.03,
    "actor.gradient_checkpointing_enable": False, "actor.aux_loss_coef": 0.0,
    "actor.entropy_coef": 0.0, "ds.adam_offload": False, "ckpt.output_dir": "./ckpt",
    "ckpt.max_num": 3,
}  # fmt: skip
# OpenRLHF's flag -> our option, for flags that are no aliases of our options.
_NAMES = {
    "actor.model_name_or_path": "model", "rollout.temperature": "temperature",
    "rollout.top_p": "top_p", "data.prompt_dataset": "dataset",
    "data.prompt_split": "dataset_split", "train.max_epochs": "num_iterations",
    "train.num_episodes": "num_train_epochs", "train.seed": "seed",
    "actor.adam.lr": "learning_rate", "actor.adam.eps": "adam_epsilon",
    "actor.adam.weight_decay": "weight_decay", "actor.max_norm": "max_grad_norm",
    "actor.lr_warmup_ratio": "warmup_steps", "ckpt.max_num": "save_total_limit",
    "actor.gradient_checkpointing_enable": "gradient_checkpointing",
    "actor.aux_loss_coef": "router_aux_loss_coef", "ds.adam_offload": "offload.optimizer",
    "ckpt.output_dir": "output_dir", "ds.lora.rank": "lora_r", "ds.lora.alpha": "lora_alpha",
    "ds.lora.dropout": "lora_dropout", "ds.lora.target_modules": "lora_target_modules",
    "ds.load_in_4bit": "load_in_4bit",
}  # fmt: skip
# flag -> (the value without effect, the reason why other values are not converted)
_ONLY: dict[str, tuple[Any, str]] = {
    "algo.advantage.gamma": (1.0, "a token's reward to come is not discounted here"),
    "algo.advantage.lambd": (1.0, "there is no value model"),
    "actor.optim": ("adam", "nearest: adamw_torch_fused (optim)"),
    "train.agent_func_path": (None, "a completion is one turn"),
    "reward.stop_properly_penalty_coef": (
        None, "the nearest is missing_eos_penalty, which is subtracted",
    ),
    "data.max_samples": (10**8, "all rows of the dataset are used"),
    "data.prompt_probs": (None, "training is on one dataset (dataset)"),
    "train.enable_ema": (False, "averaged weights are not part of this version"),
    "actor.freeze_visual_encoder": (False, "what is trained is the model, or a LoRA adapter"),
    "use_ms": (False, "names are of the Hugging Face hub"),
}  # fmt: skip
# reason -> the prefixes of flags without a counterpart
_REASONS: dict[str, tuple[str, ...]] = {
    IN_MEMORY: (
        "train.micro_batch_size", "rollout.micro_batch_size", "rollout.max_tokens_per_gpu",
        "train.max_tokens_per_gpu", "train.dynamic_batch", "ds.packing_samples",
    ),
    ENGINES: ("vllm.", "rollout.vllm", "ds.enable_sleep", "train.partial_rollout"),
    "leave-one-out needs no value model": ("critic.",),
    "the reference is the model before training; nothing has to be said of it": ("ref.",),
    "attention and kernels follow from the model (packing)": (
        "ds.attn_implementation", "ds.use_liger", "ds.experts_implementation", "flash_attn",
    ),
    "a checkpoint holds all that resuming needs (resume_from_checkpoint)": (
        "ckpt.", "ds.use_universal_ckpt",
    ),
    "the rewards' functions get every column of a row": ("data.label_key",),
    "prompts are tokenised once, by the model's tokenizer": (
        "data.disable_fast_tokenizer", "data.dataloader_num_workers", "data.prompt_max_len",
    ),
    "images are found in the rows by themselves": ("data.image_key", "data.max_images"),
    "loggers take their own settings from the environment": ("logger.",),
    "it belongs to muon, which is not here": ("actor.muon",),
    "the rewards' deadline is reward_timeout; a reward model is named by its folder (reward)": (
        "reward.",
    ),
    PROCESSES: ("actor.num_", "train.", "ds.", "local_rank", "actor."),
}  # fmt: skip


def import_openrlhf(text: str, overrides: Sequence[str] = ()) -> ImportResult:
    """Import a command line, or the script at the path `text`, with `overrides` (--flag value)
    after it. Raises ValueError without exactly one command `openrlhf.cli.train_ppo_ray`, and for
    values that cannot be read."""
    launch = read_launch(text, _MARK, _PROGRAM, _SETTING)
    flags = read_flags([*launch.words, *overrides])
    source = SettingsReader(
        {FORMERLY.get(name, name): value for name, value in flags.items()}, _NAMES
    )
    source.notes += launch.notes
    for why, words in launch.unread.items():
        source.leave_unread({why: {FORMERLY.get(name, name): v for name, v in words.items()}})
    options = source.take_same(_SAME)
    source.expect_all(_ONLY)
    options |= _read_lengths(source)
    options |= read_objective(source, options)
    key = "data.prompt_dataset"
    if "," in str(options.get("dataset")):
        names = [name.strip() for name in options["dataset"].split(",")]
        options["dataset"] = one_of(source, key, "dataset", names)
    batches, each = _read_batches(source, options)
    options |= batches | _read_data(source) | _read_rewards(source, options)
    options |= _read_run(source, each) | _read_optimizer(source) | _read_adapter(source)
    return source.finish(options, _REASONS, KNOWN)


def _read_lengths(source: SettingsReader) -> dict[str, Any]:
    """The length limits. The sampler's `max_len` limits the sum of prompt and completion
    lengths."""
    total = source.take("data.max_len", int, 2048)
    longest = source.take("rollout.max_new_tokens", int)
    if longest is None:
        source.notes.append(
            f"completions have {total} tokens less those of the prompt there (data.max_len), "
            f"and {total} here (max_completion_length)"
        )
        return {"max_completion_length": total}
    prompt = source.take("data.prompt_max_len", int, total - longest)
    return {"max_completion_length": longest} | (
        {"max_prompt_length": prompt} if prompt > 0 else {}
    )


def _read_batches(source: SettingsReader, options: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """(options of the batch sizes, optimizer steps per rollout). `train.batch_size` counts
    completions, `rollout.batch_size` counts prompts."""
    prompts = source.take("rollout.batch_size", int, 1024)
    read, each = read_batches(source, prompts, source.take("train.batch_size", int, 128), options)
    if source.take("algo.dynamic_filtering_enable", bool, False):
        low, high = source.take("algo.dynamic_filtering_range", list[float], [0.0, 1.0])
        read["dynamic_sample"] = True
        source.notes.append(
            f"groups whose mean reward is not within {low:g} and {high:g} are replaced there; here "
            "those of equal rewards"
        )
    if source.take("train.async_enable", bool, False):
        read["max_staleness"] = source.take("train.async_queue_size", int, 1)
    return read, each


def _read_data(source: SettingsReader) -> dict[str, Any]:
    column = source.take("data.input_key", str, "input")
    template = source.take("data.input_template", str)
    if source.take("data.apply_chat_template", bool, False):
        if template:
            source.give_back("data.input_template", template, "the chat template acts instead")
        source.notes.append(
            f"prompt_template is for a column {column} of text; if it has messages, call it prompt "
            "and leave prompt_template out"
        )
        return {"prompt_template": [{"role": "user", "content": f"{{{column}}}"}]}
    if template and "{}" in template:
        return {"prompt_template": template.replace("{}", f"{{{column}}}")}
    return {"prompt_template": f"{{{column}}}"}


def _read_rewards(source: SettingsReader, options: dict[str, Any]) -> dict[str, Any]:
    """The reward functions and models, and the penalty for long completions."""
    rewards: list[Any] = []
    standardised = source.take("reward.normalize_enable", bool, False)
    models = source.take("reward.model_name_or_path", str, "")
    rewards += [
        {"name": name, "normalize": True} if standardised else name
        for name in filter(None, models.split(","))
    ]
    place = source.take("reward.remote_url", str, "")
    for name in filter(None, place.split(",")):
        if name.endswith(".py"):
            rewards.append(f"{name}:reward_func")
            source.notes.append(
                f"reward_func of {name} takes (queries, prompts, labels) there; here (completions, "
                "**columns), and returns a list of numbers"
            )
        else:
            source.notes.append(
                f"reward.remote_url {name} is a server: write a reward that asks it"
            )
    weights = [1.0] * len(rewards)
    longest = options["max_completion_length"]
    if shorter := source.take("reward.overlong_buffer_len", float):
        rewards.append(
            {"name": "soft_overlong", "max_tokens": longest, "cache_tokens": int(shorter)}
        )
        weights.append(source.take("reward.overlong_penalty_factor", float, 1.0))
    read: dict[str, Any] = {"reward": rewards} if rewards else {}
    return read | ({"reward_weights": weights} if set(weights) - {1.0} else {})


def _read_run(source: SettingsReader, each: int) -> dict[str, Any]:
    read = {"logging_steps": source.take("logger.logging_steps", int, 1) * each}
    read |= steps_between("save", source.take("ckpt.save_steps", int, -1), each)
    evaluated = source.take("eval.dataset", str)
    if evaluated:
        read |= {"eval_dataset": evaluated, "eval_split": source.take("eval.split", str, "train")}
        read |= steps_between("eval", source.take("eval.steps", int, -1), each)
        read["eval_kwargs.temperature"] = source.take("eval.temperature", float, 0.6) or None
        if read["eval_kwargs.temperature"] is None:
            greedy(source, "eval.temperature")
        read["num_generations_eval"] = source.take("eval.n_samples_per_prompt", int, 4)
    for name in ("steps", "split", "temperature", "n_samples_per_prompt"):
        source.leave(f"eval.{name}", "there is no eval.dataset")
    if source.take("ckpt.load_enable", bool, False):
        read["resume_from_checkpoint"] = "auto"
    loggers = ["wandb"] if source.has("logger.wandb.key") else []
    loggers += ["tensorboard"] if source.has("logger.tensorboard_dir") else []
    read["report_to"] = loggers or "none"
    if loggers:
        read["project"] = source.take("logger.wandb.project", str, "openrlhf_train_ppo")
        read["run_name"] = source.take("logger.wandb.run_name", str)
    dtype = source.take("ds.param_dtype", str, "bf16")
    source.expect("bf16", True, "ds.param_dtype says it")
    return read | {"bf16": dtype == "bf16", "fp16": dtype == "fp16"}


def _read_optimizer(source: SettingsReader) -> dict[str, Any]:
    key = "actor.lr_scheduler"
    least = source.take("actor.min_lr_ratio", float, 0.1)
    kind = source.take(key, str, "cosine_with_min_lr")
    read = read_betas(source, "actor.adam.betas", [0.9, 0.95])
    return read | read_schedule(source, key, kind, least if "min_lr" in kind else 0.0)


def _read_adapter(source: SettingsReader) -> dict[str, Any]:
    rank = source.take("ds.lora.rank", int, 0)
    if rank <= 0:
        return {}
    sizes = source.take_same(
        {"ds.lora.alpha": 16, "ds.lora.dropout": 0.0, "ds.load_in_4bit": False}
    )
    targets = source.take("ds.lora.target_modules", list[str] | str, "all-linear")
    return {"lora_r": rank, "use_peft": True, "lora_target_modules": targets} | sizes
