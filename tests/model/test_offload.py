"""What leaves the accelerator comes back to the last bit; what could not leave is refused."""

import re
from contextlib import nullcontext

import pytest
import torch

from rloo.model import offload
from rloo.model.offload import ParkedState, activations_on_host
from rloo.trainer.resume import load_checkpoint
from support.adapters import make_adapted
from support.gpu import pretended
from support.models import CPU, make_model, make_samples
from support.policies import gradients, make_policy, weights_of
from support.training import equal, make_config, make_trainer, metrics_of, weights, without_times


@pytest.fixture
def gpu():
    """A GPU, pretended where there is none; a real one adds numbers up in one order."""
    real = torch.cuda.is_available()
    torch.use_deterministic_algorithms(real, warn_only=True)
    with nullcontext() if real else pretended():
        yield torch.device("cuda", 0)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    return CPU if request.param == "cpu" else request.getfixturevalue("gpu")


def learn(policy, steps: int = 3) -> dict[str, torch.Tensor]:
    for _ in range(steps):
        logprobs = policy.logprobs(policy.batch(make_samples()))[0]
        (logprobs * weights_of(len(logprobs)).to(policy.device)).sum().backward()
        policy.stepper.step()
    return {n: p.detach().clone() for n, p in policy.model.named_parameters()}


# -- activations ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packing": False},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"bf16": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["qwen3", "gpt2", "gpt_oss"])
def test_gradients_are_the_same_to_the_last_bit(monkeypatch, name, options, device):
    monkeypatch.setattr(offload, "SMALLEST", 64)
    results = []
    for moved in (False, True):
        policy = make_policy(make_model(name), use_cpu=device.type == "cpu", **options)
        batch = policy.batch(make_samples())
        if moved:
            with activations_on_host(policy.model.parameters(), device):
                logprobs = policy.logprobs(batch)[0]
        else:
            logprobs = policy.logprobs(batch)[0]
        (logprobs * weights_of(len(logprobs)).to(device)).sum().backward()
        results.append((logprobs.detach(), gradients(policy.model)))
    assert torch.equal(results[0][0], results[1][0])
    assert len(results[0][1]) > 10 and equal(results[0][1], results[1][1])


def test_what_is_kept_for_the_backward_moves_and_weights_stay(monkeypatch):
    moved = []
    host_like = offload._host_like
    monkeypatch.setattr(offload, "_host_like", lambda t: moved.append(t.shape) or host_like(t))
    weight = torch.nn.Parameter(torch.randn(200, 100))
    states = torch.randn(50, 200, requires_grad=True)
    small = torch.randn(10, requires_grad=True)
    with activations_on_host([weight], CPU):
        product = (states @ weight).tanh()  # keeps states, the weight's transpose, the result
        loss = product.sum() + small.exp().sum()
    assert moved == [(50, 200), (50, 100)]
    loss.backward()
    expected = torch.autograd.grad((states @ weight).tanh().sum(), [states, weight])
    assert torch.equal(states.grad, expected[0]) and torch.equal(weight.grad, expected[1])
    with activations_on_host([weight], torch.device("cuda")):  # what is elsewhere stays there
        (states @ weight).tanh()
    assert len(moved) == 2


def test_what_comes_back_lies_as_it_lay(monkeypatch):
    """A mask whose rows are aligned, one that is expanded, and one with numbers in two places."""
    monkeypatch.setattr(offload, "SMALLEST", 1)
    given = [
        torch.randn(6, 8)[:, :5],
        torch.randn(2, 1, 8)[..., :5].expand(2, 3, 5),
        torch.randn(4, 3, 5).permute(2, 0, 1),
        torch.randn(9).as_strided((3, 4), (2, 1)),
    ]
    found = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *others):
            ctx.save_for_backward(*others)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            found.extend(ctx.saved_tensors)
            return gradient, *[None] * len(given)

    with activations_on_host([], CPU):
        out = Keeps.apply(torch.zeros(1, requires_grad=True), *given)
    out.backward()
    assert all(torch.equal(a, b) for a, b in zip(found, given, strict=True))
    assert [a.stride() for a in found[:3]] == [b.stride() for b in given[:3]]
    assert found[1].untyped_storage().nbytes() < given[1].numel() * 4 + 8 * 4


# -- optimizer state ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adafactor", "adamw_8bit"])
def test_a_parked_state_changes_no_step(optim, device):
    results = []
    for parked in (False, True):
        policy = make_policy(
            make_model("qwen3"), optim=optim, learning_rate=1e-2, use_cpu=device.type == "cpu"
        )
        if parked:
            policy.stepper.parked = ParkedState(policy.stepper.optimizer, device)
        results.append(learn(policy))
    assert equal(*results)
    tensors = [
        v for s in policy.stepper.optimizer.state.values() for v in s.values() if torch.is_tensor(v)
    ]
    assert all(t.device == CPU for t in tensors)
    known = {id(buffer) for buffer in policy.stepper.parked._buffers.values()}
    assert {id(t) for t in tensors} == known and len(known) > 30
    with policy.stepper.parked.fetched():
        inside = [v for s in policy.stepper.optimizer.state.values() for v in s.values()]
        assert not known & {id(value) for value in inside}
        assert all(t.device.type == device.type for t in inside if torch.is_tensor(t))
    assert {id(t) for t in policy.stepper.parked._buffers.values()} == known


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:resuming from step 2")
def test_a_parked_state_is_saved_and_loaded(tmp_path):
    results = []
    for parked in (False, True):
        options = {"save_steps": 2, "optim": "adamw_torch", "use_cpu": True}
        config = make_config(tmp_path / str(parked), **options)
        trainer = make_trainer(config)
        park(trainer, parked)
        trainer.train()
        path = tmp_path / str(parked) / "run" / "checkpoint-2"
        tensors, _ = load_checkpoint(path).optimizer
        resumed = make_trainer(config)
        park(resumed, parked)
        resumed.train(resume_from_checkpoint=str(path))
        assert equal(weights(trainer), weights(resumed))
        results.append((tensors, without_times(metrics_of(config))))
    assert equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]


def park(trainer, parked: bool) -> None:
    if parked:
        trainer.policy.stepper.parked = ParkedState(trainer.policy.stepper.optimizer, CPU)


# -- what is refused, and what a GPU shows --------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("offload", ["optimizer"]),
        ("activation_offloading", True),
        ("offload", ["reference"]),
    ],
)
def test_on_a_cpu_there_is_nowhere_to_move_things(option, value):
    fact = f"{option} is {value} and training runs on a CPU"
    with pytest.raises(ValueError, match=re.escape(fact)):
        make_policy(make_model("qwen3"), **{option: value})


def test_an_optimizer_that_moves_its_state_itself_is_refused():
    config = make_policy(make_model("qwen3")).config
    options = {"offload": ["optimizer"], "optim": "paged_adamw_8bit"}
    config = type(config)(**{**config.to_dict(), **options})
    with pytest.raises(ValueError, match="which moves its state itself"):
        offload.check(config, torch.device("cuda"))


@pytest.mark.slow
def test_both_options_train_as_without_them_in_less_of_the_gpu_s_memory(gpu):
    results, peaks = [], []
    for options in ({}, {"offload": ["optimizer"], "activation_offloading": True}):
        policy = make_policy(make_adapted(), use_cpu=False, learning_rate=1e-2, **options)
        torch.cuda.reset_peak_memory_stats()
        results.append(learn(policy))
        peaks.append(torch.cuda.max_memory_allocated())
        held = [v for s in policy.stepper.optimizer.state.values() for v in s.values() if v.is_cuda]
        assert bool(held) != bool(options)
    assert all(torch.allclose(results[0][n], p, atol=1e-5) for n, p in results[1].items())
    assert peaks[1] < peaks[0]


def test_a_gpu_takes_values_from_pinned_memory_without_a_wait():
    values, cuda = torch.arange(3), torch.device("cuda", 0)
    with pretended() as found:
        sent = offload.send(values, cuda)
        assert sent.device == cuda
        assert found.waits_of("other") == 0
        assert sent.tolist() == [0, 1, 2]
        # A pinned copy of what is expanded could not be written to.
        assert offload.send(values.expand(2, -1), cuda).tolist() == [[0, 1, 2]] * 2
        assert offload.send(sent, cuda) is sent
    assert offload.send(values, CPU) is values


def test_a_step_parks_all_of_the_state_in_one_wait():
    with pretended() as found:
        policy = make_policy(make_model("qwen3"), use_cpu=False, offload=["optimizer"])
        learn(policy, steps=1)
        for value in next(iter(policy.stepper.optimizer.state.values())).values():
            assert value.device == CPU
        before = found.waits_of("other")
        policy.stepper.parked.park()
        with policy.stepper.parked.fetched():
            pass
        assert found.waits_of("other") == before + 2
