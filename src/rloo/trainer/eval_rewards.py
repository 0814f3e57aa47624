"""Rewards that are measured in evaluations but never trained on (`eval_reward_funcs`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rloo.algorithm.rank_rollout import RewardScorer
from rloo.config.config import RLOOConfig
from rloo.distributed import World
from rloo.rewards import RewardSet
from rloo.rewards.reward_function import name_of
from rloo.tracking.finding import text_of_content
from rloo.tracking.jsonl import START, write_json
from rloo.tracking.metrics import deviation, interval, mean_intervals
from rloo.tracking.run_reader import read_object
from rloo.trainer.build import RewardFunction, make_rewards
from rloo.types import Group, Prompt, Text


@dataclass(slots=True)
class EvalRewards:
    """Rewards for evaluation only. `rewards` score single completions. `pairwise` are judges as in
    TRL: `judge(prompts, pairs)` returns for each pair of completions 0 if the first is better, 1 if
    the second is, -1 if undecided. Completions and scores of the starting policy are saved in
    `folder`, so that a resumed run can compare with them."""

    rewards: RewardSet | None
    pairwise: Mapping[str, Any]
    folder: Path
    _start: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        given: RewardFunction | Sequence[RewardFunction] | None,
        args: RLOOConfig,
        trained: RewardSet,
        world: World,
    ) -> EvalRewards:
        """Build from `given`, by default `args.eval_reward`: rewards in any form that training
        accepts, and objects with a method `judge`. Raises ValueError for a reward that is also
        trained, and for judges without `eval_on_start`."""
        specs: Any = args.eval_reward if given is None else given
        specs = list(specs) if isinstance(specs, (list, tuple)) else [specs]
        pairwise = {name_of(s): s for s in specs if callable(getattr(s, "judge", None))}
        others = [s for s in specs if not callable(getattr(s, "judge", None))]
        rewards = None
        if others:
            plain = args.with_values(reward_weights=None)
            rewards = make_rewards(others, plain, device=world.device)
        for name in (*(rewards.names if rewards else ()), *pairwise):
            if name in trained.names:
                raise ValueError(
                    f"{name} is trained and is to judge, too; every reward that is trained is "
                    "measured in evaluations anyway (eval_reward_funcs)"
                )
        if pairwise and not args.eval_on_start:
            raise ValueError(
                f"{', '.join(pairwise)} compares completions with those of the starting policy, "
                "which are sampled by an evaluation before the first step (eval_on_start)"
            )
        return cls(rewards, pairwise, Path(args.output_dir).absolute())

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise ValueError if a reward needs a column that evaluation prompts lack."""
        if self.rewards is not None and prompts:
            self.rewards.check(prompts[0].columns)

    def measure(
        self, name: str, groups: Sequence[Group], judge: RewardScorer, step: int
    ) -> dict[str, Any]:
        """The metrics of the groups of the evaluation set `name`: mean, standard deviation and
        confidence interval of each reward, and the win rate against the completions of step 0 with
        the same prompt and index."""
        if self.rewards is None and not self.pairwise:
            return {}
        metrics: dict[str, Any] = {}
        by_function: dict[str, list[list[float | None]]] = {}
        if self.rewards is not None:
            prompts = [group.prompt for group in groups]
            own = RewardScorer(
                self.rewards, judge.tokenizer, judge.world, judge.trainer_state, judge.noise
            )
            judged, logged = own.score(prompts, [g.completions for g in groups], learn=False)
            metrics |= logged | {
                n: v for n, v in mean_intervals(judged).items() if n.startswith("rewards/")
            }
            for function in self.rewards.names:
                by_function[function] = [group.scores[function] for group in judged]
                flat = [s for some in by_function[function] for s in some if s is not None]
                metrics[f"rewards/{function}/mean"] = fmean(flat) if flat else float("nan")
                metrics[f"rewards/{function}/std"] = deviation(flat)
        now = {"texts": [group.texts for group in groups], "scores": by_function}
        found = {}
        if judge.world.is_main:  # other processes lack the file, and a judge is called once
            if step == 0:
                self._keep(name, now)
            elif (start := self._kept(name)) is not None:
                found = self._wins(start, now, [group.prompt for group in groups])
        return metrics | judge.world.broadcast_object(found)

    def _keep(self, name: str, now: dict[str, Any]) -> None:
        self._start[name] = now
        if self.folder.is_dir():
            write_json(self.folder / START, self._start)

    def _kept(self, name: str) -> dict[str, Any] | None:
        path = self.folder / START
        if name not in self._start and path.exists():
            self._start = read_object(path)
        return self._start.get(name)

    def _wins(
        self, start: dict[str, Any], now: dict[str, Any], prompts: Sequence[Prompt]
    ) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        for function, scores in now["scores"].items():
            rows = zip(start["scores"].get(function, []), scores, strict=False)
            wins = [[_win(*both) for both in zip(*row, strict=False)] for row in rows]
            metrics |= _rate(function, wins)
        for name, judge in self.pairwise.items():
            metrics |= _rate(name, _compared(judge, prompts, start["texts"], now["texts"]))
        return metrics


def _win(before: float | None, after: float | None) -> float | None:
    if before is None or after is None:
        return None
    return 0.5 if before == after else float(after > before)


def _rate(name: str, wins: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    """The win rate (the mean over prompts of each prompt's mean) and its confidence interval."""
    known = [[w for w in some if w is not None] for some in wins]
    means = [fmean(some) for some in known if some]
    if not means:
        return {}
    rate = f"rewards/{name}/win_rate"
    return {rate: fmean(means), f"{rate}_interval": interval(means)}


def _compared(
    judge: Any,
    prompts: Sequence[Prompt],
    start: Sequence[Sequence[Text]],
    now: Sequence[Sequence[Text]],
) -> list[list[float | None]]:
    pairs = [
        (number, [text_of_content(a), text_of_content(b)])
        for number, (before, after) in enumerate(zip(start, now, strict=True))
        for a, b in zip(before, after, strict=False)
    ]
    asked = [text_of_content(prompts[n].content) for n, _ in pairs]
    said = judge.judge(asked, [pair for _, pair in pairs])
    if len(said) != len(pairs):
        raise ValueError(
            f"the judge {name_of(judge)!r} returned {len(said)} judgements for {len(pairs)} pairs; "
            "each pair needs one (eval_reward_funcs)"
        )
    wins: list[list[float | None]] = [[] for _ in prompts]
    for (number, _), index in zip(pairs, said, strict=True):
        wins[number].append(float(index) if index in (0, 1) else None)
    return wins
