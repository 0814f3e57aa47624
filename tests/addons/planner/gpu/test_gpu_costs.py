"""Bytes and seconds of the parts of a rollout, by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rloo.addons.planner.gpu.cost_model import COPY, ENGINE, MODULE, SAMPLED_TOKEN, SERVER
from rloo.addons.planner.gpu.layouts import ParallelLayout, best, forecast, most_samples
from rloo.addons.planner.gpu.model_shapes import TYPICAL, shape_of_size
from rloo.addons.planner.gpu.weight_cost import publishing
from rloo.engines.serialization import pack
from rloo.types import Completion
from support.gpu_plans import make_job


@pytest.mark.parametrize(
    ("size", "replicate", "on_8", "on_64"),
    [("0.6B", 11, 2.4, 1.4), ("1.7B", 31, 7, 4), ("4B", 72, 16, 9), ("8B", 144, 32, 18),
     ("32B", 576, 128, 72)],
)  # fmt: skip
def test_memory_is_that_of_the_table_in_the_documents(size, replicate, on_8, on_64):
    """docs/distributed.md: 18 bytes a parameter, and 16 / n + 2; gathered layers come on top."""
    job = make_job(shape_of_size(size))
    copy = ENGINE * job.shape.parameters
    assert (job.trainer_bytes(1, divided=False) + copy) / 1e9 == pytest.approx(replicate, rel=0.05)
    for trainers, said in ((8, on_8), (64, on_64)):
        layer = job.trainer_bytes(10**9, divided=True)
        held = job.trainer_bytes(trainers, divided=True) - layer + copy
        assert held / 1e9 == pytest.approx(said, rel=0.06)


def test_lengths_have_the_mean_that_is_asked_for():
    for mean in (1.5, 700.0, 2000.0, 3999.0, 4000.0):
        job = make_job(completion=mean)
        assert job.alive.sum() == pytest.approx(mean, rel=1e-6)
    job = make_job(completion=100.0)
    draws = [job.length_of_longest(u) for u in (np.arange(4000) + 0.5) / 4000]
    assert np.mean(draws) == pytest.approx(100.5, rel=0.01)
    # The longest of n nearly exponential lengths: the mean times the harmonic number.
    harmonic = sum(1 / n for n in range(1, 33))
    assert job.longest_of(32) == pytest.approx(100 * harmonic, rel=0.01)


def test_decoding_is_bound_by_memory_and_then_by_operations():
    job = make_job()
    quiet = {**job.rates, "decoding_overhead": 0.0}
    job = replace(job, rates=quiet)
    one = float(job.decoding(1, 0, 1))
    assert one == pytest.approx(2 * job.shape.products / (3.35e12 * 0.6))
    many = float(job.decoding(5000, 0, 1))
    assert many == pytest.approx(5000 * 2 * job.shape.products / (989e12 * 0.65))
    cached = float(job.decoding(100, 1000, 1)) - float(job.decoding(100, 0, 1))
    assert cached == pytest.approx(100 * 1000 * 2 * 2 * 36 * 8 * 128 / (3.35e12 * 0.6))


def test_a_wave_of_equal_lengths_is_their_number_of_steps():
    job = make_job(groups=8, completion=4000.0)
    contexts = 200 + np.arange(4000)
    steps = sum(float(job.decoding(64, c, 1)) for c in contexts)
    assert job.wave(1, 1) == pytest.approx(steps + job.prefill(1, 1))


# Rates with which an update spends its time on products with weights and on attention.
ONLY_OPERATIONS = dict.fromkeys(
    ("layer_bytes", "vocabulary_bytes", "expert_bytes", "adapter_bytes", "micro_batch_overhead"),
    0.0,
)


def test_training_is_six_operations_a_parameter_and_token():
    job = make_job(prompt=1, completion=4000.0)
    job = replace(job, rates={**job.rates, **ONLY_OPERATIONS})
    computing, sending = job.training(4, divided=False)
    # Attention has two products forward and five backward.
    attention = 3.5 * 4 * 36 * 32 * 128 * 2001 * job.sampled / 350e12
    products = 6 * job.shape.products * job.sampled / (989e12 * 0.65)
    step = 32 * job.shape.parameters / 3.35e12
    assert computing == pytest.approx((products + attention) / 4 + step, rel=1e-3)
    assert sending == pytest.approx(2 * 4 * job.shape.parameters * 3 / 4 / (450e9 * 0.7))
    again = replace(job, checkpointing=True, reference=True)
    more = (products * 5 / 3 + attention * 5.5 / 3.5) / 4 + step
    assert again.training(4, divided=False)[0] == pytest.approx(more, rel=1e-3)


def test_divided_weights_are_sent_in_every_micro_batch():
    job = make_job(TYPICAL[5])
    tokens = job.tokens / 16
    times = np.ceil(tokens / job.micro_batch(16, divided=True))
    assert times > 1
    expected = times * 3 * 4 * job.shape.parameters * 15 / 16 / (50e9 * 0.7)
    assert job.training(16, divided=True)[1] == pytest.approx(expected)


def test_weights_travel_at_their_rate():
    job = make_job(TYPICAL[5])
    seconds = publishing(job, 1, divided=False, apart=True)
    sent = 2 * job.shape.parameters / 8.6e9
    assert sent == pytest.approx(7 * 32.76 / 30, rel=0.02)  # verl's figure, for 32 B
    assert seconds == pytest.approx(2 * job.shape.parameters / 2.4e9 + sent)
    handles = replace(job, sampler=replace(job.sampler, files=False))  # others write no files
    assert publishing(handles, 1, divided=False, apart=True) == pytest.approx(sent)


def test_a_server_on_the_trainers_gpu_reads_files():
    """A GB is written in 0.42 s and read in 0.625 s. Sharded weights are gathered in float32
    first."""
    job = make_job()
    size = 2 * job.shape.parameters
    by_files = size / 2.4e9 + size / 1.6e9
    assert publishing(job, 1, divided=False, apart=False) == pytest.approx(by_files)
    gathered = 2 * size * 7 / 8 / (450e9 * 0.7)
    assert publishing(job, 8, divided=True, apart=False) == pytest.approx(by_files + gathered)
    elsewhere = replace(job, by_files=True)
    assert publishing(elsewhere, 1, divided=False, apart=True) == pytest.approx(by_files)


@pytest.mark.parametrize("sampler", [COPY, MODULE, replace(SERVER, files=False)])
def test_an_engine_that_shares_the_trainers_memory_reads_no_files(sampler):
    """Weights of 4 bytes are read, and a copy of 2 bytes is written."""
    job = make_job(sampler=sampler)
    moved = 6 * job.shape.parameters / 3.35e12
    assert publishing(job, 1, divided=False, apart=False) == pytest.approx(moved)


def test_beside_each_other_a_step_is_the_longer_part():
    job = make_job(checkpointing=True)
    one = forecast(job, ParallelLayout(8, 8, 1, True, 1))
    assert one.seconds == max(one.sampling, one.gathering + one.training) + one.publishing
    assert one.reading == pytest.approx(256 * 8 * 1000 * 1.5e-6) and one.reading < one.sampling
    slow = replace(job, rates={**job.rates, "reading": 1e-3})
    read = forecast(slow, ParallelLayout(8, 8, 1, True, 1))
    assert read.seconds == 256 * 8 * 1000 * 1e-3 + read.publishing
    assert read.bottleneck == "reading answers"
    usual = forecast(job, ParallelLayout(8, 8, 1, True, 0))
    parts = (usual.sampling, usual.gathering, usual.training, usual.publishing)
    assert usual.seconds == pytest.approx(sum(parts))


def test_trainers_receive_the_completions_that_they_have_not_sampled():
    job = make_job()
    sent = 256 * 8 * 1000 * 8  # bytes
    assert job.gathering(8, apart=True) == pytest.approx(sent / (450e9 * 0.7))
    assert job.gathering(8, apart=False) == pytest.approx(sent * 7 / 8 / (450e9 * 0.7))
    assert job.gathering(16, apart=True) == pytest.approx(sent / (50e9 * 0.7))
    assert job.gathering(1, apart=True) == job.gathering(1, apart=False) == 0


def test_a_sampled_token_is_sent_in_as_many_bytes():
    long = Completion([7] * 1000, "stop", [-0.5] * 1000, [-0.5] * 1000)
    packed = pack([long]).values()
    assert sum(part.nbytes for part in packed if isinstance(part, torch.Tensor)) == (
        1000 * SAMPLED_TOKEN + 4 + 1  # the length, and whether it has ended
    )


def test_what_does_not_fit_is_not_offered():
    job = make_job(shape_of_size("70B"), checkpointing=True)
    assert best(8, job) == {}
    assert (
        forecast(job, ParallelLayout(64, 64, 1, True, 1)) is None
    )  # 141 GB of weights in an engine
    assert forecast(job, ParallelLayout(64, 16, 4, True, 1)) is not None
    replicas = ParallelLayout(8, 8, 1, False, 1)
    usual = {"checkpointing": True}
    assert forecast(make_job(**usual), replicas) is None  # 131 GB in a trainer
    assert forecast(make_job(gpu="b200", **usual), replicas) is not None


def test_more_gpus_are_never_slower_and_all_of_them_are_used():
    job, last = make_job(checkpointing=True), float("inf")
    for gpus in (8, 32, 128, 512):
        found = best(gpus, job)
        assert all(one.layout.gpus <= gpus for one in found.values())
        fastest = min(one.seconds for one in found.values())
        assert fastest < last
        last = fastest


def test_the_most_samples_fill_an_engine_or_a_micro_batch():
    job = make_job(checkpointing=True)
    one = forecast(job, ParallelLayout(8, 8, 1, True, 1))
    most = most_samples(job, one)
    fits = [200 + k * 4000 <= one.micro_batch for k in (most, most + 1)]
    cache = [
        k * 4200 * job.shape.cache_bytes + 2 * job.shape.parameters <= 0.9 * 85e9 + 4200 * 147456
        for k in (most, most + 1)
    ]
    assert fits[0] and cache[0] and not (fits[1] and cache[1])


def test_engines_of_several_gpus_share_the_trainers_gpus():
    """A copy of 64 GB does not fit beside the trainer; a quarter of it does."""
    job = make_job(TYPICAL[5], checkpointing=True)
    alone, shared = (forecast(job, ParallelLayout(32, 0, n, True, 0)) for n in (1, 4))
    assert alone is None
    held = job.trainer_bytes(32, divided=True) + ENGINE * job.shape.parameters / 4
    assert shared.trainer_bytes == pytest.approx(held)
    assert shared.sampling == job.wave(8, 4, job.trainer_bytes(32, divided=True))
    # The layout in turn comes first also if it needs engines of several GPUs.
    assert next(iter(best(32, job))) == "in turn"
    assert best(32, job)["in turn"].layout.parallel > 1
    odd = best(6, make_job(checkpointing=True))["in turn"].layout
    assert odd.gpus == 6 and 6 % odd.parallel == 0


def test_a_rollout_that_is_trained_several_times_costs_as_much_more():
    job = make_job(checkpointing=True, reference=True)
    twice = replace(job, iterations=2, steps=2)
    once, both = (one.update(8, divided=True) for one in (job, twice))
    assert both.tokens == pytest.approx(2 * once.tokens)
    # The reference scores a rollout once: 2 forward passes in each of two trainings, and 1.
    assert (once.forward, both.forward) == (3, 2.5)
    assert both.optimizer == pytest.approx(2 * once.optimizer)
    assert twice.training(8, divided=True)[1] == 2 * job.training(8, divided=True)[1]


def test_gpus_wait_for_the_fullest_one():
    job = make_job(groups=256, samples=8)
    spread = job.update(8, divided=True).tokens / (job.tokens / 8)
    equal = replace(job, completion=4000.0).update(8, divided=True)
    assert equal.tokens == pytest.approx(replace(job, completion=4000.0).tokens / 8)
    assert 1.02 < spread < 1.15
    padded = replace(job, micro_tokens=4 * 1200.0, packed=False).update(8, divided=True)
    assert padded.tokens / (job.tokens / 8) > 1.4


def test_servers_have_the_share_of_their_gpu():
    """On a trainer's GPU a server that sleeps has 1.5 GB of other memory."""
    job = make_job(sleeps=True, server_share=0.5, separate_share=0.8)
    row, weights = 1200 * 147456, 2 * job.shape.parameters
    assert job.room(1) == int((0.8 * 85e9 - weights) / row)
    assert job.room(1, 0.0) == int((0.5 * 85e9 - weights - 1.5e9) / row)
    assert job.room(2, 60e9) == int((0.9 * 85e9 - 60e9 - weights / 2 - 1.5e9) / (row / 2))
    awake = replace(job, sleeps=False)
    assert awake.room(1, 0.0) == int((0.5 * 85e9 - weights) / row)


def test_an_adapter_is_all_that_is_trained_and_sent():
    job = make_job(checkpointing=True)
    adapted = replace(job, adapter=16)
    assert adapted.trained == 16 * job.shape.sides
    frozen = 4 * job.shape.parameters
    assert adapted.trainer_bytes(1, divided=False) == frozen + 16 * adapted.trained
    sent = publishing(adapted, 1, divided=False, apart=True)
    # vLLM loads adapters from files.
    assert sent == pytest.approx(2 * adapted.trained * (1 / 2.4e9 + 1 / 1.6e9))
    merged = publishing(replace(adapted, merges=True), 1, divided=False, apart=True)
    assert merged == pytest.approx(2 * job.shape.parameters * (1 / 2.4e9 + 1 / 8.6e9))
    both = [one.training(8, divided=False)[1] for one in (job, adapted)]
    assert both[1] / both[0] == pytest.approx(adapted.trained / job.shape.parameters)
