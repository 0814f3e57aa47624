"""The parts of an update, and how its utilisation depends on the model and the micro-batches."""

import random
from dataclasses import replace

import pytest

from rloo.addons.planner.gpu.gpu_specs import GPUS, RATES
from rloo.addons.planner.gpu.model_shapes import TYPICAL, LayerSizes, shape_of_size
from rloo.addons.planner.gpu.update_cost import UpdateCost, slowest_share


def make_update(shape=TYPICAL[2], **changes) -> UpdateCost:
    usual = {
        "shape": shape,
        "gpu": GPUS["h100"],
        "rates": {name: rate.value for name, rate in RATES.items()},
        "tokens": 1e5,
        "attended": 1000.0,
        "forward": 2.0,
        "micro_batches": 4,
        "steps": 1,
        "trained": 1e9,
        "adapter": False,
    }
    return UpdateCost(**usual | changes)


def utilisation(update: UpdateCost) -> float:
    """The share of the GPU's operations, as it is published: three passes, without repetition."""
    operations = 3 * update.tokens * update.shape.operations(update.attended)
    return operations / update.seconds / update.gpu.operations


def test_wider_models_and_longer_micro_batches_use_more_of_a_gpu():
    shapes = [TYPICAL[i] for i in (0, 1, 2, 3, 5)]
    shares = [utilisation(make_update(shape)) for shape in shapes]
    assert shares == sorted(shares)
    assert 0.05 < shares[0] < 0.12 and 0.3 < shares[-1] < 0.4
    few, many = (utilisation(make_update(micro_batches=n)) for n in (4, 40))
    assert many < 0.8 * few
    short, long = (utilisation(make_update(attended=n, gpu=fast())) for n in (1e3, 3e4))
    assert short < long


def fast():
    """An H100 with FlashAttention-3."""
    return replace(GPUS["h100"], attention=2 * GPUS["h100"].attention)


def test_parts_by_hand():
    shape = TYPICAL[2]
    update = make_update()
    assert update.products == pytest.approx(1e5 * 4 * 2 * shape.products / (989e12 * 0.65))
    scores = 1e5 * 4.5 * 4 * 36 * 32 * 128 * 1000
    assert update.attention == pytest.approx(scores / 350e12)
    moved = 1e5 * 4 * (215 * 36 * 2560 + 150 * 151936)
    assert update.other == pytest.approx(moved / 3.35e12)
    assert update.optimizer == pytest.approx(32e9 / 3.35e12)
    assert update.host == pytest.approx(0.4)


def test_frozen_weights_need_no_gradient_and_adapters_move_bytes():
    full, adapted = make_update(), make_update(adapter=True)
    assert adapted.products == pytest.approx(full.products * 3 / 4)
    assert adapted.attention == full.attention
    sides = 36 * (4 * 2560 + 2 * 4096 + 2 * 1024 + 3 * (2560 + 9728))
    more = 1e5 * 4 * 14 * sides / 3.35e12
    assert adapted.other - full.other == pytest.approx(more)
    # The number of layers that a size changes is the number of layers with adapters.
    assert shape_of_size("8B").sides == TYPICAL[3].sides // 36 * 35


def test_experts_are_products_of_the_chosen_ones_and_copies_of_tokens():
    sizes = {
        "layers": 36,
        "hidden": 2560,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "vocabulary": 151936,
        "matrices": 1,
    }
    dense = LayerSizes(**sizes, feed=9728).shape("dense", "")
    mixed = LayerSizes(**sizes, feed=1216, experts=64, chosen=8).shape("mixed", "")
    router = 36 * 2560 * 64
    assert mixed.products == dense.products + router
    one, other = make_update(dense), make_update(mixed)
    copies = 1e5 * 4 * 130 * 36 * 2560 * 8
    assert other.other - one.other == pytest.approx(copies / 3.35e12)


def test_the_slowest_of_several_waits_for_none():
    """Sums of lengths that are drawn, against the estimate for normal ones."""
    draw = random.Random(0)
    for trainers, rows in ((8, 16), (64, 128)):
        mean = 0.0
        for _ in range(200):
            sums = [sum(draw.expovariate(1.0) for _ in range(rows)) / rows for _ in range(trainers)]
            mean += max(sums) / 200
        assert slowest_share(trainers, rows, 1.0) == pytest.approx(mean, rel=0.04)
    assert slowest_share(1, 16, 1.0) == 1.0
    assert slowest_share(8, 16, 0.0) == 1.0
