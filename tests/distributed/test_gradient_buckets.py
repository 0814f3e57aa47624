"""Gradients are summed over ranks in buckets while the last backward runs: the sum and its bits,
the order of the collectives, and a rank that runs out of memory."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rloo.algorithm.advantages import compute_advantages
from rloo.algorithm.update import update
from rloo.distributed.gradient_buckets import GradientBuckets
from support.models import make_samples
from support.policies import make_policy_config, make_policy_of
from support.process_groups import gloo_worlds, of_each
from support.terms import terms_of

WIDTH = 8
# Bytes of two weight matrices in float64: a bucket is a layer's weight, or two layers' biases.
SIZE = 2 * 8 * WIDTH * WIDTH


class Model(nn.Module):
    """Layers whose first and last share a weight, one that is frozen, one that no rank uses, and
    one that only micro-batches with an odd number use."""

    def __init__(self):
        super().__init__()
        self.unused, self.odd = (nn.Linear(WIDTH, WIDTH).double() for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(5))
        self.layers[4].weight = self.layers[0].weight
        self.layers[2].requires_grad_(False)

    def forward(self, number):
        value = torch.linspace(-1, number, WIDTH, dtype=torch.float64)[None].requires_grad_()
        for layer in self.layers:
            value = checkpoint(lambda x, f=layer: f(x).tanh(), value, use_reentrant=False)
        return (self.odd(value) if number % 2 else value).square().sum()


def make(world, size=SIZE):
    torch.manual_seed(0)
    model = Model()
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, trained, GradientBuckets(trained, world.collectives, size)


def backward(model, buckets, numbers, last=lambda loss: loss.backward()):
    """The backward passes of a rank, with the sum started in the last one."""
    for number in numbers[:-1]:
        model(number).backward()
    if numbers:
        loss = model(numbers[-1])
        with buckets.during_backward():
            last(loss)


def summed(size, numbers, work=backward, **options):
    """The summed gradients of each rank, whose micro-batches have these numbers."""
    with gloo_worlds(size) as (groups, worlds):
        made = [make(world, **options) for world in worlds]

        def run(rank):
            model, trained, buckets = made[rank]
            work(model, buckets, numbers[rank])
            buckets.start()
            buckets.finish()
            return [None if p.grad is None else p.grad.clone() for p in trained]

        return of_each(size, run), [group.noted for group in groups]


def of_one(numbers):
    """The gradients of one process that has all micro-batches."""
    torch.manual_seed(0)
    model = Model()
    for number in numbers:
        model(number).backward()
    return [p.grad for p in model.parameters() if p.requires_grad]


CASES = [[[1, 2], [3, 4]], [[2, 4, 6], [3]], [[2], []], [[], [5]], [[1, 2, 3], [], [4]]]


@pytest.mark.parametrize("numbers", CASES)
def test_the_sum_is_that_of_one_process_to_the_last_bit_in_every_run(numbers):
    wanted = of_one([number for part in numbers for number in part])
    size = len(numbers)
    first, noted = summed(size, numbers)
    again, _ = summed(size, numbers)
    for found in (*first, *again):
        for mine, one, other in zip(found, wanted, first[0], strict=True):
            assert (mine is None) == (one is None)
            if one is not None:
                torch.testing.assert_close(mine, one, rtol=1e-12, atol=1e-13)
                assert mine.equal(other)
    assert noted == [noted[0]] * size  # the same collectives in the same order
    trained = sum(p.nbytes for p in Model().parameters() if p.requires_grad)
    assert sum(written for _, written in noted[0][:-1]) == trained
    assert all(written <= SIZE for _, written in noted[0]) and len(noted[0]) > 4


def test_buckets_start_in_the_last_backward_before_all_gradients_are_known():
    with gloo_worlds(2) as (groups, worlds):
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
        model, started = nn.Sequential(*layers), []
        main, other = (GradientBuckets([*model.parameters()], w.collectives, 4) for w in worlds)
        layers[0].weight.register_hook(lambda _: started.append(len(groups[0].noted)))
        model(torch.ones(1, WIDTH)).sum().backward()
        with main.during_backward():
            model(torch.ones(1, WIDTH)).sum().backward()
        model(torch.ones(1, WIDTH)).sum().backward()
        assert started == [0, 3, 4]  # the three later layers, then the first; in one backward
        other.start()
        main.start()
        of_each(2, lambda rank: (main, other)[rank].finish())


def test_a_weight_that_was_frozen_in_between_counts_as_one_without_gradient():
    def freezing(model, buckets, numbers):
        model.layers[1].requires_grad_(False)
        backward(model, buckets, numbers)

    found, _ = summed(2, [[1], [3]], freezing)
    wanted = of_one([1, 3])
    assert all(sum(gradient is None for gradient in one) == 4 for one in found)
    torch.testing.assert_close(found[0][0], wanted[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("where", (0, 3))
def test_a_step_is_repeated_from_nothing_after_a_rank_ran_out_of_memory(where):
    """One rank's last backward ends in the middle, when others have summed all, and is repeated."""
    numbers = [[1, 2], [3, 4]]
    wanted = of_one([1, 2, 3, 4])

    def fail(_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with gloo_worlds(2) as (groups, worlds):
        made = [make(world) for world in worlds]

        def run(rank):
            model, trained, buckets = made[rank]
            if rank == 1:
                hook = model.layers[where].bias.register_hook(fail)

            def compute():
                backward(model, buckets, numbers[rank])

            with pytest.raises(torch.OutOfMemoryError, match="rank 1 ran out of memory"):
                worlds[rank].run_on_all_ranks(compute, buckets.start)
            buckets.finish()
            buckets.reset()
            model.zero_grad(set_to_none=True)
            if rank == 1:
                hook.remove()
            worlds[rank].run_on_all_ranks(compute, buckets.start)
            buckets.finish()
            return [p.grad for p in trained]

        for found in of_each(2, run):
            for mine, one in zip(found, wanted, strict=True):
                assert (mine is None) == (one is None)
                if one is not None:
                    torch.testing.assert_close(mine, one, rtol=1e-12, atol=1e-13)
        assert groups[0].noted == groups[1].noted


def test_a_gradient_that_changes_while_it_is_summed_is_an_error():
    def twice(loss):
        loss.backward(retain_graph=True)
        loss.backward()

    with pytest.raises(RuntimeError, match="added twice to the gradient of a weight"):
        summed(1, [[1]], lambda *given: backward(*given, last=twice))


def test_gradients_of_two_types_are_in_buckets_of_their_own_and_a_large_one_is_not_copied():
    with gloo_worlds(1) as (groups, worlds):
        some = [
            nn.Parameter(torch.zeros(n, dtype=d))
            for n, d in ((9, torch.half), (2, None), (3, None))
        ]
        buckets = GradientBuckets(some, worlds[0].collectives, 16)
        for parameter in some:
            parameter.grad = torch.ones_like(parameter)
        large = some[0].grad.data_ptr()
        buckets.start()
        buckets.finish()
        assert [written for _, written in groups[0].noted] == [12, 8, 18, 3]
        assert some[0].grad.data_ptr() == large


@pytest.mark.parametrize(("reentrant", "wanted"), [(False, [0, 0, 1]), (True, [0, 0, 0])])
def test_an_update_starts_the_sum_in_its_last_backward_unless_it_is_reentrant(reentrant, wanted):
    config = make_policy_config(
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant}
    )
    with gloo_worlds(1) as (groups, worlds):
        policy, terms = make_policy_of(config, worlds[0]), terms_of(config)
        samples, started, backward = make_samples(3), [], policy.stepper.backward

        def noting(loss, **how):
            backward(loss, **how)
            started.append(sum(name == "all_reduce" for name, _ in groups[0].noted))

        credit = compute_advantages(samples, policy, terms)
        policy.stepper.backward, policy.max_tokens = noting, 1
        noting(policy.logprobs(policy.batch(samples)).logprobs.sum())  # a rehearsal of a step
        policy.stepper.clear()
        assert started.pop() == 0
        update(policy, samples, credit, terms)
        assert started == wanted
        assert [name for name, _ in groups[0].noted].count("all_reduce") == 2
