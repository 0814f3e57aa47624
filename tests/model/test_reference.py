"""The reference's copy: 16 bits of what is rounded anyway, and layers in the host's memory."""

import pytest
import torch

from rloo.model import offload
from rloo.model.memory_estimate import weight_bytes
from rloo.model.reference import FrozenCopy, frozen_copy
from support.adapters import make_adapted
from support.models import CONFIGS, CPU, make_model, make_samples
from support.policies import make_policy

HALF = torch.bfloat16


@pytest.mark.parametrize("name", CONFIGS)
def test_in_bf16_the_reference_gives_the_numbers_of_a_float32_copy(name):
    policy = make_policy(make_model(name), beta=0.1, bf16=True)
    batch = policy.batch(make_samples())
    found = policy.reference_logprobs(batch)
    policy.reference = FrozenCopy(policy.scorer, moves=False)
    assert torch.equal(found, policy.reference_logprobs(batch))
    assert torch.equal(found, policy.score(batch))  # so that the KL is 0 at the start


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_alone_have_16_bits_and_an_embedding_keeps_its_own(tied):
    model = make_model("qwen3")
    if tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    copied = frozen_copy(model, HALF)
    numbers = dict(copied.named_parameters(remove_duplicate=False))
    for name, parameter in numbers.items():
        assert not parameter.requires_grad
        matrix = "proj" in name or "lm_head" in name
        assert parameter.dtype == (HALF if matrix else torch.float32), name
    assert copied.get_input_embeddings().weight.dtype == torch.float32
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    others = sum(p.numel() for n, p in numbers.items() if "proj" not in n and "lm_head" not in n)
    buffers = sum(b.nbytes for b in copied.buffers())
    assert weight_bytes(copied) == 2 * linear + 4 * others + buffers
    after = dict(model.named_parameters())  # the policy is as it was
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(p.dtype == torch.float32 for p in after.values())


@pytest.mark.parametrize(
    "options", [{}, {"bf16": True, "sync_ref_model": True}, {"fp16": False}], ids=str
)
def test_without_bf16_and_where_it_moves_the_copy_is_float32(options):
    policy = make_policy(make_model("qwen3"), beta=0.1, **options)
    assert {p.dtype for p in policy.reference.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("bf16", [False, True])
def test_one_layer_at_a_time_is_on_the_device(bf16, monkeypatch):
    policy = make_policy(make_model("qwen3"), beta=0.1, bf16=bf16)
    batch, reference = policy.batch(make_samples()), policy.reference
    expected = policy.reference_logprobs(batch)
    layers = reference.model.base_model.layers
    here, most = [], []
    fetch, put_back = offload._fetch, offload._put_back

    def fetching(held, device, *rest):
        fetch(held, device, *rest)
        here.append(held)
        most.append(len(here))
        for parameter, host in held:  # what the device has is another memory
            parameter.data = host.clone()

    def putting(held, *rest):
        put_back(held, *rest)
        if rest:
            here.remove(held)

    monkeypatch.setattr(offload, "_fetch", fetching)
    monkeypatch.setattr(offload, "_put_back", putting)
    reference.offload(CPU)
    assert torch.equal(policy.reference_logprobs(batch), expected)
    assert most == [1] * len(layers)
    assert here == []


def test_a_reference_on_the_host_moves_there():
    policy = make_policy(make_model("qwen3"), beta=0.1, sync_ref_model=True)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(1.0)
    before = [p.clone() for p in policy.reference.model.parameters()]
    policy.reference.offload(CPU)
    policy.reference.move(0.25)
    batch = policy.batch(make_samples())
    policy.reference_logprobs(batch)  # fetches what moved
    for old, new in zip(before, policy.reference.model.parameters(), strict=True):
        torch.testing.assert_close(new, old + 0.25)


def test_bytes_are_counted_where_they_are():
    model = make_model("qwen3")
    whole = weight_bytes(model)
    model.base_model.layers[0].to("meta")
    moved = sum(p.nbytes for p in model.base_model.layers[0].parameters())
    assert weight_bytes(model, CPU) == whole - moved


@pytest.mark.parametrize("adapted", [False, True])
def test_only_a_copy_is_offloaded(adapted):
    given = {"beta": 0.1} if adapted else {"beta": 0.0}
    policy = make_policy(make_adapted("qwen3") if adapted else make_model("qwen3"), **given)
    with pytest.raises(ValueError, match="the reference is no copy of the weights"):
        policy.reference.offload(CPU)
