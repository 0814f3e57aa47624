"""The reference engine: transformers' `generate` and filters, with the noise of `counter_rng`. The
engine is slow, but correct for every causal language model that `generate` can run, also with
images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from rloo.data.image_processing import join_inputs
from rloo.data.images import image_token_ids
from rloo.engines.counter_rng import uniforms
from rloo.engines.in_process import InProcessEngine, PromptRow, SampledTokens, limits_of, pad_left
from rloo.engines.sampling import StopStringMatcher, draw, gather_logprobs, invert_cdf
from rloo.engines.trial_sampling import SAMPLING, trial_prompts, worst_error
from rloo.model.prepare_model import rounding_of
from rloo.types import Sampling, Weights


@dataclass(frozen=True, slots=True)
class BatchingRule:
    """A way in which `generate` samples a model correctly: which rows are batched (any, rows with
    prompts of one length, or one row at a time), and whether a cache is used."""

    rows: Literal["any", "one length", "one"] = "any"
    cached: bool = True


# From fast to slow.
_WAYS = (
    BatchingRule(), BatchingRule("one length"), BatchingRule("one"),
    BatchingRule(cached=False), BatchingRule("one length", cached=False),
    BatchingRule("one", cached=False),
)  # fmt: skip
# Types of layers without a recurrent state. (Padding tokens would change such a state.)
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def is_recurrent(model: PreTrainedModel) -> bool:
    """Whether any layer has a recurrent state, as in linear attention, state space models and short
    convolutions."""
    types = getattr(model.config.get_text_config(), "layer_types", None) or []
    return bool(model._is_stateful or set(types) - _ATTENTION)


def find_way(model: PreTrainedModel) -> BatchingRule:
    """The fastest batching rule whose log-probs match a forward pass. Each rule is tried. A
    recurrent model is never padded: the effect of padding on its state depends on the weights,
    which training changes. Raises ValueError if no rule matches."""
    recurrent = is_recurrent(model)
    # The errors of recurrent steps, compared with a full pass, accumulate over tokens.
    sampling = replace(SAMPLING, max_tokens=16) if recurrent else SAMPLING
    found: str | None = None
    for way in _WAYS:
        if recurrent and way.rows == "any":
            continue
        fault = _fault_of(model, way, sampling)
        if fault is None:
            return way
        found = found or fault
    raise ValueError(f"{type(model).__name__} cannot be sampled: {found} (model)")


def _fault_of(model: PreTrainedModel, way: BatchingRule, sampling: Sampling) -> str | None:
    """Run a trial of a batching rule. Return why the rule is wrong, or None."""
    prompts = trial_prompts(model, (2, 2, 5, 5))
    try:
        groups = HFEngine(model, pad_token_id=0, way=way).sample(prompts, 2, sampling, noise=0)
        worst = worst_error(model, prompts, groups)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # model code may fail in any way
        return f"a trial of transformers' generate failed: {type(error).__name__}: {error}"
    if worst <= rounding_of(model):
        return None
    return (
        "log-probabilities of what transformers' generate draws differ from those of one forward "
        f"pass by {worst:.1e}, so another distribution would be sampled than is trained"
    )


class HFEngine(InProcessEngine):
    """Samples with `generate` from the policy's module. Placeholder tokens of images are never
    sampled, since no images would belong to them. The distribution of `behavior_logprobs` excludes
    these tokens. The distribution of `policy_logprobs` includes them, as in training, so that the
    difference is visible."""

    name = "hf"
    default_cache_bytes = 2 << 30
    keeps_finished = True

    def __init__(
        self, model: PreTrainedModel, *, way: BatchingRule | None = None, **options: Any
    ) -> None:
        """`way`: see `find_way`. If None, a model without a recurrent state uses the default rule,
        other models the result of `find_way`. Raises ValueError if no rule is correct."""
        super().__init__(model, **options)
        if way is None:
            way = find_way(model) if is_recurrent(model) else BatchingRule()
        self.way = way

    def _together(self, lengths: Sequence[int]) -> int:
        if self.way.rows == "any":
            return len(lengths)
        same = list(takewhile(lambda length: length == lengths[0], lengths))
        return 1 if self.way.rows == "one" else len(same)

    def load(self, weights: Weights, version: int) -> None:
        """Set the version. No weights are copied, since the engine shares the policy's module."""
        self.version = version

    def _draw(self, rows: list[PromptRow], keys: Tensor, sampling: Sampling) -> SampledTokens:
        device = keys.device
        input_ids, pads = pad_left([p.token_ids for p, _ in rows], self._pad_token_id, device)
        width = input_ids.shape[1]
        pixels = [(prompt.noise_id, prompt.pixels) for prompt, _ in rows]
        limits = limits_of(rows, sampling)
        never = image_token_ids(self._model.config)
        drawing = _Drawing(sampling, keys, pads, input_ids.shape[1], limits, never)
        stopping: Any = [drawing.stop]
        with _no_defaults(self._model):
            self._model.generate(  # type: ignore[operator]
                input_ids,
                **join_inputs(pixels, pads.tolist(), width, device),
                attention_mask=(torch.arange(width, device=device) >= pads[:, None]).long(),
                generation_config=GenerationConfig(
                    max_new_tokens=max(limits),
                    do_sample=False,
                    num_beams=1,
                    use_cache=self.way.cached,
                    eos_token_id=list(sampling.stop_token_ids) or None,
                    pad_token_id=self._pad_token_id,
                ),
                logits_processor=LogitsProcessorList([drawing]),
                stopping_criteria=transformers.StoppingCriteriaList(stopping),
            )
        lengths = drawing.stop_text.lengths
        return drawing.tokens, drawing.policy_logprobs, drawing.behavior_logprobs, lengths


@contextmanager
def _no_defaults(model: PreTrainedModel) -> Iterator[None]:
    """Hide the model's generation settings, which `generate` uses for all unset options."""
    settings = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = settings


class _Drawing(LogitsProcessor):
    """Samples each token with the noise and masks all other tokens, so that greedy `generate`
    selects the sampled token."""

    def __init__(
        self,
        sampling: Sampling,
        keys: Tensor,
        pads: Tensor,
        width: int,
        limits: Sequence[int],
        never: Sequence[int],
    ) -> None:
        self._sampling = sampling
        self._never = torch.tensor(never, dtype=torch.long, device=keys.device)
        self._width = width
        self._limits = torch.tensor(limits, device=keys.device)
        self._noise = uniforms(keys, 0, max(limits))
        self._filters = _make_filters(sampling, pads)
        self.tokens = torch.full((len(keys), max(limits)), -1, device=keys.device)
        self.policy_logprobs = torch.zeros(self.tokens.shape, device=keys.device)
        self.behavior_logprobs = torch.zeros(self.tokens.shape, device=keys.device)
        self.stop_text = StopStringMatcher(sampling, len(keys), keys.device)
        self._rows = torch.arange(len(keys), device=keys.device)
        self.ended = torch.zeros(len(keys), dtype=torch.bool, device=keys.device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        position = input_ids.shape[1] - self._width
        noise = self._noise[:, position]
        allowed = scores.index_fill(1, self._never, float("-inf"))
        if self._sampling.greedy or not self._sampling.filtered:
            drawn = draw(allowed, noise, self._sampling)
            tokens, behavior = drawn.tokens, drawn.behavior_logprobs
        else:
            tokens, behavior = invert_cdf(self._filters(input_ids, allowed), noise)  # type: ignore[arg-type]
        temperature = 1.0 if self._sampling.greedy else self._sampling.temperature
        policy = behavior
        if self._sampling.filtered or len(self._never):
            policy = gather_logprobs(scores.float() / temperature, tokens)
        self.tokens[:, position] = tokens
        self.policy_logprobs[:, position] = policy
        self.behavior_logprobs[:, position] = behavior
        ended = self.stop_text.update(self.tokens, self._rows, position)
        self.ended = self._limits <= position + 1
        if ended is not None:
            self.ended |= ended
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens[:, None], 0.0)

    def stop(self, *_: Any, **__: Any) -> Tensor:
        """A stopping criterion: the rows that have reached their limit, or whose last token
        completed a stop string."""
        return self.ended


class _PenaltyBehindPadding(LogitsProcessor):
    """transformers' repetition penalty on the tokens of the prompt and the completion, but not on
    left padding, which only newer versions of transformers can exclude."""

    def __init__(self, penalty: float, pads: Tensor) -> None:
        self._penalty = transformers.RepetitionPenaltyLogitsProcessor(penalty)
        self._pads = pads

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        penalised = scores.clone()
        for pad in self._pads.unique().tolist():
            rows = self._pads == pad
            ids = input_ids[rows, pad:]
            penalised[rows] = self._penalty(ids, scores[rows])
        return penalised


def _make_filters(sampling: Sampling, pads: Tensor) -> LogitsProcessorList:
    """transformers' filters, in the order in which its `generate` applies them."""
    filters = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        filters.append(_PenaltyBehindPadding(sampling.repetition_penalty, pads))
    filters.append(transformers.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        filters.append(transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        filters.append(transformers.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        filters.append(transformers.MinPLogitsWarper(sampling.min_p))
    return filters
