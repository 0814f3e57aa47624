"""Injects non-finite values in every place of a step. None may reach a checkpoint."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.chaos.harness import Rig
from benchmarks.chaos.processes import command, fork
from benchmarks.chaos.results import Trial

FIGURE = "values that are not finite, in every place of a step: none is in a checkpoint"
REWARDS = '''
import math


def broken(completions, **_):
    """{value} in one completion of every call from the third on: an evaluation, then training."""
    broken.calls = getattr(broken, "calls", 0) + 1
    values = [float(len(set(c.split()))) for c in completions]
    if broken.calls > 2:
        values[1] = {value}
    return values
'''


def nan(tensor: Any) -> Any:
    """A copy of the tensor with one NaN."""
    tensor = tensor.clone()
    tensor.view(-1)[0] = math.nan
    return tensor


def in_result(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """A replacement for a function that changes the function's result."""
    return lambda original, *args, **kwargs: change(original(*args, **kwargs))


def in_hidden(output: Any) -> Any:
    """Change the hidden states of a transformer."""
    output.last_hidden_state = nan(output.last_hidden_state)
    return output


def in_drawn(drawn: Any) -> Any:
    """Change a log-prob of an engine's samples."""
    nan(drawn[1])
    return drawn


def in_loss(original: Any, stepper: Any, loss: Any, **turn: Any) -> Any:
    """Call backward with an infinite loss."""
    return original(stepper, loss * math.inf, **turn)


def in_gradient(original: Any, stepper: Any) -> Any:
    """Make a gradient non-finite before the norm is computed."""
    first = next(p for p in stepper._parameters if p.grad is not None)
    first.grad.view(-1)[0] = math.inf
    return original(stepper)


def after_the_guard(original: Any, stepper: Any) -> Any:
    """Make gradients non-finite in a callback after the check of gradients."""
    before = stepper.before_step

    def broken() -> None:
        before()
        next(p for p in stepper._parameters if p.grad is not None).grad.fill_(math.nan)

    stepper.before_step = broken
    try:
        return original(stepper)
    finally:
        stepper.before_step = before


def in_weight(original: Any, stepper: Any) -> Any:
    """Make a weight non-finite after a step."""
    stats = original(stepper)
    stepper._parameters[-1].data.view(-1)[0] = math.inf
    return stats


def in_moment(name: str) -> Callable[..., Any]:
    """Make the optimizer's state non-finite after a step."""

    def change(original: Any, stepper: Any) -> Any:
        stats = original(stepper)
        next(iter(stepper.optimizer.state.values()))[name].view(-1)[0] = math.nan
        return stats

    return change


def in_scale(original: Any, stepper: Any) -> Any:
    """Make the loss scale of fp16 overflow after a step."""
    stats = original(stepper)
    stepper._scaler.get_scale = lambda: math.inf
    return stats


def in_learning_rate(original: Any, stepper: Any) -> Any:
    """Make the scheduler return NaN."""
    for group in stepper.optimizer.param_groups:
        group["lr"] = math.inf
    return original(stepper)


STEPPER = "rloo.model.optimizer_step:PolicyOptimizer"
ENGINE = "rloo.engines.native.native_engine:NativeEngine"
# Place -> the function whose calls are changed, the first changed call, and the change.
PLACES: dict[str, tuple[str, str, int, Callable[..., Any]]] = {
    "hidden states": ("transformers:Qwen3Model", "forward", 6, in_result(in_hidden)),
    "log-probs of the sampler": (ENGINE, "_draw", 2, in_result(in_drawn)),
    "reference": ("rloo.model.policy:Policy", "reference_logprobs", 2, in_result(nan)),
    "advantages": ("rloo.algorithm.loss_context:LossContext", "advantages", 2, in_result(nan)),
    "ratio": ("rloo.algorithm.loss", "ratio_of", 2, in_result(nan)),
    "loss": (STEPPER, "backward", 2, in_loss),
    "gradient before the guard": (STEPPER, "step", 2, in_gradient),
    "gradient after the guard": (STEPPER, "step", 2, after_the_guard),
    "weight": (STEPPER, "step", 3, in_weight),
    "weight in the last step": (STEPPER, "step", 5, in_weight),
    "first moment": (STEPPER, "step", 3, in_moment("exp_avg")),
    "second moment": (STEPPER, "step", 3, in_moment("exp_avg_sq")),
    "loss scale": (STEPPER, "step", 3, in_scale),
    "learning rate": (STEPPER, "step", 2, in_learning_rate),
}
LEARNING: dict[str, dict[str, Any]] = {
    "plain": {},
    "normalised": {"normalize_rewards": "running"},
    "adaptive KL": {"kl_kwargs": {"target": 0.1}},
}
VALUES = {
    "inf": "math.inf",
    "-inf": "-math.inf",
    "NaN": "math.nan",
    "1e39": "1e39",
    "1e308": "1e308",
}


def trials(rig: Rig, count: int | None, seed: int) -> list[Trial]:
    """Each place, changed once and permanently; and each value of a reward."""
    found = [
        Trial(f"{place}, {how}", "full", partial(break_place, rig, place, once=how == "once"))
        for place in PLACES
        for how in ("once", "from then on")
    ]
    found += [
        Trial(f"reward {name}, {how}", "full", partial(break_reward, rig, value, options))
        for name, value in VALUES.items()
        for how, options in LEARNING.items()
    ]
    return found[seed % len(found) :][:count] if count else found


def break_place(rig: Rig, place: str, *, once: bool) -> str:
    """Change the calls of a function in a run, and check the files of the run."""
    where, name, first, change = PLACES[place]
    with rig.folder() as folder:
        hit = folder / "hit"

        def prepare() -> None:
            module, _, owner = where.partition(":")
            found = importlib.import_module(module)
            target = getattr(found, owner) if owner else found
            original, calls = getattr(target, name), [0]

            def changed(*args: Any, **kwargs: Any) -> Any:
                calls[0] += 1
                if calls[0] == first or (calls[0] > first and not once):
                    hit.touch()
                    return change(original, *args, **kwargs)
                return original(*args, **kwargs)

            setattr(target, name, changed)

        ended = rig.train("full", folder, prepare)
        if not hit.exists():
            return f"was not hit: status {ended.status}: {ended.output[-300:]}"
        return look(folder / "run", ended.status, ended.output)


def break_reward(rig: Rig, value: str, options: dict[str, Any]) -> str:
    """Train with a reward that returns `value`, and check the files of the run."""
    with rig.folder() as folder:
        file = folder / "rewards_broken.py"
        file.write_text(REWARDS.replace("{value}", value))
        arguments = rig.arguments("full", folder, reward=f"{file}:broken", **options)
        ended = fork(command(arguments, None), folder / "log")
        return look(folder / "run", ended.status, ended.output)


def look(run: Path, status: int, output: str) -> str:
    """The errors in the results of a run: its checkpoints, the model, and the message at its
    end."""
    import torch
    from safetensors.torch import load_file

    wrong = []
    for path in sorted(run.rglob("*.safetensors")):
        for name, tensor in load_file(path).items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                wrong.append(f"{path.relative_to(run)}: {name} is not finite")
    for path in sorted(run.glob("checkpoint-*/*.json")):
        state = json.loads(path.read_text())
        if isinstance(state, dict):  # an evaluation may have undefined figures
            state = {key: value for key, value in state.items() if key not in ("start", "last")}
        if re.search(r"\b(NaN|-?Infinity)\b", json.dumps(state)):
            wrong.append(f"{path.relative_to(run)} has a number that is not finite")
    if status not in (0, 1, 2) or "Traceback" in output:
        wrong.append(f"status {status}: {output[-400:]}")
    finished = (run / "model.safetensors").exists()
    if finished and status:
        wrong.append(f"a model as of a finished run, status {status}")
    return "; ".join(wrong[:4])
