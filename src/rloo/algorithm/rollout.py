"""Prompts to scored groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase, TrainerState

from rloo.algorithm.packing import pack_completions, unpack_completions
from rloo.algorithm.shaping import has_signal
from rloo.config.batches import Batches
from rloo.config.config import RLOOConfig
from rloo.data.stream import Prompts, StreamSource
from rloo.dist import World
from rloo.engines.noise import noise_key
from rloo.report.metrics import (
    mean_of_parts,
    require_free,
    rollout_metrics,
    sampled_entropy,
)
from rloo.report.profiling import Clock
from rloo.rewards import RewardSet, Scores
from rloo.rewards.combine import Raw
from rloo.types import Completion, Engine, Group, Prompt, Rollout, Sampling, Text, text_of


@dataclass(slots=True)
class SyncRollouts:
    """Samples and scores in this process, when it is asked to: no rollout is older than the weights
    that the engine has. `trainer` is what reward functions see of the run; `step` is the number of
    the next rollout's first optimizer step, which its noise is a function of."""

    config: RLOOConfig
    world: World
    batches: Batches
    engine: Engine
    prompts: Prompts
    rewards: RewardSet
    sampling: Sampling
    tokenizer: PreTrainedTokenizerBase
    trainer: TrainerState
    clock: Clock
    step: int = 0

    @property
    def epoch(self) -> float:
        return self.prompts.epoch

    def describe(self) -> dict[str, Any]:
        """The number of rows, and the rewards."""
        prompts = self.prompts
        rows = "a stream" if isinstance(prompts, StreamSource) else len(prompts)
        return {"rows": rows, "rewards": self.rewards.names}

    def state_dict(self) -> dict[str, Any]:
        """The position in the data and the state of the rewards."""
        return {"prompts": self.prompts.state_dict(), "rewards": self.rewards.state_dict()}

    def load_state_dict(self, state: dict[str, Any], *, step: int) -> None:
        self.prompts.load_state_dict(state["prompts"])
        self.rewards.load_state_dict(state["rewards"])
        self.step = step

    def next(self) -> Rollout:
        """One rollout and the metrics of everything that was sampled for it.

        With `dynamic_sample` groups without signal are replaced by those of further prompts, drawn
        at most `max_resample_times` times (DAPO, arXiv 2503.14476, section 3.2); what
        is missing even then is made up by groups without signal.
        """
        wanted = self.batches.prompts_per_rollout
        groups, logged = self._collect(wanted)
        own = list(logged)
        everything = list(groups)
        if self.config.dynamic_sample:
            parts = [(len(groups), logged)]
            chosen = [group for group in groups if has_signal(group, self.config)]
            while len(chosen) < wanted and len(parts) <= self.config.max_resample_times:
                more, logged = self._collect(wanted - len(chosen))
                parts.append((len(more), logged))
                everything += more
                chosen += [group for group in more if has_signal(group, self.config)]
            flat = [group for group in everything if not has_signal(group, self.config)]
            groups = chosen + flat[: wanted - len(chosen)]
            drawn = len(everything) / wanted
            logged = mean_of_parts(parts) | {"dynamic_sampling/drawn_share": drawn}
        sampled = sum(len(c.token_ids) for g in everything for c in g.completions)
        read = sum(len(g.prompt.token_ids) * len(g.completions) for g in everything)
        speed = {"tokens_per_second/sample": sampled / self.clock.seconds["time/sample"]}
        self.step += self.batches.steps_per_rollout
        metrics = rollout_metrics(everything)
        require_free(own, metrics)
        metrics |= logged | speed
        if not self.sampling.filtered:  # else of what an update computes
            metrics |= sampled_entropy(c.policy_logprobs for g in everything for c in g.completions)
        return Rollout(
            groups,
            metrics,
            num_tokens=sampled + read,
            version=self.engine.version,
            position=self.state_dict(),
            epoch=self.epoch,
        )

    def _collect(self, num_prompts: int) -> tuple[list[Group], dict[str, float]]:
        """Draw prompts, sample and score completions; return groups and the rewards' metrics."""
        prompts = self.prompts.next(num_prompts)
        noise = noise_key(self.config.seed, "train", self.step)
        count, keyed = self.config.num_generations, (self.config.seed, self.step)
        with self.clock.phase("sample"):
            sampled = sample(self.engine, prompts, count, self.sampling, noise, self.world)
        judge = Judge(self.rewards, self.tokenizer, self.world, self.trainer, keyed)
        with self.clock.phase("reward"):
            return judge.score(prompts, sampled)


def sample(
    engine: Engine,
    prompts: Sequence[Prompt],
    count: int,
    sampling: Sampling,
    noise: int,
    world: World,
) -> list[list[Completion]]:
    """`engine.sample`, of which each process does an equal part. Where processes are more than
    prompts, several sample one group."""
    if world.size == 1:
        return engine.sample(prompts, count, sampling, noise)
    mine = world.share(len(prompts) * count)
    numbers = [
        range(max(mine.start - first, 0), min(mine.stop - first, count))
        for first in range(0, len(prompts) * count, count)
    ]
    own = [index for index, some in enumerate(numbers) if some]
    drawn = engine.sample(
        [prompts[index] for index in own], [numbers[index] for index in own], sampling, noise
    )
    parts = world.gather(pack_completions([c for group in drawn for c in group]))
    flat = [completion for part in parts for completion in unpack_completions(part)]
    return [flat[first : first + count] for first in range(0, len(flat), count)]


@dataclass(frozen=True, slots=True)
class Judge:
    """Scores completions, of which each process judges an equal part of the groups. `keyed` numbers
    what is judged: the other processes' global generators are a function of it, since checkpoints
    have only the main one's."""

    rewards: RewardSet
    tokenizer: PreTrainedTokenizerBase
    world: World
    trainer_state: Any = None
    keyed: tuple[int, int] = (0, 0)

    def score(
        self,
        prompts: Sequence[Prompt],
        sampled: Sequence[Sequence[Completion]],
        *,
        learn: bool = True,
    ) -> tuple[list[Group], dict[str, float]]:
        """Score all completions of a rollout, with one call of each reward function; return the
        groups and the metrics that rewards logged. `learn`: see `RewardSet.score`."""
        world, names = self.world, list(dict.fromkeys(n for p in prompts for n in p.columns))
        mine = world.share(len(prompts))
        if not self.rewards.shared:
            mine = range(len(prompts) if world.is_main else 0)
        if not world.is_main:
            seed, number = self.keyed
            transformers.set_seed(noise_key(seed, f"rank {world.rank}", number) >> 32)
        part = self._call([(prompts[index], sampled[index]) for index in mine], names)
        parts = [done for done in world.gather(part) if done is not None]
        scores = self.rewards.combine([raw for _, raw in parts], learn=learn)
        texts = [text for some, _ in parts for text in some]
        return _groups(prompts, sampled, texts, scores), scores.metrics

    def _call(
        self, groups: Sequence[tuple[Prompt, Sequence[Completion]]], names: Sequence[str]
    ) -> tuple[list[Text], Raw] | None:
        """The texts of some groups, and what the reward functions say; None for no group."""
        if not groups:
            return None
        repeated = [prompt for prompt, completions in groups for _ in completions]
        flat = [completion for _, completions in groups for completion in completions]
        decoded = self.tokenizer.batch_decode([c.token_ids for c in flat], skip_special_tokens=True)
        texts = [_as_text(p, text) for p, text in zip(repeated, decoded, strict=True)]
        raw = self.rewards.call(
            [p.content for p in repeated],
            texts,
            [c.token_ids for c in flat],
            {name: [p.columns.get(name) for p in repeated] for name in names},
            self.trainer_state,
        )
        return texts, raw


def _groups(
    prompts: Sequence[Prompt],
    sampled: Sequence[Sequence[Completion]],
    texts: Sequence[Text],
    scores: Scores,
) -> list[Group]:
    groups, start = [], 0
    for prompt, completions in zip(prompts, sampled, strict=True):
        part = slice(start, start + len(completions))
        groups.append(
            Group(
                prompt=prompt,
                completions=list(completions),
                texts=list(texts[part]),
                rewards=scores.totals[part],
                scores={name: values[part] for name, values in scores.by_function.items()},
                extras={name: values[part] for name, values in scores.extras.items()},
            )
        )
        start += len(completions)
    return groups


def _as_text(prompt: Prompt, text: str) -> Text:
    """As rewards see it and as in TRL: a string for a string, else an assistant message."""
    if isinstance(prompt.content, str):
        return text
    last = prompt.content[-1]
    if last["role"] == "assistant":  # the completion continues this message
        text = text_of(last["content"]) + text
    return [{"role": "assistant", "content": text}]
