"""An advantage of one's own: the baseline is the mean of the other rewards, weighed by length.

OPO (Hao et al. 2025, arXiv 2505.23585) takes that mean over the whole group: the baseline of least
variance, if the squared norm of a gradient grows with the length. There a completion is part of its
own baseline, which biases the gradient; without it the gradient is exact:

    rloo check-estimator examples/estimator.py:opo
    rloo check-estimator examples/estimator.py:length_weighted
    rloo train --estimator examples/estimator.py:length_weighted
"""


def opo(returns):
    weight, total = returns.length_N, returns.return_N
    return total - (weight * total).sum() / weight.sum()


def length_weighted(returns):
    # From the lowest on, so that equal returns have advantages of exactly 0.
    weight, total = returns.length_N, returns.return_N - returns.return_N.min()
    others = (weight * total).sum() - weight * total
    return total - others / (weight.sum() - weight)
