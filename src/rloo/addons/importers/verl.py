"""Converts settings of verl's PPO trainer (verl.trainer.main_ppo and similar ones, 0.8) to our
options.

Missing settings have the defaults of verl's `ppo_trainer.yaml`. A step of verl is a rollout, so
counts of steps are converted to optimizer steps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rloo.addons.importers.known_keys import VERL
from rloo.addons.importers.settings_reader import (
    ENGINES,
    IN_MEMORY,
    PROCESSES,
    ImportResult,
    SettingsReader,
    follow_references,
    greedy,
    one_of,
    read_batches,
    read_loggers,
    steps_between,
)  # fmt: skip
from rloo.addons.importers.shared_optimizer import read_betas, read_schedule
from rloo.addons.importers.source_file import read_settings
from rloo.addons.importers.verl_objective import read_objective
from rloo.addons.importers.verl_versions import is_former

_MARK = re.compile(
    r"(?:verl|recipe|recipes)(?:\.\w+)*\.(?:main_ppo|main_dapo|fully_async_main)"
    r"|(?:.*/)?main_ppo\w*\.py"
)
_SETTING = re.compile(r"\bactor_rollout_ref\.\w+|\balgorithm\.adv_estimator\b")
_ACTOR = "actor_rollout_ref.actor."
_ROLLOUT = "actor_rollout_ref.rollout."
_MODEL = "actor_rollout_ref.model."
_OPTIM = "actor_rollout_ref.actor.optim."

# verl's key -> verl's default, for keys with the same meaning as one of our options.
_SAME: dict[str, Any] = {
    f"{_MODEL}path": None, f"{_MODEL}trust_remote_code": False,
    f"{_MODEL}enable_gradient_checkpointing": True, f"{_MODEL}enable_activation_offload": False,
    f"{_ROLLOUT}n": 1, f"{_ROLLOUT}temperature": 1.0, f"{_ROLLOUT}top_p": 1.0,
    "data.max_prompt_length": 512, "data.max_response_length": 512, "data.shuffle": True,
    "data.apply_chat_template_kwargs": None, f"{_ACTOR}ppo_epochs": 1,
    f"{_ACTOR}entropy_coeff": 0.0, f"{_OPTIM}lr": 1e-6, f"{_OPTIM}weight_decay": 0.01,
    f"{_ACTOR}fsdp_config.optimizer_offload": False, f"{_ACTOR}fsdp_config.seed": 42,
    "trainer.total_epochs": 30.0, "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k", "trainer.default_local_dir": None,
    "trainer.max_actor_ckpt_to_keep": None,
}  # fmt: skip
# verl's key -> our option, for keys that are no aliases of our options.
_NAMES = {
    f"{_MODEL}trust_remote_code": "trust_remote_code",
    f"{_MODEL}enable_gradient_checkpointing": "gradient_checkpointing",
    f"{_MODEL}enable_activation_offload": "activation_offloading", f"{_ROLLOUT}top_p": "top_p",
    "data.shuffle": "shuffle_dataset", "data.apply_chat_template_kwargs": "chat_template_kwargs",
    f"{_ACTOR}ppo_epochs": "num_iterations", f"{_OPTIM}weight_decay": "weight_decay",
    f"{_ACTOR}fsdp_config.optimizer_offload": "offload.optimizer",
    f"{_ACTOR}fsdp_config.seed": "seed", "trainer.total_epochs": "num_train_epochs",
    "trainer.project_name": "project", "trainer.experiment_name": "run_name",
    "trainer.default_local_dir": "output_dir",
    "trainer.max_actor_ckpt_to_keep": "save_total_limit",
    f"{_MODEL}lora_rank": "lora_r", f"{_MODEL}lora_alpha": "lora_alpha",
    f"{_MODEL}target_modules": "lora_target_modules",
}  # fmt: skip
# key -> (the value without effect, the reason why other values are not converted)
_ONLY: dict[str, tuple[Any, str]] = {
    "algorithm.gamma": (1.0, "a token's reward to come is not discounted here"),
    "algorithm.lam": (1.0, "there is no value model"),
    "algorithm.use_pf_ppo": (False, "samples are not drawn again by their weight"),
    "data.prompt_key": ("prompt", "rename the column to prompt, or write a prompt_template"),
    "data.train_max_samples": (-1, "all rows of the file are used"),
    "data.val_max_samples": (-1, "the option here is eval_size"),
    "data.return_raw_chat": (True, "prompts are messages wherever the file has messages"),
    "data.custom_cls.path": (None, "a dataset is a file, a folder or a hub id"),
    "data.custom_cls.name": (None, "a dataset is a file, a folder or a hub id"),
    "data.sampler.class_path": (None, "prompts are drawn in random order, or in the file's"),
    "data.sampler.class_name": (None, "prompts are drawn in random order, or in the file's"),
    f"{_ACTOR}shuffle": (False, "the parts of a rollout are trained in their order"),
    f"{_ACTOR}freeze_vision_tower": (False, "what is trained is the model, or a LoRA adapter"),
    f"{_ROLLOUT}do_sample": (True, "training samples from the policy"),
    f"{_ROLLOUT}ignore_eos": (False, "completions end when the policy ends them"),
    f"{_ROLLOUT}multi_turn.enable": (False, "a completion is one turn"),
    f"{_ACTOR}fsdp_config.model_dtype": ("fp32", "weights are float32 here"),
    "trainer.val_only": (False, "rloo eval does it"),
    "trainer.critic_warmup": (0, "leave-one-out needs no value model"),
    "reward_model.enable": (False, "name the reward model's folder or hub id (reward)"),
}  # fmt: skip
# Key prefixes of a reward function and of the penalty for long completions, in verl's versions.
_FUNCTIONS = ("custom_reward_function.", "reward.custom_reward_function.")
_OVERLONG = (
    "reward_model.reward_kwargs.overlong_buffer_cfg.", "reward.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.overlong_buffer.", "custom_reward_function.overlong_buffer.",
    "reward_manager.overlong_buffer.", "reward_model.overlong_buffer_cfg.",
)  # fmt: skip
_LONGEST = ("reward_model.reward_kwargs.max_resp_len", "reward.reward_kwargs.max_resp_len")
# reason -> the prefixes of keys without a counterpart
_REASONS: dict[str, tuple[str, ...]] = {
    "hydra's: which class a section is made with": ("_target_",),
    IN_MEMORY: (
        f"{_ACTOR}ppo_micro_batch_size", f"{_ACTOR}ppo_max_token_len_per_gpu",
        f"{_ACTOR}ppo_infer_", f"{_ACTOR}use_dynamic_bsz", f"{_ROLLOUT}log_prob_",
        "actor_rollout_ref.ref.log_prob_", f"{_ACTOR}entropy_", f"{_MODEL}tiled_mlp",
    ),
    "leave-one-out needs no value model": ("critic.",),
    "the reference is the model before training; nothing has to be said of it": (
        "actor_rollout_ref.ref.",
    ),
    "a completion is one turn": (f"{_ROLLOUT}multi_turn", f"{_ROLLOUT}agent", "data.tool_config"),
    "evaluation is sampled as training is, and greedily (eval_kwargs.temperature)": (
        f"{_ROLLOUT}val_kwargs",
    ),
    ENGINES: (_ROLLOUT, "actor_rollout_ref.hybrid_engine", "actor_rollout_ref.rollout_manager"),
    "name the reward model's folder or hub id, or functions (reward)": (
        "reward_model.", "reward_manager.", "reward.", "sandbox_fusion.", "custom_reward_function.",
    ),
    "prompts are tokenised once, without loader workers": (
        "data.dataloader_num_workers", "data.filter_overlong_prompts_workers", "data.num_workers",
        "data.gen_batch_size", "data.val_batch_size", "data.validation_shuffle", "data.use_shm",
        "data.trust_remote_code", "data.seed",
    ),
    "images are found in the rows by themselves": (
        "data.image", "data.video", "data.return_multi_modal_inputs",
    ),
    "every column of a row is passed to the rewards": ("data.",),
    "attention and kernels follow from the model (packing)": (
        f"{_MODEL}use_remove_padding", f"{_MODEL}use_fused_kernels", f"{_MODEL}use_liger",
        f"{_MODEL}fused_kernel_options", f"{_ACTOR}use_fused_kernels", f"{_ACTOR}use_torch_compile",
        f"{_ACTOR}use_remove_padding", f"{_ACTOR}use_prefix_grouper", f"{_MODEL}use_shm",
    ),
    "the model, its tokenizer and chat template are those of one folder or hub id": (_MODEL,),
    "a checkpoint holds all that resuming needs (resume_from_checkpoint)": (
        f"{_ACTOR}checkpoint", f"{_ACTOR}load_checkpoint", "trainer.resume",
        "trainer.del_local_ckpt", "trainer.max_critic", "trainer.default_hdfs_dir", "trainer.esi_",
    ),
    "optimizers and schedules are transformers' (optim, lr_scheduler_type)": (_OPTIM,),
    "the option here is profile": ("global_profiler", "trainer.profile", f"{_ACTOR}profiler"),
    "completions are logged by log_completions": (
        "trainer.log_val_generations", "trainer.rollout_data_dir", "trainer.validation_data_dir",
    ),
    "sampling beside training is set by max_staleness": ("async_training", "rollout."),
    "hydra's own": ("hydra.",),
    "it acts with filter_groups.enable only": ("algorithm.filter_groups.",),
    "samples are not drawn again by their weight": ("algorithm.pf_ppo.",),
    "distillation is not part of this version": ("distillation.",),
    PROCESSES: (
        _ACTOR, "trainer.", "actor_rollout_ref.nccl_timeout", "ray_kwargs", "ray_init",
        "transfer_queue", "global_", "actor_rollout_ref.", "model_engine",
    ),
}  # fmt: skip


def import_verl(text: str, overrides: Sequence[str] = (), version: str = "") -> ImportResult:
    """Import verl's YAML file or script at the path `text`, or a command line, with `overrides`
    after it. `version` is the version of verl (such as 0.3) that the source is for; without it, the
    keys of the source determine the version. Raises ValueError for an unreadable source or
    value."""
    given = read_settings(text, overrides, _MARK, "verl.trainer.main_ppo", "verl/trainer", _SETTING)
    source = SettingsReader(follow_references(given.values), _NAMES)
    source.notes += given.notes
    source.leave_unread(given.unread)
    former, said = is_former(source.values, version)
    source.notes += [said] if said else []
    options = source.take_same(_SAME | ({f"{_ACTOR}entropy_coeff": 0.001} if former else {}))
    source.expect_all(_ONLY)
    each_agent = options["num_generations"]
    options |= _read_agents(source, each_agent)
    for key, name in (("prompt", "max_prompt_length"), ("response", "max_completion_length")):
        options[name] = source.take(f"{_ROLLOUT}{key}_length", int, options[name])
    options |= read_objective(source, options, former)
    batches, each = _read_batches(source, options, each_agent)
    options |= batches | _read_data(source) | _read_rewards(source, options)
    options |= _read_run(source, each, "eval_dataset" in options)
    options |= _read_optimizer(source, each) | _read_adapter(source)
    for key in [key for key in source.values if key.endswith("._target_")]:
        source.leave(key, "hydra's: which class a section is made with")
    return source.finish(options, _REASONS, VERL)


def _read_agents(source: SettingsReader, size: int) -> dict[str, Any]:
    """The group size of Search-R1 and similar forks, which sample `n_agent` * `size` completions
    per prompt."""
    if (agents := source.take(f"{_ROLLOUT}n_agent", int)) is None:
        return {}
    source.notes.append(
        f"rollout.n_agent {agents} is a fork's group size (Search-R1): num_generations is that "
        f"times rollout.n, {size}; ppo_mini_batch_size counts its completions"
    )
    return {"num_generations": agents * size}


def _read_batches(
    source: SettingsReader, options: dict[str, Any], each_agent: int
) -> tuple[dict[str, Any], int]:
    """(options of the batch sizes, optimizer steps per rollout). `ppo_mini_batch_size` counts
    prompts, as does `train_batch_size`."""
    prompts = source.take("data.train_batch_size", int, 1024)
    part = source.take(f"{_ACTOR}ppo_mini_batch_size", int, 256)
    if not prompts:  # asynchronous: the training batch is given in mini-batches
        prompts = part * source.take("async_training.require_batches", int, 1)
        source.notes.append("sampling goes on beside training there: the option is max_staleness")
    read, each = read_batches(source, prompts, part * each_agent, options)
    size = source.take(f"{_ACTOR}ulysses_sequence_parallel_size", int, 1)
    read |= {"parallel_kwargs.sp_size": size} if size > 1 else {}
    if source.take(f"{_ACTOR}use_dynamic_bsz", bool, False):
        most = source.take(f"{_ACTOR}ppo_max_token_len_per_gpu", int, 16384)
        read["max_tokens_per_micro_batch"] = most * size
    if source.take("algorithm.filter_groups.enable", bool, False):
        source.expect("algorithm.filter_groups.metric", "seq_reward", "groups of equal rewards")
        most = source.take("algorithm.filter_groups.max_num_gen_batches", int, 0)
        read["dynamic_sample"] = True
        read |= {"prompt_sampling_kwargs.max_resample_times": most - 1} if most > 1 else {}
    return read, each


def _read_data(source: SettingsReader) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for key, ours in (("data.train_files", "dataset"), ("data.val_files", "eval_dataset")):
        files = source.take(key, list[str] | str) or []
        files = [files] if isinstance(files, str) else files
        if files:
            read[ours] = one_of(source, key, ours, files)
    kept = source.take(f"{_ROLLOUT}top_k", int, -1)
    read["top_k"] = max(kept, 0)
    cut = source.take("data.truncation", str, "error")
    if source.take("data.filter_overlong_prompts", bool, False):
        read["overlong_prompts"] = "drop"
    elif cut in ("error", "left"):
        read["overlong_prompts"] = cut
    else:
        source.give_back("data.truncation", cut, "overlong_prompts is error, drop or left")
    return read


def _read_rewards(source: SettingsReader, options: dict[str, Any]) -> dict[str, Any]:
    """The reward function in a file, and the penalty for long completions that verl's `dapo`
    manager adds to the reward."""
    read: dict[str, Any] = {}
    source.notes.append(
        "verl chooses its reward by the row's data_source: say so here with reward, a function of "
        "(completions, **columns); the answer is in the column reward_model (ground_truth)"
    )
    start = next((s for s in _FUNCTIONS if f"{s}path" in source.values), _FUNCTIONS[0])
    file = source.take(f"{start}path", str)
    name = source.take(f"{start}name", str, "compute_score")
    if file:
        read["reward"] = [f"{file}:{name}"]
        source.notes.append(
            f"{name} takes (data_source, solution_str, ground_truth, extra_info) there, and one "
            "completion; here (completions, **columns), and returns a list"
        )
    for start in _OVERLONG:
        if not source.take(f"{start}enable", bool, False):
            continue
        shorter = source.take(f"{start}len", int, 0)
        factor = source.take(f"{start}penalty_factor", float, 1.0)
        source.take(f"{start}log")
        for key in _LONGEST:
            source.expect(key, options["max_completion_length"], "it is max_completion_length here")
        if shorter <= 0:
            continue
        longest = options["max_completion_length"]
        penalty = {"name": "soft_overlong", "max_tokens": longest, "cache_tokens": shorter}
        if not file:
            source.notes.append(
                "put your own reward in the place of REWARD.py:compute_score; soft_overlong beside "
                "it is verl's overlong_buffer"
            )
        read["reward"] = [*read.get("reward", ["REWARD.py:compute_score"]), penalty]
        read |= {"reward_weights": [1.0, factor]} if factor != 1 else {}
        break
    return read


def _read_run(source: SettingsReader, each: int, evaluated: bool) -> dict[str, Any]:
    read: dict[str, Any] = {"logging_steps": each}
    total = source.take("trainer.total_training_steps", int)
    read |= {} if total is None else {"max_steps": total * each}
    read |= steps_between("save", source.take("trainer.save_freq", int, -1), each)
    test = source.take("trainer.test_freq", int | bool, -1)
    before = source.take("trainer.val_before_train", bool, True)
    read |= steps_between("eval", test if evaluated else -1, each)
    if test > 0 and evaluated:
        read["eval_on_start"] = before
    elif before:
        source.give_back("trainer.val_before_train", before, "evaluation is off (eval_strategy)")
    names = source.take("trainer.logger", list[str], ["console", "wandb"])
    read["report_to"] = read_loggers(source, "trainer.logger", names)
    mode = source.take("trainer.resume_mode", str)
    if mode == "auto":
        read["resume_from_checkpoint"] = "auto"
    elif mode == "resume_path":
        read["resume_from_checkpoint"] = source.take("trainer.resume_from_path", str)
    if source.take(f"{_ROLLOUT}val_kwargs.do_sample", bool, False):
        sampled = (("n", "num_generations_eval"), ("temperature", "eval_kwargs.temperature"),
                   ("top_p", "eval_kwargs.top_p"))  # fmt: skip
        for key, ours in sampled:
            value = source.take(f"{_ROLLOUT}val_kwargs.{key}", float)
            if value == 0 and key == "temperature":
                greedy(source, f"{_ROLLOUT}val_kwargs.temperature")
            elif value:
                read[ours] = int(value) if key == "n" else value
    dtype = source.take(f"{_ACTOR}fsdp_config.dtype", str, "bfloat16")
    return read | {"bf16": dtype in ("bfloat16", "bf16"), "fp16": dtype in ("float16", "fp16")}


def _read_optimizer(source: SettingsReader, each: int) -> dict[str, Any]:
    read = read_betas(source, f"{_OPTIM}betas", [0.9, 0.999])
    source.expect(f"{_OPTIM}optimizer", "AdamW", "nearest: adamw_torch_fused (optim)")
    clip = source.take(f"{_OPTIM}clip_grad", float, 1.0)
    bound = source.take(f"{_ACTOR}grad_clip", float, clip)
    style = source.take(f"{_OPTIM}warmup_style", str)
    kind = source.take(f"{_OPTIM}lr_scheduler_type", str, style or "constant")
    least = source.take(f"{_OPTIM}min_lr_ratio", float, 0.0)
    source.expect(f"{_OPTIM}num_cycles", 0.5, "a cosine is half a wave here")
    warm = source.take(f"{_OPTIM}lr_warmup_steps", int, -1)
    share = source.take(f"{_OPTIM}lr_warmup_steps_ratio", float, 0.0)
    read["max_grad_norm"] = bound
    read |= read_schedule(source, f"{_OPTIM}lr_scheduler_type", kind, least)
    return read | {"warmup_steps": share if warm < 0 else warm * each}


def _read_adapter(source: SettingsReader) -> dict[str, Any]:
    if source.take(f"{_MODEL}lora_rank", int, 0) <= 0:
        return {}
    rank = source.original[f"{_MODEL}lora_rank"]
    sizes = source.take_same({f"{_MODEL}lora_alpha": 16, f"{_MODEL}target_modules": "all-linear"})
    return {"lora_r": int(rank), "use_peft": True, "lora_dropout": 0.0} | sizes
