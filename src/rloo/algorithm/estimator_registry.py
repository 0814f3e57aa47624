"""Load the estimator that the options name. The package's estimators are called directly. The
result of a user's estimator is checked, and each error names the user's file and line."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rloo import plugins
from rloo.algorithm.estimators import Estimator, EstimatorInput, composed, rloo
from rloo.config.config import RLOOConfig
from rloo.config.estimator_config import PAPER, estimator_config_of
from rloo.config.user_functions import load_function

# The built-in estimators of one advantage for each token, whatever their arguments are.
_PER_TOKEN = ("reinforce_pp", "optimal_token")


@dataclass(frozen=True, slots=True)
class LoadedEstimator:
    """An estimator with its arguments. If `over_rollout`, it receives the whole rollout in one
    call, else one group. A group with fewer than `smallest_group` scored completions is not trained
    on. `reads_score_norms`: see `estimator_input.reads_score_norms`."""

    name: str
    function: Estimator
    over_rollout: bool
    smallest_group: int
    reads_score_norms: bool = False

    @property
    def reads_coefficients(self) -> bool:
        """Whether the baselines have coefficients that are fitted on earlier rollouts."""
        return self.name == "regression"

    @property
    def built_in(self) -> bool:
        """Whether the estimator is one of this package."""
        return self.name in plugins.BUILT_IN["estimators"]

    @property
    def compute(self) -> Estimator:
        """The function that computes advantages, (N,) or (T,). A function from outside this package
        is checked: ValueError is raised if it fails or its result is invalid."""
        return self.function if self.built_in else self._compute_checked

    def advantages(self, returns: EstimatorInput) -> Tensor:
        """Return the advantages of whole groups, (N,) or (T,). The rewards of a pilot decide how
        many completions follow, so the baselines of a pilot are computed among the pilot: its terms
        then do not depend on this number. The baselines of the others may include the pilot,
        because they are unbiased for every pilot."""
        return returns.compute(self.compute)

    def __str__(self) -> str:
        return f"the estimator {self.name}{_place(self.function)}"

    def _compute_checked(self, returns: EstimatorInput) -> Tensor:
        parts = [returns] if self.over_rollout else returns.groups()
        found = [self._checked(part) for part in parts]
        if sum(map(len, found)) != returns.num_completions:
            found = [part.per_token(values) for values, part in zip(found, parts, strict=True)]
        return torch.cat(found)

    def _checked(self, returns: EstimatorInput) -> Tensor:
        try:
            values = self.function(returns)
        except torch.OutOfMemoryError:
            raise  # the update is retried with smaller micro-batches
        except Exception as error:  # a user's function may raise anything
            given = "rollout" if self.over_rollout else "group of 2 or more completions"
            raise ValueError(
                f"the estimator {self.name} failed in {_failing_line(error, self.function)}: "
                f"{type(error).__name__}: {error}; it must do with every {given}"
            ) from error
        size, num_tokens = returns.num_completions, len(returns.sequence_T)
        wanted = f"it must be a tensor of {size} numbers, one for each completion it was given"
        fault = None
        if not isinstance(values, Tensor):
            fault = f"a {type(values).__name__}; {wanted}"
        elif values.shape not in ((size,), (num_tokens,)):
            shape = " x ".join(map(str, values.shape)) or "no dimension"
            fault = f"a tensor of {shape}; {wanted}, or of {num_tokens}, one for each token"
        elif not values.is_floating_point():
            fault = f"numbers of type {values.dtype}; advantages are floating-point numbers"
        elif values.requires_grad:
            fault = "a tensor with a gradient attached; advantages are constants (detach it)"
        elif not values.isfinite().all():
            number = int((~values.isfinite()).nonzero()[0])
            what = "completion" if len(values) == size else "token"
            given = "rollout" if self.over_rollout else "group"
            fault = (
                f"{values[number].item()} for {what} {number} of a {given} of {size} completions; "
                "advantages must be finite"
            )
        if fault is not None:
            raise ValueError(f"{self} returned {fault}")
        return values.to(returns.reward_N)


def load_estimator(config: RLOOConfig) -> LoadedEstimator:
    """Return the estimator of `config`: by default `rloo`, which is `composed` with default
    options. Raises ValueError for an unknown function, for arguments that the function does not
    accept, and if groups are too small for the estimator."""
    name, arguments = config.estimator, config.estimator_kwargs or {}
    if name == "composed":
        form = estimator_config_of(config)
        chosen = rloo if form == PAPER else partial(composed, form=form)
        return LoadedEstimator(name, chosen, form.over_rollout, form.smallest_group)
    known = name in plugins.names("estimators")
    function = plugins.load("estimators", name) if known else load_function(name, "estimator")
    _check_arguments(name, function, arguments)
    scope = getattr(function, "scope", "group")
    if scope not in ("group", "batch"):
        raise ValueError(
            f"the estimator {name}{_place(function)} has the scope {scope!r}; it must be 'group' "
            "(one group at a time) or 'batch' (the whole rollout)"
        )
    smallest = 2 if scope == "group" else 1
    if config.num_generations < smallest:
        raise ValueError(
            f"num_generations is {config.num_generations} and the estimator {name} looks at one "
            "group; it needs at least 2 completions per prompt (num_generations, or an estimator "
            "of the scope 'batch')"
        )
    norms = getattr(function, "reads_score_norms", False)
    return LoadedEstimator(name, partial(function, **arguments), scope == "batch", smallest, norms)


def require_estimator(config: RLOOConfig) -> LoadedEstimator:
    """Return the estimator. Raises ValueError as `load_estimator` does, and if a built-in estimator
    gives each token an advantage and the ratio is one of the completion."""
    estimator = load_estimator(config)
    level = config.importance_sampling_level
    if config.estimator in _PER_TOKEN and level != "token":
        raise ValueError(
            f"the estimator {config.estimator} gives every token an advantage of its own, and "
            f"importance_sampling_level is {level}, one ratio for all of them "
            "(importance_sampling_level token)"
        )
    return estimator


def _check_arguments(name: str, function: Estimator, arguments: dict[str, Any]) -> None:
    try:
        inspect.signature(function).bind(None, **arguments)
    except TypeError as error:
        taken = ", ".join(list(inspect.signature(function).parameters)[1:]) or "none"
        raise ValueError(
            f"the estimator {name}{_place(function)} cannot be called with its returns and "
            f"estimator_kwargs {arguments}: {error} (arguments: {taken})"
        ) from None


def _code_of(function: Callable[..., Any]) -> Any:
    function = inspect.unwrap(function.func if isinstance(function, partial) else function)
    return getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)


def _place(function: Callable[..., Any]) -> str:
    """` (file, line n)`; an empty string for a function that is not written in Python."""
    code = _code_of(function)
    return f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""


def _failing_line(error: Exception, function: Callable[..., Any]) -> str:
    """`file, line n`: the last line in the function's file on the traceback of `error`."""
    code, frames = _code_of(function), traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code and frame.filename == code.co_filename]
    last = (own or frames)[-1]
    return f"{last.filename}, line {last.lineno}"
