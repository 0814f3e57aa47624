"""The plans of docs/scaling.md: models of 0.6 to 70 B parameters on 1 to 1,024 GPUs. The rollout
has a constant size, or grows with the number of GPUs.

    python -m benchmarks.scaling [--gpu h100] [--gpu_price 2.5] [--prompts 512] [--grows]
"""

from __future__ import annotations

import argparse

from rloo.addons.planner.gpu.cost_model import RolloutCost
from rloo.addons.planner.gpu.gpu_specs import GPUS, RATES
from rloo.addons.planner.gpu.layouts import best, most_samples
from rloo.addons.planner.gpu.model_shapes import shape_of_size
from rloo.addons.planner.gpu.printing import GPUPlan, simulated
from rloo.config.vllm_options import SHARED_GPU

SIZES = ("0.6B", "1.7B", "8B", "32B", "70B")
NUMBERS = (1, 8, 64, 256, 1024)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="h100", choices=list(GPUS))
    parser.add_argument("--gpu_price", type=float, default=2.5)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--grows", action="store_true", help="8 prompts for each GPU instead")
    options = parser.parse_args()
    print(
        "| model | GPUs | layout | trainers | engines | seconds per step | simulated | tokens/s "
        "| weight transfer, s | trainer memory, GB | cost per 1M tokens | bottleneck | largest K "
        "|\n|" + "---|" * 13
    )
    for size in SIZES:
        for gpus in NUMBERS:
            job = RolloutCost(
                shape=shape_of_size(size),
                gpu=GPUS[options.gpu],
                rates={name: rate.value for name, rate in RATES.items()},
                groups=8 * gpus if options.grows else options.prompts,
                samples=8,
                prompt=256,
                completion=2048.0,
                longest=8192,
                reference=False,
                checkpointing=True,
                sleeps=True,
                server_share=SHARED_GPU,
            )
            ways = best(gpus, job)
            if not ways:
                print(f"| {size} | {gpus:,} | does not fit |" + " |" * 10)
                continue
            plan = GPUPlan(job, gpus, ways, (), options.gpu_price)
            one, course = ways[plan.chosen], simulated(job, ways[plan.chosen])
            at, rate = one.layout, job.sampled / one.seconds
            engines = f"{at.engines:,} x {at.parallel}" if at.engines else "the same"
            engines += f" x {at.parallel}" if not at.engines and at.parallel > 1 else ""
            queue = f"{course.seconds_a_rollout(10):.3g}" if course else ""
            kind = "fsdp2" if at.divided else "replicate"
            print(
                f"| {size} | {gpus:,} | {plan.chosen} | {at.trainers:,} {kind} | {engines} "
                f"| {one.seconds:.3g} | {queue} | {rate:,.0f} | {one.publishing:.2g} "
                f"| {one.trainer_bytes / 1e9:.1f} "
                f"| {gpus * options.gpu_price / 3600 / rate * 1e6:.3g} | {one.bottleneck} "
                f"| {most_samples(job, one):,} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
