"""`rloo plan --num_gpus N --gpu NAME`: the options that only this plan has, and the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from rloo.addons.planner.gpu.gpu_specs import GPU, GPUS, RATES
from rloo.config.batch_sizes import batches_of
from rloo.config.config import RLOOConfig
from rloo.config.fields import suggest
from rloo.config.parsing import parse_command_line
from rloo.config.vllm_options import memory_share
from rloo.data.tasks import configuration_of
from rloo.distributed.standard_streams import counted

if TYPE_CHECKING:
    from rloo.addons.launch.cluster import Cluster
    from rloo.addons.planner.gpu.cost_model import RolloutCost
    from rloo.addons.planner.gpu.model_shapes import ModelShape

# The options that are not options of a run: their meanings and defaults.
OPTIONS = {
    "num_gpus": "how many GPUs, from 1 to 1,024: plan for these instead of this machine (1 with "
    "gpu)",
    "gpu": f"one of {', '.join(GPUS)} (h100)",
    "cluster": "a file of rloo launch: plan for its GPUs, instead of num_gpus (none)",
    "gpu_price": "what an hour of a GPU costs (none)",
    "parameters": "a size such as 7B with a typical shape, instead of the model",
    "prompt_tokens": "tokens of a prompt in the mean (256)",
    "completion_tokens": "tokens of a completion in the mean (half of max_completion_length)",
    **{name: f"{rate.meaning} ({rate.value:g})" for name, rate in RATES.items()},
}
MOST_GPUS = 1024


@dataclass(frozen=True)
class GPUPlanRequest:
    """The command line of a GPU plan: the options of a run, the plan's options, and notes for the
    user."""

    config: RLOOConfig
    values: dict[str, str]
    notes: tuple[str, ...] = ()

    @cached_property
    def shape(self) -> ModelShape:
        """The shape of the model. Raises ValueError without a model, and for an invalid size."""
        from rloo.addons.planner.gpu.model_shapes import shape_of_config, shape_of_size

        if "parameters" in self.values:
            return shape_of_size(self.values["parameters"])
        model = self.config.model
        if model is None:
            raise ValueError(
                "there is no model to plan for; name one, or a size such as 7B (model, parameters)"
            )
        return shape_of_config(model, configuration_of(model, self.config))

    @property
    def price(self) -> float | None:
        """The price of a GPU hour, or None."""
        return self.number("gpu_price", None) if "gpu_price" in self.values else None

    @property
    def num_gpus(self) -> int:
        """The number of GPUs. Raises ValueError unless it is a whole number up to `MOST_GPUS`."""
        gpus = self.number("num_gpus", 1.0, least=-float("inf"))
        if gpus != int(gpus) or not 1 <= gpus <= MOST_GPUS:
            text = self.values["num_gpus"]
            raise ValueError(
                f"num_gpus is {text}; it must be a whole number from 1 to {MOST_GPUS:,} (num_gpus)"
            )
        return int(gpus)

    def number(self, name: str, default: float | None, least: float = 0.0) -> float:
        """The value of option `name`. Raises ValueError if it is not a number above `least`."""
        text = self.values.get(name)
        if text is None:
            assert default is not None, f"{name} has no default"
            return default
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least < value < float("inf"):
            raise ValueError(f"{name} is {text}; it must be a number above {least:g} ({name})")
        return value


def split(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Divide a command line into (arguments of the run, values of the plan's options). Raises
    ValueError for an option that has no value or is given twice."""
    rest: list[str] = []
    values: dict[str, str] = {}
    remaining = list(arguments)
    while remaining:
        token = remaining.pop(0)
        key, equals, text = token.partition("=")
        name = key.lstrip("-").replace("-", "_")
        if name not in OPTIONS or not (equals or key.startswith("--")):
            rest.append(token)
            continue
        if not equals:
            if not remaining or remaining[0].startswith("--"):
                raise ValueError(f"{name} has no value; it is {OPTIONS[name]} ({name})")
            text = remaining.pop(0)
        if name in values:
            raise ValueError(f"{name} is given twice, as {values[name]} and {text} ({name})")
        values[name] = text
    return rest, values


def asks_for_gpus(arguments: Sequence[str]) -> bool:
    """Whether any of the plan's options is given."""
    return bool(split(arguments)[1])


def plan_gpus(arguments: Sequence[str]) -> None:
    """Print the plan. Raises ValueError for invalid options and for a run that does not fit."""
    rest, values = split(arguments)
    if not values.keys() & {"num_gpus", "gpu", "cluster"}:
        raise ValueError(
            f"num_gpus is missing; {', '.join(values)} belongs to a plan of GPUs (num_gpus)"
        )
    cluster = _read_cluster(values)
    asked = GPUPlanRequest(parse_command_line(rest), values)
    if cluster:
        asked = replace(asked, notes=(_note_on(asked, cluster),))
    gpus = cluster.trainers + cluster.engine_gpus if cluster else asked.num_gpus
    name = values.get("gpu", "h100").lower()
    if name not in GPUS:
        known = ", ".join(GPUS)
        raise ValueError(f"gpu is {name}; the table has {known}{suggest(name, GPUS)} (gpu)")
    asked = _with_fp16(asked, rest, GPUS[name])
    # Imported late, since the import takes a second: invalid options are reported before.
    from rloo.addons.planner.gpu.layouts import best
    from rloo.addons.planner.gpu.printing import GPUPlan, print_gpu_plan

    if gpus == 1:
        _plan_one(asked, name)
        return
    job = job_of(asked, asked.config, name, gpus)
    found = best(gpus, job, cluster.engine_gpus if cluster else None)
    if not found:
        raise ValueError(_misfit(job, gpus))
    print_gpu_plan(GPUPlan(job, gpus, found, list(values), asked.price, asked.notes))


def _read_cluster(values: Mapping[str, str]) -> Cluster | None:
    """The cluster of the option `cluster`. Raises ValueError for a cluster without GPUs, and if the
    number of GPUs is given, too."""
    path = values.get("cluster")
    if path is None:
        return None
    if "num_gpus" in values:
        raise ValueError(
            f"num_gpus is {values['num_gpus']} and cluster is {path}, which has the number of "
            "GPUs; give one of them (num_gpus, cluster)"
        )
    from rloo.addons.launch.cluster import read_cluster

    cluster, _, _ = read_cluster(["--cluster", path])
    if not cluster.gpus_per_node:
        raise ValueError(f"gpus_per_node is 0 in {path}; a plan needs GPUs (gpus_per_node)")
    return cluster


def _note_on(asked: GPUPlanRequest, cluster: Cluster) -> str:
    """A note on the GPUs of a cluster."""
    where = f"{counted(cluster.nodes, 'node')} of {counted(cluster.gpus_per_node, 'GPU')}"
    some = f"train, {cluster.engine_gpus:,} sample" if cluster.engine_gpus else "train and sample"
    return f"{asked.values['cluster']}: {where}; {cluster.trainers:,} {some}"


def _plan_one(asked: GPUPlanRequest, name: str) -> None:
    """Print the plan for one GPU. Raises ValueError for a run that does not fit, with the cheapest
    change that makes it fit."""
    from rloo.addons.planner.gpu import shared_gpu
    from rloo.addons.planner.gpu.shared_printing import print_shared_plan

    def make(config: RLOOConfig) -> RolloutCost:
        return job_of(asked, config, name, 1)

    config, job = asked.config, make(asked.config)
    if shared_gpu.ways(config, job):
        plan = shared_gpu.SharedPlan(config, job, make)
        print_shared_plan(plan, list(asked.values), asked.price, asked.notes)
        return
    change = next(shared_gpu.repairs(config, make), None)
    fits = f"it fits with {change.options}" if change else "no change that was tried makes it fit"
    raise ValueError(f"{_misfit(job, 1)}; {fits}")


def _misfit(job: RolloutCost, gpus: int) -> str:
    return (
        f"{job.shape.name} does not fit {gpus:,} x {job.gpu.name}: neither weights, gradients and "
        "optimizer of the trainer nor an engine's weights and cache have room in any way that "
        "was tried (num_gpus, gpu, max_completion_length)"
    )


def _with_fp16(asked: GPUPlanRequest, arguments: list[str], gpu: GPU) -> GPUPlanRequest:
    """The request with fp16 if the GPU has no bf16 and the run's `arguments` do not set bf16."""
    if gpu.bf16 or not asked.config.bf16:
        return asked
    try:
        config = parse_command_line([*arguments, "--fp16", "true"])
    except ValueError:  # bf16 is set to true
        return asked
    note = f"{gpu.name} has no bf16 arithmetic: this plan is for fp16; give the run --fp16 true"
    return replace(asked, config=config, notes=(*asked.notes, note))


def _check_precision(config: RLOOConfig, gpu: GPU) -> None:
    """Raise ValueError for a precision that the GPU does not have, or of which there are no
    rates."""
    if config.bf16 and not gpu.bf16:
        raise ValueError(
            f"bf16 is true and gpu is {gpu.name}, which has no bf16 arithmetic; give --bf16 false "
            "--fp16 true (bf16, fp16)"
        )
    if not (config.bf16 or config.fp16):
        raise ValueError(
            "bf16 and fp16 are false; a plan of GPUs has the rates of 16 bits (bf16, fp16)"
        )


def job_of(asked: GPUPlanRequest, config: RLOOConfig, gpu: str, gpus: int) -> RolloutCost:
    """The costs of a rollout of a run with the options `config` on `gpus` GPUs of the type `gpu`;
    `asked` has the plan's options. Raises ValueError for options that a plan does not support."""
    from rloo.addons.planner.gpu.cost_model import RolloutCost
    from rloo.addons.planner.gpu.memory_sizes import memory_sizes

    _check_precision(config, GPUS[gpu])
    if config.num_prompts is None and gpus > 1:
        raise ValueError(
            "num_prompts is not given; how long a rollout takes on many GPUs depends on it "
            "(num_prompts)"
        )
    batches = batches_of(config, 1)
    longest = config.max_completion_length
    mean = asked.number("completion_tokens", max(1.0, longest / 2))
    if config is not asked.config:
        mean = min(mean, float(longest))
    if mean > longest:
        raise ValueError(
            f"completion_tokens is {mean:g}; it must be at most max_completion_length {longest} "
            "(completion_tokens)"
        )
    return RolloutCost(
        shape=asked.shape,
        gpu=GPUS[gpu],
        rates={name: asked.number(name, rate.value) for name, rate in RATES.items()},
        groups=batches.prompts_per_rollout,
        samples=config.num_generations,
        prompt=int(asked.number("prompt_tokens", 256)),
        completion=mean,
        longest=longest,
        reference=config.beta > 0,
        checkpointing=config.gradient_checkpointing,
        iterations=batches.num_iterations,
        steps=batches.parts_per_rollout * batches.num_iterations,
        adapter=config.lora_r if config.use_peft else 0,
        micro_tokens=config.max_tokens_per_micro_batch or float("inf"),
        memory=memory_sizes(config),
        sleeps=config.vllm_enable_sleep_mode is not False,
        server_share=memory_share(config, separate=False),
        separate_share=memory_share(config, separate=True),
        merges=bool(config.engine_options.merge_adapter),
        by_files=config.engine_options.weight_transfer == "files",
    )
