"""Converts NeMo-RL's GRPO configurations (examples/run_grpo.py, 0.7) to our options.

A file overrides the files in its `defaults`. A step of NeMo-RL is a rollout, so counts of steps are
converted to optimizer steps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rloo.addons.importers.known_keys import NEMO_RL
from rloo.addons.importers.nemo_rl_objective import read_objective
from rloo.addons.importers.nemo_rl_optimizer import read_adapter, read_optimizer
from rloo.addons.importers.settings_reader import (
    ENGINES,
    IN_MEMORY,
    PROCESSES,
    ImportResult,
    SettingsReader,
    follow_references,
    greedy,
    read_batches,
    steps_between,
)
from rloo.addons.importers.source_file import read_settings

_SETTING = re.compile(r"\b(?:grpo|policy|loss_fn)\.\w+")
_MARK = re.compile(r"(?:.*/)?run_\w*(?:grpo|ppo|gdpo|dapo)\w*\.py")
_SAMPLING = "policy.generation."

# NeMo-RL's key -> NeMo-RL's default, for keys with the same meaning as one of our options.
_SAME: dict[str, Any] = {
    "policy.model_name": None, "grpo.num_generations_per_prompt": 16, "grpo.seed": 42,
    "grpo.max_num_epochs": 1.0, "grpo.overlong_filtering": False,
    f"{_SAMPLING}max_new_tokens": None, f"{_SAMPLING}temperature": 1.0, f"{_SAMPLING}top_p": 1.0,
    f"{_SAMPLING}stop_strings": None, "data.shuffle": True, "data.max_input_seq_length": None,
    "policy.tokenizer.chat_template_kwargs": None, "checkpointing.checkpoint_dir": None,
}  # fmt: skip
# NeMo-RL's key -> our option, for keys that are no aliases of our options.
_NAMES = {
    "policy.model_name": "model", "grpo.num_generations_per_prompt": "num_generations",
    "grpo.seed": "seed", "grpo.max_num_epochs": "num_train_epochs",
    "grpo.overlong_filtering": "mask_truncated_completions",
    f"{_SAMPLING}max_new_tokens": "max_completion_length",
    f"{_SAMPLING}temperature": "temperature", f"{_SAMPLING}top_p": "top_p",
    f"{_SAMPLING}stop_strings": "stop_strings", "data.shuffle": "shuffle_dataset",
    "data.max_input_seq_length": "max_prompt_length",
    "policy.tokenizer.chat_template_kwargs": "chat_template_kwargs",
    "checkpointing.checkpoint_dir": "output_dir",
}  # fmt: skip
# key -> (the value without effect, the reason why other values are not converted)
_ONLY: dict[str, tuple[Any, str]] = {
    "grpo.max_rollout_turns": (1, "a completion is one turn"),
    "grpo.batch_multiplier": (1.0, "further prompts are drawn one rollout at a time"),
    "grpo.seq_logprob_error_threshold": (None, "nearest: a sequence mode that masks"),
    "grpo.invalid_tool_call_advantage": (None, "a completion is one turn"),
    "grpo.malformed_thinking_advantage": (None, "write a reward for it (reward)"),
    "grpo.stop_at_validation_metric": (None, "a run ends after its steps"),
    f"{_SAMPLING}stop_token_ids": (None, "tokens that end a completion are the model's"),
    "reward_penalties.penalize_duplicated_reasoning": (False, "write a reward for it (reward)"),
    "reward_penalties.penalize_empty_final_answer": (False, "write a reward for it (reward)"),
    "reward_penalties.penalize_unwanted_tokens": (False, "write a reward for it (reward)"),
    "reward_penalties.penalize_malformed_think_tag": (False, "write a reward for it (reward)"),
    "on_policy_distillation": (None, "distillation is not part of this version"),
    "policy.draft.enabled": (False, "no draft model is trained"),
    "data.use_multiple_dataloader": (False, "training is on one dataset (dataset)"),
}  # fmt: skip
# reason -> the prefixes of keys without a counterpart
_REASONS: dict[str, tuple[str, ...]] = {
    IN_MEMORY: (
        "policy.train_micro_batch_size", "policy.logprob_batch_size", "policy.dynamic_batching",
        "policy.sequence_packing", "policy.logprob_chunk_size", "policy.generation_batch_size",
        "policy.make_sequence_length",
    ),
    "max_prompt_length and max_completion_length bound the two": ("policy.max_total_sequence",),
    ENGINES: (_SAMPLING, "sglang", "vllm"),
    "the model, its tokenizer and chat template are those of one folder or hub id": (
        "policy.tokenizer", "policy.hf_config_overrides", "policy.hf_overrides",
    ),
    "only the optimizer's state is moved (offload)": ("policy.offload_optimizer",),
    "it belongs to the backend that is off there": (
        "policy.megatron_cfg", "policy.dtensor_cfg", "policy.optimizer", "policy.scheduler",
    ),
    "no draft model is trained": ("policy.draft",),
    "the reference is the model before training; nothing has to be said of it": (
        "grpo.skip_reference_policy",
    ),
    "evaluation samples as much at once as memory allows": ("grpo.val_batch_size",),
    "evaluation goes by steps or epochs (eval_strategy)": ("grpo.val_", "grpo.max_val"),
    "sampling beside training is set by max_staleness": ("grpo.async_grpo", "async_rl"),
    "it belongs to an estimator that is not chosen": ("grpo.adv_estimator",),
    "a run ends after its steps": ("grpo.stop_at",),
    "save_total_limit keeps the newest checkpoints, not the best": ("checkpointing.keep_top_k",),
    "checkpoints are complete, and go by steps or epochs (save_strategy)": ("checkpointing.",),
    "a dataset is a file, a folder or a hub id, its prompts are made by prompt_template": (
        "data.",
    ),
    "the environment's reward is named by reward": ("env.",),
    "write a reward for it (reward)": ("reward_penalties", "grpo.reward"),
    "loggers are named by report_to; their settings are in the environment": ("logger.",),
    "there is no value model": ("value.", "ppo."),
    "distillation is not part of this version": ("on_policy_distillation", "teacher"),
    PROCESSES: ("cluster.", "data_plane.", "policy."),
}  # fmt: skip


def import_nemo_rl(text: str, overrides: Sequence[str] = ()) -> ImportResult:
    """Import NeMo-RL's YAML file or script at the path `text`, or a command line, with `overrides`
    after it. Raises ValueError for an unreadable source or value."""
    given = read_settings(text, overrides, _MARK, "run_grpo.py", own=_SETTING)
    source = SettingsReader(follow_references(given.values), _NAMES)
    source.notes += given.notes
    source.leave_unread(given.unread)
    megatron = source.take("policy.megatron_cfg.enabled", bool, False)
    source.take("policy.dtensor_cfg.enabled", bool)
    options = source.take_same(_SAME)
    source.expect_all(_ONLY)
    batches, each = _read_batches(source, options)
    options |= read_objective(source, options, each)
    options |= batches | _read_data(source) | _read_run(source, each)
    options |= read_optimizer(source, each, megatron) | read_adapter(source, megatron)
    return source.finish(options, _REASONS, NEMO_RL)


def _read_batches(source: SettingsReader, options: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """(options of the batch sizes, optimizer steps per rollout). `train_global_batch_size` counts
    completions."""
    prompts = source.take("grpo.num_prompts_per_step", int, 32)
    whole = prompts * options["num_generations"]
    step = source.take("policy.train_global_batch_size", int, whole)
    read, each = read_batches(source, prompts, step, options | {"num_iterations": 1})
    if source.take("grpo.use_dynamic_sampling", bool, False):
        most = source.take("grpo.dynamic_sampling_max_gen_batches", int, 10)
        times = max(most - 1, 1)
        read |= {"dynamic_sample": True, "prompt_sampling_kwargs.max_resample_times": times}
    source.leave("grpo.dynamic_sampling_max_gen_batches", "it acts with use_dynamic_sampling only")
    if source.take("grpo.async_grpo.enabled", bool, False):
        read["max_staleness"] = source.take("grpo.async_grpo.max_trajectory_age_steps", int, 1)
    return read, each


def _read_data(source: SettingsReader) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for section, ours in (("data.train", "dataset"), ("data.validation", "eval_dataset")):
        if isinstance(several := source.values.get(section), list):
            why = "training is on one dataset, here the first of them (dataset)"
            source.leave(section, why)
            source.values |= {f"{section}.{key}": v for key, v in dict(several[0]).items()}
            source.original |= {f"{section}.{key}": v for key, v in dict(several[0]).items()}
        path = source.take(f"{section}.data_path", str)
        name = source.take(f"{section}.dataset_name", str)
        if path or name:
            read[ours] = path or name
        if name and not path:
            source.notes.append(
                f"{name} is a name of NeMo-RL's: give a hub id, file or folder ({ours})"
            )
        if split := source.take(f"{section}.split", str):
            read["dataset_split" if ours == "dataset" else "eval_split"] = split
    column = source.take("data.default.input_key", str)
    column = source.take("data.train.input_key", str, column)
    if column:
        read["prompt_template"] = [{"role": "user", "content": f"{{{column}}}"}]
    else:
        source.notes.append("say with prompt_template how a row's columns make the prompt")
    scored = source.take("data.default.env_name", str)
    scored = source.take("data.train.env_name", str, scored)
    if scored == "math":
        read["reward"] = ["math"]
        source.notes.append("reward math compares with the column solution, as math-verify does")
    elif scored:
        source.notes.append(f"environment {scored} scores there: name a reward here (reward)")
    return read


def _read_run(source: SettingsReader, each: int) -> dict[str, Any]:
    read: dict[str, Any] = {"logging_steps": each}
    total = source.take("grpo.max_num_steps", int, 10**6)
    if total < 10**6:
        read["max_steps"] = total * each
        source.notes.append("max_steps is the end, also where grpo.max_num_epochs comes first")
    saved = source.take("checkpointing.enabled", bool, True)
    period = source.take("checkpointing.save_period", int, 10)
    read |= steps_between("save", period if saved else None, each)
    period = source.take("grpo.val_period", int, 10)
    start = source.take("grpo.val_at_start", bool, False)
    if source.original.get("data.validation") is not None or any(
        key.startswith("data.validation.") for key in source.original
    ):
        read |= steps_between("eval", period, each)
        read["eval_on_start"] = start and period > 0
        read["eval_size"] = source.take("grpo.max_val_samples", int)
        read["num_generations_eval"] = source.take("grpo.val_num_generations_per_prompt", int, 1)
        for name in ("temperature", "top_p"):
            read[f"eval_kwargs.{name}"] = source.take(f"{_SAMPLING}val_{name}", float)
        if read["eval_kwargs.temperature"] == 0:
            read["eval_kwargs.temperature"] = None
            greedy(source, "val_temperature")
    else:
        source.notes.append("name the rows to evaluate on (eval_dataset, eval_split)")
    for name, ours in (("top_k", "top_k"), ("val_top_k", "eval_kwargs.top_k")):
        if (kept := source.take(f"{_SAMPLING}{name}", int)) is not None:
            read[ours] = max(kept, 0)
    loggers = [
        name
        for name in ("wandb", "tensorboard", "mlflow", "swanlab")
        if source.take(f"logger.{name}_enabled", bool, False)
    ]
    if "wandb" in loggers:
        read["project"] = source.take("logger.wandb.project", str)
        read["run_name"] = source.take("logger.wandb.name", str)
    dtype = source.take("policy.precision", str, "bfloat16")
    found = {name: value for name, value in read.items() if value is not None}
    return found | {
        "report_to": loggers or "none", "bf16": dtype == "bfloat16", "fp16": dtype == "float16",
    }  # fmt: skip
