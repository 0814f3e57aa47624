import torch

from support.models import VOCAB_SIZE, make_model, make_samples
from support.policies import make_policy


def order_of_calls(scorer, compute) -> list[str]:
    """Where the forwards of the scorer, the model's body and its head begin and end."""
    parts = {"all": scorer, "body": scorer.model.base_model, "head": scorer.model.lm_head}
    seen, handles = [], []
    for name, module in parts.items():
        handles += [
            module.register_forward_pre_hook(lambda *_, n=name: seen.append(n)),
            module.register_forward_hook(lambda *_, n=name: seen.append(f"end of {n}")),
        ]
    compute()
    for handle in handles:
        handle.remove()
    return seen


def test_every_forward_of_the_weights_is_inside_the_scorer_s():
    policy = make_policy(make_model("llama"), beta=0.1)
    batch = policy.batch(make_samples())
    chunks = -(-len(batch.target_T) // 7)
    for scorer, compute, heads in (
        (policy.scorer, lambda: policy.logprobs(batch), 1),
        (policy.scorer, lambda: policy.logprobs(batch, chunk_elements=VOCAB_SIZE * 7), chunks),
        (policy.scorer, lambda: policy.score(batch), 1),
        (policy.reference._scorer, lambda: policy.reference_logprobs(batch), 1),
    ):
        calls = ["all", "body", "end of body", *["head", "end of head"] * heads, "end of all"]
        assert order_of_calls(scorer, compute) == calls


def test_the_log_probs_alone_are_those_of_the_scores_without_gradients_or_entropies():
    policy = make_policy(make_model("qwen3_moe"))
    batch = policy.batch(make_samples())
    whole, alone = policy.scorer(batch), policy.scorer(batch, only="logprobs")
    assert whole.balance is not None and alone.balance is None
    assert whole.entropy.shape == whole.logprobs.shape and alone.entropy.shape == (0,)
    assert torch.allclose(whole.logprobs, alone.logprobs, atol=1e-6)
    assert torch.equal(policy.scorer.logprobs(batch), alone.logprobs)
    assert whole.logprobs.requires_grad and not policy.scorer.logprobs(batch).requires_grad
