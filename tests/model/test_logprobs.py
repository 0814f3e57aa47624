"""Log-probs and entropies of tokens from hidden states, beside torch's own on all logits."""

import pytest
import torch

from rloo import kernels
from rloo.kernels.cpu_matmul import matrix_of
from rloo.kernels.fused_lm_head import LogprobRequest
from rloo.model.logprobs import CHUNK_ELEMENTS, token_logprobs
from support.arrays import WatchRows
from support.gpu import pretended
from support.policies import weights_of


@pytest.mark.parametrize("chunk_elements", [97, 97 * 7, 97 * 1000])
def test_chunks_of_the_vocabulary_change_nothing_and_bound_the_largest_tensor(chunk_elements):
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 97)
    targets = torch.randint(0, 97, (50,))
    hidden = torch.randn(50, 16, requires_grad=True)
    watch = WatchRows(97, ignored=(16, 97))
    with watch:
        logprobs, _ = token_logprobs(
            head, hidden, LogprobRequest(targets, 0.5, chunk_elements), vocab_size=97
        )
        (logprobs * weights_of(50)).sum().backward()
    assert 0 < watch.largest <= max(chunk_elements, 97)
    computed = hidden.grad.clone(), head.weight.grad.clone()
    hidden.grad, head.weight.grad = None, None
    expected = (head(hidden) / 0.5).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (expected * weights_of(50)).sum().backward()
    assert torch.allclose(logprobs, expected, atol=1e-5)
    assert torch.allclose(computed[0], hidden.grad, atol=1e-5)
    assert torch.allclose(computed[1], head.weight.grad, atol=1e-5)


def test_entropy_keeps_float32_under_autocast():
    torch.manual_seed(0)
    hidden, targets = torch.randn(40, 16), torch.randint(0, 97, (40,))
    head = torch.nn.Linear(16, 97)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = head(hidden).float()
        logprobs, entropy = token_logprobs(
            head,
            hidden.requires_grad_(),
            LogprobRequest(targets, 1.0, CHUNK_ELEMENTS),
            vocab_size=97,
        )
    expected = torch.distributions.Categorical(logits=logits.detach())
    assert (entropy - expected.entropy()).abs().max() < 1e-5
    assert (logprobs - expected.log_prob(targets)).abs().max() < 1e-5


@pytest.mark.parametrize("cached_elements", [1, 97 * 7, 97 * 1000])
def test_impossible_tokens_and_large_logits_leave_entropy_exact(cached_elements, monkeypatch):
    monkeypatch.setattr("rloo.model.logprobs.CACHED_ELEMENTS", cached_elements)
    torch.manual_seed(0)
    logits = 30 * torch.randn(50, 97)
    logits[:, 5] = -torch.inf
    targets = torch.full((50,), 7)
    distribution = torch.distributions.Categorical(logits=logits[:, torch.arange(97) != 5].double())
    expected = distribution.entropy().float()
    logprobs, entropy = token_logprobs(
        lambda hidden: hidden + 0,
        logits.requires_grad_(),
        LogprobRequest(targets, 1.0, CHUNK_ELEMENTS),
        vocab_size=97,
    )
    assert (entropy - expected).abs().max() < 1e-4
    assert (logprobs - logits.detach().log_softmax(-1)[:, 7]).abs().max() < 1e-4
    logprobs.sum().backward()
    expected_gradient = -logits.detach().softmax(-1)
    expected_gradient[:, 7] += 1
    assert (logits.grad - expected_gradient).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_of_the_head_takes_a_twentieth_of_a_launch_on_a_gpu(dtype):
    """A vocabulary of 152k by the number of rows in a chunk, which is what counts."""
    rows, vocabulary = CHUNK_ELEMENTS // 151_936, 40
    tokens = 8 * rows
    with pretended() as device:
        weight = torch.randn(vocabulary, 8, device="cuda", dtype=dtype, requires_grad=True)
        hidden = torch.randn(tokens, 8, device="cuda", dtype=dtype, requires_grad=True)
        targets = torch.randint(0, vocabulary, (tokens,)).to("cuda")
        device.forget_counts()
        found, _ = token_logprobs(
            lambda x: x @ weight.t(),
            hidden,
            LogprobRequest(targets, 0.7, rows * vocabulary),
            vocab_size=vocabulary,
        )
        found.sum().backward()
    assert device.waits_of("other") == 0
    assert sum(device.launches.values()) <= 0.05 * tokens


class Layer(torch.nn.Linear):
    """A head that is known to be a matrix, as the policy's."""

    def matrix(self):
        return matrix_of(self)


@pytest.mark.parametrize("chunk_elements", [97 * 7, 97 * 1000])
@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_collision_probabilities_are_sums_of_squares(chunk_elements, by_kernels, fused):
    torch.manual_seed(0)
    kernels.use(by_kernels)
    layer, hidden = Layer(16, 97), 3 * torch.randn(50, 16)
    found = torch.full((50,), torch.nan)
    asked = LogprobRequest(torch.randint(0, 97, (50,)), 0.7, chunk_elements, collision=found)
    head = layer if fused else lambda rows: layer(rows)
    scores = token_logprobs(head, hidden, asked, vocab_size=97)
    expected = (layer(hidden).double() / 0.7).softmax(-1).square().sum(-1)
    assert torch.allclose(found.double(), expected, rtol=0.0, atol=1e-6)
    assert not found.requires_grad
    alone = token_logprobs(head, hidden, asked._replace(collision=None), vocab_size=97)
    assert all(map(torch.equal, scores, alone))
