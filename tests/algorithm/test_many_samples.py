"""Rollouts of many short completions: how they are cut into micro-batches and optimizer steps, and
that twice the completions are twice the work. Operations of Python are counted, not seconds."""

import random
import sys

import pytest

from rloo.algorithm.reward_shaping import make_training_samples
from rloo.algorithm.state import minibatches
from rloo.algorithm.update_metrics import imbalance
from rloo.config.batch_sizes import BatchSizes
from rloo.model.micro_batch import deal, exceeds, make_sample, pack, pad, split
from rloo.tracking.metrics import rollout_metrics
from rloo.types import Completion, Group, Prompt
from support.models import CPU
from support.policies import make_policy_config
from support.terms import rollout_of


def tokens_by_definition(samples, packed):
    """Each prompt once and every completion but its last token; padded, rows of the longest."""
    if not packed:
        return len(samples) * max(len(s.prompt_ids) + len(s.token_ids) - 1 for s in samples)
    prompts = {s.key[0]: len(s.prompt_ids) for s in samples}
    return sum(prompts.values()) + sum(len(s.token_ids) - 1 for s in samples)


def split_by_definition(samples, max_tokens, *, whole_groups, packed):
    """Each unit joins the last micro-batch, if that as a whole is then within the budget."""
    groups = {}
    for sample in samples:
        groups.setdefault(sample.key[0], []).append(sample)
    units = [[s] for group in groups.values() for s in group]
    batches = []
    for unit in groups.values() if whole_groups else units:
        if batches and tokens_by_definition([*batches[-1], *unit], packed) <= max_tokens:
            batches[-1] += unit
        else:
            batches.append(list(unit))
    return batches


@pytest.mark.parametrize("whole_groups", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_micro_batches_are_those_of_counting_each_from_the_start(packed, whole_groups):
    rng = random.Random(0)
    sizes = set()
    for _ in range(150):
        samples = []
        for group in range(rng.randrange(1, 6)):
            prompt = rng.randrange(1, 9)
            samples += [
                make_sample((group, k), prompt, rng.randrange(1, 12))
                for k in range(rng.randrange(1, 7))
            ]
        if rng.random() < 0.5:  # groups need not lie together
            rng.shuffle(samples)
        how = {"whole_groups": whole_groups, "packed": packed}
        budget = rng.choice([1, 10, 30, 80, 10_000])
        expected = split_by_definition(samples, budget, **how)
        assert split(samples, budget, **how) == expected
        sizes.add(len(expected))
    assert len(sizes) >= 5


def count_operations(work) -> int:
    """Bytecodes that Python executes within `work`, done for the second time: since 3.12 code tells
    of them only after it was traced once."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    for _ in range(2):
        count = 0
        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(before)
    return count


def make_groups(count):
    prompt = Prompt(0, [3, 4, 5], "p")
    completion = Completion([7, 2], "stop", [-1.0, -2.0], [-1.0, -2.0])
    rewards = [0.0, 1.0, None, 2.0]
    return [Group(prompt, [completion] * 4, ["x"] * 4, rewards, {"f": rewards})] * count


def samples_of(groups):
    return make_training_samples(rollout_of(groups), make_policy_config())


def batches_of(groups):
    """Optimizer steps of four completions, so that there are as many as groups."""
    return BatchSizes(4, 4 * len(groups), len(groups), 2)


def cut(**how):
    return lambda groups, samples: split(samples, 400, **how)


WORK = {
    "shaping": lambda groups, samples: samples_of(groups),
    "metrics": lambda groups, samples: rollout_metrics(groups),
    "packed groups": cut(whole_groups=True, packed=True),
    "packed samples": cut(whole_groups=False, packed=True),
    "padded groups": cut(whole_groups=True, packed=False),
    "padded samples": cut(whole_groups=False, packed=False),
    "one micro-batch": lambda groups, samples: split(samples, 10**9, whole_groups=False),
    "dealing": lambda groups, samples: deal(samples, 8, whole_groups=False),
    "exceeds": lambda groups, samples: exceeds(samples, 10**9),
    "imbalance": lambda groups, samples: imbalance([samples] * 2, packed=True),
    "steps": lambda groups, samples: list(minibatches(samples, batches_of(groups))),
    "packing": lambda groups, samples: pack(samples, CPU),
    "padding": lambda groups, samples: pad(samples, CPU, 0),
}


@pytest.mark.parametrize("name", WORK)
def test_twice_the_completions_are_twice_the_operations(name):
    counts = []
    for number in (40, 80):
        groups = make_groups(number)
        samples = samples_of(groups)
        counts.append(count_operations(lambda g=groups, s=samples: WORK[name](g, s)))
    assert counts[0] > 100
    assert counts[1] <= 2.1 * counts[0]
