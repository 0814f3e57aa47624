"""Trials of engines: a few sampled tokens are scored again by forward passes without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from rloo.data.images import image_token_ids
from rloo.engines.in_process import in_inference_mode
from rloo.engines.sampling import gather_logprobs
from rloo.types import Completion, Prompt, Sampling

# The sampling settings of a trial.
SAMPLING = Sampling(max_tokens=4, stop_token_ids=())


def trial_prompts(model: PreTrainedModel, lengths: Sequence[int]) -> list[Prompt]:
    """Prompts of these lengths with different tokens, without placeholder tokens of images."""
    vocabulary, never = model.config.get_text_config().vocab_size, image_token_ids(model.config)
    usual = [token for i in range(64) if (token := (7 * i + 3) % vocabulary) not in never]
    return [
        Prompt(id=number, token_ids=(usual[number:] + usual * length)[:length], content="")
        for number, length in enumerate(lengths)
    ]


def worst_error(
    model: PreTrainedModel, prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]
) -> float:
    """The largest error of the log-probs of completions that were sampled with `SAMPLING`. The
    expected log-probs come from one forward per completion, without a cache and without padding."""
    worst = 0.0
    with in_inference_mode(model):
        for prompt, group in zip(prompts, groups, strict=True):
            for completion in group:
                tokens = [*prompt.token_ids, *completion.token_ids]
                ids = torch.tensor([tokens], device=model.device)
                count = len(completion.token_ids)
                logits = model(input_ids=ids, use_cache=False).logits[0, -count - 1 : -1].float()
                expected = gather_logprobs(logits, ids[0, -count:])
                returned = torch.tensor(completion.policy_logprobs, device=model.device)
                worst = max(worst, float((expected - returned).abs().max()))
    return worst
