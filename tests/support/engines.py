"""Engines by how they sample, and prompts of several lengths."""

import functools

import torch

from rloo.engines.hf_engine import HFEngine
from rloo.engines.native.native_engine import NativeEngine
from rloo.types import Completion, Prompt
from support.models import VOCAB_SIZE

ENGINES = {
    "native": NativeEngine,
    "module": functools.partial(NativeEngine, fused=False),
    "hf": HFEngine,
}
LENGTHS = (1, 3, 12, 7)


def make_prompts(lengths=LENGTHS) -> list[Prompt]:
    return [
        Prompt(
            id=100 + index,
            token_ids=[3 + (11 * index + 5 * place) % (VOCAB_SIZE - 3) for place in range(length)],
            content="",
        )
        for index, length in enumerate(lengths)
    ]


def expected_logprobs(model, prompt: Prompt, completion: Completion) -> torch.Tensor:
    """Of the completion's tokens (T,), by a plain forward pass of the module."""
    ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
    with torch.no_grad():
        model.set_attn_implementation("eager")
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt.token_ids) - 1 : -1]
    chosen = ids[0, len(prompt.token_ids) :, None]
    return logits.float().log_softmax(-1).gather(1, chosen)[:, 0]


def rounding_errors(model, prompts, groups) -> torch.Tensor:
    """How far the log-probs of all tokens are from those of a plain forward pass."""
    errors = [
        torch.tensor(completion.policy_logprobs) - expected_logprobs(model, prompt, completion)
        for prompt, group in zip(prompts, groups, strict=True)
        for completion in group
    ]
    return torch.cat(errors).abs()
