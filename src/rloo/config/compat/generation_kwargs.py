"""`generation_kwargs`: sampling options under the names of transformers' GenerationConfig.

These options override our options (as in TRL). They are therefore written into our options: code
that reads a temperature or a length from the configuration reads the value that is used for
sampling.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from rloo.config.fields import coerce, suggest

# name -> (our option, the type in transformers, our value for null)
_OURS: dict[str, tuple[str, Any, Any]] = {
    "temperature": ("temperature", float | None, 1.0),
    "top_p": ("top_p", float | None, 1.0),
    "top_k": ("top_k", int | None, 0),
    "min_p": ("min_p", float | None, None),
    "repetition_penalty": ("repetition_penalty", float | None, 1.0),
    "max_new_tokens": ("max_completion_length", int, None),
    "stop_strings": ("stop_strings", list[str] | None, None),
}
# reason -> {name: the value that is accepted, in addition to null}
_REFUSED: dict[str, dict[str, Any]] = {
    "completions are sampled one token after the other, without beams": {
        "num_beams": 1, "num_beam_groups": 1, "length_penalty": 1.0, "early_stopping": False,
        "diversity_penalty": 0.0, "constraints": None, "force_words_ids": None,
        "penalty_alpha": 0.0, "dola_layers": None,
    },
    "training samples from the policy, evaluation is sampled and greedy": {"do_sample": True},
    "the number of completions is num_generations": {"num_return_sequences": 1},
    "the longest completion is max_new_tokens": {"max_length": None, "max_time": None},
    "the filters of this version are top_k, top_p, min_p and repetition_penalty": {
        "typical_p": 1.0, "top_h": None, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
        "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0,
        "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "sequence_bias": None,
        "suppress_tokens": None, "begin_suppress_tokens": None, "guidance_scale": 1.0,
        "watermarking_config": None, "exponential_decay_length_penalty": None,
    },
    "a completion ends when the policy ends it": {
        "min_length": 0, "min_new_tokens": 0, "forced_bos_token_id": None,
        "forced_eos_token_id": None,
    },
    "the prompt is given to the model as it is": {
        "token_healing": False, "decoder_start_token_id": None,
    },
    "completions are sampled by the policy alone (rollout_engine)": {
        "assistant_confidence_threshold": None, "assistant_early_exit": None,
        "assistant_ensemble_weight": None, "assistant_lookbehind": None,
        "continuous_batching_config": None, "is_assistant": False, "max_matching_ngram_size": None,
        "num_assistant_tokens": None, "num_assistant_tokens_schedule": None,
        "prompt_lookup_num_tokens": None, "speculation_type": None, "target_lookbehind": None,
        "use_mtp": False,
    },
}  # fmt: skip
_IDLE: dict[str, tuple[str, ...]] = {
    "the engines keep their own caches": (
        "use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size",
        "low_memory", "compile_config", "disable_compile",
    ),
    "engines return tokens and their log-probabilities": (
        "output_attentions", "output_hidden_states", "output_logits", "output_scores",
        "return_dict_in_generate",
    ),
    "probabilities are always normalised, and ones that are no numbers an error": (
        "renormalize_logits", "remove_invalid_values",
    ),
    "prompts and padding are the tokenizer's": ("pad_token_id", "bos_token_id"),
}  # fmt: skip
# Names in vLLM's SamplingParams.
_ELSEWHERE = {"max_tokens": "max_new_tokens", "stop": "stop_strings", "n": "num_generations"}

_REASON_OF = {name: (ok, why) for why, names in _REFUSED.items() for name, ok in names.items()}
_IDLE_OF = {name: why for why, names in _IDLE.items() for name in names}
_KNOWN = (*_OURS, "eos_token_id", *_REASON_OF, *_IDLE_OF)


def sampling_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Our options that `generation_kwargs` set, without `eos_token_id` (see `stop_tokens`). Raises
    ValueError for an unknown name, and for a setting that is not implemented."""
    options: dict[str, Any] = {}
    for name, value in (given or {}).items():
        where = f"generation_kwargs.{name}"
        if name in _OURS:
            ours, kind, null = _OURS[name]
            read = coerce(where, kind, value)
            options[ours] = null if read is None else read
        elif name in _REASON_OF:
            harmless, reason = _REASON_OF[name]
            if value is not None and value != harmless:
                raise ValueError(f"{where} is {value!r}; {reason}")
        elif name in _IDLE_OF:
            if value is not None:
                warnings.warn(f"{where} has no effect: {_IDLE_OF[name]}", stacklevel=4)
        elif name != "eos_token_id":
            known = _ELSEWHERE.get(name)
            hint = f"; here it is called {known}" if known else suggest(name, _KNOWN)
            raise ValueError(f"unknown option {where}{hint}")
    stop_tokens(given, ())
    return options


def stop_tokens(given: Mapping[str, Any] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that end a completion: `eos_token_id` of `generation_kwargs` (one token or
    several), or else `default`. Raises ValueError if `eos_token_id` is not a token id."""
    asked = (given or {}).get("eos_token_id")
    if asked is None:
        return default
    tokens = tuple(coerce("generation_kwargs.eos_token_id", list[int], asked))
    if not tokens or min(tokens) < 0:
        raise ValueError(
            f"generation_kwargs.eos_token_id is {asked!r}; it must be a token, or a list of them"
        )
    return tokens
