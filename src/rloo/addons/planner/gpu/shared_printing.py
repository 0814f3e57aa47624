"""A plan for one GPU as text: the engines, the parts of memory, what fits, and other options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.console import Console

from rloo.addons.planner.gpu import shared_gpu
from rloo.addons.planner.gpu.cost_model import USABLE, RolloutCost
from rloo.addons.planner.gpu.gpu_specs import RATES
from rloo.addons.planner.gpu.layouts import Forecast, fastest, most_samples
from rloo.addons.planner.gpu.printing import WORTH, aligned, heading, sources
from rloo.addons.planner.gpu.shared_gpu import SharedPlan
from rloo.addons.planner.gpu.weight_cost import publishing
from rloo.distributed.standard_streams import counted
from rloo.tracking.console import write_line

# Rates without a meaning on one GPU.
_OF_SEVERAL = ("weight_rate", "reading", "failure_hours", "restart")


def print_shared_plan(
    plan: SharedPlan, given: Sequence[str], price: float | None, notes: Sequence[str] = ()
) -> None:
    """Print the plan to stdout. `given` are the names of the plan's options that the user set,
    `price` is the price of an hour, and `notes` say what the plan assumes."""
    console, job = Console(), plan.job
    found = shared_gpu.ways(plan.config, job)
    name = fastest(found, WORTH)
    one = found[name]
    own = with_sampler(plan, one)
    alone = {key: rate for key, rate in RATES.items() if key not in _OF_SEVERAL}
    for block in (
        heading(job, 1, notes),
        engines(plan, found, name),
        [*advice(plan, own, one), *([cost(own, one, price)] if price else [])],
        memory(own, one),
        fits(plan),
        alternatives(plan),
        sources(job, alone, given),
    ):
        for line in [*block, *([""] if block[-1:] != [""] else [])]:
            write_line(console, line)


def with_sampler(plan: SharedPlan, one: Forecast) -> RolloutCost:
    """The costs with the engine of a forecast."""
    return shared_gpu.with_sampler(plan.job, one.sampler, plan.config)


def engines(plan: SharedPlan, found: Mapping[str, Forecast], chosen: str) -> list[str]:
    """A table with a row for each engine. A star marks the recommended one."""
    rows = [["  engine", "s a step", "tokens/s", "sample", "train", "sync", "GB", "at once"]]
    for sampler in shared_gpu.samplers(plan.config):
        one = found.get(sampler.name)
        name = f"{'*' if sampler.name == chosen else ' '} {sampler.name}"
        if one is None:
            rows.append([name, "does not fit", *[""] * 6])
            continue
        job = with_sampler(plan, one)
        seconds = (one.seconds, one.sampling, one.computing, one.publishing)
        whole, *each = (f"{value:.3g}" for value in seconds)
        peak = max(shared_gpu.peaks(job, one)) / 1e9
        rate = f"{job.sampled / one.seconds:,.0f}"
        rows.append([name, whole, rate, *each, f"{peak:.1f}", f"{one.room:,}"])
    return aligned(rows)


def advice(plan: SharedPlan, job: RolloutCost, one: Forecast) -> list[str]:
    """The recommended engine and micro-batch, as options."""
    options = _options_of(plan, job)
    lines = [f"take     {job.sampler.name}{': ' if options else ''}{' '.join(options)}"]
    if job.sampler.serves:
        given, memory = plan.config.vllm_gpu_memory_utilization, job.gpu.memory / 1e9
        share = shared_gpu.server_share(job) if given is None else given
        lines.append(
            f"         the server reserves {share * memory:.1f} of {memory:.1f} GB while it "
            "samples; GB above is the need of trainer and server at the peak"
        )
    if job.sampler.serves and job.memory.quantised and not job.merges:
        seconds = publishing(replace(job, merges=True), 1, divided=False, apart=False)
        lines.append(
            "         its base model is not quantised; with --engine_kwargs.merge_adapter true it "
            f"samples with the trainer's weights, and sync takes {seconds:.3g} s"
        )
    budget, most = job.micro_tokens, one.micro_batch
    group = job.prompt + job.samples * job.longest
    tokens = counted(round(min(budget, most)), "token")
    text = f"micro-batch  {tokens}, and {most:,.0f} fit; a group has {group:,}"
    if budget < group <= most:
        text += f": --max_tokens_per_micro_batch {group} avoids a second pass"
    elif group > most:
        text += " and is scored in a second pass"
    lines.append(text)
    lines.append(
        f"K        up to {counted(most_samples(job, one), 'completion')} of maximum length in the "
        "engine and one micro-batch"
    )
    return lines


def _options_of(plan: SharedPlan, job: RolloutCost) -> list[str]:
    """The options that the recommended engine needs and the run does not have."""
    config, sampler = plan.config, job.sampler
    if not sampler.serves:
        own = sampler is shared_gpu.samplers(config)[0]
        return [] if own else [f"--engine_kwargs.copy_weights {str(sampler.copies).lower()}"]
    options = [] if config.rollout_engine == "vllm" else ["--rollout_engine vllm"]
    if config.vllm_gpu_memory_utilization is None:
        options.append(f"--vllm_gpu_memory_utilization {shared_gpu.server_share(job):g}")
    return options


def cost(job: RolloutCost, one: Forecast, price: float) -> str:
    """The price of a step and of a million tokens."""
    step = price * one.seconds / 3600
    return (
        f"cost     {step:.3g} a step, {step / job.sampled * 1e6:.3g} per million sampled tokens "
        "(gpu_price)"
    )


def memory(job: RolloutCost, one: Forecast) -> list[str]:
    """The parts of memory with the chosen engine."""
    sampling, update = (f"{peak / 1e9:.1f}" for peak in shared_gpu.peaks(job, one))
    usable = USABLE * job.gpu.memory / 1e9
    rows = [
        (name, f"{size / 1e9:.2f} GB", _about(job, one, name))
        for name, size in shared_gpu.parts(job, one).items()
    ]
    head = (
        f"memory   {sampling} GB while it samples, {update} GB in the update, of {usable:.1f} "
        f"usable ({USABLE:g} of {job.gpu.memory / 1e9:.1f})"
    )
    return [head, *("  " + line for line in aligned(rows))]


def _about(job: RolloutCost, one: Forecast, name: str) -> str:
    shape, sizes = job.shape, job.memory
    if name == "base model":
        rest = shape.parameters - shape.linear
        return (
            f"{shape.linear / 1e9:.2f} B of {sizes.linear:.3g} bytes, {rest / 1e9:.2f} B of "
            f"{sizes.other:g}"
        )
    if name == "adapter":
        return f"{job.trained / 1e6:.1f} M, on all matrices of the layers (all-linear)"
    if name == "optimizer":
        return f"{sizes.state:.3g} bytes per trained parameter"
    if name == "caches":
        length = job.completion if job.sampler.serves else job.longest
        rows = min(job.rows, one.room)
        tokens = counted(round(length), "token")
        return f"of {counted(rows, 'completion')} of {tokens} and prompts, while it samples"
    if name == "server's weights" and job.sleeps:
        return f"{'in host memory' if job.sends_adapter else 'dropped'} in the update"
    if name == "micro-batch":
        return f"{job.activations / 1e3:,.0f} kB per token"
    return ""


def fits(plan: SharedPlan) -> list[str]:
    """A table of tokens/s for numbers and lengths of completions."""
    sizes = sorted({*shared_gpu.SIZES, plan.job.samples})
    rows = [["K", *(f"{length:,}" for length in shared_gpu.LENGTHS)]]
    for samples in sizes:
        cells = [cell(plan, samples, length) for length in shared_gpu.LENGTHS]
        rows.append([str(samples), *cells])
    return [
        "fits     sampled tokens/s of K completions of at most so many tokens, and the engine: n "
        "native, c its copy, v vllm; * a group is scored in a second pass; - does not fit",
        *aligned(rows),
    ]


def cell(plan: SharedPlan, samples: int, length: int) -> str:
    """The tokens/s of the fastest engine for groups of `samples` completions of at most `length`
    tokens."""
    job = plan.job
    mean = length * job.completion / job.longest
    other = replace(job, samples=samples, longest=length, completion=mean)
    found = shared_gpu.ways(plan.config, other)
    if not found:
        return "-"
    one = found[fastest(found, 1.0)]
    engine = "v" if one.sampler.serves else "c" if one.sampler.copies else "n"
    second = "*" if other.prompt + samples * length > one.micro_batch else ""
    return f"{other.sampled / one.seconds:,.0f} {engine}{second}"


def alternatives(plan: SharedPlan) -> list[str]:
    """A table of the costs with other options, each with its fastest engine."""
    rows = [["other options", "engine", "tokens/s", "GB", "micro-batch fits"]]
    for change in shared_gpu.alternatives(plan.config, plan.make):
        if change.one is None or change.job is None:
            rows.append([change.options, "does not fit", "", "", ""])
            continue
        peak = max(shared_gpu.peaks(change.job, change.one)) / 1e9
        rate = f"{change.job.sampled / change.one.seconds:,.0f}"
        most = counted(round(change.one.micro_batch), "token")
        rows.append([change.options, change.name, rate, f"{peak:.1f}", most])
    return aligned(rows)
