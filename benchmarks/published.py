"""Compare plans for GPUs with published times of other systems: the tables of docs/scaling.md.

    python -m benchmarks.published [--fit]

The points and their sources are in published.toml. The plan has the published number of GPUs, the
published division into trainers and engines, and rloo's own way to train (replicate or fsdp2). A
training phase is predicted from the published micro-batches, a complete step by the plan alone.
With `--fit`, the rates whose kind is "fitted" are fitted again and printed.
"""

from __future__ import annotations

import argparse
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from math import log
from pathlib import Path
from typing import Any

from rloo.addons.planner.gpu.cost_model import SERVER, RolloutCost
from rloo.addons.planner.gpu.gpu_specs import GPUS, RATES
from rloo.addons.planner.gpu.layouts import Forecast, ParallelLayout, forecast
from rloo.addons.planner.gpu.model_shapes import LayerSizes

FILE = Path(__file__).with_suffix(".toml")
# NeMo RL's engines on the GPUs that train read the weights there, through CUDA's IPC handles. Those
# on other GPUs get them over NCCL, as ours do.
BY_HANDLES = replace(SERVER, files=False)
# A prediction within this factor of the published time is counted.
WITHIN = 1.4


@dataclass(frozen=True, slots=True)
class Point:
    """A published time: the facts of published.toml, the work in the plan's terms, and the system
    and the model by name."""

    facts: dict[str, Any]
    job: RolloutCost
    system: str

    @property
    def layouts(self) -> list[ParallelLayout]:
        """The published division of GPUs, with replicated and with sharded weights. Updates that
        were measured without sampling have an engine on other GPUs."""
        gpus, parallel = self.facts["gpus"], self.facts.get("parallel", 1)
        trainers = self.facts.get("trainers", gpus)
        engines = (gpus - trainers) // parallel
        if self.facts["part"] == "update":
            engines, parallel = 1, 8
        ways = (False, True)[: 1 + (trainers > 1)]
        staleness = self.facts.get("staleness", 0)
        return [ParallelLayout(trainers, engines, parallel, way, staleness) for way in ways]

    @property
    def forecast(self) -> Forecast | None:
        """The fastest way of the layout that fits into memory; None if no way fits."""
        found = [one for way in self.layouts if (one := forecast(self.job, way))]
        return min(found, key=lambda one: one.seconds, default=None)

    @property
    def predicted(self) -> float:
        """The predicted seconds of the published part; infinity for a layout that does not fit."""
        job = self.job
        if self.facts["part"] == "token":
            context = job.prompt + job.completion / 2
            return float(job.decoding(job.rows, context, self.facts["parallel"]))
        one = self.forecast
        if one is None:
            return float("inf")
        return one.training if self.facts["part"] == "update" else one.seconds

    @property
    def fits(self) -> bool:
        """Whether the plan says that the published layout fits into memory."""
        if self.facts["part"] == "token":
            return self.job.room(self.facts["parallel"]) > 0
        return self.forecast is not None

    @property
    def ratio(self) -> float:
        """Predicted over published seconds."""
        return self.predicted / float(self.facts["seconds"])


@cache
def read_file() -> dict[str, Any]:
    """The content of published.toml."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def read_points(rates: dict[str, float] | None = None) -> list[Point]:
    """The points of published.toml, with the plan's rates or with `rates` instead of some."""
    data = read_file()
    return [make_point(facts, data, rates or {}) for facts in data["point"]]


def make_point(facts: dict[str, Any], data: dict[str, Any], rates: dict[str, float]) -> Point:
    """The work of a point in the plan's terms."""
    sizes = dict(data["model"][facts["model"]])
    name = sizes.pop("name")
    own = {key: facts[key] for key in RATES if key in facts}
    job = RolloutCost(
        shape=LayerSizes(**sizes).shape(name, "published"),
        gpu=GPUS[facts["gpu"]],
        rates={key: rate.value for key, rate in RATES.items()} | rates | own,
        # The published systems compute a prompt once per completion.
        groups=facts["rows"],
        samples=1,
        prompt=facts["prompt"],
        completion=float(facts["completion"]),
        longest=facts["longest"],
        reference=False,
        checkpointing=True,
        steps=facts.get("steps", 1),
        adapter=facts.get("adapter", 0),
        scored=facts.get("scored", 0),
        micro_tokens=facts.get("micro_tokens", float("inf")),
        packed=facts.get("packed", True),
        sampler=BY_HANDLES,
    )
    return Point(facts, job, data["source"][facts["source"]]["system"])


def table(points: list[Point]) -> list[str]:
    """The lines of the table."""
    head = (
        "| system | model | GPUs | tokens of a sequence | published part | published, s "
        "| predicted, s | predicted / published | used to fit |"
    )
    return [head, "|" + "---|" * 9, *map(row, points)]


def row(point: Point) -> str:
    """A point as a line of the table."""
    facts = point.facts
    model = point.job.shape.name + (f", LoRA {facts['adapter']}" if "adapter" in facts else "")
    gpus = f"{facts['gpus']} x {facts['gpu']}"
    if "trainers" in facts:
        gpus += f", {facts['trainers']} train"
    cells = (
        point.system,
        model,
        gpus,
        f"{facts['prompt'] + facts['completion']:,}",
        facts["part"],
        f"{facts['seconds']:.3g}",
        f"{point.predicted:.3g}",
        f"{point.ratio:.2f}",
        "yes" if facts["fit"] else "no",
    )
    return f"| {' | '.join(cells)} |"


def is_close(point: Point) -> bool:
    """Whether the prediction is within the factor WITHIN of the published time."""
    return 1 / WITHIN <= point.ratio <= WITHIN


def summary(points: list[Point]) -> list[str]:
    """The lines of a table that counts the points within the factor."""
    lines = [f"| points | within a factor of {WITHIN} | fit into memory |", "|---|---|---|"]
    for name, fit in (("used to fit", True), ("not used to fit", False)):
        some = [point for point in points if point.facts["fit"] is fit]
        close, fits = sum(map(is_close, some)), sum(point.fits for point in some)
        lines.append(f"| {name} | {close} of {len(some)} | {fits} of {len(some)} |")
    return lines


def error(rates: dict[str, float]) -> float:
    """The sum of squared logarithms of the ratios of the points that are used to fit."""
    return sum(log(point.ratio) ** 2 for point in read_points(rates) if point.facts["fit"])


def fitted_rates() -> dict[str, float]:
    """The fitted rates with the smallest error, found by steps along one rate at a time."""
    rates = {name: rate.value for name, rate in RATES.items() if rate.kind == "fitted"}
    least, factor = error(rates), 1.3
    while factor > 1.005:
        tried = [rates | {name: rates[name] * by} for name in rates for by in (factor, 1 / factor)]
        errors = [error(one) for one in tried]
        if min(errors) < least:
            least = min(errors)
            rates = tried[errors.index(least)]
        else:
            factor **= 0.5
    return rates


def main() -> None:
    """Print both tables, or the fitted rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the rates and print them")
    if parser.parse_args().fit:
        print("| rate | fitted | used |\n|---|---|---|")
        for name, value in fitted_rates().items():
            print(f"| `{name}` | {value:.3g} | {RATES[name].value:g} |")
        return
    points = read_points()
    print("\n".join([*table(points), "", *summary(points)]))


if __name__ == "__main__":
    main()
