"""Tests for engines on servers: engines that sample while the model trains, and engines that sleep
meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, replace
from typing import Any

from rloo.testing.completion_check import check_completion, require

# The tokens of the prompts, and the most tokens of a completion.
_ROWS, _MAX_TOKENS = ([1, 2], [3], [4, 5, 6], [7, 2]), 16
_SAMPLES = 4


@dataclass(frozen=True, slots=True)
class ServerEngineCase:
    """An engine that samples in other processes, and the needs of its checks. `use(0)` and `use(1)`
    put two different sets of weights into the model, which `weights` iterates over.
    `logprobs(prompt, tokens)` returns the log-probs (T,) of a completion's tokens at temperature 1
    with the weights in use; those of the engine may differ by `tolerance`. `lose()` ends one of at
    least two servers. `asleep()` returns whether all servers have released their memory. With
    `partial`, unfinished completions continue with new weights. A wait takes at most `seconds`."""

    engine: Any
    weights: Callable[[], Any]
    use: Callable[[int], None]
    logprobs: Callable[[list[int], list[int]], Sequence[float]]
    lose: Callable[[], None] | None = None
    asleep: Callable[[], bool] | None = None
    partial: bool = False
    tolerance: float = 1e-3
    seconds: float = 120.0


def check_async_engine(case: ServerEngineCase) -> None:
    """Check an engine that samples while the model trains (`rloo.engines.async_engine`). `submit`
    must return at once. Each token must have the version of the weights that sampled it: the
    log-probs must be those of these weights. A load must keep the submitted requests, and
    `cancel_pending` must end them. If the case can `lose` a server, no completion may be missing
    afterwards."""
    version = _load(case, 0)
    _check_submit(case, version)
    version = _check_load_meanwhile(case, version)
    _check_cancel(case, version)
    if case.lose is not None:
        _check_loss(case, version)


def check_sleeping_engine(case: ServerEngineCase) -> None:
    """Check an engine whose servers are `asleep` while the model trains: after a load, and after
    `sample`. A sample must have the weights of the last load."""
    for number in (0, 1, 0):
        version = _load(case, number)
        require(_sleeps(case), "the servers do not sleep after a load")
        groups = case.engine.sample(*_request())
        for prompt, group in zip(_prompts(), groups, strict=True):
            for one in group:
                spans = one.weight_versions or ((version, len(one.token_ids)),)
                _check_tokens(case, prompt, replace(one, weight_versions=spans), {version: number})
        require(_sleeps(case), "the servers do not sleep after sample")


def _sleeps(case: ServerEngineCase) -> bool:
    require(case.asleep is not None, "the case has no function asleep")
    return case.asleep is not None and case.asleep()


def _load(case: ServerEngineCase, number: int) -> int:
    """Load a set of weights and return its version."""
    version = int(case.engine.version) + 1
    case.use(number)
    case.engine.load(case.weights, version)
    require(case.engine.version == version, "after load, version is the version that was loaded")
    return version


def _prompts() -> list[Any]:
    from rloo.types import Prompt

    return [Prompt(number, list(tokens), "") for number, tokens in enumerate(_ROWS)]


def _request(samples: Any = _SAMPLES, noise: int = 5) -> tuple[Any, ...]:
    from rloo.types import Sampling

    return _prompts(), samples, Sampling(_MAX_TOKENS, stop_token_ids=(0,)), noise


def _begin(case: ServerEngineCase, samples: Any = _SAMPLES, noise: int = 5) -> Any:
    begun = case.engine.submit(*_request(samples, noise))
    require(
        len(begun) == len(_ROWS) and all(isinstance(one, futures.Future) for one in begun),
        "submit returns one future for each prompt",
    )
    return begun


def _end(case: ServerEngineCase, begun: Any, numbers: Mapping[int, int]) -> Any:
    """The completions of submitted requests. `numbers` are the weights of each version that may
    have sampled them."""
    late = futures.wait(begun, case.seconds).not_done
    require(not late, f"a submitted request is not done after {case.seconds:g} s")
    groups = []
    for prompt, one in zip(_prompts(), begun, strict=True):
        error = futures.CancelledError() if one.cancelled() else one.exception()
        require(error is None, f"a submitted request has failed: {error!r}")
        groups.append(one.result())
        for completion in groups[-1]:
            _check_tokens(case, prompt, completion, numbers)
    return groups


def _check_tokens(
    case: ServerEngineCase, prompt: Any, completion: Any, numbers: Mapping[int, int]
) -> None:
    """Check a completion, and that each version has sampled the tokens that are said to be its."""
    check_completion(completion, _MAX_TOKENS)
    spans, tokens = completion.weight_versions, list(completion.token_ids)
    require(
        sum(size for _, size in spans) == len(tokens),
        f"weight_versions {spans} do not have a version for each of {len(tokens)} tokens",
    )
    names = [version for version, _ in spans]
    require(names == sorted(set(names)), f"weight_versions {spans} are not in order")
    require(
        {*names} <= {*numbers},
        f"tokens have the version {names[-1]}, and only {sorted(numbers)} can have sampled them",
    )
    require(case.partial or len(names) == 1, "a completion continued with other weights")
    start = 0
    for version, size in spans:
        case.use(numbers[version])
        part = slice(start, start := start + size)
        pairs = zip(
            case.logprobs(prompt.token_ids, tokens)[part], completion.policy_logprobs[part],
            strict=True,
        )  # fmt: skip
        apart = max(abs(ours - theirs) for ours, theirs in pairs)
        require(
            apart <= case.tolerance,
            f"tokens of version {version} have log-probs {apart:.2g} away from its weights' own",
        )


def _check_submit(case: ServerEngineCase, version: int) -> None:
    before = case.engine.busy_seconds()
    for _ in range(3):  # the process may have to wait for a processor
        begun = _begin(case)
        if at_once := not all(one.done() for one in begun):
            break
    require(at_once, "submit returned when all completions were done; it must return at once")
    groups = _end(case, begun, {version: 0})
    counts = {len(group) for group in groups}
    require(counts == {_SAMPLES}, f"{_SAMPLES} completions were asked for, and {counts} came")
    require(case.engine.busy_seconds() > before, "busy_seconds does not grow while it samples")
    parts = [range(1, 3)] * len(_ROWS)
    part = _end(case, _begin(case, parts), {version: 0})
    require({len(group) for group in part} == {2}, "submit samples a range of completions")
    if case.engine.capabilities.exact_noise:
        require(
            [_tokens(group) for group in part] == [_tokens(group[1:3]) for group in groups],
            "exact_noise is True, and a range has other completions",
        )
    other = _end(case, _begin(case, noise=6), {version: 0})
    require([*map(_tokens, other)] != [*map(_tokens, groups)], "noise changes no completion")


def _tokens(group: Sequence[Any]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in group]


def _check_load_meanwhile(case: ServerEngineCase, version: int) -> int:
    begun = _begin(case, noise=7)
    newest = _load(case, 1)
    groups = _end(case, begun, {version: 0, newest: 1})
    tokens = list(groups[0][0].token_ids), _prompts()[0].token_ids
    found = []
    for number in (0, 1):
        case.use(number)
        found.append(case.logprobs(tokens[1], tokens[0]))
    apart = max(abs(a - b) for a, b in zip(*found, strict=True))
    require(apart > 3 * case.tolerance, "use(0) and use(1) must have different log-probs")
    _end(case, _begin(case), {newest: 1})
    return newest


def _check_cancel(case: ServerEngineCase, version: int) -> None:
    begun = _begin(case, noise=8)
    case.engine.cancel_pending()
    late = futures.wait(begun, case.seconds).not_done
    require(not late, f"cancel_pending leaves a request that has no end after {case.seconds:g} s")
    _end(case, _begin(case), {version: 1})


def _check_loss(case: ServerEngineCase, version: int) -> None:
    assert case.lose is not None
    before = case.engine.stats().get("engine/lost", 0)
    begun = _begin(case, noise=9)
    case.lose()
    groups = _end(case, begun, {version: 1})
    require(
        {len(group) for group in groups} == {_SAMPLES}, "completions of a lost server are missing"
    )
    newest = _load(case, 0)
    _end(case, _begin(case), {newest: 0})
    require(
        case.engine.stats().get("engine/lost", 0) > before,
        "a server was lost, and stats does not count it as engine/lost",
    )
