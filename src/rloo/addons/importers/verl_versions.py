"""Detects the verl version of a configuration, since some keys changed their meaning in 0.4.

From `trainer/config/ppo_trainer.yaml` and `trainer/ppo/ray_trainer.py` of 0.1, 0.3 and 0.4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
# Prefixes of keys that were added in 0.4 or later.
_LATER = (
    "algorithm.use_kl_in_reward", "algorithm.norm_adv_by_std", "algorithm.rollout_",
    "algorithm.filter_groups", "algorithm.use_pf_ppo", f"{_ACTOR}clip_ratio_", "critic.enable",
    f"{_ACTOR}loss_agg_mode", f"{_ACTOR}policy_loss", f"{_ACTOR}entropy_from", f"{_ACTOR}profiler",
    f"{_ACTOR}loss_scale", f"{_ACTOR}use_torch_compile", f"{_ACTOR}optim.num_cycles",
    f"{_ACTOR}fsdp_config.dtype", f"{_ACTOR}fsdp_config.model_dtype",
    f"{_ACTOR}fsdp_config.reshard", f"{_ACTOR}fsdp_config.strategy",
    f"{_ROLLOUT}mode", f"{_ROLLOUT}multi_turn", f"{_ROLLOUT}agent", f"{_ROLLOUT}engine_kwargs",
    f"{_ROLLOUT}layered_summon", f"{_ROLLOUT}calculate_log", f"{_ROLLOUT}data_parallel",
    "actor_rollout_ref.model.use_fused", "actor_rollout_ref.model.use_shm",
    "actor_rollout_ref.model.lora_", "actor_rollout_ref.model.use_liger", "reward.",
    "transfer_queue",
    "data.return_full_prompt", "data.reward_fn_key", "data.custom_cls", "data.sampler", "ray_init",
    "ray_kwargs", "trainer.device", "trainer.log_val", "trainer.rollout_data",
    "trainer.validation_data", "trainer.use_legacy", "global_profiler", "async_training",
    "rollout.",
)  # fmt: skip
# Keys that were removed before 0.4, and a key of a fork of that time.
_BEFORE = (
    "trainer.val_generations_to_log_to_wandb", "fsdp_config.grad_offload", f"{_ROLLOUT}n_agent",
    "reward_model.model.fsdp_config.min_num_params",
)  # fmt: skip
_BOUNDARY = (0, 4)


def is_former(values: Mapping[str, Any], version: str) -> tuple[bool, str]:
    """(whether the settings are for verl before 0.4, a note for the user). Raises ValueError for an
    invalid `version`."""
    if version:
        if not re.fullmatch(r"v?\d+(\.\w+)*", version):
            raise ValueError(f"--from is verl@{version}; a version is a number, verl@0.3")
        numbers = [int(n) for n in re.findall(r"\d+", version)[:2]]
        return tuple([*numbers, 0][:2]) < _BOUNDARY, ""
    if any(key.startswith(_LATER) for key in values):
        return False, ""
    in_loss = str(values.get(f"{_ACTOR}use_kl_loss")).lower() == "true"
    found = [key for key in values if any(mark in key for mark in _BEFORE)]
    if not found and not in_loss:
        found = [key for key in values if key.startswith("algorithm.kl_ctrl.")]
    if found:
        return True, (
            f"read as for verl before 0.4, by {found[0]}: the KL is in the reward unless "
            "use_kl_loss puts it in the loss, entropy_coeff is 0.001, clip_ratio has no dual clip; "
            "if it is for a later one: rloo config --from verl@0.8"
        )
    return False, (
        "nothing in it says which version of verl it is for: read as for 0.8; before 0.4 the KL "
        "was in the reward and entropy_coeff 0.001 where nothing said otherwise: rloo config "
        "--from verl@0.3"
    )
