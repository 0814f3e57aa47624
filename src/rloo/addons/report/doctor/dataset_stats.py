"""Facts that are known before the first step: evaluation prompts that are trained on, unknown
words in prompts, the use of the chat template, the tokens that end a completion.
`rloo.addons.report.doctor.data_rules` contains the rules on these facts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rloo.addons.report.doctor.run_record import LONGEST
from rloo.algorithm.state import TrainerComponents
from rloo.data.images import tokenizer_of, without_images
from rloo.data.prompt_dataset import PromptDataset
from rloo.data.tokenization import ProcessingClass
from rloo.model.policy import Policy
from rloo.rewards import RewardSet
from rloo.tracking.finding import text_of_content
from rloo.tracking.guarded import Note, attempt
from rloo.trainer.evaluate import Sets
from rloo.trainer.prompt_lengths import longest_completion, prompts_of
from rloo.types import Message, Prompt, Text

# The number of prompts that are tried with their last words as completion, and the largest number
# of words that is tried.
_TRIED_PROMPTS, _TRIED_WORDS = 16, 12
# Messages of out-of-memory errors without a type: from other devices, and from a CPU.
_LACKS_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
# Question and answer of artificial conversations: words that no template contains.
_WORD, _ANSWER = "rloo", "oolr"


def facts_of(parts: TrainerComponents, sets: Sets) -> dict[str, Any]:
    """The facts of a run; `sets` are its evaluation sets. Empty for a prompt stream. A fact that
    cannot be computed is missing, and a note of the run gives the reason."""
    source, policy = prompts_of(parts), parts.policy
    if source is None:
        return {}

    def template() -> dict[str, Any]:
        (first,) = source.all_prompts(1)
        given = policy.config.chat_template_kwargs or {}
        return of_template(policy.processing_class, first, policy.stop_token_ids, given)

    note = parts.monitor.note
    shared = attempt("what evaluations share", lambda: _shared(source, sets), None, note)
    unknown = attempt("which words are unknown", lambda: _unknown(policy, source), None, note)
    found = {
        "shared_prompts": shared,
        LONGEST: longest_completion(parts),
        "unknown_tokens": unknown,
    }
    known = {name: fact for name, fact in found.items() if fact is not None}
    nothing: dict[str, Any] = {}
    return known | attempt("how the chat template is used", template, nothing, note)


def facts_of_error(error: BaseException, note: Note) -> dict[str, Any]:
    """The facts that `error` shows about the end of a run. If they cannot be computed, `note` gets
    the reason."""
    nothing: dict[str, Any] = {}
    return attempt("why the run ended", lambda: _of_error(error), nothing, note)


def _of_error(error: BaseException) -> dict[str, Any]:
    said = " ".join(str(error).split())
    lacks = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and _LACKS_MEMORY.search(said) is not None
    )
    return {"out_of_memory": f"{type(error).__name__}: {said[:200]}"} if lacks else {}


def _shared(source: PromptDataset, sets: Sets) -> dict[str, tuple[int, int, str]]:
    return {
        name: (len(shared), len(prompts), text_of_content(shared[0].content))
        for name, prompts in sets.items()
        if (shared := source.shared_with(prompts))
    }


def _unknown(policy: Policy, source: PromptDataset) -> tuple[int, int, str, str] | None:
    """Return (number of unknown tokens in the prompts, number of their tokens, the unknown token,
    the prompt with the most unknown tokens as the model reads it). None if there are none, or if
    the unknown token begins or ends texts, too."""
    tokenizer, counts = policy.tokenizer, []
    unknown = tokenizer.unk_token_id
    if unknown not in (None, tokenizer.bos_token_id, tokenizer.eos_token_id):
        counts = source.counts_of(unknown)
    if not any(counts):
        return None
    example = str(tokenizer.decode(source.token_ids(counts.index(max(counts)))))
    return sum(counts), sum(source.lengths), str(tokenizer.unk_token), example


def of_template(
    processing_class: ProcessingClass,
    prompt: Prompt,
    stops: Sequence[int],
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """How a prompt uses the chat template. The template is rendered with the prompt's messages, or
    with an artificial conversation if the prompt is a text. Raises the template's exceptions."""
    content, tokenizer = prompt.content, tokenizer_of(processing_class)
    if not processing_class.chat_template:
        return {}
    if not isinstance(content, str) and content[-1]["role"] == "assistant":  # an open turn
        return {}

    def render(conversation: Sequence[Message], *, opens: bool = False) -> str:
        fixed: dict[str, Any] = {"tokenize": False, "add_generation_prompt": opens}
        return str(processing_class.apply_chat_template(list(conversation), **fixed, **kwargs))

    messages, whole = _answered(render, _messages(content))
    plain, opened = (render(messages, opens=opens) for opens in (False, True))
    # Empty if the template changes the answer.
    ending = whole.rpartition(_ANSWER)[2] if _ANSWER in whole else ""
    if isinstance(content, str):
        ends = (tokenizer.bos_token, tokenizer.eos_token)  # a plain text may contain these
        marks = [mark for mark in tokenizer.all_special_tokens if mark not in ends]
        how = _how_rendered(content, plain, opened, marks)
        if how == "unused":
            return {"chat_template": how, "prompt": content}
        found = {"chat_template": how, "prompt": content} if how else {}
    else:
        # Some templates open the turn without add_generation_prompt: the answer follows directly.
        gap = whole[len(plain) : whole.rfind(_ANSWER)] if whole.startswith(plain) else ""
        unopened = plain == opened and gap.strip()
        found = {"chat_template": "turn not opened", "prompt": plain} if unopened else {}
    return found | _end_of_turn(tokenizer, ending, stops)


def _messages(content: Text) -> list[Message]:
    """The messages of a prompt, without null values; an artificial message for a text prompt."""
    if isinstance(content, str):
        return [{"role": "user", "content": _WORD}]
    bare = without_images(content)
    assert not isinstance(bare, str)
    return [{k: v for k, v in message.items() if v is not None} for message in bare]


def _answered(
    render: Callable[[Sequence[Message]], str], messages: list[Message]
) -> tuple[list[Message], str]:
    """The messages, and their rendering with a one-word answer. Some templates require content as a
    string, some as parts (models with images), and some in a form that depends on the role."""
    parts = [{"type": "text", "text": _ANSWER}]
    answers: list[Any] = [_ANSWER, parts]
    if any(isinstance(message.get("content"), list) for message in messages):
        answers.reverse()
    for answer in answers:
        with suppress(Exception):  # templates raise anything; the next form is tried
            return messages, render([*messages, {"role": "assistant", "content": answer}])
    in_parts = [
        {**message, "content": [{"type": "text", "text": said}]}
        if isinstance(said, str)
        else message
        for message, said in ((message, message.get("content")) for message in messages)
    ]
    return in_parts, render([*in_parts, {"role": "assistant", "content": parts}])


def _how_rendered(text: str, plain: str, opened: str, marks: Sequence[str]) -> str:
    """How the author of a text prompt applied the chat template: "" (the assistant's turn is open),
    "turn not opened" or "unused". `marks` are special tokens that no plain text contains."""
    opening, closing = (frame.rpartition(_WORD)[2].strip() for frame in (opened, plain))
    said = text.rstrip()
    if opened.strip() == _WORD:  # the template adds nothing
        return ""
    if opening and said.endswith(opening):
        return ""
    if closing and said.endswith(closing):
        return "turn not opened"
    # The prompt may end the template differently: with other options, or with a turn's first words.
    return "" if any(mark in opened and mark in text for mark in marks) else "unused"


def _end_of_turn(
    tokenizer: PreTrainedTokenizerBase, ending: str, stops: Sequence[int]
) -> dict[str, Any]:
    """The special token that ends a turn, if it does not also end a completion."""
    ends = tokenizer(ending, add_special_tokens=False)["input_ids"]
    # An ending that the tokenizer maps to unk is no end token, unless it is the text of unk.
    unknown = None if str(tokenizer.unk_token) in ending else tokenizer.unk_token_id
    special = [i for i in ends if i in tokenizer.all_special_ids and i != unknown]
    if not special or set(special) & set(stops):
        return {}
    return {"end_of_turn": tokenizer.decode(special[:1]), "end_of_turn_id": special[0]}


def answered_prompts(
    rewards: RewardSet, prompts: Sequence[Prompt], state: Any, threshold: float
) -> tuple[int, int, str] | None:
    """Return (number of prompts whose last words, scored as a completion, get at least `threshold`
    from the first reward; number of prompts tried; an example). None if the reward is not binary (0
    and 1)."""
    tried = [
        (prompt, " ".join(words[-count:]))
        for prompt in prompts[:_TRIED_PROMPTS]
        if (words := text_of_content(prompt.content).split())
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
    example = text_of_content(next(iter(earned.values())).content) if earned else ""
    return len(earned), len({prompt.id for prompt, _ in tried}), example
