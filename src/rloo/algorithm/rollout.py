"""Rollout generation in one process: take prompts, sample completions, score groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainerState

from rloo.algorithm.pilot import add_second_stage
from rloo.algorithm.reward_scoring import score_completions
from rloo.algorithm.reward_shaping import has_reward_variance
from rloo.config.batch_sizes import BatchSizes
from rloo.config.config import RLOOConfig
from rloo.data.iterable_dataset import IterablePromptDataset, Prompts
from rloo.engines.counter_rng import noise_key
from rloo.engines.sampling import requested_samples
from rloo.rewards import RewardSet
from rloo.tracking.metrics import (
    mean_of_parts,
    require_free,
    rollout_metrics,
    sampled_entropy,
    task_metrics,
)
from rloo.tracking.profiler import PhaseTimer
from rloo.types import Completion, Engine, Group, Prompt, Rollout, Sampling, of_trained


@dataclass(slots=True)
class SyncRolloutGenerator:
    """Samples and scores rollouts in this process on demand. Every rollout is sampled with the
    current weights. `trainer` is the state of the run that reward functions receive. `step` is the
    number of the next rollout's first optimizer step, and determines the noise of its sampling."""

    config: RLOOConfig
    batches: BatchSizes
    engine: Engine
    prompts: Prompts
    rewards: RewardSet
    sampling: Sampling
    tokenizer: PreTrainedTokenizerBase
    trainer: TrainerState
    clock: PhaseTimer
    step: int = 0

    @property
    def epoch(self) -> float:
        """The number of passes over the dataset so far."""
        return self.prompts.epoch

    @property
    def needs_weights(self) -> bool:
        """Whether the engine gets new weights before the next rollout."""
        return True

    def describe(self) -> dict[str, Any]:
        """Return the number of dataset rows and the names of the reward functions."""
        prompts = self.prompts
        rows = "a stream" if isinstance(prompts, IterablePromptDataset) else len(prompts)
        return {"rows": rows, "rewards": self.rewards.names}

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the dataset and the state of the reward functions."""
        return {"prompts": self.prompts.state_dict(), "rewards": self.rewards.state_dict()}

    def load_state_dict(self, state: dict[str, Any], *, step: int) -> None:
        """Restore what `state_dict` returned. The next rollout starts at optimizer step `step`."""
        self.prompts.load_state_dict(state["prompts"])
        self.rewards.load_state_dict(state["rewards"])
        self.step = step

    def close(self) -> None:
        """Do nothing: no rollout is in flight."""

    def next(self) -> Rollout:
        """Return one rollout, with the metrics of all groups that were sampled for it.

        With `dynamic_sample`, groups whose rewards are all equal are replaced by groups of further
        prompts. Further prompts are sampled at most `max_resample_times` times (DAPO, arXiv
        2503.14476, section 3.2). Groups with equal rewards fill the places that are then still
        empty.
        """
        wanted = self.batches.prompts_per_rollout
        groups, logged = self._collect(wanted)
        own = list(logged)
        everything = list(groups)
        if self.config.dynamic_sample:
            parts, most = [(len(groups), logged)], self.config.prompt_options.max_resample_times
            chosen = [group for group in groups if has_reward_variance(group, self.config)]
            while len(chosen) < wanted and len(parts) <= most:
                more, logged = self._collect(wanted - len(chosen))
                parts.append((len(more), logged))
                everything += more
                chosen += [group for group in more if has_reward_variance(group, self.config)]
            flat = [group for group in everything if not has_reward_variance(group, self.config)]
            groups = chosen + flat[: wanted - len(chosen)]
            drawn = len(everything) / wanted
            logged = mean_of_parts(parts) | {"dynamic_sampling/drawn_share": drawn}
        completions = [c for g in everything for c in g.completions]
        sampled = sum(c.num_trained for c in completions)
        told = sum(len(c.token_ids) for c in completions) - sampled
        read = sum(len(g.prompt.token_ids) * len(g.completions) for g in everything) + told
        speed = {"tokens_per_second/sample": sampled / max(self._seconds(), 1e-9)}
        self.step += self.batches.steps_per_rollout
        metrics = rollout_metrics(everything, weighted=self.config.prompt_sampling == "variance")
        require_free(own, metrics)
        metrics |= task_metrics(everything, self.config.eval_options.pass_threshold)
        metrics |= logged | speed | self._stats()
        if not self.sampling.filtered:  # else the update computes the entropy
            logprobs = (of_trained(c.policy_logprobs, c.trained) for c in completions)
            metrics |= sampled_entropy(logprobs)
        tokens, version = sampled + read, self.engine.version
        return Rollout(groups, metrics, tokens, version, self.state_dict(), self.epoch)

    def _seconds(self) -> float:
        """Seconds spent sampling."""
        return self.clock.seconds["time/sample"]

    def _stats(self) -> dict[str, float]:
        """Metrics of sampling."""
        return self.engine.stats() | self.prompts.stats()

    def _collect(self, num_prompts: int) -> tuple[list[Group], dict[str, float]]:
        """Take prompts, sample and score completions. Return groups and metrics of the rewards."""
        prompts = self.prompts.next(num_prompts)
        noise = noise_key(self.config.seed, "train", self.step)
        groups, logged = self._sample_and_score(prompts, noise)
        if self.config.prompt_options.pilot is not None:
            pilot = groups, logged
            groups, logged = add_second_stage(pilot, self.prompts, noise, self._sample_and_score)
        self.prompts.update(groups)
        return groups, logged

    def _sample_and_score(
        self, prompts: Sequence[Prompt], noise: int
    ) -> tuple[list[Group], dict[str, float]]:
        with self.clock.phase("sample"):
            sampled = self.generate(prompts, noise)
        with self.clock.phase("reward"):
            return self.score(prompts, sampled, noise)

    def generate(self, prompts: Sequence[Prompt], noise: int) -> list[list[Completion]]:
        """Return the completions of each prompt."""
        samples = requested_samples(prompts, self.config.num_generations)
        return self.engine.sample(prompts, samples, self.sampling, noise)

    def score(
        self, prompts: Sequence[Prompt], sampled: Sequence[Sequence[Completion]], noise: int
    ) -> tuple[list[Group], dict[str, float]]:
        """Return the groups with their rewards, and the metrics that reward functions logged."""
        return score_completions(self.rewards, self.tokenizer, prompts, sampled, self.trainer)
