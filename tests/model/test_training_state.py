"""What an optimizer and the random generators hold, taken out and put back."""

import json
import random

import numpy as np
import pytest
import torch
from torch import nn

from rloo.model.training_state import (
    capture_rng,
    first_not_finite,
    parameter_shapes,
    require_same_shapes,
    restore_rng,
)
from support.optimizers import load_state, make_optimizer, state_of, take_step
from support.training import identical


def test_state_in_another_precision_than_the_weights_keeps_its_bits():
    def make():
        model = nn.Linear(3, 1, bias=False, dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.state[model.weight]["momentum_buffer"] = torch.tensor([[1 / 3, 1e-9, 7.0]])
        return model, optimizer

    (model, saved), (other, loaded) = make(), make()
    next(iter(loaded.state.values()))["momentum_buffer"].zero_()
    load_state(other, loaded, *state_of(model, saved))
    (buffer,) = (state["momentum_buffer"] for state in loaded.state.values())
    assert identical(buffer, torch.tensor([[1 / 3, 1e-9, 7.0]]))


def test_a_loaded_optimizer_shares_no_memory_with_what_it_was_loaded_from():
    model, optimizer = make_optimizer()
    take_step(model, optimizer)
    tensors, meta = state_of(model, optimizer)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    other, other_optimizer = make_optimizer()
    load_state(other, other_optimizer, tensors, meta)
    take_step(other, other_optimizer)
    assert identical(tensors, before)


def test_an_optimizer_of_another_model_is_refused_and_unchanged():
    model, optimizer = make_optimizer(size=3)
    take_step(model, optimizer)
    tensors, meta = state_of(model, optimizer)
    larger, other = make_optimizer(size=5)
    before = other.state_dict()
    with pytest.raises(
        ValueError, match=r"parameter 0\.weight is \[3, 4\] there and \[5, 4\] here"
    ):
        load_state(larger, other, tensors, meta)
    assert identical(other.state_dict(), before)
    single = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=r"0\.weight is \[3, 4\] there and absent here"):
        load_state(single, torch.optim.AdamW(single.parameters(), lr=0.1), tensors, meta)


def test_models_are_compared_by_the_names_and_shapes_of_their_parameters():
    shapes = parameter_shapes(nn.Linear(2, 3))
    assert shapes == {"weight": [3, 2], "bias": [3]}
    require_same_shapes(shapes, {"bias": [3], "weight": [3, 2]})
    with pytest.raises(ValueError, match="parameter bias is absent there"):
        require_same_shapes({"weight": [3, 2]}, shapes)


def test_generators_go_on_from_the_captured_state():
    np.random.standard_normal()  # leaves the second of a pair behind
    state = json.loads(json.dumps({"numpy": capture_rng()["numpy"]}))
    state = {**capture_rng(), **state}

    def draw():
        return (
            random.random(),
            random.gauss(0, 1),
            np.random.standard_normal(3).tolist(),
            torch.rand(3),
        )

    first = draw()
    restore_rng(state)
    assert identical(draw(), first)


def test_generator_states_of_absent_devices_are_reported(monkeypatch):
    state = capture_rng()
    here = len(state["cuda"])
    with pytest.warns(UserWarning, match=f"of {here + 2} CUDA devices and there are {here}"):
        restore_rng({**state, "cuda": [*state["cuda"], torch.zeros(1), torch.zeros(1)]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_first_tensor_that_is_not_finite_is_named(value, dtype):
    tensors = {name: torch.ones(5, 7, dtype=dtype) for name in "abc"}
    assert first_not_finite(tensors.items()) is None
    tensors["b"][4, 6] = tensors["c"][0, 0] = value
    assert first_not_finite(tensors.items()) == "b"
    assert first_not_finite({"counts": torch.ones(3, dtype=torch.long), **tensors}.items()) == "b"


def test_finite_numbers_whose_sum_is_not_are_finite():
    large = torch.full((4,), torch.finfo(torch.float32).max)
    assert not large.sum().isfinite()
    assert first_not_finite([("large", large), ("none", torch.empty(0))]) is None
