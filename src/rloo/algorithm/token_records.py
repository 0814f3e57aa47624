"""Token-level records of a few groups for the report, with the values of their first update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rloo.algorithm.reward_shaping import has_reward_variance
from rloo.algorithm.state import ActiveRollout
from rloo.config.config import RLOOConfig
from rloo.data.images import without_images
from rloo.tracking.sample_text import counts_of
from rloo.types import Sample

NUM_GROUPS = 2
NUM_COMPLETIONS = 16
# A longer completion is recorded by its first 256 and last 256 tokens.
NUM_TOKENS = 512


def detailed(
    hand: ActiveRollout, config: RLOOConfig, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Return one row for each of two groups. Groups whose rewards differ come first. A row has the
    prompt, and its first 16 completions with reward, advantage and tokens. `mismatch` is the
    trainer's log-prob of each token minus the engine's, in nats. `trained` is 0 for tokens of tool
    output, which have no mismatch. Data that only another rank has is left out. An advantage is one
    number per completion, or one per token."""
    groups = hand.rollout.groups
    first = sorted(range(len(groups)), key=lambda n: not has_reward_variance(groups[n], config))
    samples = {sample.key: sample for sample in hand.samples}
    return [
        {
            "group": number,
            "prompt_id": groups[number].prompt.id,
            "prompt": without_images(groups[number].prompt.content),
            "num_completions": len(groups[number].texts),
            "completions": [
                {
                    "completion": text,
                    "reward": groups[number].rewards[k],
                    "scores": {name: of[k] for name, of in groups[number].scores.items()},
                    "finish": groups[number].completions[k].finish,
                    "num_tokens": len(groups[number].completions[k].token_ids),
                    **counts_of(groups[number].completions[k].episode),
                    **_seen(hand, samples.get((number, k)), tokenizer),
                }
                for k, text in enumerate(groups[number].texts[:NUM_COMPLETIONS])
            ],
        }
        for number in first[:NUM_GROUPS]
    ]


def _seen(
    hand: ActiveRollout, sample: Sample | None, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """The advantage, tokens and mismatch of a completion, as far as this rank has them."""
    if sample is None:  # it is not trained on
        return {}
    found: dict[str, Any] = {}
    if (known := hand.credit.by_completion.get(sample.key)) is not None:
        values = known.tolist()
        found["advantage"] = values[0] if len(values) == 1 else _of_all(values, sample)
    found["tokens"] = _ends(pieces(sample.token_ids, tokenizer))
    if sample.trained is not None:
        found["trained"] = _ends([int(kept) for kept in sample.trained])
    now = hand.credit.old_logprobs.get(sample.key)
    if now is not None and len(now) == sample.num_trained:
        both = zip(now.tolist(), sample.of_trained(sample.policy_logprobs), strict=True)
        found["mismatch"] = _of_all(
            [float(f"{ours - theirs:.2g}") for ours, theirs in both], sample
        )
    return found


def _of_all(values: Sequence[Any], sample: Sample) -> list[Any]:
    """The first and last tokens' values: `values` for trained tokens, None for the others."""
    known = iter(values)
    trained = sample.trained or [True] * len(sample.token_ids)
    return _ends([next(known) if kept else None for kept in trained])


def _ends(values: Sequence[Any]) -> list[Any]:
    if len(values) <= NUM_TOKENS:
        return list(values)
    return [*values[: NUM_TOKENS // 2], *values[-NUM_TOKENS // 2 :]]


def pieces(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text that each token adds, special tokens included. If a character consists of
    several tokens, the last of them has the character and the others have an empty text."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return [str(tokenizer.decode([token])) for token in token_ids]
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(fast, token) or "" for token in token_ids]
