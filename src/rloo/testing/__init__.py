"""Tests for plugins. Each function raises AssertionError with the violated rule.

The built-in rewards, engines, datasets, estimators, observers and commands pass these tests
(docs/plugins.md).
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from rloo.config.engine_spec import EngineSpec
from rloo.data.dataset_spec import DatasetSpec
from rloo.testing.completion_check import check_completion, require
from rloo.testing.server_engine_check import (
    ServerEngineCase,
    check_async_engine,
    check_sleeping_engine,
)

__all__ = [
    "ServerEngineCase", "check_async_engine", "check_command", "check_dataset", "check_engine",
    "check_estimator", "check_observer", "check_reward", "check_sleeping_engine",
]  # fmt: skip


def check_reward(
    reward: Callable[..., Any],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    **columns: Sequence[Any],
) -> list[float | None]:
    """Score `completions` with `reward` and return the scores. A reward must return one number or
    None for each completion, return equal scores in a second call, and not change its arguments.
    The score of a completion must not depend on the other completions of the call."""
    given = {"prompts": list(prompts), "completions": list(completions), **columns}
    found = _scores(reward, given)
    require(
        isinstance(found, (list, tuple)),
        f"the reward returned a {type(found).__name__}; it must return a list",
    )
    require(
        len(found) == len(completions),
        f"the reward returned {len(found)} scores for {len(completions)} completions",
    )
    for score in found:
        number = isinstance(score, Real) and math.isfinite(score)
        require(
            score is None or number, f"the reward returned {score!r}; it must be a number or None"
        )
    require(_scores(reward, given) == found, "the reward returned other scores the second time")
    alone = [
        _scores(reward, {name: [values[at]] for name, values in given.items()})[0]
        for at in range(len(completions))
    ]
    require(alone == list(found), "the reward scores a completion otherwise when it is alone")
    return list(found)


def _scores(reward: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    before = copy.deepcopy(dict(given))
    parameters = inspect.signature(reward).parameters.values()
    taken = {parameter.name for parameter in parameters}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    passed = {name: value for name, value in given.items() if takes_all or name in taken}
    found = reward(**passed)
    if inspect.isawaitable(found):

        async def wait() -> Any:
            return await found

        found = asyncio.run(wait())
    require(before == given, "the reward has changed the prompts, completions or columns")
    return found


def check_engine(spec: EngineSpec, inputs: Any, weights: Any, *, max_tokens: int = 8) -> Any:
    """Create an engine from `inputs` (`rloo.engines.engine_registry.EngineInputs`), load `weights`
    (a function that returns names and tensors), sample, and check the completions. Returns the
    engine; the caller must close it."""
    from rloo.types import EngineCapabilities, Prompt, Sampling

    require(isinstance(spec, EngineSpec), "an engine's entry point is an EngineSpec")
    engine, note = spec.make(inputs)
    require(note is None or isinstance(note, str), "make returns the engine and a note or None")
    capabilities = engine.capabilities
    require(isinstance(capabilities, EngineCapabilities), "capabilities are EngineCapabilities")
    calls: list[int] = []

    def counted() -> Any:
        calls.append(1)
        return weights()

    engine.load(counted, 7)
    require(engine.version == 7, "after load, version is the version that was loaded")
    before = len(calls)
    engine.load(counted, 7)
    require(len(calls) == before, "load asks for the weights of a version that it has")
    prompts = [Prompt(id=0, token_ids=[1, 2], content="a"), Prompt(id=1, token_ids=[3], content="")]
    sampling = Sampling(max_tokens=max_tokens, stop_token_ids=(0,))
    found = engine.sample(prompts, 3, sampling, 5)
    require(
        [len(group) for group in found] == [3, 3],
        "sample returns, for each prompt, as many completions as it is asked for",
    )
    for completion in (each for group in found for each in group):
        check_completion(completion, max_tokens)
    if capabilities.exact_noise:
        require(
            engine.sample(prompts, 3, sampling, 5) == found,
            "exact_noise is True, and an equal call returned other completions",
        )
    numbers = engine.stats().values()
    require(all(isinstance(value, Real) for value in numbers), "stats returns numbers")
    return engine


def check_dataset(spec: DatasetSpec, name: str, split: str = "train", options: Any = None) -> Any:
    """Load the rows of `name` twice and return them. Both results must be equal, and every row must
    have a prompt."""
    from rloo.config.config import RLOOConfig

    require(isinstance(spec, DatasetSpec), "a dataset's entry point is a DatasetSpec")
    options = RLOOConfig(dataset=name) if options is None else options
    spec.check(name, options)
    rows = list(spec.load(name, split, options))
    require(bool(rows), f"{name} has no rows in the split {split}")
    for row in rows:
        require(
            isinstance(row, Mapping) and isinstance(row.get("prompt"), (str, list)),
            f"{name} has a row without a prompt that is a text or messages",
        )
    require(list(spec.load(name, split, options)) == rows, f"{name} has other rows each time")
    return rows


def check_estimator(estimator: Callable[..., Any], **kwargs: Any) -> Any:
    """Check an estimator on 2 groups of 4 completions and return its results. The estimator must
    return finite advantages without a gradient, one per completion or one per token. It must return
    equal results in a second call, and not change the rewards."""
    import torch

    from rloo.algorithm.estimators import EstimatorInput

    reward_N = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.25, 0.5, 0.0, 1.0], dtype=torch.float64)
    sequence_T = torch.arange(8).repeat_interleave(torch.arange(1, 9))
    truncated_N = torch.zeros(8, dtype=torch.bool)
    group_N = torch.arange(8) // 4
    penalty_T = 0.01 * torch.ones(len(sequence_T), dtype=torch.float64)
    norms = torch.linspace(0.1, 1.9, len(sequence_T)).double()
    norm_T = norms if getattr(estimator, "reads_score_norms", False) else None
    whole = EstimatorInput(reward_N, penalty_T, sequence_T, group_N, truncated_N, norm_T)
    parts = [whole] if getattr(estimator, "scope", "group") == "batch" else whole.groups()
    found = []
    for part in parts:
        before = part.reward_N.clone()
        values = estimator(part, **kwargs)
        require(isinstance(values, torch.Tensor), "an estimator returns a tensor")
        sizes = (part.num_completions,), (len(part.sequence_T),)
        require(
            tuple(values.shape) in sizes,
            f"the estimator returned a tensor of {tuple(values.shape)}; it must be of {sizes[0]} "
            f"or {sizes[1]}",
        )
        require(
            values.is_floating_point() and bool(values.isfinite().all()),
            "advantages are finite floating-point numbers",
        )
        require(not values.requires_grad, "advantages have no gradient")
        require(torch.equal(before, part.reward_N), "the estimator has changed the rewards")
        require(torch.equal(values, estimator(part, **kwargs)), "the estimator is not a function")
        found.append(values)
    return found


def check_observer(make: Callable[..., Any], folder: Path) -> Any:
    """Create an observer with `make`, call its methods with the events of a small run in `folder`,
    and return the observer."""
    from rloo.config.config import RLOOConfig
    from rloo.tracking.finding import Finding
    from rloo.tracking.jsonl import ALARMS, COMPLETIONS, EVALUATIONS, GROUPS, METRICS
    from rloo.tracking.observer import ObservedRun, Observer

    said: list[Any] = []
    config = RLOOConfig(output_dir=str(folder), max_steps=2)
    run = ObservedRun(config, folder, said.append, said.append, lambda *found: said.append(found))
    observer = make(run)
    require(isinstance(observer, Observer), "an observer is a rloo.tracking.observer.Observer")
    row = {"reward": 0.5, "reward_std": 0.1, "loss": 0.1, "kl": 0.0, "step_time": 1.0}
    text = {"step": 1, "prompt": "a", "completion": "b", "reward": 0.5, "num_tokens": 1}
    observer.on_resume(
        {
            METRICS: [{"step": 1, **row}],
            COMPLETIONS: [text],
            EVALUATIONS: [],
            GROUPS: [],
            ALARMS: [],
        }
    )
    observer.on_step(2, row)
    observer.on_completions(2, [{**text, "step": 2}])
    observer.on_evaluation({"step": 2, "name": "end", "pass@1": 0.5})
    summary = {"status": "finished", "steps": 2, "start": {}, "end": {}, "config": config.to_dict()}
    found = observer.on_finish(summary)
    require(all(isinstance(each, Finding) for each in found), "on_finish returns a list of Finding")
    observer.on_end()
    observer.on_repeat()
    return observer


def check_command(
    command: Callable[..., Any], arguments: Sequence[str], wrong: Sequence[str]
) -> int:
    """Call `command` with the valid `arguments`, and then with the invalid arguments `wrong`, for
    which it must raise ValueError. The command must have a docstring, which its `--help` prints.
    Returns the exit status of the first call."""
    from rloo.algorithm.stop_signals import StopSignals

    require(bool(inspect.getdoc(command)), "a command has a docstring, which its --help prints")
    status = command(list(arguments), StopSignals())
    require(status is None or isinstance(status, int), "a command returns its status, or None")
    try:
        command(list(wrong), StopSignals())
    except ValueError as error:
        require(bool(str(error)), "a command says what is wrong with its arguments")
        return status or 0
    raise AssertionError(f"the command took {list(wrong)}; it must raise ValueError for them")
