"""What can be told of a run before its first step, counted: prompts that are held out and trained
on, the chat template, the tokens that end a completion. The rules that judge it are in
`rloo.report.doctor.data`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rloo.algorithm.parts import Parts
from rloo.data.prompts import PromptSource
from rloo.report.doctor.finding import written
from rloo.rewards import RewardSet
from rloo.run.evaluate import Sets
from rloo.types import Prompt

# Prompts whose last words are tried as a completion, and how many words at most.
_TRIED_PROMPTS, _TRIED_WORDS = 16, 12


def facts_of(parts: Parts, sets: Sets) -> dict[str, Any]:
    """The facts of a run; `sets` are its evaluation sets. The prompts of a stream are not known."""
    facts: dict[str, Any] = {}
    source, policy = getattr(parts.rollouts, "prompts", None), parts.policy
    if isinstance(source, PromptSource):
        (first,) = source.all_prompts(1)
        facts["shared_prompts"] = {
            name: (len(shared), len(prompts), written(shared[0].content))
            for name, prompts in sets.items()
            if (shared := source.shared_with(prompts))
        }
        facts |= _of_template(policy.tokenizer, first, policy.stop_token_ids)
    return facts


def _of_template(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, stops: Sequence[int]
) -> dict[str, Any]:
    if not tokenizer.chat_template:
        return {}
    if isinstance(prompt.content, str):
        return {"chat_template": "unused", "prompt": prompt.content}
    if prompt.content[-1]["role"] == "assistant":  # its turn is open
        return {}
    messages = [{"role": "user", "content": "a"}]
    plain, opened = (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens)
        for opens in (False, True)
    )
    facts = {} if plain != opened else {"chat_template": "turn not opened", "prompt": plain}
    answered = [*messages, {"role": "assistant", "content": "rloo"}]
    whole = str(tokenizer.apply_chat_template(answered, tokenize=False))
    _, said, after = whole.rpartition("rloo")
    ends = [i for i in tokenizer(after, add_special_tokens=False)["input_ids"] if said]
    special = [i for i in ends if i in tokenizer.all_special_ids]
    if special and not set(special) & set(stops):
        facts |= {"end_of_turn": tokenizer.decode(special[:1]), "end_of_turn_id": special[0]}
    return facts


def answered_prompts(
    rewards: RewardSet, prompts: Sequence[Prompt], state: Any, threshold: float
) -> tuple[int, int, str] | None:
    """How many of some prompts earn the full first reward with their own last words as a
    completion, of how many, and one of them. None for a reward that gives more than 0 and 1."""
    tried = [
        (prompt, " ".join(words[-count:]))
        for prompt in prompts[:_TRIED_PROMPTS]
        if (words := written(prompt.content).split())
        for count in range(1, min(len(words), _TRIED_WORDS) + 1)
    ]
    if not tried:
        return None
    plain = [isinstance(prompt.content, str) for prompt, _ in tried]
    said: list[Any] = [
        text if is_text else [{"role": "assistant", "content": text}]
        for (_, text), is_text in zip(tried, plain, strict=True)
    ]
    names = dict.fromkeys(name for prompt, _ in tried for name in prompt.columns)
    columns = {name: [prompt.columns.get(name) for prompt, _ in tried] for name in names}
    given = [prompt.content for prompt, _ in tried]
    scores = rewards.score(given, said, [[0] for _ in tried], columns, state, learn=False)
    first = next(iter(scores.by_function.values()))
    if any(score not in (0.0, 1.0, None) for score in first):
        return None
    passed = [
        prompt
        for (prompt, _), score in zip(tried, first, strict=True)
        if score is not None and score >= threshold
    ]
    earned = {prompt.id: prompt for prompt in passed}
    example = written(next(iter(earned.values())).content) if earned else ""
    return len(earned), len({prompt.id for prompt, _ in tried}), example
