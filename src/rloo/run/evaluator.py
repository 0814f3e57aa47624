"""Evaluation of a policy in training: its sets by name, measured without a trace.

What is measured is in `evaluate.py`; this module knows the run's options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerState

from rloo.config.config import RLOOConfig
from rloo.engines.sampling import noise_key
from rloo.model.policy import Policy
from rloo.model.state import capture_rng, restore_rng
from rloo.rewards import RewardSet
from rloo.run.evaluate import evaluate
from rloo.run.setup import make_sampling
from rloo.types import Engine, Prompt

# By name; one without others has none ("").
Sets = Mapping[str, Sequence[Prompt]]


class Evaluator:
    """Measures the policy. Every measurement draws the same noise, and the global generators, which
    a reward function may draw from, are put back: training goes on as if nothing had been."""

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        rewards: RewardSet,
        config: RLOOConfig,
        *,
        state: TrainerState,
    ) -> None:
        self._policy = policy
        self._engine = engine
        self._rewards = rewards
        self._config = config
        self._state = state

    def measure(self, sets: Sets) -> dict[str, dict[str, Any]]:
        """The metrics of each set (see `evaluate`), one after the other."""
        generators = capture_rng()
        try:
            self._engine.load(self._policy.weights())
            return {name: self._measure(prompts) for name, prompts in sets.items()}
        finally:
            restore_rng(generators)

    def _measure(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        config, policy = self._config, self._policy
        metrics, _ = evaluate(
            self._engine,
            prompts,
            self._rewards,
            tokenizer=policy.tokenizer,
            sampling=make_sampling(
                config, policy.stop_token_ids, policy.tokenizer, evaluation=True
            ),
            num_samples=config.num_generations_eval or config.num_generations,
            noise=noise_key(config.seed, "eval", 0),
            pass_threshold=config.pass_threshold,
            pass_k=config.eval_pass_k,
            precision=policy.autocast,
            trainer_state=self._state,
        )
        return metrics


def flatten(results: Mapping[str, Mapping[str, Any]], prefix: str) -> dict[str, Any]:
    """The metrics of all sets under transformers' names: prefix_metric, or prefix_set_metric."""
    return {
        "_".join(part for part in (prefix, name, metric) if part): value
        for name, metrics in results.items()
        for metric, value in metrics.items()
    }
