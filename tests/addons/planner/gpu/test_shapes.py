"""What a model is made of, against a count of its operations and of its weights."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rloo.addons.planner.gpu.model_shapes import (
    TYPICAL,
    LayerSizes,
    shape_of_config,
    shape_of_size,
)
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


def small_mixture(**changes):
    from transformers import Qwen3MoeConfig

    usual = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 100,
        "tie_word_embeddings": False,
    }
    return Qwen3MoeConfig(**usual | changes)


def test_a_mixture_of_experts_is_counted_on_the_module():
    config = small_mixture()
    counted = shape_of_config("m", config)
    sizes = LayerSizes(2, 64, 4, 2, 16, 32, 100, 2, experts=8, chosen=2)
    assert counted.expert_parameters == 2 * 8 * 3 * 64 * 32
    by_hand = sizes.shape("m", "by hand")
    for name in ("products", "expert_parameters", "experts", "chosen"):
        assert getattr(counted, name) == getattr(by_hand, name)
    # Attention, and a router for each of 8 experts; experts are not quantised.
    assert counted.linear == 2 * (2 * 64 * 64 + 2 * 64 * 32 + 64 * 8)
    # Norms are the parameters that are no matrices.
    assert counted.parameters - by_hand.parameters == 2 * (2 * 64 + 2 * 16) + 64
    dense = LayerSizes(2, 64, 4, 2, 16, 32, 100, 2).shape("d", "by hand")
    assert by_hand.products - dense.products == 2 * (3 * 64 * 32 + 64 * 8)


def test_a_published_mixture_has_the_published_parameters():
    sizes = LayerSizes(48, 2048, 32, 4, 128, 768, 151936, 2, experts=128, chosen=8)
    shape = sizes.shape("Qwen3-30B-A3B", "its config.json")
    assert shape.parameters == pytest.approx(30.53e9, rel=1e-3)
    assert shape.products + 2048 * 151936 == pytest.approx(3.35e9, rel=5e-3)


def test_a_decoding_step_reads_the_experts_that_a_row_has_chosen():
    shape = LayerSizes(2, 64, 4, 2, 16, 32, 100, 2, experts=8, chosen=2).shape("m", "by hand")
    assert shape.read(1) == shape.products
    everything = shape.products + shape.expert_parameters * 3 / 4
    assert shape.read(1000) == pytest.approx(everything)
    assert shape.products < shape.read(4) < everything
    dense = TYPICAL[0]
    assert dense.read(1) == dense.read(1000) == dense.products


def test_experts_that_cannot_be_counted_are_refused():
    with pytest.raises(ValueError, match="the model m is a mixture of experts"):
        shape_of_config("m", small_mixture(num_experts_per_tok=0))


def test_adapters_are_counted_by_the_sides_of_all_matrices_in_layers():
    model = make_model("qwen3")
    shape = shape_of_config("m", model.config)
    linear = [
        module for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name
    ]  # fmt: skip
    assert shape.sides == sum(one.in_features + one.out_features for one in linear)
