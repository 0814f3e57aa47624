"""Costs of a rollout on a GPU, for tests of the planner."""

from rloo.addons.planner.gpu.cost_model import RolloutCost
from rloo.addons.planner.gpu.gpu_specs import GPUS, RATES
from rloo.addons.planner.gpu.model_shapes import TYPICAL


def make_job(shape=TYPICAL[3], gpu="h100", **changes) -> RolloutCost:
    usual = {
        "shape": shape,
        "gpu": GPUS[gpu],
        "rates": {name: rate.value for name, rate in RATES.items()},
        "groups": 256,
        "samples": 8,
        "prompt": 200,
        "completion": 1000.0,
        "longest": 4000,
        "reference": False,
        "checkpointing": False,
    }
    return RolloutCost(**{**usual, **changes})
