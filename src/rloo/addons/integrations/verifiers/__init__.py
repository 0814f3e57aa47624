"""Converts environments of `verifiers` to arguments of a trainer."""

from __future__ import annotations

from typing import Any

from rloo.config.optional_packages import install


def from_verifiers(environment: Any) -> dict[str, Any]:
    """The arguments of RLOOTrainer for an environment of `verifiers`: the rows of its dataset, its
    rollouts as a `rollout_func`, and the rewards of its rubric. The run's options control sampling.
    Raises ValueError for an environment with its own sampling arguments or advantages.

    >>> RLOOTrainer(model, args=args, **from_verifiers(verifiers.load_environment("wordle")))
    """
    try:
        from rloo.addons.integrations.verifiers.verifiers_environment import (
            REWARD,
            VerifiersEnvironment,
        )
    except ModuleNotFoundError as error:
        raise ValueError(
            "from_verifiers needs the package verifiers, before 0.4, which has another interface: "
            f"{install('verifiers')}"
        ) from error
    own = {n: v for n, v in environment.sampling_args.items() if v and (n, v) != ("n", 1)}
    if own:
        raise ValueError(
            f"the environment has sampling_args {own}, and the run's options say how is sampled; "
            "set environment.sampling_args to {} (from_verifiers)"
        )
    if environment.provides_advantages:
        raise ValueError(
            "the environment's rubric makes advantages, which here follow from the rewards of a "
            "group (from_verifiers, estimator)"
        )

    def rubric(**columns: Any) -> list[float | None]:
        given: list[float | None] = columns[REWARD]
        return given

    return {
        "train_dataset": environment.get_dataset(),
        "reward_funcs": rubric,
        "rollout_func": VerifiersEnvironment(environment),
    }
