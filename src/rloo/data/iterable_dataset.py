"""A cursor over the prompts of a streaming dataset (without a length). Its position can be saved at
any prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeAlias

from datasets import Dataset, IterableDataset

from rloo.data.prompt_dataset import PromptDataset
from rloo.types import Group, Prompt, sound

# The number of rows that are read, tokenised and shuffled together.
BLOCK = 1000


class IterablePromptDataset:
    """A cursor over the prompts of a stream. When the stream ends, the next pass starts.

    The stream is read in blocks of `BLOCK` rows; `make_source(rows, seed)` converts a block to
    prompts and shuffles within it. A saved position has the state of the stream at the start of the
    block, and the index in the block. If the state does not restore the same block (`datasets` does
    not restore shuffle buffers), the stream is read again from its start up to the block.
    """

    def __init__(
        self,
        rows: IterableDataset,
        make_source: Callable[[Dataset, int], PromptDataset],
        *,
        seed: int,
    ) -> None:
        """Raises ValueError for a stream without rows, and for invalid rows in the first block."""
        self._given, self._make_source, self._seed = rows, make_source, seed
        self.dropped: int = 0
        self.truncated: int = 0
        self._begin_pass(0)
        while len(self._block) == 0:
            self._next_block()

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each prompt in the current block. Later blocks are not known
        yet."""
        return self._block.lengths

    @property
    def columns(self) -> list[str]:
        """The names of the stream's columns."""
        return self._block.columns

    @property
    def notes(self) -> Sequence[str]:
        """Notes for the user about the rows of the current block."""
        return self._block.notes

    @property
    def epoch(self) -> float:
        """The number of complete passes over the stream."""
        return float(self._pass + (self._is_last and self._taken == len(self._block)))

    def next(self, num: int) -> list[Prompt]:
        """Return the next `num` prompts. The id of a prompt is the row's number in its pass."""
        prompts: list[Prompt] = []
        while len(prompts) < num:
            if self._taken == len(self._block):
                self._next_block()
            drawn = self._block.next(min(num - len(prompts), len(self._block) - self._taken))
            self._taken += len(drawn)
            prompts += [replace(p, id=self._first_row + p.id, epoch=self._pass) for p in drawn]
        return prompts

    def update(self, groups: Sequence[Group]) -> None:
        """Do nothing: the order of a stream does not depend on rewards."""

    def stats(self) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor's position, as plain JSON values."""
        return {
            "pass": self._pass,
            "first_row": self._first_row,
            "stream": self._state,
            "block": self._block.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved position. Raises ValueError if the stream has other rows at that
        position."""
        try:
            self._go_to(state, state["stream"], skip=0)
        except ValueError:
            self._go_to(state, None, skip=state["first_row"])
        self._taken = state["block"]["drawn"]

    def _go_to(self, position: dict[str, Any], state: dict[str, Any] | None, skip: int) -> None:
        self._pass, self._first_row = position["pass"], position["first_row"]
        self._any_prompt = True
        self._iterator: Iterator[dict[str, Any]] = islice(self._open(state), skip, None)
        self._state = position["stream"]
        self._set_block(self._read())
        self._block.load_state_dict(position["block"])

    def _begin_pass(self, number: int) -> None:
        self._pass, self._first_row, self._state = number, 0, None
        self._iterator = self._open(None)
        self._any_prompt = False
        self._set_block(self._read())

    def _next_block(self) -> None:
        """Go to the next block or pass. Raises ValueError if all prompts of a pass were dropped."""
        state = self._rows.state_dict()
        rows = [] if self._is_last else self._read()
        if rows:
            self._state = state
            self._first_row += BLOCK
            self._set_block(rows)
        elif self._any_prompt:
            self._begin_pass(self._pass + 1)
        else:
            raise ValueError(
                "all prompts of the stream were too long and dropped; training needs at least 1 "
                "(max_prompt_length, overlong_prompts)"
            )

    def _open(self, state: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
        # A copy, because an IterableDataset stores its own iteration state and epoch.
        self._rows = self._given.with_format(None)
        self._rows.set_epoch(self._pass)
        if state is not None:
            self._rows.load_state_dict(state)
        return iter(self._rows)

    def _read(self) -> list[dict[str, Any]]:
        return list(islice(self._iterator, BLOCK))

    def _set_block(self, rows: list[dict[str, Any]]) -> None:
        key = f"{self._seed} {self._pass} {self._first_row}".encode()
        seed = int.from_bytes(hashlib.sha256(key).digest()[:8], "little")
        try:
            self._block = self._make_source(as_table(rows, self._given), seed)
        except ValueError as error:
            raise ValueError(
                f"in the stream's rows from {self._first_row} on, counted from there: {error}"
            ) from error
        self._taken = 0
        self._is_last = len(rows) < BLOCK
        self._any_prompt |= len(self._block) > 0
        self.dropped += self._block.dropped
        self.truncated += self._block.truncated


Prompts: TypeAlias = PromptDataset | IterablePromptDataset


def as_table(rows: list[dict[str, Any]], stream: IterableDataset) -> Dataset:
    """Return `rows` of a stream as a dataset with the stream's columns. Raises ValueError for no
    rows."""
    if not rows:
        raise ValueError("the stream has 0 rows; at least 1 is needed (dataset)")
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [sound(row.get(name)) for row in rows] for name in names}
    return Dataset.from_dict(columns, features=stream.features)
