"""The cases: the options of each run, and its problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.broken_runs import rewards as r

BASE = {
    "model": "countdown", "dataset": "countdown", "eval_split": "heldout", "eval_size": 48,
    "eval_on_start": True, "num_generations_eval": 2, "num_prompts": 8, "num_generations": 8,
    "max_completion_length": 60, "max_steps": 18, "learning_rate": 4e-4, "warmup_steps": 2,
    "lr_scheduler_type": "constant_with_warmup", "beta": 0.001, "bf16": False,
    "gradient_checkpointing": False, "save_strategy": "no", "num_threads": 1, "use_cpu": True,
    "disable_tqdm": True,
}  # fmt: skip
TASK = "countdown"
# Rules were changed after results on seeds 101 to 301, so these seeds are no test any more.
SEEDS = {"fit": (1, 2, 101, 102, 201, 202, 301), "judge": (302, 303, 304)}


@dataclass(frozen=True)
class Case:
    """A run. `wrong` has the findings that are correct for it; it is empty for a healthy run.
    `hook` changes the trainer before training. `before`: the configuration is examined without a
    run. `dies`: an error stops the run in the middle. `dead`: the doctor must not praise the run.
    `prompt` returns the changed prompt of a row. `template` is a chat template for the
    tokenizer."""

    name: str
    wrong: tuple[str, ...] = ()
    reward: Sequence[Any] = (TASK,)
    options: dict[str, Any] = field(default_factory=dict)
    hook: Callable[[Any], None] | None = None
    before: bool = False
    dies: bool = False
    dead: bool = True
    prompt: Callable[[dict[str, Any]], str] | None = None
    template: str = ""
    seed: int = 0

    @property
    def key(self) -> str:
        return f"{self.name}@{self.seed}"


def stale(trainer: Any) -> None:
    """Make the engine ignore all weights after its first load."""
    load, engine = trainer.engine.load, trainer.engine
    engine.load = lambda weights, version: load(weights, version) if engine.version < 0 else None


def hot(trainer: Any) -> None:
    """Make the engine sample at another temperature than requested."""
    sample = trainer.engine.sample

    def other(prompts, samples, sampling, noise):
        return sample(prompts, samples, replace(sampling, temperature=0.6), noise)

    trainer.engine.sample = other


def answered(row: dict[str, Any]) -> str:
    """The prompt followed by a correct answer, so that nothing is left to generate."""
    from rloo.data.tasks.countdown import list_attempts

    right = next(a for a in list_attempts(row["numbers"]) if a.value == row["target"])
    return f"{row['prompt']} {right}"


CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
LORA = {"use_peft": True}
ONE_PROMPT = {"num_prompts": 1}


def of_troubleshooting() -> list[Case]:
    """Problems from published troubleshooting tables. Some cases have small batches (one prompt per
    rollout), high learning rates, no KL, or adapters."""
    fast = {"eval_reward": [TASK], "num_prompts": 4, "max_steps": 20, "learning_rate": 1e-3}
    unheard = {"eval_on_start": False, "eval_split": None}
    return [
        Case("hack", ("hacking",), [r.names_target], fast),
        Case("hack-one-prompt", ("hacking",), [r.names_target],
            {**fast, **ONE_PROMPT, "num_generations": 16, "max_steps": 24}),
        Case("hack-lora", ("hacking",), [r.names_target], {**fast, **LORA, "learning_rate": 4e-3}),
        Case("zero-no-kl", ("rewards_zero",), [r.zero], {"beta": 0.0, "max_steps": 8}),
        Case("zero-one-prompt", ("rewards_zero",), [r.zero],
            {**ONE_PROMPT, "beta": 0.05, "num_generations": 4}),
        Case("one-kl", ("rewards_equal",), [r.one], {"beta": 0.1, "max_steps": 8}),
        Case("nearly-one", ("rewards_alike",), [r.nearly_one], {"beta": 0.05}),
        Case("nearly-one-no-kl", ("rewards_alike",), [r.nearly_one],
            {**ONE_PROMPT, "beta": 0.0, "num_generations": 4}),
        Case("chat-model", ("chat_template",), template=CHAT, prompt=answered,
            options=unheard),
        Case("silent", ("silent",), prompt=answered, options=unheard),
        Case("cold-start", ("rewards_zero",), [r.unreachable], {"beta": 0.05, "max_steps": 8}),
        Case("rate-lora", ("learning_rate_high",), options={**LORA, "learning_rate": 0.5}),
        Case("rate-one-prompt", ("learning_rate_high",),
            options={**ONE_PROMPT, "learning_rate": 0.1, "max_steps": 24}),
        Case("rate-low-lora", ("learning_rate_low",), options={**LORA, "learning_rate": 1e-7}),
    ]  # fmt: skip


def sick() -> list[Case]:
    """One case for each kind of problem."""
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
        # In two runs, 40 % of the last completions were truncated, and no truncated one was
        # correct.
        Case("limit-30", ("truncation",), options={"max_completion_length": 30}, dead=False),
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
        Case("prompt-answers", ("prompt_answers",), before=True, prompt=answered),
        Case("solved", ("already_solved", "rewards_equal"), [r.has_equals], dead=False),
        Case("sometimes", ("partly_missing",), [r.sometimes], dead=False),
        Case("one-never", ("partly_missing",), [TASK, r.none], dead=False),
        Case("huge", ("steps_refused", "nothing_trained"), [r.huge], dies=True),
        Case("rare", ("little_signal", "few_generations"), [r.rare], {"num_generations": 2},
            dead=False),
        Case("beta-30", ("beta_high",), options={"beta": 30.0}, dead=False),
        Case("zero-died", ("rewards_zero",), [r.zero], {"max_steps": 8}, dies=True),
        *of_troubleshooting(),
    ]  # fmt: skip


def healthy() -> list[Case]:
    """Runs that learn, or are too short for a conclusion."""
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
        *small_batches(),
        *recipes(),
    ]


def small_batches() -> list[Case]:
    """Healthy runs with noisy small rollouts, and with high learning rates."""
    little = {**ONE_PROMPT, "max_steps": 20}
    return [
        Case("one-prompt-k8", options=little),
        Case("one-prompt-k4", options={**little, "num_generations": 4}),
        Case("one-prompt-k4-no-kl", options={**little, "num_generations": 4, "beta": 0.0}),
        Case("one-prompt-lora", options={**little, **LORA, "learning_rate": 1e-3}),
        Case("one-prompt-no-kl-lora",
            options={**little, **LORA, "learning_rate": 1e-3, "beta": 0.0}),
        Case("one-prompt-near", reward=[r.near_target], options=little),
        Case("two-prompts-k2", options={"num_prompts": 2, "num_generations": 2}),
        Case("two-prompts-k4", options={"num_prompts": 2, "num_generations": 4}),
        Case("fast", options={"learning_rate": 1e-3}),
        Case("fast-no-kl", options={"learning_rate": 1e-3, "beta": 0.0}),
        # At 1e-2 two of two runs lost half of their skill, and alarms reported this correctly.
        Case("fast-lora", options={**LORA, "learning_rate": 6e-3}),
        Case("kl-0.05", options={"beta": 0.05}),
        Case("judged-well", reward=[r.near_target], options={"eval_reward": [TASK]}),
        Case("cool", options={"temperature": 0.7}),
        Case("roomy", options={"max_completion_length": 120}),
        Case("short-one-prompt", options={**ONE_PROMPT, "max_steps": 6}),
    ]  # fmt: skip


def recipes() -> list[Case]:
    """Published options of other projects, including the learning rate, with fewer prompts, shorter
    completions and the embedded model."""
    small: dict[str, Any] = {"max_steps": 16, "eval_on_start": False}
    kept: dict[str, dict[str, Any]] = {
        "reference-table": {"learning_rate": 1e-6, "beta": 0.05, "max_grad_norm": 0.5},
        "skill": {**LORA, "learning_rate": 1e-5, "num_generations": 4, "beta": 0.05, **ONE_PROMPT},
        "trl": {"preset": "trl", "learning_rate": 1e-6, "num_generations": 2, "beta": 0.05},
        "trl-lora": {**LORA, "learning_rate": 1e-5, "num_generations": 8, "beta": 0.04},
        "verl": {"learning_rate": 1e-6, "num_generations": 5, "beta": 0.001},
        "openrlhf": {"learning_rate": 5e-7, "num_generations": 4, "beta": 0.01},
        "ms-swift": {"learning_rate": 1e-6, "num_generations": 8, "beta": 0.04, "temperature": 0.9},
        "open-r1": {
            "preset": "grpo",
            "learning_rate": 1e-6,
            "num_generations": 16,
            "temperature": 0.7,
            "beta": 0.0,
        },
        "unsloth": {**LORA, "learning_rate": 5e-6, "num_generations": 4, **ONE_PROMPT, "beta": 0.0},
        "paper": {"learning_rate": 1e-6, "num_generations": 4, "beta": 0.03, "temperature": 0.75},
    }
    return [Case(f"recipe-{name}", options={**small, **given}) for name, given in kept.items()]


def cases(part: str) -> list[Case]:
    """The cases of a part: `fit`, on which thresholds were chosen, or `judge`, with other seeds."""
    return [replace(case, seed=seed) for seed in SEEDS[part] for case in (*healthy(), *sick())]
