"""The exact KL compared with k1: the variance of the gradient, seconds and memory of an update.

    python -m benchmarks.exact_kl [--task countdown|gym|smollm2] [--steps 50 10 0]
        [--prompts 5] [--groups 32] [--rounds 5]

Variance: the base model of a task of benchmarks/baselines is trained for each number of `--steps`,
with its base as the reference. Then completions of `--prompts` prompts are sampled. The gradients
of `--groups` groups of each size are computed by the code of training, with every form of the KL on
the same groups. A gradient is linear in beta, so those at beta 0 and 1 give all others. A variance
is the trace of the covariance of a group's gradient, summed over prompts. The figures are ratios to
k1 in the reward of the whole completion, with 95 % bootstrap intervals over groups.

Cost: an update is a forward and a backward of 64 completions, without the optimizer's step, in turn
with k1, with the exact KL, and with the estimator regression. The figures are medians of the CPU
seconds of `--rounds`. Memory is the peak of the tensors of such an update. `--rounds 0` leaves the
costs out, `--steps` without numbers the variance. Random models with large vocabularies are
measured with `--task countdown`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines.arms import Task
from benchmarks.baselines.tasks import TASKS
from benchmarks.baselines.training import make_trainer
from benchmarks.baselines.variance import Gradients, draw, interval, resamples, trace_variance
from benchmarks.shapes import make_random_model, make_word_tokenizer
from rloo import RLOOConfig, RLOOTrainer
from rloo.algorithm.advantages import compute_advantages
from rloo.algorithm.loss_context import LossContext
from rloo.algorithm.regression import HALF_LIFE, Observation, ReturnRegression
from rloo.algorithm.update import micro_batch_loss
from rloo.config.batch_sizes import batches_of
from rloo.distributed import make_world
from rloo.model.memory_estimate import make_samples, measured_peak_bytes
from rloo.model.policy import Policy
from rloo.types import Sample

SIZES = (2, 4, 8)
BETAS = (0.001, 0.01, 0.03, 0.1)
TO_GO = {"kl_placement": "reward_to_go", "importance_sampling_level": "token"}
FORMS: dict[str, dict[str, Any]] = {
    "k1": {},
    "exact": {"kl_estimator": "exact"},
    "k1 to go": TO_GO,
    "exact to go": {**TO_GO, "kl_estimator": "exact"},
}
# Measured for their costs, with k1 first.
COMPARED: dict[str, dict[str, Any]] = {
    "k1": {},
    "exact": {"kl_estimator": "exact"},
    "regression": {"estimator": "regression"},
}
TRAINING: dict[str, Any] = {
    "preset": "paper", "beta": 0.001, "num_prompts": 8, "num_generations": 8,
    "warmup_steps": 3, "eval_strategy": "no", "save_strategy": "no", "bf16": False,
    "use_cpu": True, "num_threads": 1, "gradient_checkpointing": False, "report_to": [],
    "disable_tqdm": True,
}  # fmt: skip
# Learning rates by task.
RATES = {"countdown": 4e-4, "gym": 1e-4, "smollm2": 1e-5}
# Random weights: 3 M parameters without embeddings.
VOCABULARIES = ("3m-8k", "3m-32k")


def training(task: Task) -> dict[str, Any]:
    """The options of a task's runs."""
    return TRAINING | {"max_completion_length": task.max_tokens, "learning_rate": RATES[task.name]}


@contextmanager
def options_of(policy: Policy, config: RLOOConfig) -> Iterator[None]:
    """Within this context, the policy computes under other options of the KL."""
    before, policy.config = policy.config, config
    try:
        yield
    finally:
        policy.config = before


def variances(task: Task, steps: int, prompts: int, groups: int) -> dict[str, Any]:
    """Variances after `steps` of training, as ratios to k1: form, K and beta -> [value, low,
    high]."""
    with tempfile.TemporaryDirectory() as folder:
        options = training(task) | {"max_steps": max(steps, 1), "seed": 1}
        place = Path(folder)
        trainer = make_trainer(task, options, model=task.model(place), folder=place)
        if steps:
            trainer.train()
        parts, _ = trainer.make_parts()
        rollouts: Any = parts.rollouts
        chosen = rollouts.prompts.next(prompts)
        drawn = [draw(trainer, rollouts, prompt, groups * max(SIZES)) for prompt in chosen]
        found: dict[str, Any] = {"KL of a completion, nats": kl_of(trainer.policy, drawn)}
        for size in SIZES:
            found |= _ratios(trainer, [samples[: groups * size] for samples in drawn], size)
        return found


def _ratios(trainer: RLOOTrainer, drawn: list[list[Sample]], size: int) -> dict[str, Any]:
    """The ratios of one size of groups."""
    gradients = Gradients(trainer, num_coordinates=2**14)
    totals: dict[tuple[str, float], Tensor | float] = {}
    for number, samples in enumerate(drawn):
        counts = None
        without = gradients.of_groups(samples, size, {"beta": 0.0})
        for name, form in FORMS.items():
            config = replace(trainer.args, num_generations=size, beta=1.0, **form)
            with options_of(trainer.policy, config):
                slope = gradients.of_groups(samples, size, {**form, "beta": 1.0}) - without
            if counts is None:
                counts = resamples(len(slope), torch.Generator().manual_seed(number))
            for beta in BETAS:
                known = totals.get((name, beta), 0.0)
                totals[name, beta] = known + trace_variance(without + beta * slope, counts)
    ratios: dict[str, Any] = {}
    for (name, beta), total in totals.items():
        if name != "k1":
            ratios[f"{name}, K {size}, beta {beta:g}"] = interval(total / totals["k1", beta])  # type: ignore[arg-type]
    return ratios


@torch.no_grad()
def kl_of(policy: Policy, drawn: Sequence[Sequence[Sample]]) -> float:
    """The mean KL of a completion, in nats, over the vocabulary."""
    total, count = 0.0, 0
    with options_of(policy, replace(policy.config, kl_estimator="exact")):
        for samples in drawn:
            scores = policy.logprobs(policy.batch(samples[:64]), reference=True)
            assert scores.kl is not None
            total, count = total + scores.kl.sum().item(), count + len(samples[:64])
    return round(total / count, 4)


def costs(policy: Policy, samples: Sequence[Sample], rounds: int) -> dict[str, Any]:
    """Median CPU seconds of an update with each of COMPARED, the medians of its ratios to k1 in a
    round, and the ratios of peak memory."""
    seconds: dict[str, list[float]] = {name: [] for name in COMPARED}
    peaks = {}
    configs = {name: policy.config.with_values(**form) for name, form in COMPARED.items()}
    for turn in range(rounds + 1):
        for name, config in configs.items():
            with options_of(policy, config):
                spent = cpu_seconds(partial(_update, policy, samples, config))
                if turn:  # the first one warms up
                    seconds[name].append(spent)
                else:
                    peaks[name] = measured_peak_bytes(policy, samples)
    found = {f"seconds, {name}": round(median(each), 3) for name, each in seconds.items()}
    for name in list(COMPARED)[1:]:
        pairs = [b / a for a, b in zip(seconds["k1"], seconds[name], strict=True)]
        found[f"seconds, {name} / k1"] = round(median(pairs), 3)
        found[f"peak memory, {name} / k1"] = round(peaks[name] / peaks["k1"], 3)
    return found


def _update(policy: Policy, samples: Sequence[Sample], config: RLOOConfig) -> None:
    terms = LossContext(config, batches_of(config, world_size=1), config.beta)
    credit = compute_advantages(samples, policy, terms)
    loss, _ = micro_batch_loss(policy, policy.batch(samples), credit, terms, len(samples))
    torch.autograd.grad(loss, policy.parameters)


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this thread."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def task_costs(task: Task, rounds: int) -> dict[str, Any]:
    """The costs on a task, with the share of sampling in a step, and the fit of the regression."""
    with tempfile.TemporaryDirectory() as folder:
        options, place = training(task) | {"max_steps": 1}, Path(folder)
        trainer = make_trainer(task, options, model=task.model(place), folder=place)
        parts, _ = trainer.make_parts()
        rollouts: Any = parts.rollouts
        trainer.engine.load(trainer.policy.weights, trainer.policy.version)
        prompts = rollouts.prompts.next(8)
        sampling = median(
            cpu_seconds(partial(rollouts.generate, prompts, turn)) for turn in range(rounds)
        )
        samples = [
            replace(sample, key=(number, index))
            for number, prompt in enumerate(prompts)
            for index, sample in enumerate(draw(trainer, rollouts, prompt, 8))
        ]
        found = costs(trainer.policy, samples, rounds)
    fitted, rewards = ReturnRegression(), [sample.reward for sample in samples]
    seen = [Observation(1.0, reward - fmean(rewards), fmean(rewards)) for reward in rewards]
    groups = [("", seen[start : start + 8]) for start in range(0, len(seen), 8)]
    spent = [cpu_seconds(partial(fitted.add, groups, HALF_LIFE)) for _ in range(rounds)]
    found["seconds of the fit"] = round(median(spent), 5)
    usual, *others = (sampling + found[f"seconds, {name}"] for name in COMPARED)
    for name, step in zip(list(COMPARED)[1:], others, strict=True):
        found[f"step, {name}"] = round(step / usual, 3)
    return found | {"seconds of sampling": round(sampling, 3)}


def vocabulary_costs(name: str, rounds: int) -> dict[str, Any]:
    """The costs of 64 completions of 60 tokens with random weights and another vocabulary."""
    config = RLOOConfig(**training(TASKS["countdown"]))
    policy = Policy(
        make_random_model(name, "cpu"), make_word_tokenizer(), config,
        world=make_world(use_cpu=True), num_training_steps=1,
    )  # fmt: skip
    samples = [replace(s, reward=float(s.key[1])) for s in make_samples(24, 60, 8, 8)]
    return costs(policy, samples, rounds)


def main() -> None:
    """Print each figure as soon as it is measured: one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=list(RATES), default="countdown")
    parser.add_argument("--steps", type=int, nargs="*", default=[50, 10, 0])
    for name, default in {"prompts": 5, "groups": 32, "rounds": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    task = TASKS[args.task]
    if args.rounds:
        print(json.dumps({"costs": args.task, **task_costs(task, args.rounds)}), flush=True)
        for name in VOCABULARIES if args.task == "countdown" else ():
            print(json.dumps({"costs": name, **vocabulary_costs(name, args.rounds)}), flush=True)
    for steps in args.steps:
        found = variances(task, steps, args.prompts, args.groups)
        for what, value in found.items():
            print(json.dumps({"steps": steps, "of": what, "value": value}), flush=True)


if __name__ == "__main__":
    main()
