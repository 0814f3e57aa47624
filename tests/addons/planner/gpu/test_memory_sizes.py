"""Bytes per parameter for the options of a run, against measurements and by hand."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks.memory import CHOICES
from rloo import RLOOConfig
from rloo.addons.planner.gpu.gpu_specs import GPUS
from rloo.addons.planner.gpu.memory_sizes import memory_sizes
from rloo.addons.planner.gpu.model_shapes import LayerSizes
from rloo.model.memory_estimate import state_bytes
from support.gpu_plans import make_job

PAGE = Path(__file__).parents[4] / "docs" / "memory.md"
# The model of the table in docs/memory.md.
SHAPE = LayerSizes(8, 512, 8, 4, 64, 1536, 4096, 2).shape("m", "by hand")


def measured(name: str) -> list[float]:
    """Bytes per parameter of weights, gradients, optimizer and reference, as measured."""
    row, *_ = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return [float(cell) for cell in row.split(" | ")[:4]]


@pytest.mark.parametrize(
    "name",
    ["full", "full, reference", "full, 8-bit AdamW", "LoRA", "QLoRA, 4 bits", "QLoRA, 8 bits"],
)
def test_bytes_are_those_that_were_measured(name):
    config = RLOOConfig(use_cpu=True, **{"beta": 0.0, **CHOICES[name]})
    job = make_job(
        SHAPE,
        memory=memory_sizes(config),
        adapter=config.lora_r * config.use_peft,
        reference=config.beta > 0,
    )
    lasting = job.lasting()
    weights = sum(lasting.get(part, 0.0) for part in ("weights", "base model", "adapter"))
    parts = (weights, *(lasting.get(n, 0.0) for n in ("gradients", "optimizer", "reference")))
    for planned, found in zip(parts, measured(name), strict=True):
        assert planned / SHAPE.parameters == pytest.approx(found, abs=0.012)


def test_four_bits_have_a_scale_for_each_block():
    config = RLOOConfig(use_peft=True, load_in_4bit=True)
    nested = RLOOConfig(use_peft=True, load_in_4bit=True, use_bnb_nested_quant=True)
    assert memory_sizes(config).linear == 0.5 + 4 / 64
    assert memory_sizes(nested).linear == 0.5 + 1 / 64 + 4 / (64 * 256)


def test_a_product_with_quantised_weights_moves_them_several_times():
    """4 bits are read, float32 is written and read, 16 bits are written and read."""
    four = {"use_peft": True, "load_in_4bit": True}
    assert memory_sizes(RLOOConfig(**four)).read == 0.5625 + 4 + 4 + 2 + 2
    half = RLOOConfig(**four, model_init_kwargs={"dtype": "bfloat16"})
    assert memory_sizes(half).read == 0.5625 + 2 + 2
    assert memory_sizes(RLOOConfig(use_peft=True)).read == 4 + 2 + 2
    assert memory_sizes(RLOOConfig(use_peft=True, model_init_kwargs={"dtype": "auto"})).read == 2


@pytest.mark.parametrize(("optim", "bytes_"), [("sgd", 0.0), ("adamw_torch_fused", 8.0)])
def test_the_state_is_that_of_the_optimizer(optim, bytes_):
    config = RLOOConfig(optim=optim)
    assert memory_sizes(config).state == bytes_
    values = torch.zeros(64, 64)
    real = state_bytes(torch.nn.Module(), values, config) / values.numel()
    assert real == pytest.approx(bytes_, abs=0.01)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # bitsandbytes', at import
def test_an_8_bit_state_is_that_of_bitsandbytes():
    pytest.importorskip("bitsandbytes")
    config = RLOOConfig(optim="adamw_8bit", use_cpu=True)
    values = torch.zeros(512, 512)
    real = state_bytes(torch.nn.Module(), values, config) / values.numel()
    assert memory_sizes(config).state == pytest.approx(real, rel=1e-3)


def test_parked_state_leaves_the_gpu():
    usual, parked, paged = (
        make_job(memory=memory_sizes(RLOOConfig(**options)))
        for options in ({}, {"offload": ["optimizer"]}, {"optim": "paged_adamw_8bit"})
    )
    state = 8 * usual.shape.parameters
    assert usual.trainer_bytes(1, divided=False) - parked.trainer_bytes(1, divided=False) == state
    assert paged.lasting()["optimizer"] == 0 and 0 < paged.optimizer_bytes < state


def test_offloaded_activations_leave_those_of_one_layer_and_take_time():
    usual, away = (
        make_job(checkpointing=True, memory=memory_sizes(RLOOConfig(activation_offloading=on)))
        for on in (False, True)
    )
    one_layer = 34 * 3 * 4096
    assert usual.activations == one_layer + 4 * 36 * 4096 and away.activations == one_layer
    before, after = (job.update(1, divided=False) for job in (usual, away))
    moved = 2 * 4 * 36 * 4096 * after.tokens / (GPUS["h100"].host * 0.7)
    assert before.offloading == 0 and after.offloading == pytest.approx(moved)


def test_a_quantised_base_is_not_sharded():
    config = RLOOConfig(use_peft=True, load_in_4bit=True)
    job = make_job(memory=memory_sizes(config), adapter=16)
    shape = job.shape
    whole = 0.5625 * shape.linear
    ends = 2 * 4096 * 151936 * 4
    rest = (16 * job.trained + ends) / 8 + 2 * 4 * 4096 * 151936
    assert job.trainer_bytes(8, divided=True) == pytest.approx(whole + rest)
