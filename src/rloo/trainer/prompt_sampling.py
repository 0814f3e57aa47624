"""Installs the sampler of prompts that the options select."""

from __future__ import annotations

from typing import Any

import numpy as np

from rloo.algorithm.estimator_registry import load_estimator
from rloo.algorithm.regression import column_of
from rloo.algorithm.reward_shaping import shaped_rewards
from rloo.config.batch_sizes import BatchSizes
from rloo.config.config import RLOOConfig
from rloo.config.prompt_sampling_validation import refused_with_weights
from rloo.data.group_budget import GroupBudget
from rloo.data.iterable_dataset import Prompts
from rloo.data.probe_sampler import ProbedEstimate, ProbeSampler
from rloo.data.prompt_dataset import PromptDataset
from rloo.data.reward_estimate import RewardEstimate
from rloo.data.reward_probe import NUM_FEATURES
from rloo.data.token_features import token_features
from rloo.data.variance_sampler import VarianceSampler
from rloo.model import probe_state
from rloo.model.policy import Policy
from rloo.rewards import RewardSet
from rloo.tracking.profiler import PhaseTimer
from rloo.trainer.multi_turn import MultiTurnSetup
from rloo.types import Group


def with_prompt_sampling(source: Prompts, config: RLOOConfig, batches: BatchSizes) -> Prompts:
    """Return the prompts of `source`, drawn as `prompt_sampling` states. Raises ValueError for an
    unknown column, and if `prompt_sampling` is variance, for a stream and an estimator over the
    rollout."""
    if load_estimator(config).reads_coefficients:
        _require_column(source, "estimator_kwargs.column", column_of(config))
    if config.prompt_sampling != "variance":
        return source
    if not isinstance(source, PromptDataset):
        raise ValueError(
            "prompt_sampling is variance and the dataset is a stream, whose prompts and their "
            "number are not known; prompts are drawn from a dataset with a length "
            "(prompt_sampling uniform)"
        )
    check_estimator_of_weights(config)
    options = config.prompt_options
    _require_column(source, "prompt_sampling_kwargs.column", options.column)
    if options.probe == "policy" and any(prompt.pixels for prompt in source.all_prompts(1)):
        raise ValueError(
            "prompt_sampling_kwargs.probe is policy and the prompts have images; it reads prompts "
            "of text (prompt_sampling_kwargs.probe text)"
        )
    values = source.values(options.column or "prompt")
    pools = ["" if options.column is None else repr(value) for value in values.values()]

    def rewards_of(group: Group) -> list[float]:
        return shaped_rewards([group], config)

    how: dict[str, Any] = {
        "seed": _seed(config), "floor": options.floor,
        "lag": config.max_staleness * batches.rollouts_per_version,
    }  # fmt: skip
    sampler: VarianceSampler
    if options.probe is not None:
        each = candidates_per_prompt(options.probe)
        probed = ProbedEstimate(pools, half_life=options.half_life, size=NUM_FEATURES)
        sampler = ProbeSampler(list(values), probed, rewards_of, candidates_per_prompt=each, **how)
    else:
        estimate = RewardEstimate(pools, half_life=options.half_life)
        sampler = VarianceSampler(list(values), estimate, rewards_of, **how)
    if options.max_generations is not None:
        size = config.num_generations
        prompts_per_step = batches.completions_per_step // size
        sampler.budget = GroupBudget(size, options.max_generations, prompts_per_step, options.pilot)
    source.set_sampler(sampler)
    return source


def _require_column(source: Prompts, option: str, column: str | None) -> None:
    if column not in (None, *source.columns):
        raise ValueError(
            f"{option} is {column} and the dataset has no such column; its columns are "
            f"{', '.join(source.columns)} ({option})"
        )


def candidates_per_prompt(probe: str | None) -> int | None:
    """Return the number of candidates for each drawn prompt; None: all prompts."""
    return probe_state.CANDIDATES if probe == "policy" else None


def connect_probe(source: Prompts, policy: Policy, clock: PhaseTimer) -> None:
    """Let the sampler of `source` read prompts, if it has a probe: their tokens, or the hidden
    states of `policy`."""
    if not isinstance(source, PromptDataset) or not isinstance(source.sampler, ProbeSampler):
        return
    rows, config = source, policy.config
    if config.prompt_options.probe == "text":
        tokens = [np.array(rows.token_ids(number)) for number in range(len(rows))]
        features_ND = token_features(tokens, _seed(config))
        source.sampler.look = lambda number_M: features_ND[number_M]
        return

    def look(number_M: np.ndarray) -> np.ndarray:
        with clock.phase("probe"):
            prompts = [rows.token_ids(number) for number in number_M.tolist()]
            return probe_state.read_prompts(policy, prompts, _seed(config))

    source.sampler.look = look


def _seed(config: RLOOConfig) -> int:
    return config.seed if config.data_seed is None else config.data_seed


def check_estimator_of_weights(config: RLOOConfig) -> None:
    """Raise ValueError if `prompt_sampling` is variance and the estimator is over the rollout."""
    if config.prompt_sampling == "variance" and load_estimator(config).over_rollout:
        why = "whose advantages depend on other drawn prompts"
        raise ValueError(refused_with_weights("estimator", config.estimator, why))


def check_terms(policy: Policy) -> None:
    """Raise ValueError if the loss of `policy` has a term that prompt weights do not multiply."""
    if policy.config.prompt_sampling == "variance" and policy.aux_loss_weight != 0:
        why = "whose load-balancing loss is over the drawn prompts (router_aux_loss_coef 0)"
        raise ValueError(refused_with_weights("router_aux_loss_coef", policy.aux_loss_weight, why))


def check_pilot(config: RLOOConfig, rewards: RewardSet, turns: MultiTurnSetup) -> None:
    """Raise ValueError if `prompt_sampling_kwargs.pilot` is given and the completions of a prompt
    cannot be sampled and scored in two calls."""
    scaled = [f.__name__ for f in rewards.functions if hasattr(f, "normalize")]
    faults = (
        (turns.environments is not None, "the run has environments", "whose first states are "
         "the same within one call only (environment_factory"),
        (turns.rollout_func is not None, "the run has a rollout_func", "which makes all "
         "completions of a prompt in one call (rollout_func"),
        (bool(scaled), f"{', '.join(scaled)} normalizes its scores by earlier ones", "so the scale "
         "of the second stage would depend on the pilot (reward_funcs"),
    )  # fmt: skip
    pilot = config.prompt_options.pilot
    for found, fact, why in faults:
        if found and pilot is not None:
            raise ValueError(
                f"prompt_sampling_kwargs.pilot is {pilot} and {fact}, {why}, or "
                "prompt_sampling_kwargs.pilot null)"
            )
