"""bf16: what is computed in which precision, and how often weights are cast for it."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rloo.algorithm import update as update_module
from rloo.algorithm.advantages import compute_advantages
from rloo.algorithm.update import update
from rloo.kernels import bf16_rounding, cpu_matmul
from rloo.model.autocast_cache import casting_once
from support.adapters import make_adapted
from support.markers import in_pairs
from support.models import make_model, make_samples
from support.policies import gradients, make_policy, make_policy_config, weights_of
from support.terms import terms_of


class Watch(TorchDispatchMode):
    """Counts operations by name and by the dtype and memory of their first tensor."""

    def __init__(self):
        super().__init__()
        self.dtypes, self.casts = set(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if "flash_attention" in name:
            self.dtypes |= {(name, x.dtype) for x in args if isinstance(x, torch.Tensor)}
        if name == "aten::_to_copy":
            self.casts[args[0].data_ptr()] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("autocast", [True, False])
def test_attention_is_computed_in_float32_and_returned_as_the_next_layer_wants_it(autocast):
    model = make_model("qwen3")
    policy = make_policy(model, bf16=True)
    cpu_matmul.use(["bf16"])
    if not autocast:  # as a frozen base of 16 bits is
        model.bfloat16()
        policy.config.bf16 = False
    given = set()
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, x: given.add(x[0].dtype))
    with Watch() as watch:
        policy.logprobs(policy.batch(make_samples())).logprobs.sum().backward()
    assert {dtype for _, dtype in watch.dtypes} == {torch.float32}
    assert len(watch.dtypes) == 2  # its forward and its backward
    assert given == {torch.bfloat16}


def updated(options, make):
    """The weights after an update of several micro-batches, their number, and casts by weight, or
    how often they are rounded."""
    options = {"bf16": True, "max_tokens_per_micro_batch": 60, **options}
    options |= {"optim": "sgd", "learning_rate": 1.0}
    config, policy = make_policy_config(**options), make_policy(make(), **options)
    weights = {p.data_ptr(): name for name, p in policy.model.named_parameters()}
    samples, terms = make_samples(2), terms_of(config)
    credit = compute_advantages(samples, policy, terms)
    count, backward = Counter(), policy.stepper.backward
    policy.stepper.backward = lambda *given, **how: count.update(n=1) or backward(*given, **how)
    casts, rounded = Counter(), bf16_rounding.rounded

    def noted(x):
        casts[x.data_ptr()] += 1
        return rounded(x)

    with Watch() as watch, pytest.MonkeyPatch.context() as patch:
        patch.setattr(bf16_rounding, "rounded", noted)
        update(policy, samples, credit, terms)
    casts = watch.casts if cpu_matmul.in_use() else casts
    after = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    return after, count["n"], {weights.get(place): n for place, n in casts.items()}


REENTRANT = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
}


def whole():
    return make_model("qwen3")


MADE = [
    (whole, {}),
    (whole, {"gradient_checkpointing": True}),
    (whole, REENTRANT),
    (make_adapted, {}),
    (make_adapted, {"gradient_checkpointing": True}),
]


# Reentrant checkpointing says so of passes without gradients; a frozen embedding has none either.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("made", "beta", "by_onednn"), in_pairs(MADE, [0.0, 0.1], [["bf16"], []]))
def test_an_update_casts_each_trained_weight_once(made, beta, by_onednn, monkeypatch):
    cpu_matmul.use(by_onednn)
    make, options = made
    options = {**options, "beta": beta}
    after, micro_batches, casts = updated(options, make)
    assert micro_batches > 2
    trained = {name for name in after if "lora" in name or make is whole}
    counts = {casts[name] for name in trained & casts.keys() if "proj" in name}
    assert counts == {1} if "gradient_checkpointing_kwargs" not in options else min(counts) > 2
    monkeypatch.setattr(update_module, "casting_once", lambda policy: nullcontext())
    expected, _, often = updated(options, make)
    assert max(often[name] for name in trained & often.keys()) > 2
    for name, values in expected.items():
        assert torch.equal(after[name], values), name


def test_a_reference_of_16_bits():
    samples = make_samples()
    exact = make_policy(make_model("qwen3"), beta=0.1)
    policy = make_policy(make_model("qwen3"), beta=0.1, bf16=True)
    policy.reference.model.bfloat16()
    with casting_once(policy):
        batch = policy.batch(samples)
        logprobs = policy.logprobs(batch).logprobs
        reference = policy.reference_logprobs(batch)
        (logprobs * weights_of(len(logprobs))).sum().backward()
    expected = exact.reference_logprobs(exact.batch(samples))
    assert reference.dtype == torch.float32
    assert 1e-5 < (reference - expected).abs().max() < 0.1
    assert len(gradients(policy.model)) == len(list(policy.model.parameters()))
