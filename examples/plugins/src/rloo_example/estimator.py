"""An estimator of advantages: `median`."""


def median(returns):
    """The return minus the median of its group, divided by 1 plus the group's mean deviation."""
    above_N = returns.return_N - returns.return_N.median()
    return above_N / (1 + above_N.abs().mean())
