"""A user-defined estimator: the baseline is the length-weighted mean of the other rewards of the
group.

OPO (Hao et al. 2025, arXiv 2505.23585) uses the length-weighted mean over the complete group. It is
the baseline of minimum variance if the squared norm of a gradient is proportional to the length. In
OPO a completion is part of its own baseline, which biases the gradient. Without this completion the
gradient is exact:

    rloo check-estimator examples/estimator.py:opo
    rloo check-estimator examples/estimator.py:length_weighted
    rloo train --estimator examples/estimator.py:length_weighted
"""


def opo(returns):
    weight, total = returns.length_N, returns.return_N
    return total - (weight * total).sum() / weight.sum()


def length_weighted(returns):
    # Relative to the lowest return, so that equal returns have advantages of exactly 0.
    weight, total = returns.length_N, returns.return_N - returns.return_N.min()
    others = (weight * total).sum() - weight * total
    return total - others / (weight.sum() - weight)
