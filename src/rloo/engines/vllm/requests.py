"""Builds the requests for completions, and reads and validates a server's answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rloo.config.vllm_validation import COLDEST, HOTTEST
from rloo.engines.counter_rng import noise_key
from rloo.engines.sampling import check_request, refuse_images
from rloo.engines.vllm.client import TOKENS_ROUTE, ServerError
from rloo.types import Completion, Prompt, Sampling, WeightVersions

PHASE = "sampling"
# Log-probs may exceed 0 by this value, since they are rounded.
_ABOVE_ZERO = 1e-3


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request for the completions of a prompt that have these `numbers`. It has one seed for all
    of them."""

    prompt: Prompt
    numbers: range
    sampling: Sampling
    noise: int

    @property
    def limit(self) -> int:
        """The maximum number of new tokens: without the tokens of the completion that the prompt
        contains already."""
        return self.sampling.max_tokens - self.prompt.offset

    def body(self, route: str, *, model: str | None, salt: str) -> dict[str, Any]:
        """The JSON body. `salt` separates the prefix caches of different weights."""
        how, ids = self.sampling, self.prompt.token_ids
        draw = f"prompt {self.prompt.noise_id}"
        if self.prompt.offset:  # otherwise all turns would have the same noise
            draw += f" from {self.prompt.offset}"
        # vLLM assigns consecutive seeds to the completions of a request. A completion has the same
        # seed if the completions of its prompt are divided among several requests.
        seed = (noise_key(self.noise, draw, 0) >> 2) + self.numbers.start
        params: dict[str, Any] = {
            "n": len(self.numbers),
            "max_tokens": self.limit,
            "temperature": 0.0 if how.greedy else how.temperature,
            # Set explicitly, since a server may use the defaults of its model.
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": seed,
            "logprobs": 0,
            "ignore_eos": True,
            "stop_token_ids": list(how.stop_token_ids),
            "stop": list(how.stop_strings),
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
        }
        if route == TOKENS_ROUTE:
            params["detokenize"] = bool(how.stop_strings)
            body: dict[str, Any] = {"token_ids": ids, "sampling_params": params}
        else:
            ways = {"return_token_ids": True, "return_tokens_as_token_ids": True}
            body = {"prompt": ids, **params, **ways}
        return body | {"cache_salt": salt} | ({"model": model} if model else {})


def requests_of(
    prompts: Sequence[Prompt], numbers: Sequence[range], sampling: Sampling, noise: int
) -> list[CompletionRequest]:
    """One request per prompt for its completions. Raises ValueError for requests that vLLM, or
    every engine, cannot sample."""
    check_request(prompts, min(map(len, numbers), default=1), sampling)
    check_sampling(sampling)
    refuse_images(prompts, "which are not sent to vLLM in this version (rollout_engine hf)")
    both = zip(prompts, numbers, strict=True)
    return [CompletionRequest(prompt, own, sampling, noise) for prompt, own in both]


def check_sampling(sampling: Sampling) -> None:
    """Raise ValueError for settings with which vLLM samples differently from our engines, or does
    not return the policy's log-probs."""
    if sampling.filtered and not sampling.greedy:
        raise ValueError(
            "vLLM returns one log-prob a token, that of the distribution sampled from; with top_p, "
            "top_k, min_p or repetition_penalty the policy's would be unknown (set them to 1, 0, 0 "
            "and 1, or rollout_engine native)"
        )
    if not sampling.greedy and not COLDEST <= sampling.temperature <= HOTTEST:
        raise ValueError(
            f"temperature is {sampling.temperature:g}; vLLM samples from {COLDEST} to {HOTTEST:g} "
            "(temperature, eval_kwargs.temperature)"
        )


def read_answer(
    answer: Any,
    request: CompletionRequest,
    *,
    url: str,
    versions: Mapping[str, int],
    vocabulary: int,
) -> list[Completion]:
    """Read the completions in an answer. Tokens must be below `vocabulary`. `versions` maps labels
    to versions of the weights that may have sampled the answer. The first is the version that the
    server had at the request. Raises ServerError for an answer that does not match the request, or
    that names other versions."""

    def fault(fact: str) -> ServerError:
        return ServerError(PHASE, url, f"answered with {fact}")

    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    if not isinstance(choices, Sequence) or isinstance(choices, str):
        raise fault(f"no completions: {str(answer)[:200]}")
    if len(choices) != len(request.numbers):
        raise fault(f"{len(choices)} completions, of which {len(request.numbers)} were asked for")
    found: dict[int, Completion] = {}
    for choice in choices:
        try:
            index = int(choice["index"])
            completion = _read_choice(choice, request, versions, vocabulary)
        except _Fault as error:
            raise fault(str(error)) from None
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise fault(f"a completion that cannot be read: {error!r}") from error
        found[index] = completion
    if sorted(found) != list(range(len(choices))):
        raise fault(f"completions numbered {sorted(found)}")
    return [found[index] for index in range(len(choices))]


class _Fault(Exception):
    pass


def _read_choice(
    choice: Mapping[str, Any],
    request: CompletionRequest,
    versions: Mapping[str, int],
    vocabulary: int,
) -> Completion:
    how, tokens = request.sampling, choice["token_ids"]
    if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        raise _Fault("something that is no token's number")
    scored, logprobs = _logprobs(choice["logprobs"])
    if scored != tokens:
        raise _Fault(f"log-probs of other tokens than the {len(tokens)} of its completion")
    if not all(math.isfinite(value) and value <= _ABOVE_ZERO for value in logprobs):
        raise _Fault("log-probs that are not finite, or above 0")
    spans: WeightVersions = ((next(iter(versions.values())), len(tokens)),)
    if "content" in choice["logprobs"]:
        spans = _spans(choice.get("weight_versions") or [], versions, len(tokens))
    finish = _checked_finish(choice["finish_reason"], tokens, how, request.limit)
    return Completion(
        tokens,
        finish,
        [min(value, 0.0) for value in logprobs],
        [0.0] * len(tokens) if how.greedy else [min(value, 0.0) for value in logprobs],
        weight_versions=spans,
    )


def _spans(given: Sequence[Any], versions: Mapping[str, int], count: int) -> WeightVersions:
    """The versions that sampled the `count` tokens, as spans, from the report of the server."""
    spans: list[tuple[int, int]] = []
    end = 0
    for span in given:
        name, start, stop = span["version"], int(span["start"]), int(span["end"])
        if name not in versions:
            raise _Fault(f"tokens of version {name}, not {' or '.join(versions)}")
        if start != end or stop <= start or (spans and versions[name] <= spans[-1][0]):
            raise _Fault(f"versions of its tokens that do not follow each other: {given}")
        spans.append((versions[name], stop - start))
        end = stop
    if end != count:
        raise _Fault("tokens of an unknown version")
    return tuple(spans)


def _logprobs(given: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """The tokens and their log-probs, from the answer of either route."""
    if "content" in given:
        content = given["content"]
        return [e["token_id"] for e in content], [float(e["logprob"]) for e in content]
    names = [name.removeprefix("token_id:") for name in given["tokens"]]
    return [int(name) for name in names], [float(value) for value in given["token_logprobs"]]


def _checked_finish(finish: Any, tokens: Sequence[int], how: Sampling, limit: int) -> Any:
    """Return the finish reason after checking it against the tokens and `limit`."""
    stops = [place for place, token in enumerate(tokens) if token in how.stop_token_ids]
    by_token = bool(stops) and stops[0] == len(tokens) - 1
    if stops and not by_token:
        raise _Fault(f"{len(tokens) - 1 - stops[0]} tokens after the one that ends it")
    by_text = False
    if how.stop_strings and how.decode is not None:
        (text,) = how.decode([list(tokens)])
        by_text = any(stop in text for stop in how.stop_strings)
    if len(tokens) > limit or not tokens:
        raise _Fault(f"{len(tokens)} tokens, of which at most {limit} were asked for")
    if finish not in ("stop", "length"):
        raise _Fault(f"the finish reason {finish!r}")
    if finish == "stop" and not (by_token or by_text):
        raise _Fault("a completion that has stopped without a stop token or text")
    if finish == "length" and len(tokens) < limit:
        raise _Fault(
            f"{len(tokens)} tokens as if that were its limit, of {limit}: its context "
            "(--max-model-len) is too short"
        )
    # A completion that ends by a stop at its last allowed token counts as stopped.
    return "stop" if by_token or by_text else finish


def greedy(sampling: Sampling, max_tokens: int) -> Sampling:
    """Greedy settings for exactly `max_tokens` tokens, without stop tokens and stop strings."""
    return replace(sampling, greedy=True, max_tokens=max_tokens, stop_token_ids=(), stop_strings=())
