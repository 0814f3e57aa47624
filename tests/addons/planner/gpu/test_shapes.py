"""What a model is made of, against a count of its operations and of its weights."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rloo.addons.planner.gpu.model_shapes import TYPICAL, shape_of_config, shape_of_size
from rloo.kernels.fused_layers import CACHES
from support.models import make_model


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_operations_and_parameters_are_those_of_the_module(kind):
    model = make_model(kind)
    model.set_attn_implementation("eager")  # of others the counter sees no products
    shape = shape_of_config(kind, model.config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    tokens = 24
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(tokens)[None] % 40)
    # The attention that is counted does not leave out what causality does; some versions compute
    # the angles of positions by a product, a thousandth of the whole.
    counted = counter.get_total_flops()
    assert counted == pytest.approx(tokens * shape.operations(tokens), rel=1e-3)
    with torch.no_grad():
        output = model(torch.arange(tokens)[None] % 40, use_cache=True)
    kept = next(output[name] for name in CACHES if name in output)
    numbers = sum(layer.keys.numel() + layer.values.numel() for layer in kept.layers)
    assert tokens * shape.cache_bytes == 2 * numbers


def test_a_backward_pass_takes_twice_the_operations():
    model = make_model("qwen3")
    model.set_attn_implementation("eager")
    shape = shape_of_config("m", model.config)
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(16)[None] % 40).logits.sum().backward()
    assert counter.get_total_flops() == pytest.approx(3 * 16 * shape.operations(16), rel=0.02)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3-0.6B", 0.596),
        ("Qwen3-1.7B", 1.7206),
        ("Qwen3-4B", 4.022),
        ("Qwen3-8B", 8.191),
        ("Qwen3-14B", 14.768),
        ("Qwen3-32B", 32.762),
        ("Llama-3-70B", 70.554),
    ],
)
def test_typical_shapes_have_the_published_number_of_parameters(name, billions):
    (shape,) = (shape for shape in TYPICAL if shape.name == name)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=2e-4)


@pytest.mark.parametrize(("text", "size"), [("7B", 7e9), ("600M", 6e8), ("70b", 70e9), ("3e9", 0)])
def test_a_size_is_as_large_as_it_says(text, size):
    if not size:
        with pytest.raises(ValueError, match="parameters is 3e9; it must be a size"):
            shape_of_size(text)
        return
    shape = shape_of_size(text)
    assert shape.parameters == pytest.approx(size, rel=0.02)
    assert shape.products <= shape.parameters


def test_a_mixture_of_experts_is_refused():
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(num_experts=8)
    with pytest.raises(ValueError, match="the model m is a mixture of experts"):
        shape_of_config("m", config)
