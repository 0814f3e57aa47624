"""Rewrites the plans in two pages of docs/how-to: `python tools/machine_plans.py`. A test compares
the pages with this tool.

An output stands behind each command `rloo plan` with the option `gpu`, without the sources of its
rates. The table of cards is the plan of one recipe on each card."""

from __future__ import annotations

import io
import os
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

from rloo.addons.planner.gpu.cost_model import COPY, MODULE, SERVER, USABLE
from rloo.addons.planner.gpu.gpu_plan_command import GPUPlanRequest, job_of, plan_gpus, split
from rloo.addons.planner.gpu.gpu_specs import GPUS
from rloo.addons.planner.gpu.layouts import fastest
from rloo.addons.planner.gpu.shared_gpu import LENGTHS, peaks, ways, with_sampler
from rloo.config.config import RLOOConfig
from rloo.config.parsing import parse_command_line

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "docs/how-to" / name for name in ("one-gpu.md", "machines.md")]
# The recipe of the table, and the first line of a plan's sources.
RECIPE, SOURCES = ["examples/machines/one_gpu.yaml", "--parameters", "4B"], "counted:"
COMMAND = r"(^```sh\n(rloo plan [^\n]*--gpu [^\n]*)\n```\n\n<!-- output -->\n)(?:\n|    .*\n)*"
HEAD = (
    "| GPU | native, tokens/s | native with a copy, tokens/s | vllm, tokens/s | memory with the "
    "fastest, GB, of usable | longest completions |\n|---|---|---|---|---|---|\n"
)


def filled(page: str) -> str:
    """The page with all plans rewritten."""

    def output(match: re.Match[str]) -> str:
        lines = plan_of(match[2]).splitlines()
        return match[1] + "\n" + "".join(f"    {line}".rstrip() + "\n" for line in lines) + "\n"

    page = re.sub(COMMAND, output, page, flags=re.MULTILINE)
    table = HEAD + "".join(map(card, GPUS))
    return re.sub(r"(<!-- table:cards -->\n\n)(?:\|.*\n)*", lambda m: m[1] + table, page)


def plan_of(command: str) -> str:
    """The output of a command `rloo plan`, without the sources of its rates."""
    printed, before = io.StringIO(), Path.cwd()
    os.chdir(ROOT)
    try:
        with redirect_stdout(printed):
            plan_gpus(shlex.split(command)[2:])
    finally:
        os.chdir(before)
    return printed.getvalue().partition(SOURCES)[0].rstrip()


def card(name: str) -> str:
    """The row of a GPU: tokens/s of the engines for the recipe, and the longest completions."""
    precision = [] if GPUS[name].bf16 else ["--bf16", "false", "--fp16", "true"]
    rest, values = split([str(ROOT / RECIPE[0]), *RECIPE[1:], *precision])
    asked = GPUPlanRequest(parse_command_line(rest), values)
    # The recipe has a copy of the weights; here the engines are compared.
    config = asked.config.with_values(engine_kwargs={})
    job = job_of(asked, config, name, 1)
    found = ways(config, job)
    fit = [n for n in LENGTHS if ways(config, job_of(asked, longer(config, n), name, 1))]
    cells = [f"`{name}`"]
    for sampler in (MODULE, COPY, SERVER):
        one = found.get(sampler.name)
        cells.append("does not fit" if one is None else f"{job.sampled / one.seconds:,.0f}")
    memory = ""
    if found:
        one = found[fastest(found, 1.0)]
        peak = max(peaks(with_sampler(job, one.sampler, config), one))
        memory = f"{peak / 1e9:.1f} of {USABLE * job.gpu.memory / 1e9:.1f}"
    cells += [memory, f"{fit[-1]:,}" if fit else "none"]
    return f"| {' | '.join(cells)} |\n"


def longer(config: RLOOConfig, tokens: int) -> RLOOConfig:
    """The options with completions of at most `tokens` tokens."""
    return config.with_values(max_completion_length=tokens)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
