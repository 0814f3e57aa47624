"""From rows to prompts: templates, tokenisation, and a cursor over the prompts."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal

from datasets import Dataset, Image
from transformers import ProcessorMixin

from rloo.data.dataset_formats import SIMILAR, example_template, holds_messages, with_column
from rloo.data.images import ImageReader, image_columns
from rloo.data.sampler import Draw, EpochSampler, PromptSampler
from rloo.data.tokenization import Encode, ProcessingClass, apply_chat_template, check_message
from rloo.distributed.standard_streams import HAS, counted
from rloo.types import Group, Message, Prompt, Text

_FIRST_PASS = Draw(0, 0)


def with_prompts(rows: Dataset, template: str | list[Message] | None) -> Dataset:
    """Fill `template` into a `prompt` column; without a template, return `rows` unchanged.

    In the template, or in each string of a list of messages, `{name}` is replaced by the value of
    column `name` as text. Attributes and formats are not interpreted. `{{` and `}}` are literal
    braces; `{}` is literal, too (as in `\\boxed{}`).

    >>> with_prompts(Dataset.from_dict({"question": ["1+1?"]}), "Q: {question} A:")[0]["prompt"]
    'Q: 1+1? A:'
    """
    columns = rows.column_names
    if template is None:
        if "prompt" not in columns:
            example = example_template(columns)
            raise ValueError(
                f"the dataset has no column 'prompt'; its columns are {', '.join(columns)}. Name "
                f"the ones that make the prompt: prompt_template: '{example}'; for a chat model "
                f"messages: '[{{role: user, content: \"{example}\"}}]'"
            )
        return rows
    if isinstance(template, list):
        for message in template:
            check_message(message)
    elif not isinstance(template, str):
        raise ValueError(
            f"prompt_template is a {type(template).__name__}; it must be a string or a list of "
            "messages (prompt_template)"
        )
    readable = [name for name in columns if not _holds_images(rows.features[name])]
    # Image columns are left out, so that they are not decoded. A Dataset without columns has no
    # rows.
    texts = rows.select_columns(readable) if readable else rows
    prompts = [_fill(template, row, number) for number, row in enumerate(texts)]
    return with_column(rows, "prompt", prompts)


def image_reader(
    rows: Dataset, processing_class: ProcessingClass, *, chat_template_kwargs: dict[str, Any]
) -> ImageReader:
    """Return the reader of the images in `rows`. Raises ValueError if the rows have images and the
    model cannot read images."""
    columns = image_columns(rows.column_names)
    if not isinstance(processing_class, ProcessorMixin):
        if any(_holds_images(rows.features[name]) for name in columns):
            raise ValueError(
                f"the dataset has images (column {columns[0]}) and the model has no processor that "
                "reads them; give one (processing_class) or remove the column"
            )
        return ImageReader()
    process = partial(
        apply_chat_template, processing_class=processing_class, kwargs=chat_template_kwargs
    )
    return ImageReader(columns, process)


def _holds_images(feature: Any) -> bool:
    return isinstance(getattr(feature, "feature", feature), Image)


@dataclass(frozen=True, slots=True)
class PromptLengthLimit:
    """The limit of a prompt's length. A prompt with more than `max_tokens` tokens is overlong.
    `overlong` is "error" (raise), "drop" (remove the prompt) or "left" (cut the prompt from the
    left). All prompts may be dropped only with `may_be_empty`. Token ids must be below
    `vocabulary`. A text of more than `max_characters` characters always exceeds the limit; it is
    not tokenised as a whole, since this can take minutes.
    """

    max_tokens: int
    overlong: Literal["error", "drop", "left"] = "error"
    may_be_empty: bool = False
    vocabulary: int = 2**31
    max_characters: int = 2**62


class PromptDataset:
    """A cursor over the prompts of a dataset, in an order determined by (seed, epoch, index) or by
    another sampler (`set_sampler`).

    The constructor tokenises all rows and raises ValueError for an invalid or overlong prompt. Such
    a prompt is therefore reported before sampling starts. `dropped` and `truncated` are the numbers
    of prompts that `limit` removed and cut. Prompts of a dataset with images are never cut.
    """

    # Notes for the user about the rows.
    notes: Sequence[str] = ()

    def __init__(
        self,
        rows: Dataset,
        encode: Encode,
        *,
        seed: int,
        shuffle: bool = True,
        limit: PromptLengthLimit,
        images: ImageReader | None = None,
    ) -> None:
        max_prompt_length, overlong = limit.max_tokens, limit.overlong
        if max_prompt_length < 1:
            raise ValueError(
                f"max_prompt_length is {max_prompt_length}; a prompt needs at least 1 token "
                "(max_prompt_length)"
            )
        images = images or ImageReader()
        tokens = _tokenise(rows, encode, images, limit)
        too_long = {i: len(ids) for i, ids in enumerate(tokens) if len(ids) > max_prompt_length}
        if too_long and overlong == "error":
            raise ValueError(_describe_overlong(too_long, max_prompt_length))
        if too_long and overlong == "left" and images.columns:
            raise ValueError(
                f"{counted(len(too_long), 'prompt', HAS)} more than {max_prompt_length} tokens; "
                "prompts of a dataset with images cannot be cut, since each image needs all of its "
                "tokens (overlong_prompts, max_prompt_length)"
            )
        self.dropped: int = len(too_long) if overlong == "drop" else 0
        self.truncated: int = len(too_long) if overlong == "left" else 0
        if self.dropped == len(rows) and not limit.may_be_empty:
            raise ValueError(
                f"no prompt of {counted(len(rows), 'row')} has at most {max_prompt_length} tokens: "
                "all were dropped; training needs at least 1 (max_prompt_length, overlong_prompts)"
            )
        self._rows, self._images = rows, images
        self._tokens = [ids[-max_prompt_length:] for ids in tokens]
        self._numbers = [i for i in range(len(rows)) if not (self.dropped and i in too_long)]
        self.sampler: PromptSampler = EpochSampler(len(self._numbers), seed=seed, shuffle=shuffle)
        self._identity = {
            "seed": seed,
            "shuffle": shuffle,
            "prompts": len(self._numbers),
            "rows": len(rows),
            "columns": sorted(rows.column_names),
            "content": _hash_content(rows),
        }

    def __len__(self) -> int:
        """The number of prompts in one epoch."""
        return len(self._numbers)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each prompt, in the order of the dataset."""
        return [len(self._tokens[number]) for number in self._numbers]

    def counts_of(self, token: int) -> list[int]:
        """Return how often each prompt has the token, in the order of `lengths`."""
        return [self._tokens[number].count(token) for number in self._numbers]

    @property
    def epoch(self) -> float:
        """The number of passes over the dataset so far, with fractions."""
        return self.sampler.drawn / len(self)

    def next(self, num: int) -> list[Prompt]:
        """Return the next `num` prompts. When an epoch ends, the next epoch starts. No row is left
        out, and a row can occur twice in one call."""
        return [self._prompt(self._numbers[draw.number], draw) for draw in self.sampler.next(num)]

    def update(self, groups: Sequence[Group]) -> None:
        """Pass the rewards of this dataset's prompts to the sampler."""
        self.sampler.update(groups)

    def stats(self) -> dict[str, float]:
        """Return the metrics of the sampler."""
        return self.sampler.stats()

    def token_ids(self, index: int) -> list[int]:
        """Return the tokens of the prompt with this index, in the order of `values`."""
        ids: list[int] = self._tokens[self._numbers[index]].tolist()
        return ids

    def set_sampler(self, order: PromptSampler) -> None:
        """Use another sampler from now on. Its indices must be below the number of prompts."""
        self.sampler = order

    @property
    def columns(self) -> list[str]:
        """The names of the dataset's columns."""
        return list(self._rows.column_names)

    def values(self, column: str) -> dict[int, Any]:
        """Return the values of a column by row number, in dataset order, without dropped rows.
        Raises ValueError for an unknown column."""
        if column not in self._rows.column_names:
            raise ValueError(f"the dataset has no column {column!r} (dataset)")
        values = self._rows[column]
        return {number: values[number] for number in self._numbers}

    def all_prompts(self, limit: int | None = None) -> list[Prompt]:
        """Return the first `limit` prompts in dataset order, without moving the cursor."""
        return [self._prompt(number) for number in self._numbers[:limit]]

    def shared_with(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return those of `prompts` whose tokens are equal to the tokens of a prompt of this
        dataset. Prompts with images are left out."""
        theirs = {tuple(p.token_ids): p for p in prompts if p.pixels is None}
        found = {ids for number in self._numbers if (ids := tuple(self._tokens[number])) in theirs}
        return [p for p in prompts if p.pixels is None and tuple(p.token_ids) in found]

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor's position and a fingerprint of its prompts, as plain JSON values."""
        return {**self.sampler.state_dict(), **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved position. Raises ValueError if the position was saved for other data or
        another order: the cursor would then repeat or skip rows."""
        for name, here in self._identity.items():
            if state[name] != here:
                raise ValueError(
                    f"the saved position is in other prompts: {name} is {state[name]} in the "
                    f"checkpoint and {here} now; resume with the dataset, the seed and the prompt "
                    "settings of the run (resume_from_checkpoint)"
                )
        self.sampler.load_state_dict(state)

    def _prompt(self, number: int, draw: Draw = _FIRST_PASS) -> Prompt:
        columns = dict(self._rows[number])
        content = self._images.content(columns)
        del columns["prompt"]
        return Prompt(
            id=number,
            token_ids=self._tokens[number].tolist(),
            content=content,
            columns=columns,
            epoch=draw.turn,
            pixels=self._images.pixels(content),
            weight=draw.weight,
            num_completions=draw.num_completions,
        )


def _tokenise(
    rows: Dataset, encode: Encode, images: ImageReader, limit: PromptLengthLimit
) -> list[array]:
    # An array takes 4 bytes per token, a list of ints takes 36.
    tokens: list[array] = []
    read = iter(rows.select_columns(["prompt", *images.columns]))
    together = 1 if images.columns else 1000  # rows with images: one at a time
    try:
        while contents := [images.content(row) for row in islice(read, together)]:
            first = len(tokens)
            small = [_bounded(content, limit, n) for n, content in enumerate(contents, first)]
            encoded = iter(encode([content for content in small if content is not None]))
            for content in small:
                # A text that is certainly too long gets one token more than the limit.
                ids = [0] * (limit.max_tokens + 1) if content is None else next(encoded)
                tokens.append(array("i", ids))
    except _TooLarge:
        raise
    except ValueError as error:
        raise ValueError(f"row {len(tokens)}: {error} (dataset)") from error
    for number, prompt in enumerate(tokens):
        if max(prompt) >= limit.vocabulary:
            raise ValueError(
                f"row {number}: the tokenizer makes token {max(prompt)} of it and the model embeds "
                f"{limit.vocabulary}; they do not belong together (model, processing_class)"
            )
    return tokens


class _TooLarge(ValueError):
    pass


def _bounded(content: Text, limit: PromptLengthLimit, number: int) -> Text | None:
    """The part of a prompt to tokenise: the end of a text that will be cut, None if it is
    dropped."""
    characters = _count_characters(content)
    if characters <= limit.max_characters:
        return content
    if limit.overlong == "drop":
        return None
    if limit.overlong == "left" and isinstance(content, str):
        return content[-limit.max_characters :]
    raise _TooLarge(
        f"row {number}: the prompt has {characters:,} characters, more than {limit.max_tokens:,} "
        "tokens, to which prompts are limited, can stand for: leave the row out, as "
        "overlong_prompts 'drop' does (dataset, max_prompt_length)"
    )


def _count_characters(content: Text) -> int:
    if isinstance(content, str):
        return len(content)
    if not isinstance(content, list):
        return 0
    said = [message.get("content") for message in content if isinstance(message, dict)]
    parts = [part for text in said if isinstance(text, list) for part in text]
    said += [part.get("text") for part in parts if isinstance(part, dict)]
    return sum(len(text) for text in said if isinstance(text, str))


def _describe_overlong(too_long: dict[int, int], limit: int) -> str:
    shown = ", ".join(f"row {i}: {length}" for i, length in list(too_long.items())[:5])
    more = ", ..." if len(too_long) > 5 else ""
    return (
        f"{counted(len(too_long), 'prompt', HAS)} more than {counted(limit, 'token')} "
        f"({shown}{more}). Choose: a larger max_prompt_length, overlong_prompts 'drop' (leave "
        "these rows out) or 'left' (keep the last tokens) (max_prompt_length, overlong_prompts)"
    )


def _hash_content(rows: Dataset) -> str:
    # In Arrow format the hash does not depend on the format or decoding that the user set.
    digest = hashlib.sha256()
    for batch in rows.with_format("arrow").iter(batch_size=1000):
        for row in batch.to_pylist():
            digest.update(json.dumps(row, sort_keys=True, default=_plain).encode())
    return digest.hexdigest()


def _plain(value: Any) -> str:
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else repr(value)


def _fill(template: str | list[Message], row: dict[str, Any], number: int) -> Text:
    def value_of(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return match[0][0]
        if name not in row:
            near = difflib.get_close_matches(name, row, n=1, cutoff=SIMILAR)
            hint = f" (did you mean {{{near[0]}}}?)" if near else ""
            raise ValueError(
                f"the template has {{{name}}}, which is no column{hint}. The columns are "
                f"{', '.join(row)}; write {{{{ and }}}} for literal braces (prompt_template)"
            )
        if row[name] is None:
            raise ValueError(f"row {number}: column '{name}' is empty (prompt_template)")
        if holds_messages(row[name]):
            raise ValueError(
                f"row {number}: column '{name}' has messages, with the answer among them, and no "
                f"text. If they have role and content, '{{{name}}}' alone makes the prompt of "
                "them, without the assistant's last turn (prompt_template)"
            )
        return str(row[name])

    def filled(text: str) -> str:
        return re.sub(r"\{\{|\}\}|\{([^{}]+)\}", value_of, text)

    if isinstance(template, str):
        return filled(template)
    return [{**m, "content": filled(m["content"] or "")} for m in template]
