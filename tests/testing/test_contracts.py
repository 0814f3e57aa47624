"""`rloo.testing`: what is built in passes, and what breaks a contract is told in a sentence."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rloo import plugins, testing
from rloo.config.engine_spec import EngineSpec, engine_spec
from rloo.data.dataset_spec import DatasetSpec
from rloo.engines.engine_registry import EngineInputs
from rloo.rewards import load_reward
from support.models import make_model


def test_the_reward_of_the_embedded_task_passes():
    columns = {"numbers": [[1, 4], [2, 3]], "target": [5, 6]}
    testing.check_reward(load_reward("countdown"), ["a", "b"], ["1 + 4", "3"], **columns)


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (lambda completions: 1.0, "must return a list"),
        (lambda completions: [1.0], "1 scores for 2 completions"),
        (lambda completions: ["a" for _ in completions], "must be a number or None"),
        (lambda completions: [float("nan") for _ in completions], "must be a number or None"),
        (lambda completions: [len(completions) for _ in completions], "when it is alone"),
        (lambda completions: [completions.append("") or 1.0 for _ in (1, 2)], "has changed"),
    ],
)
def test_what_is_no_reward_is_told(reward, said):
    with pytest.raises(AssertionError, match=said):
        testing.check_reward(reward, ["a", "b"], ["c", "d"])


@pytest.mark.parametrize("name", ["auto", "native", "hf"])
def test_built_in_engines_pass(name):
    model = make_model("qwen3").eval()
    testing.check_engine(engine_spec(name), EngineInputs(model, 0), model.named_parameters)


def test_what_is_no_engine_is_told():
    model = make_model("qwen3").eval()
    inputs = EngineInputs(model, 0)

    def few(inputs):
        engine, note = engine_spec("hf").make(inputs)
        found = engine.sample
        engine.sample = lambda *arguments: [group[:2] for group in found(*arguments)]
        return engine, note

    with pytest.raises(AssertionError, match="as many completions as it is asked for"):
        testing.check_engine(EngineSpec(few), inputs, model.named_parameters)
    with pytest.raises(AssertionError, match="is an EngineSpec"):
        testing.check_engine(few, inputs, model.named_parameters)


def test_what_is_no_dataset_is_told():
    rows = iter(range(9))
    spec = DatasetSpec(lambda name, split, options: [{"prompt": f"{next(rows)}"}])
    options = SimpleNamespace()
    with pytest.raises(AssertionError, match="has other rows each time"):
        testing.check_dataset(spec, "a:b", options=options)
    empty = replace(spec, load=lambda name, split, options: [{"question": ""}])
    with pytest.raises(AssertionError, match="a row without a prompt"):
        testing.check_dataset(empty, "a:b", options=options)


@pytest.mark.parametrize("name", ["rloo", "grpo", "reinforce_pp"])
def test_built_in_estimators_pass(name):
    testing.check_estimator(plugins.load("estimators", name))


@pytest.mark.parametrize(
    ("estimator", "said"),
    [
        (lambda returns: [0.0], "returns a tensor"),
        (lambda returns: torch.zeros(3), r"of \(3,\); it must be"),
        (lambda returns: returns.return_N / 0, "finite"),
        (lambda returns: returns.reward_N.add_(1.0), "has changed the rewards"),
    ],
)
def test_what_is_no_estimator_is_told(estimator, said):
    with pytest.raises(AssertionError, match=said):
        testing.check_estimator(estimator)


def test_what_is_no_command_is_told():
    def undocumented(arguments, signals):
        return 0

    with pytest.raises(AssertionError, match="docstring"):
        testing.check_command(undocumented, [], [])
    with pytest.raises(AssertionError, match="must raise ValueError"):
        testing.check_command(print, [], [])
