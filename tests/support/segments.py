"""torch's flash attention over segments, by its definition and on any device: what replaces the
GPU's functions where there is no GPU. Written from their documented arguments alone."""

import torch


def _pieces(edges_q, edges_k, used):
    for n, (q, k) in enumerate(zip(edges_q.tolist(), edges_k.tolist(), strict=True)):
        if n + 1 < len(edges_q):
            end = int(edges_k[n + 1]) if used is None else k + int(used[n])
            yield slice(q, int(edges_q[n + 1])), slice(k, end)


def _scores(query, key, causal, scale):
    """(H, Q, L); causal is aligned to the last key."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if causal:
        queries, keys = scores.shape[1:]
        seen = torch.ones(queries, keys).tril(keys - queries).bool()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores


@torch.library.custom_op("rloo_tests::attend_segments", mutates_args=())
def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, edges_q: torch.Tensor,
    edges_k: torch.Tensor, causal: bool, scale: float, used: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One operation for those who record operations, as on a GPU."""
    output = torch.full_like(query, torch.nan)
    normalizer = torch.full((query.shape[1], len(query)), torch.nan, dtype=query.dtype)
    for queries, keys in _pieces(edges_q, edges_k, used):
        scores = _scores(query[queries], key[keys], causal, scale)
        repeated = value[keys].repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        output[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), repeated)
        normalizer[:, queries] = scores.logsumexp(-1)
    return output, normalizer


def forward(
    query, key, value, edges_q, edges_k, most_q, most_k, dropout, causal, debug, *,
    scale, seqused_k=None,
):  # fmt: skip
    """`aten._flash_attention_forward`."""
    assert edges_q.dtype == edges_k.dtype == torch.int32
    assert dropout == 0.0
    assert not debug
    found = attend(query, key, value, edges_q, edges_k, causal, scale, seqused_k)
    state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return *found, *state, torch.empty(0)


def backward(
    gradient, query, key, value, output, normalizer, edges_q, edges_k, most_q, most_k, dropout,
    causal, state, unused, *, scale,
):  # fmt: skip
    """`aten._flash_attention_backward`: probabilities from the given normalizers, and the part that
    all keys share from the given output."""
    assert gradient.is_contiguous()
    assert normalizer.is_contiguous()
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    repeats = query.shape[1] // key.shape[1]
    for queries, keys in _pieces(edges_q, edges_k, None):
        scores = _scores(query[queries], key[keys], causal, scale)
        weights = (scores - normalizer[:, queries, None]).exp()
        wide_key, wide_value = (x[keys].repeat_interleave(repeats, dim=1) for x in (key, value))
        common = (gradient[queries] * output[queries]).sum(-1).t()[..., None]
        of_weights = torch.einsum("qhd,khd->hqk", gradient[queries], wide_value)
        of_scores = weights * (of_weights - common) * scale
        grads[0][queries] += torch.einsum("hqk,khd->qhd", of_scores, wide_key)
        of_key = torch.einsum("hqk,qhd->khd", of_scores, query[queries])
        of_value = torch.einsum("hqk,qhd->khd", weights, gradient[queries])
        for grad, part in ((grads[1], of_key), (grads[2], of_value)):
            grad[keys] += part.unflatten(1, (-1, repeats)).sum(2)
    return tuple(grads)


def install(monkeypatch):
    """Have `rloo.model.gpu_attention` use these, whatever the device and the dtype."""
    monkeypatch.setattr("rloo.model.gpu_attention._flash", forward)
    monkeypatch.setattr("rloo.model.gpu_attention._flash_backward", backward)
    monkeypatch.setattr("rloo.model.gpu_attention.has_segments", lambda *_: True)
