"""The KL over the vocabulary, in chunks, beside torch's own on all logits."""

import pytest
import torch

from rloo.model.exact_kl import ReferenceStates, ScoreRequest, exact_scores
from support.adapters import make_adapted, perturb
from support.arrays import WatchRows
from support.models import disturb, make_model, make_samples
from support.policies import TEMPERATURE, gradients, make_policy, weights_of

V = 97


def own_logits(model, sample) -> torch.Tensor:
    """The logits, at the temperature, that predict a completion's tokens: the completion alone."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.token_ids]])
    return model(ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1] / TEMPERATURE


def full_kl(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return torch.distributions.kl_divergence(
        *(torch.distributions.Categorical(logits=x) for x in (logits, reference))
    )


def require_equal(model, reference, policy, samples) -> None:
    """KL, log-probs and entropy, and the gradients of all three, are those of all logits."""
    ours = [own_logits(model, sample) for sample in samples]
    with torch.no_grad():
        theirs = [own_logits(reference, sample) for sample in samples]
    expected = torch.cat([full_kl(*both) for both in zip(ours, theirs, strict=True)])
    ids = [torch.tensor(sample.token_ids)[:, None] for sample in samples]
    chosen, other = (
        torch.cat([x.log_softmax(-1).gather(1, i)[:, 0] for x, i in zip(each, ids, strict=True)])
        for each in (ours, theirs)
    )
    entropy = torch.cat([torch.distributions.Categorical(logits=x).entropy() for x in ours])
    weights = weights_of(len(expected))

    def slopes(kl, logprobs, entropies) -> dict[str, torch.Tensor]:
        policy.model.zero_grad()
        (kl * (weights + 2) + logprobs * weights + 0.5 * entropies * weights).sum().backward()
        return gradients(policy.model)

    right = slopes(expected, chosen, entropy)
    found = policy.logprobs(policy.batch(samples), reference=True, collision=True)
    collision = torch.cat([(x.softmax(-1) ** 2).sum(-1) for x in ours])
    assert (found.collision - collision).abs().max() < 1e-6
    assert (found.kl - expected).abs().max() < 1e-5 and expected.max() > 1e-3
    for one, another in ((found.logprobs, chosen), (found.reference, other)):
        assert (one - another).abs().max() < 1e-5
    assert (found.entropy - entropy).abs().max() < 1e-5 and not found.reference.requires_grad
    computed = slopes(found.kl, found.logprobs, found.entropy)
    assert computed.keys() == right.keys()
    for name, gradient in computed.items():
        assert (gradient - right[name]).norm() <= 2e-5 * right[name].norm(), name


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("qwen3", {"gradient_checkpointing": True}),
        ("gemma2", {"packing": False}),
        ("qwen3_moe", {"router_aux_loss_coef": 0.01}),
    ],
)
def test_kl_and_gradients_are_those_of_full_logits(name, options):
    policy = make_policy(make_model(name), beta=0.1, kl_estimator="exact", **options)
    torch.manual_seed(1)
    disturb(policy.reference.model)
    require_equal(policy.model, policy.reference.model, policy, make_samples())
    balance = policy.logprobs(policy.batch(make_samples()), reference=True).balance
    assert (balance is not None) == ("router_aux_loss_coef" in options)


def test_without_known_hidden_states_the_logits_of_both_models_are_compared():
    policy = make_policy(make_model("llama"), beta=0.1, kl_estimator="exact")
    torch.manual_seed(1)
    disturb(policy.reference.model)
    policy.scorer.own_logits = True
    require_equal(policy.model, policy.reference.model, policy, make_samples())


@pytest.mark.parametrize("head", ["plain", "adapted", "saved"])
def test_the_reference_of_an_adapter_is_the_model_without_it(head):
    kinds = {
        "plain": {},
        "adapted": {"target_modules": ["q_proj", "lm_head"]},
        "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    }
    policy = make_policy(
        make_adapted(effect=False, **kinds[head]), beta=0.1, kl_estimator="exact", bf16=False
    )
    trained = {n for n, p in policy.model.named_parameters() if p.requires_grad}
    perturb(policy.model)
    require_equal(policy.model, make_model("qwen3"), policy, make_samples())
    assert trained == {n for n, p in policy.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("bf16", [False, True])
def test_the_kl_is_0_at_the_start_and_log_probs_are_those_of_other_estimators(bf16):
    samples = make_samples()
    exact, k1 = (
        make_policy(make_model("qwen3"), beta=0.1, kl_estimator=name, bf16=bf16)
        for name in ("exact", "k1")
    )
    found, usual = (p.logprobs(p.batch(samples), reference=True) for p in (exact, k1))
    assert not found.kl.any()
    assert (found.logprobs - usual.logprobs).abs().max() < 1e-5
    assert (found.entropy - usual.entropy).abs().max() < 1e-5
    assert torch.equal(found.reference, found.logprobs)


def two_heads(
    rows: int = 50, vocabulary: int = V, dtype=torch.float32
) -> tuple[torch.nn.Linear, ReferenceStates]:
    torch.manual_seed(0)
    width = 16 if vocabulary == V else 2
    head, other = (torch.nn.Linear(width, vocabulary, dtype=dtype) for _ in range(2))
    return head, ReferenceStates(torch.randn(rows, width, dtype=dtype), other)


@pytest.mark.parametrize("chunk_elements", [V, 2 * V * 7, 2 * V * 1000])
def test_chunks_change_nothing_and_bound_the_arrays_over_the_vocabulary(chunk_elements):
    head, reference = two_heads()
    targets = torch.randint(0, V, (50,))
    hidden = torch.randn(50, 16, requires_grad=True)
    watch = WatchRows(V, ignored=(16, V))
    with watch:
        found = exact_scores(head, hidden, reference, ScoreRequest(targets, 0.5, V, chunk_elements))
        (found.kl * weights_of(50)).sum().backward()
    assert 0 < watch.largest <= max(chunk_elements // 2, V)
    slope, hidden.grad = hidden.grad, None
    expected = full_kl(head(hidden) / 0.5, reference.head(reference.hidden).detach() / 0.5)
    (expected * weights_of(50)).sum().backward()
    assert torch.allclose(found.kl, expected, atol=1e-5)
    assert torch.allclose(slope, hidden.grad, atol=1e-5)


@pytest.mark.parametrize(("rows", "vocabulary"), [(50, V), (2, 2**20 + 1)])
def test_gradients_are_exact_in_float64(rows, vocabulary):
    """Of the larger vocabulary, one row is computed at a time."""
    head, reference = two_heads(rows, vocabulary, torch.float64)
    hidden = torch.randn_like(reference.hidden, requires_grad=True)
    asked = ScoreRequest(torch.randint(0, vocabulary, (rows,)), 0.7, vocabulary, 2**26)
    weights = weights_of(rows).double()
    parts = [weights * x for x in exact_scores(head, hidden, reference, asked)[:2]]
    parts.append((weights - 3) * exact_scores(head, hidden, reference, asked).kl)
    found = torch.autograd.grad(sum(x.sum() for x in parts), hidden)[0]
    logits, other = head(hidden) / 0.7, reference.head(reference.hidden).detach() / 0.7
    chosen = logits.log_softmax(-1).gather(1, asked.targets[:, None])[:, 0]
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    value = weights * (chosen + entropy) + (weights - 3) * full_kl(logits, other)
    assert (found - torch.autograd.grad(value.sum(), hidden)[0]).abs().max() < 1e-12


def test_tokens_that_are_impossible_in_both_models_count_nothing():
    head, reference = two_heads()
    hidden = torch.randn(50, 16, requires_grad=True)
    blocked = torch.zeros(V).index_fill(0, torch.tensor([5, 9]), -torch.inf)
    asked = ScoreRequest(torch.full((50,), 7), 1.0, V, 2**20)
    masked = ReferenceStates(reference.hidden, lambda x: reference.head(x) + blocked)
    found = exact_scores(lambda x: head(x) + blocked, hidden, masked, asked)
    left = [i for i in range(V) if i not in (5, 9)]
    expected = full_kl(head(hidden)[:, left], reference.head(reference.hidden)[:, left].detach())
    assert torch.allclose(found.kl, expected, atol=1e-5)
    slopes = [torch.autograd.grad(x.sum(), hidden)[0] for x in (found.kl, expected)]
    assert torch.allclose(*slopes, atol=1e-5)
