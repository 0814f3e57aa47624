"""Divides the completions of an optimizer step among its prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Leave-one-out needs at least 2 completions.
FEWEST = 2


@dataclass(frozen=True, slots=True)
class GroupBudget:
    """A step has `num_prompts` prompts and `num_prompts` * `num_generations` completions. A prompt
    has 2 to `max_generations` of them.

    With a `pilot`, each prompt first has this number of completions. The others, 1 to
    `max_generations` - `pilot` of a prompt, are divided when the rewards of the pilot are known.
    """

    num_generations: int
    max_generations: int
    num_prompts: int
    pilot: int | None = None

    def sizes(self, spread_P: np.ndarray) -> list[int]:
        """Return the number of completions of each of P prompts, the prompts of one or more steps
        in order. With a pilot, return the numbers of further completions. `spread_P`: see
        `allocate`."""
        each, most, before = self.num_generations, self.max_generations, 0
        if self.pilot is not None:
            # The variance of a mean of n further terms is proportional to 1 / n, not 1 / (K - 1).
            before = 1
            each, most = each - self.pilot + before, most - self.pilot + before
        steps = np.split(spread_P, range(self.num_prompts, len(spread_P), self.num_prompts))
        return [
            size - before
            for spread in steps
            for size in allocate(spread, len(spread) * each, most).tolist()
        ]


def allocate(spread_P: np.ndarray, total: int, most: int) -> np.ndarray:
    """Return the number of completions K_p of each prompt, (P,), of `total` in all. K_p is at least
    2 and at most `most`.

    `spread_P` is w_p s_p: the weight of the prompt's draw, and the standard deviation of its reward
    as estimated from earlier rollouts. If the gradients of log-probs have equal norms and do not
    depend on the reward, the variance of a leave-one-out gradient with weights is proportional to

        sum over p of (w_p s_p)^2 / (K_p - 1)

    The K_p minimise this sum. Without the bounds and as real numbers, K_p - 1 is proportional to
    w_p s_p (Neyman 1934). The next completion of a prompt with K removes (w_p s_p)^2 / (K (K - 1)),
    which falls with K, so to give each completion to the prompt where it removes most is optimal
    (Fox 1966). All equal: the numbers differ by at most 1. Of equal gains, those of smaller groups
    come first, and then those of earlier prompts, so the result is the same on all machines. Raises
    ValueError if no such numbers exist.
    """
    num = len(spread_P)
    if not FEWEST * num <= total <= most * num:
        raise ValueError(
            f"{total} completions for {num} prompts; each has at least {FEWEST} and at most {most} "
            "(num_generations, prompt_sampling_kwargs.max_generations)"
        )
    left = total - FEWEST * num
    size_S = np.arange(FEWEST, min(most, FEWEST + left), dtype=np.float64)
    gain_SP = spread_P**2 / (size_S * (size_S - 1.0))[:, None]
    best = np.argsort(-gain_SP.ravel(), kind="stable")[:left]
    return FEWEST + np.bincount(best % num, minlength=num)
