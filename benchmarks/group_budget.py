"""The variance that drawing and numbers of completions remove, by the formula that both minimise.

    python -m benchmarks.group_budget

The sum over the drawn prompts of (w s)^2 / (K - 1), relative to uniform drawing with K completions
each. Deviations s are the true ones, so this is the best that estimates can reach."""

from __future__ import annotations

import numpy as np

from rloo.data.group_budget import allocate
from rloo.data.variance_sampler import draw_systematically, shares_of

NUM_PROMPTS, DRAWS, ROLLOUTS = 600, 16, 2000
SIZES, FLOORS = (4, 8), (1.0, 0.25)


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


def main() -> None:
    print("| pass rates | K | floor | drawn, K each | drawn, K by prompt |\n|---|---|---|---|---|")
    for name, rate_N in pass_rates().items():
        # In random order, as in a shuffled dataset: neighbours would have equal rates.
        rate_N = np.random.default_rng(2).permutation(rate_N)
        for size in SIZES:
            for floor in FLOORS:
                equal, chosen = variances(np.sqrt(rate_N * (1 - rate_N)), size, floor)
                print(f"| {name} | {size} | {floor:g} | {equal:.2f} | {chosen:.2f} |")


if __name__ == "__main__":
    main()
