"""The runs: how each is made, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.sick import rewards as r

BASE = {
    "model": "countdown", "dataset": "countdown", "eval_split": "heldout", "eval_size": 48,
    "eval_on_start": True, "num_generations_eval": 2, "num_prompts": 8, "num_generations": 8,
    "max_completion_length": 60, "max_steps": 18, "learning_rate": 4e-4, "warmup_steps": 2,
    "lr_scheduler_type": "constant_with_warmup", "beta": 0.001, "bf16": False,
    "gradient_checkpointing": False, "save_strategy": "no", "num_threads": 1, "use_cpu": True,
    "disable_tqdm": True,
}  # fmt: skip
TASK = "countdown"
# Counts on 101 to 202 have changed rules, so they count no more.
SEEDS = {"fit": (1, 2, 101, 102, 201, 202), "judge": (301, 302)}


@dataclass(frozen=True)
class Case:
    """A run. `wrong` are the findings any of which names what is wrong, empty for a healthy one.
    `hook` changes the trainer before it trains; `before`: a configuration is examined, not run;
    `dies`: it is stopped by an error on the way; `dead`: it must not be praised."""

    name: str
    wrong: tuple[str, ...] = ()
    reward: Sequence[Any] = (TASK,)
    options: dict[str, Any] = field(default_factory=dict)
    hook: Callable[[Any], None] | None = None
    before: bool = False
    dies: bool = False
    dead: bool = True
    seed: int = 0

    @property
    def key(self) -> str:
        return f"{self.name}@{self.seed}"


def stale(trainer: Any) -> None:
    """The engine keeps the weights of its first load."""
    load, engine = trainer.engine.load, trainer.engine
    engine.load = lambda weights, version: load(weights, version) if engine.version < 0 else None


def hot(trainer: Any) -> None:
    """The engine draws at another temperature than it is asked for."""
    sample = trainer.engine.sample

    def other(prompts, samples, sampling, noise):
        return sample(prompts, samples, replace(sampling, temperature=0.6), noise)

    trainer.engine.sample = other


def sick() -> list[Case]:
    """One for each way of being sick."""
    long = {"max_steps": 24}
    return [
        Case("reward-none", ("rewards_missing",), [r.none]),
        Case("reward-nan", ("rewards_missing",), [r.nan]),
        Case("reward-zero", ("rewards_zero",), [r.zero]),
        Case("reward-one", ("rewards_equal",), [r.one]),
        Case("reward-of-prompt", ("groups_flat",), [r.of_the_prompt]),
        Case("cold", ("greedy_sampling",), options={"temperature": 0.01}, dead=False),
        Case("rate-zero", ("nothing_trained",), options={"learning_rate": 0.0}),
        Case("rate-1e-13", ("nothing_trained", "learning_rate_low"),
            options={"learning_rate": 1e-13}),
        Case("rate-1e-7", ("learning_rate_low",), options={"learning_rate": 1e-7}),
        Case("rate-1e-7-no-kl", ("learning_rate_low",),
            options={"learning_rate": 1e-7, "beta": 0.0}),
        Case("rate-0.1", ("learning_rate_high",), options={"learning_rate": 0.1}),
        Case("rate-0.02", ("learning_rate_high",), options={"learning_rate": 0.02}),
        Case("rate-0.1-no-kl", ("learning_rate_high",),
            options={"learning_rate": 0.1, "beta": 0.0}),
        Case("longer", ("gibberish", "length_explosion"), [r.longer], long),
        Case("judged", ("hacking",), [r.longer], {"eval_reward": [TASK], "max_steps": 16}),
        Case("shorter", ("empty",), [r.shorter], {"max_steps": 30, "learning_rate": 1e-3}),
        Case("semicolons", ("gibberish", "length_explosion"), [r.semicolons],
            {"max_steps": 30, "learning_rate": 1e-3}),
        Case("sevens", ("kl_explosion", "gibberish", "length_explosion"), [r.sevens],
            {"max_steps": 30, "learning_rate": 2e-3, "beta": 1e-5}),
        Case("limit-8", ("truncation", "missing_eos"), options={"max_completion_length": 8},
            dead=False),
        Case("no-end", ("missing_eos",), options={"generation_kwargs": {"eos_token_id": 0}},
            dead=False),
        Case("giving-up", ("only_form", "reward_at_cost", "hacking"),
            [r.format_of_one_attempt, TASK], {"reward_weights": [2.0, 1.0], **long}),
        Case("form-only", ("only_form",), [r.format_of_three_attempts, r.unreachable], long),
        Case("two-few", ("few_generations",), [r.noisy], {"num_generations": 2, "num_prompts": 4},
            dead=False),
        Case("stale-engine", ("mismatch",), hook=stale, options=long, dead=False),
        Case("hot-engine", ("mismatch",), hook=hot, dead=False),
        Case("held-out-trained", ("held_out_trained",), options={"eval_split": "train"},
            dead=False),
        Case("prompt-answers", ("prompt_answers",), before=True, options={}),
        Case("solved", ("already_solved", "rewards_equal"), [r.has_equals], dead=False),
        Case("sometimes", ("partly_missing",), [r.sometimes], dead=False),
        Case("one-never", ("partly_missing",), [TASK, r.none], dead=False),
        Case("huge", ("steps_refused", "nothing_trained"), [r.huge], dies=True),
        Case("rare", ("little_signal", "few_generations"), [r.rare], {"num_generations": 2},
            dead=False),
        Case("beta-30", ("beta_high",), options={"beta": 30.0}, dead=False),
        Case("zero-died", ("rewards_zero",), [r.zero], {"max_steps": 8}, dies=True),
    ]  # fmt: skip


def healthy() -> list[Case]:
    """Runs that learn, or are too short to tell."""
    mixed = {"reward_weights": [1.0, 0.2]}
    return [
        Case("countdown"),
        Case("countdown-no-kl", options={"beta": 0.0}),
        Case("countdown-k16", options={"num_generations": 16, "num_prompts": 4}),
        Case("countdown-k4", options={"num_generations": 4, "num_prompts": 16}),
        Case("countdown-lora", options={"use_peft": True, "learning_rate": 4e-3}),
        Case("countdown-two-steps", options={"num_iterations": 2}),
        Case("countdown-short", options={"max_steps": 5}),
        Case("near-target", reward=[r.near_target]),
        Case("uses-product", reward=[r.uses_product]),
        Case("four-attempts", reward=[r.four_attempts]),
        Case("mixed", reward=[TASK, r.well_formed], options=mixed),
        Case("near-and-right", reward=[TASK, r.near_target]),
        Case("countdown-grpo", options={"preset": "grpo"}),
        Case("countdown-no-evaluation", options={"eval_on_start": False}),
    ]


def cases(part: str) -> list[Case]:
    """Those of `fit`, on which thresholds were chosen, or of `judge`, on other seeds."""
    return [replace(case, seed=seed) for seed in SEEDS[part] for case in (*healthy(), *sick())]
