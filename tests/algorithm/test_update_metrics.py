"""Sums that stay on their device until all micro-batches are computed."""

import torch

from rloo.algorithm.update_metrics import add, gather, read, recorded_sum, to_cpu


def test_sums_of_tensors_are_those_of_their_numbers():
    torch.manual_seed(0)
    parts = [
        {"loss": torch.randn(()), "mismatch/max": torch.rand(()), "count": torch.tensor(n + 3)}
        | {"tokens": 2.0}
        for n in range(5)
    ]
    tally, sums = {}, {}
    for part in parts:
        add(tally, {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in part.items()})
        gather(sums, part)
    assert read(sums) == tally
    assert list(read(sums)) == list(tally)
    assert all(isinstance(value, float) for value in read(sums).values())
    assert read({}) == {}


def test_a_maximum_that_is_no_number_is_none():
    sums = {}
    gather(sums, {"x/max": torch.tensor(torch.nan)})
    gather(sums, {"x/max": torch.tensor(0.5)})
    gather(sums, {"x/max": torch.tensor(torch.nan)})
    assert read(sums) == {"x/max": 0.5}


def test_only_what_is_watched_is_summed():
    values, watched = torch.tensor([1.0, torch.inf, 4.0]), torch.tensor([True, False, True])
    assert recorded_sum(values, watched) == 5.0


def test_tensors_come_to_the_host_as_they_were():
    values = {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(0), "c": torch.tensor([3.0])}
    found = to_cpu(values)
    assert list(found) == list(values)
    assert all(torch.equal(found[key], value) for key, value in values.items())
    assert to_cpu({}) == {}
