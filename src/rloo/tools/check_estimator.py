"""`rloo check-estimator`: the bias and the variance of an estimator, by enumeration of all
rollouts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import torch

from rloo.algorithm.estimator_registry import LoadedEstimator, load_estimator
from rloo.config.config import RLOOConfig
from rloo.data.group_budget import GroupBudget
from rloo.tools.exact_gradient import (
    GradientComparison,
    TabularPolicy,
    all_draws,
    draw_error,
    logits_table,
    measure,
    pilot_error,
    size_error,
)
from rloo.tools.probe_sampling import PROBES, all_probe_draws, make_probe_sampler
from rloo.trainer.prompt_sampling import candidates_per_prompt, check_estimator_of_weights

SIZES = (2, 3, 4)
KL_WEIGHT = 0.3
# The numbers of completions of two stages.
PILOT = GroupBudget(num_generations=4, max_generations=5, num_prompts=2, pilot=2)
# Assumed deviations of the rewards of two prompts.
DEVIATIONS = ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.9, 0.1))
# The prompts that a probe draws among, copies of the two: candidates are 2, 4 or all of them.
PROBED = 6
# The largest error, relative to the norm of the exact gradient, that counts as exact. An estimator
# may compute in float32.
EXACT = 1e-6


@dataclass(frozen=True, slots=True)
class EstimatorComparison:
    """One row of the report's table: the result `found` of the estimator, and the result `usual` of
    leave-one-out for comparison."""

    rewards: str
    beta: float
    size: int
    prompt: int
    found: GradientComparison
    usual: GradientComparison


def report(config: RLOOConfig) -> Iterator[str]:
    """Yield the lines of the report on the estimator of `config`. Raises ValueError for an
    estimator that does not exist or fails."""
    estimator = load_estimator(config)
    check_estimator_of_weights(config)
    given = "the whole rollout" if estimator.over_rollout else "one group at a time"
    yield f"{estimator}, given {given}"
    yield "Every rollout of two small prompts; loss: mean over completions, at the first update."
    yield "Scale and cosine: expected gradient compared with the exact one of E[reward] - beta KL."
    yield "Variance: over the squared scale; last column: leave-one-out's, with k1."
    if estimator.reads_coefficients:
        yield "Coefficients: fitted to every rollout of the prompt, as after many earlier rollouts."
    yield ""
    yield "rewards  beta  K  prompt    scale   cosine   variance  leave-one-out"
    # A KL in the loss does not belong to an estimator.
    betas = (0.0,) if config.kl_placement == "loss" else (0.0, KL_WEIGHT)
    exact_kl = config.kl_estimator == "exact"
    cases = []
    for case in enumerate_cases(estimator, betas, exact_kl=exact_kl):
        cases.append(case)
        about = f"{case.rewards:7}  {case.beta:<4g}  {case.size}  {case.prompt:<6}"
        found = case.found
        scale = f"{found.scale:7.4f}" if abs(found.scale) < 100 else f"{found.scale:7.5g}"
        figures = f"{scale}  {found.cosine:7.4f}  {found.variance:9.4f}"
        yield f"{about}  {figures}  {case.usual.variance:13.4f}"
    yield ""
    yield verdict(cases)
    if config.prompt_sampling == "variance":
        yield from report_draws(cases, config.prompt_options.floor)
    if config.prompt_options.probe is not None:
        yield from report_probe(cases, config)
    if config.prompt_options.max_generations is not None:
        yield from report_sizes(cases, config.prompt_options.floor)
    if config.prompt_options.pilot is not None:
        yield from report_pilots(estimator, betas, exact_kl=exact_kl)


def report_draws(cases: list[EstimatorComparison], floor: float) -> Iterator[str]:
    """Yield the lines about `prompt_sampling` variance: the expected gradient over all draws of two
    prompts, compared with that of uniform drawing. Estimates are given: no rewards are learned."""
    yield ""
    yield "prompt_sampling variance: every outcome of 1 to 3 weighted draws of the two prompts."
    yield "Deviations that are assumed, whatever the rewards are; expected gradient beside that of"
    yield "uniform drawing."

    def error(deviations: tuple[float, float]) -> float:
        shares = _shares(*deviations, floor)
        return max(
            draw_error(all_draws(shares, num), [one.found.gradient, other.found.gradient])
            for one, other in zip(cases[::2], cases[1::2], strict=True)
            for num in (1, 2, 3)
        )

    largest = yield from _errors_by_deviations(error)
    yield (
        "exact: the weighted draws have the expected gradient of uniform drawing"
        if largest < EXACT
        else f"biased: the weighted draws differ from uniform drawing by up to {largest:.2g}"
    )


def report_probe(cases: list[EstimatorComparison], config: RLOOConfig) -> Iterator[str]:
    """Yield the lines about `prompt_sampling_kwargs.probe`: as `report_draws`, over all sets of
    candidates and `PROBES`."""
    options = config.prompt_options
    each = candidates_per_prompt(options.probe)
    yield ""
    yield f"prompt_sampling_kwargs.probe: every set of candidates of {PROBED} prompts, copies of"
    yield "the two, and every outcome of 1 to 3 draws among them. Half of the prompts are assumed"
    yield "to have signal; expected gradient beside that of uniform drawing."
    yield ""
    yield "the probe      draws with signal  largest error"
    largest = 0.0
    for probe in PROBES:
        sampler = make_probe_sampler(probe, PROBED, floor=options.floor, each=each)
        error, signal = 0.0, []
        for num in (1, 2, 3):
            drawn = list(all_probe_draws(sampler, num))
            signal += [c * sum(n % 2 == 0 for n, _ in draws) / num for c, draws in drawn]
            for one, other in zip(cases[::2], cases[1::2], strict=True):
                gradients = [one.found.gradient, other.found.gradient] * (PROBED // 2)
                error = max(error, draw_error(drawn, gradients))
        yield f"{probe:13}  {sum(signal) / 3:<17.4f}  {error:.2g}"
        largest = max(largest, error)
    yield ""
    yield (
        "exact: a probe does not change the expected gradient"
        if largest < EXACT
        else f"biased: the expected gradient depends on the probe, by up to {largest:.2g}"
    )


def report_sizes(cases: list[EstimatorComparison], floor: float) -> Iterator[str]:
    """Yield the lines about `prompt_sampling_kwargs.max_generations`: as `report_draws`, with
    numbers of completions that follow the assumed deviations."""
    by_case: dict[tuple[str, float], dict[int, list[torch.Tensor]]] = {}
    for case in cases:
        sized = by_case.setdefault((case.rewards, case.beta), {})
        sized.setdefault(case.size, []).append(case.found.gradient)
    yield ""
    yield "prompt_sampling_kwargs.max_generations: the same draws of 2 or 3 prompts, with"
    yield f"{min(SIZES)} to {max(SIZES)} completions, on average {SIZES[1]}."

    def error(deviations: tuple[float, float]) -> float:
        shares = _shares(*deviations, floor)
        return max(
            size_error(shares, deviations, sized, num)
            for sized in by_case.values()
            for num in (2, 3)
        )

    largest = yield from _errors_by_deviations(error)
    yield (
        "exact: the numbers of completions do not change the expected gradient"
        if largest < EXACT
        else "biased: the expected gradient depends on the numbers of completions, by up to "
        f"{largest:.2g}"
    )


def report_pilots(
    estimator: LoadedEstimator, betas: tuple[float, ...], *, exact_kl: bool
) -> Iterator[str]:
    """Yield the lines about `prompt_sampling_kwargs.pilot`: the expected gradient over every pilot
    of two prompts, the numbers of completions that follow from its rewards, and every second stage,
    compared with that of one stage."""
    yield ""
    yield f"prompt_sampling_kwargs.pilot: every pilot of {PILOT.pilot} completions of two prompts,"
    yield f"the numbers that follow from its rewards (in all up to {PILOT.max_generations}), and"
    yield "every second stage; expected gradient beside that of"
    yield f"{PILOT.num_generations} completions each, sampled together."
    yield ""
    yield "rewards  beta  largest error"
    largest = 0.0
    for rewards in ("binary", "graded"):
        bandits = [_bandit(number, 2, rewards) for number in range(2)]
        for beta in betas:
            error = pilot_error(estimator, bandits, beta, PILOT, exact_kl=exact_kl)
            yield f"{rewards:7}  {beta:<4g}  {error:.2g}"
            largest = max(largest, error)
    yield ""
    yield (
        "exact: a pilot does not change the expected gradient"
        if largest < EXACT
        else f"biased: the expected gradient depends on the pilot, by up to {largest:.2g}"
    )


def _errors_by_deviations(
    error: Callable[[tuple[float, float]], float],
) -> Generator[str, None, float]:
    """Yield a table of the error for each pair of `DEVIATIONS`, and return the largest error."""
    yield ""
    yield "first prompt  second prompt  largest error"
    errors = [error(deviations) for deviations in DEVIATIONS]
    for (first, second), found in zip(DEVIATIONS, errors, strict=True):
        yield f"{first:<12g}  {second:<13g}  {found:.2g}"
    yield ""
    return max(errors)


def _shares(first: float, second: float, floor: float) -> list[float]:
    """N q of two prompts with these deviations."""
    mean = (first + second) / 2
    return [floor + (1.0 - floor) * value / mean for value in (first, second)]


def enumerate_cases(
    estimator: LoadedEstimator, betas: tuple[float, ...], *, exact_kl: bool = False
) -> Iterator[EstimatorComparison]:
    """Yield comparisons for binary and graded rewards, two prompts, and groups of 2 to 4
    completions. An estimator of groups is enumerated for each prompt separately. An estimator of
    whole rollouts is enumerated for both prompts together, with fewer tokens. `exact_kl`: see
    `measure`. Leave-one-out, for comparison, has k1."""
    usual = load_estimator(RLOOConfig(estimator="rloo"))
    num_tokens = 2 if estimator.over_rollout else 3
    for rewards in ("binary", "graded"):
        bandits = [_bandit(number, num_tokens, rewards) for number in range(2)]
        together = [bandits] if estimator.over_rollout else [[bandit] for bandit in bandits]
        for beta in betas:
            for size in SIZES:
                ours = [
                    found
                    for prompts in together
                    for found in measure(estimator, prompts, size, beta, exact_kl=exact_kl)
                ]
                theirs = [f for bandit in bandits for f in measure(usual, [bandit], size, beta)]
                for number, (found, other) in enumerate(zip(ours, theirs, strict=True), start=1):
                    yield EstimatorComparison(rewards, beta, size, number, found, other)


def verdict(cases: list[EstimatorComparison]) -> str:
    """Return the conclusion from all cases, in one line."""
    if all(case.found.error < EXACT for case in cases):
        return f"exact: the expected gradient is the exact one in all {len(cases)} cases"
    scales = [case.found.scale for case in cases]
    spread = f"scale {min(scales):.4f} to {max(scales):.4f}"
    least = min(case.found.cosine for case in cases)
    if least > 1 - EXACT:
        by_size = {case.size: case.found.scale for case in cases}
        if all(abs(case.found.scale - by_size[case.size]) < EXACT for case in cases):
            factors = ", ".join(f"{scale:.4f} for K = {size}" for size, scale in by_size.items())
            return f"exact up to a factor: {factors}"
        return (
            "biased: the direction is exact at each prompt, but the prompts have different weights "
            f"({spread})"
        )
    return f"biased: cosine down to {least:.4f}, {spread}"


def _bandit(number: int, num_tokens: int, rewards: str) -> TabularPolicy:
    policy, reference = (logits_table(2 * number + i, num_tokens) for i in range(2))
    num_sequences = 1 + (num_tokens - 1) * num_tokens
    graded = torch.sin(1.7 * torch.arange(num_sequences, dtype=torch.float64) + number)
    binary = (graded > graded.mean()).double()
    return TabularPolicy(policy, reference, binary if rewards == "binary" else graded)
