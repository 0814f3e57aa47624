"""Engines that run in this process. They sample with the policy's module and restore the module's
state afterwards. Rows are sampled in waves: a wave has as many rows as fit into memory together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rloo.config.file_checks import largest_of_layers
from rloo.distributed.sharded_tensor import is_sharded
from rloo.engines.counter_rng import offset_keys, row_keys
from rloo.engines.sampling import check_request, collect_completions, sample_indices
from rloo.kernels.bf16_rounding import keeping
from rloo.model.attention import head_size, num_kv_heads
from rloo.model.token_budget import available_bytes
from rloo.types import Completion, EngineCapabilities, NumSamples, Prompt, Sampling

# One row: a prompt, and the number k of the sample in its group.
PromptRow = tuple[Prompt, int]
# Tokens, policy and behavior log-probs, each (R, largest limit of a row), and the lengths (R,) at
# which a stop string was complete.
SampledTokens = tuple[Tensor, Tensor, Tensor, Tensor]


# The share of a GPU's memory that caches leave free for a prompt's forward and fragmentation.
RESERVE = 0.1

# Bytes of a sampled token and its two log-probs. Bytes per vocabulary entry (four float32 numbers)
# while a token is sampled.
_DRAWN_TOKEN_BYTES, _ENTRY_BYTES = 16, 16

# Returns a context manager within which a process has all weights.
GatherWeights = Callable[[], AbstractContextManager[object]]
# Receives a one-line message for the user.
Tell = Callable[[str], object]


@contextmanager
def in_inference_mode(
    model: PreTrainedModel, precision: torch.dtype | None = None
) -> Iterator[None]:
    """Within this context, the model is in evaluation mode (which disables gradient checkpointing),
    with autocast to `precision` (None: no autocast) and without autograd. A mixture of experts
    never returns router logits, since a cached forward has no balancing loss. Each submodule's mode
    is restored afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    text_config = model.config.get_text_config()
    routed = getattr(text_config, "output_router_logits", False)
    if routed:
        text_config.output_router_logits = False
    try:
        casts = precision is not None
        # In inference_mode autocast would cast every weight again for every token, and a later
        # forward with gradients could not use gathered weights. no_grad avoids both.
        divided = any(map(is_sharded, model.parameters()))
        with (
            torch.autocast(model.device.type, dtype=precision, enabled=casts),
            torch.no_grad() if casts or divided else torch.inference_mode(),
            keeping() if casts and not divided else nullcontext(),
        ):
            yield
    finally:
        for module in training:
            module.training = True
        if routed:
            text_config.output_router_logits = routed
        # An enclosing autocast would cache the low-precision copies made here, which a later
        # forward with gradients cannot use.
        torch.clear_autocast_cache()


def layer_windows(model: PreTrainedModel) -> list[int | None]:
    """The sliding window of each layer according to the configuration, None for full attention."""
    config = model.config.get_text_config()
    window = largest_of_layers(config, "sliding_window")
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types]


def pad_left(
    rows: Sequence[list[int]], pad_token_id: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Pad rows of token ids on the left to the longest. Returns (R, W) and the padding lengths
    (R,)."""
    width = max(map(len, rows))
    padding = [width - len(ids) for ids in rows]
    padded = [[pad_token_id] * pad + ids for pad, ids in zip(padding, rows, strict=True)]
    return torch.tensor(padded, device=device), torch.tensor(padding, device=device)


def limits_of(rows: Sequence[PromptRow], sampling: Sampling) -> list[int]:
    """The maximum number of tokens to sample in each row."""
    return [sampling.max_tokens - prompt.offset for prompt, _ in rows]


def cache_bytes_per_token(model: PreTrainedModel, dtype: torch.dtype | None = None) -> int:
    """Bytes of one token's keys and values over all layers (an upper estimate), in `dtype`
    (default: the model's dtype, but at least float32)."""
    config = model.config.get_text_config()
    size = max(4, model.dtype.itemsize) if dtype is None else dtype.itemsize
    return 2 * config.num_hidden_layers * num_kv_heads(config) * head_size(config) * size


def cast_bytes(model: PreTrainedModel, precision: torch.dtype | None) -> int:
    """Bytes of the copies of the trained matrices that autocast caches in the dtype `precision` (an
    upper estimate). On a CPU, these copies are stored as float32."""
    if precision is None:
        return 0
    size = 4 if model.device.type == "cpu" else precision.itemsize
    return size * sum(p.numel() for p in model.parameters() if p.requires_grad and p.dim() > 1)


def cache_room(device: torch.device, on_cpu: int) -> int:
    """Bytes that the caches of one wave may occupy now. On a GPU: the free memory minus a reserve.
    On a CPU: always `on_cpu`, so that the batches do not depend on free memory."""
    if device.type != "cuda":
        return on_cpu
    reserve = int(RESERVE * torch.cuda.get_device_properties(device).total_memory)
    return max(0, available_bytes(device) - reserve)


class InProcessEngine(ABC):
    """Samples `PromptRow`s with the policy's module. `cache_bytes` is the limit on the bytes of a
    wave's caches, and thereby on its number of rows (None: the result of `cache_room` at each
    call). Keys and values have the type `cache_dtype`. `precision` is the dtype of autocast (None:
    no autocast). `whole`, `tell`: see `EngineInputs`."""

    name: ClassVar[str]
    # Bytes that the caches of one wave may occupy on a CPU; further rows wait for the next wave.
    default_cache_bytes: ClassVar[int]
    cache_dtype: torch.dtype | None = None
    keeps_finished: ClassVar[bool] = False
    tell: Tell = print

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pad_token_id: int,
        cache_bytes: int | None = None,
        precision: torch.dtype | None = None,
        copies_weights: bool = False,
        whole: GatherWeights = nullcontext,
    ) -> None:
        self._model = model
        # The limit on the rows of a wave after a GPU ran out of memory.
        self._most_rows: int | None = None
        self._pad_token_id = pad_token_id
        self._precision = precision
        # An engine without a copy of the weights needs the module's full weights.
        self._whole = nullcontext if copies_weights else whole
        self.version = -1
        self._cache_bytes = cache_bytes
        self.capabilities: EngineCapabilities = EngineCapabilities(
            self.name,
            copies_weights=copies_weights,
            shares_memory=True,
            exact_noise=True,
            filters=True,
            cast_bytes=0 if copies_weights else cast_bytes(model, precision),
            cache_bytes=self._room(),
            keeps_finished=self.keeps_finished,
        )
        self._count_rows(cache_bytes_per_token(model, self.cache_dtype))

    def _count_rows(self, token_bytes: int, more_tokens: int = 0) -> None:
        """Set the memory of rows in `capabilities`: `token_bytes` of keys and values per token, and
        memory for `more_tokens` in each row and its prompt."""
        self.capabilities = replace(
            self.capabilities,
            prompt_token_bytes=token_bytes,
            completion_token_bytes=token_bytes + _DRAWN_TOKEN_BYTES,
            row_bytes=_ENTRY_BYTES * int(self._model.config.get_text_config().vocab_size)
            + more_tokens * token_bytes,
        )

    def sample(
        self, prompts: Sequence[Prompt], samples: NumSamples, sampling: Sampling, noise: int
    ) -> list[list[Completion]]:
        """See `rloo.types.Engine`."""
        numbers = sample_indices(samples, prompts)
        check_request(prompts, min(map(len, numbers), default=1), sampling)
        with self._whole():
            return self._sample(prompts, numbers, sampling, noise)

    def stats(self) -> dict[str, float]:
        """See `rloo.types.Engine`. Empty, since an engine in this process has no workers that could
        be lost."""
        return {}

    def _sample(
        self,
        prompts: Sequence[Prompt],
        numbers: Sequence[range],
        sampling: Sampling,
        noise: int,
    ) -> list[list[Completion]]:
        if not prompts:
            return []
        # Rows are sorted by length, which leaves little padding.
        by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index].token_ids))
        rows = [(index, k) for index in by_length for k in numbers[index]]
        wave = self._at_once([(prompts[index], k) for index, k in rows], sampling)
        completions: dict[tuple[int, int], Completion] = {}
        with in_inference_mode(self._model, self._precision):
            while len(completions) < len(rows):
                part = rows[len(completions) :][: min(wave, self._most_rows or wave)]
                part = part[: self._together([len(prompts[i].token_ids) for i, _ in part])]
                finished = self._wave([(prompts[i], k) for i, k in part], sampling, noise)
                completions.update(zip(part, finished, strict=True) if finished else ())
        return [[completions[i, k] for k in own] for i, own in enumerate(numbers)]

    def _wave(
        self, rows: list[PromptRow], sampling: Sampling, noise: int
    ) -> list[Completion] | None:
        """The completions of one wave of rows. None if a GPU runs out of memory; later waves are
        then smaller. Raises torch.OutOfMemoryError if a single row does not fit."""
        try:
            drawn = self._draw(rows, self._keys(rows, noise), sampling)
            return collect_completions(drawn, sampling.stop_token_ids, limits_of(rows, sampling))
        except torch.OutOfMemoryError:
            if len(rows) == 1:
                raise
        # The deleted error referred to frames, and so to the memory that these frames allocated.
        torch.cuda.empty_cache()
        self._most_rows = len(rows) // 2
        self.tell(
            f"memory did not suffice to sample {len(rows):,} completions at once; from now on at "
            f"most {self._most_rows:,} are (num_generations, num_prompts, max_completion_length)"
        )
        return None

    def _room(self) -> int:
        if self._cache_bytes is not None:
            return self._cache_bytes
        return cache_room(self._model.device, self.default_cache_bytes)

    def _at_once(self, rows: list[PromptRow], sampling: Sampling) -> int:
        """The number of rows of a wave."""
        self.capabilities = replace(self.capabilities, cache_bytes=self._room())
        longest = max(len(prompt.token_ids) for prompt, _ in rows)
        return self.capabilities.rows_at_once(len(rows), longest, sampling.max_tokens)

    def _together(self, lengths: Sequence[int]) -> int:
        """The number of leading rows that may be batched. Their prompts have these `lengths`."""
        return len(lengths)

    def _keys(self, rows: list[PromptRow], noise: int) -> Tensor:
        device = self._model.device
        ids = torch.tensor([prompt.noise_id for prompt, _ in rows], device=device)
        keys = row_keys(noise, ids, torch.tensor([k for _, k in rows], device=device))
        return offset_keys(keys, torch.tensor([prompt.offset for prompt, _ in rows], device=device))

    @abstractmethod
    def _draw(self, rows: list[PromptRow], keys: Tensor, sampling: Sampling) -> SampledTokens:
        """Sample one wave and return the input of `collect_completions`, in the order of `rows`.
        `keys` (R,) are the noise keys of the rows."""
