"""The variance that drawing and numbers of completions remove, by the formula that both minimise.

    python -m benchmarks.group_budget

The sum over the drawn prompts of (w s)^2 / (K - 1), relative to uniform drawing with K completions
each. Deviations s are the true ones, so this is the best that estimates can reach.

A second table has two stages: of each prompt, only a pilot and the distribution of pass rates are
known."""

from __future__ import annotations

import numpy as np

from rloo.data.group_budget import GroupBudget, allocate
from rloo.data.reward_estimate import Prior, RewardedPrompt, RewardEstimate
from rloo.data.variance_sampler import draw_systematically, shares_of

NUM_PROMPTS, DRAWS, ROLLOUTS = 600, 16, 2000
SIZES, FLOORS = (4, 8), (1.0, 0.25)
# Parameters of the Beta distributions of pass rates.
RATES = ((0.3, 3.0), (0.1, 3.0), (0.3, 0.3), (1.0, 1.0))
# (num_generations, pilot)
PILOTS = ((4, 2), (8, 2), (8, 4), (16, 2), (16, 4), (16, 8), (32, 8), (64, 16))


def pass_rates() -> dict[str, np.ndarray]:
    third = NUM_PROMPTS // 3
    return {
        "thirds: 0, 0.5, 1": np.repeat([0.0, 0.5, 1.0], third),
        "thirds: 0.05, 0.5, 0.95": np.repeat([0.05, 0.5, 0.95], third),
        "Beta(0.5, 0.5)": np.random.default_rng(0).beta(0.5, 0.5, NUM_PROMPTS),
    }


def variances(deviation_N: np.ndarray, size: int, floor: float) -> tuple[float, float]:
    """With equal numbers of completions, and with up to 4 K each."""
    random, share_N = np.random.default_rng(1), shares_of(deviation_N, floor)
    equal = chosen = 0.0
    for _ in range(ROLLOUTS):
        drawn = draw_systematically(share_N, DRAWS, random.random())
        spread_P = np.array([weight * deviation_N[n] for n, weight in drawn])
        numbers_P = allocate(spread_P, DRAWS * size, 4 * size)
        equal += (spread_P**2).mean() / (size - 1)
        chosen += (spread_P**2 / (numbers_P - 1)).mean()
    uniform = ROLLOUTS * (deviation_N**2).mean() / (size - 1)
    return equal / uniform, chosen / uniform


def two_stages(a: float, b: float, budget: GroupBudget) -> tuple[float, float, float]:
    """The variance of gradients whose numbers of completions follow a pilot, those that are equal
    after the pilot, and those that follow the true deviations without a pilot, relative to equal
    numbers.

    With norms of 1 and gradients of log-probs that do not depend on the reward, the variance is the
    sum of the expected squares of w A / K: s^2 (p / K)^2 / (p - 1) for a pilot of p, and for n
    further completions ((K - p) / K)^2 / n * E[A^2]. The baseline of these has p known and n - 1
    unknown rewards."""
    size, pilot, random = budget.num_generations, budget.pilot, np.random.default_rng(1)
    assert pilot is not None
    mean, total = a / (a + b), a + b
    within = mean * (1 - mean) * total / (total + 1)
    moments = (mean, mean, within, mean * (1 - mean) - within)
    prior, row_P = Prior(*(np.full(DRAWS, x) for x in moments)), np.arange(DRAWS)
    sums = np.zeros(4)
    for _ in range(ROLLOUTS):
        rate_P = random.beta(a, b, DRAWS)
        rewards_PK = (random.random((DRAWS, pilot)) < rate_P[:, None]).astype(float)
        estimate = RewardEstimate([""] * DRAWS, half_life=100.0)
        estimate.add([RewardedPrompt(n, 1.0, some.tolist()) for n, some in enumerate(rewards_PK)])
        numbers_P = np.array(budget.sizes(estimate.posterior(row_P, prior)))
        square_P = rate_P * (1 - rate_P)
        wrong_P = (rewards_PK.mean(1) - rate_P) ** 2

        def variance(
            n: np.ndarray, square_P: np.ndarray = square_P, wrong_P: np.ndarray = wrong_P
        ) -> float:
            others = pilot + n - 1
            second = square_P * (1 + (n - 1) / others**2) + wrong_P * (pilot / others) ** 2
            first = square_P * pilot**2 / (pilot - 1)
            return float((first + (size - pilot) ** 2 / n * second).mean()) / size**2

        known_P = allocate(np.sqrt(square_P), DRAWS * size, budget.max_generations)
        sums += (
            variance(numbers_P),
            variance(np.full(DRAWS, size - pilot)),
            (square_P / (known_P - 1)).mean(),
            square_P.mean() / (size - 1),
        )
    followed, equal, known, _ = (sums / sums[-1]).tolist()
    return followed, equal, known


def main() -> None:
    print("| pass rates | K | floor | drawn, K each | drawn, K by prompt |\n|---|---|---|---|---|")
    for name, rate_N in pass_rates().items():
        # In random order, as in a shuffled dataset: neighbours would have equal rates.
        rate_N = np.random.default_rng(2).permutation(rate_N)
        for size in SIZES:
            for floor in FLOORS:
                equal, chosen = variances(np.sqrt(rate_N * (1 - rate_N)), size, floor)
                print(f"| {name} | {size} | {floor:g} | {equal:.2f} | {chosen:.2f} |")
    print()
    print(
        "| pass rates | K | pilot | after the pilot | equal after it | true deviations, no pilot |"
    )
    print("|---|---|---|---|---|---|")
    for a, b in RATES:
        for size, pilot in PILOTS:
            budget = GroupBudget(size, 4 * size, DRAWS, pilot)
            found = two_stages(a, b, budget)
            figures = " | ".join(f"{value:.2f}" for value in found)
            print(f"| Beta({a:g}, {b:g}) | {size} | {pilot} | {figures} |")


if __name__ == "__main__":
    main()
