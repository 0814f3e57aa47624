"""Engines that run in this process: sampling in waves within bounded memory, with the policy's own
module, which is given back as it was."""

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
from rloo.model.attention import head_size
from rloo.model.token_budget import available_bytes
from rloo.types import Completion, EngineCapabilities, NumSamples, Prompt, Sampling

# One row: a prompt and the sample's number k in its group.
PromptRow = tuple[Prompt, int]
# Tokens, policy and behavior log-probs, each (R, as many as the longest row may have), and the
# lengths (R,) at which a stop string was complete.
SampledTokens = tuple[Tensor, Tensor, Tensor, Tensor]


# The share of a GPU's memory that caches leave: for a prompt's forward, and what is scattered.
RESERVE = 0.1

# A token and its two log-probabilities; four float32 numbers for an entry of the vocabulary, while
# one is drawn.
_DRAWN_TOKEN_BYTES, _ENTRY_BYTES = 16, 16

# In the block of what this returns, a process has all weights.
GatherWeights = Callable[[], AbstractContextManager[object]]
# Takes one line for the user.
Tell = Callable[[str], object]


@contextmanager
def in_inference_mode(
    model: PreTrainedModel, precision: torch.dtype | None = None
) -> Iterator[None]:
    """Evaluation mode (in which gradient checkpointing is inactive), autocast to `precision` (None:
    without) and no autograd inside; each submodule's own mode is restored outside. Inside, a
    mixture of experts does not return its router's logits, whatever its configuration says, since
    a cached forward has no balancing loss."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    text_config = model.config.get_text_config()
    routed = getattr(text_config, "output_router_logits", False)
    if routed:
        text_config.output_router_logits = False
    try:
        casts = precision is not None
        # Not inference_mode, in which autocast would cast every weight again for every token, and
        # what is gathered would be of no use to a later forward with gradients.
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
        # Inside another autocast the low-precision copies of weights made here are kept, which a
        # later forward with gradients cannot use.
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
    """Rows of token ids, padded on the left to the longest (R, W), and by how much (R,)."""
    width = max(map(len, rows))
    padding = [width - len(ids) for ids in rows]
    padded = [[pad_token_id] * pad + ids for pad, ids in zip(padding, rows, strict=True)]
    return torch.tensor(padded, device=device), torch.tensor(padding, device=device)


def limits_of(rows: Sequence[PromptRow], sampling: Sampling) -> list[int]:
    """How many tokens may be drawn in each row."""
    return [sampling.max_tokens - prompt.offset for prompt, _ in rows]


def cache_bytes_per_token(model: PreTrainedModel, dtype: torch.dtype | None = None) -> int:
    """Bytes of the keys and values of one token over all layers (an upper estimate), in `dtype`, by
    default that of the model, but at least float32."""
    config = model.config.get_text_config()
    heads = largest_of_layers(config, "num_attention_heads") or 1
    kv_heads = largest_of_layers(config, "num_key_value_heads") or heads
    size = max(4, model.dtype.itemsize) if dtype is None else dtype.itemsize
    return 2 * config.num_hidden_layers * kv_heads * head_size(config) * size


def cast_bytes(model: PreTrainedModel, precision: torch.dtype | None) -> int:
    """Bytes of the weights that are kept as autocast to `precision` has them (an upper estimate):
    the trained matrices; float32, too, where those are rounded."""
    if precision is None:
        return 0
    size = 4 if model.device.type == "cpu" else precision.itemsize
    return size * sum(p.numel() for p in model.parameters() if p.requires_grad and p.dim() > 1)


def cache_room(device: torch.device, on_cpu: int) -> int:
    """Bytes that the caches of one wave may occupy now: on a GPU what is free but for a reserve, on
    a CPU always as many, so that free memory does not decide which rows are computed together."""
    if device.type != "cuda":
        return on_cpu
    reserve = int(RESERVE * torch.cuda.get_device_properties(device).total_memory)
    return max(0, available_bytes(device) - reserve)


class InProcessEngine(ABC):
    """Samples `PromptRow`s with the policy's module, as many at once as `cache_bytes` allow (None:
    see `cache_room`, asked for each call), whose keys and values are of `cache_dtype`. `precision`
    is that of its autocast (None: the module computes in its own). `whole`, `tell`: see
    `EngineInputs`."""

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
        # Where memory did not suffice for more.
        self._most_rows: int | None = None
        self._pad_token_id = pad_token_id
        self._precision = precision
        # The module's own weights are needed where there is no copy of them.
        self._whole = nullcontext if copies_weights else whole
        self.version = -1
        self._cache_bytes = cache_bytes
        self.capabilities = EngineCapabilities(
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
        """Say in `capabilities` what rows occupy: so many bytes of keys and values for each token,
        and in a row and its prompt room for `more_tokens`."""
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
        """See `rloo.types.Engine`: in this process nothing is lost."""
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
        # Sorted, so that prompts of similar length come together and little is padded.
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
        """The completions of rows that are computed together; None where a GPU's memory does not
        suffice, and from now on fewer are. Raises torch.OutOfMemoryError for a single one."""
        try:
            drawn = self._draw(rows, self._keys(rows, noise), sampling)
            return collect_completions(drawn, sampling.stop_token_ids, limits_of(rows, sampling))
        except torch.OutOfMemoryError:
            if len(rows) == 1:
                raise
        # Here the error no longer refers to the frames, and so to the memory that they allocated.
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
        """How many of these rows make one wave."""
        self.capabilities = replace(self.capabilities, cache_bytes=self._room())
        longest = max(len(prompt.token_ids) for prompt, _ in rows)
        return self.capabilities.rows_at_once(len(rows), longest, sampling.max_tokens)

    def _together(self, lengths: Sequence[int]) -> int:
        """How many of the first rows, with prompts of these lengths, may be computed together."""
        return len(lengths)

    def _keys(self, rows: list[PromptRow], noise: int) -> Tensor:
        device = self._model.device
        ids = torch.tensor([prompt.noise_id for prompt, _ in rows], device=device)
        keys = row_keys(noise, ids, torch.tensor([k for _, k in rows], device=device))
        return offset_keys(keys, torch.tensor([prompt.offset for prompt, _ in rows], device=device))

    @abstractmethod
    def _draw(self, rows: list[PromptRow], keys: Tensor, sampling: Sampling) -> SampledTokens:
        """What `collect_completions` takes, of one wave in the order of its `rows`; `keys` (R,)
        are those of their noise."""
