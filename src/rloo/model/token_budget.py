"""Finds a token budget with which the largest micro-batch fits into memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from rloo.config.batch_sizes import BatchSizes
from rloo.config.config import RLOOConfig
from rloo.config.file_checks import largest_of_layers
from rloo.kernels import torch_compat
from rloo.model import memory_estimate
from rloo.model.attention import head_size
from rloo.model.logprobs import CHUNK_ELEMENTS
from rloo.model.memory_estimate import (
    count_tokens,
    make_samples,
    measured_peak_bytes,
    predicted_peak_bytes,
)
from rloo.model.micro_batch import make_sample
from rloo.model.policy import Policy
from rloo.types import Sample

if TYPE_CHECKING:  # engine workers do not load the datasets package
    from rloo.data.iterable_dataset import Prompts

# The share of a CPU's free memory to use; the rest is for memory that torch does not allocate.
CPU_SHARE = 0.9
# Files of a control group (version 1 and 2): limit, usage, and the key of reclaimable memory.
_GROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_GROUP_V2 = ("memory.max", "memory.current", "inactive_file")
# A micro-batch that certainly needs less than this share of the free memory is not measured.
_CERTAIN_SHARE = 0.5
_UNLIMITED = 2**60
# Bytes of a sampled token on the host: entries in two lists, a Python int and a Python float.
TOKEN_BYTES = 2 * 8 + 28 + 24


@dataclass(frozen=True, slots=True)
class Workload:
    """The largest possible optimizer step: its prompt and completion lengths in tokens, the most
    completions of a prompt, and the number of groups if all have so many."""

    longest_prompt: int
    shortest_prompt: int
    completion_tokens: int
    num_generations: int
    num_groups: int


@dataclass(frozen=True, slots=True)
class FittedBudget:
    """A token budget that fits, and the reason if it differs from the requested budget."""

    max_tokens: int
    reason: str | None = None


def workload_of(prompts: Prompts, config: RLOOConfig, batches: BatchSizes) -> Workload:
    """The largest step that the dataset and the options allow. Raises ValueError if a rollout of
    completions of maximum length could not be held in this machine's memory."""
    held = batches.completions_per_rollout * config.max_completion_length * TOKEN_BYTES
    if held > (whole := psutil.virtual_memory().total):
        raise ValueError(
            f"a rollout of {batches.completions_per_rollout:,} completions of "
            f"{config.max_completion_length:,} tokens takes {gigabytes(held)}, and this machine "
            f"has {gigabytes(whole)} (num_prompts, num_generations, max_completion_length)"
        )
    lengths = prompts.lengths
    size = config.prompt_options.max_generations or config.num_generations
    num_groups = -(-batches.completions_per_step // size)
    return Workload(max(lengths), min(lengths), config.max_completion_length, size, num_groups)


def largest_micro_batch(policy: Policy, workload: Workload, max_tokens: int) -> list[Sample]:
    """A micro-batch that fills the budget with completions of maximum length. The first prompt is
    the longest of the dataset, which gives the longest context. If micro-batches are packed, all
    other prompts have the shortest length, which gives the most completion tokens. The last
    completion is cut to the budget. A single completion may exceed the budget, as in training."""
    if not policy.packed:
        width = workload.longest_prompt + workload.completion_tokens - 1
        rows = min(-(-max_tokens // width), workload.num_generations * workload.num_groups)
        width = min(width, max(1, max_tokens // rows)) if rows > 1 else width
        prompt = min(workload.longest_prompt, width)
        return make_samples(prompt, width - prompt + 1, rows)
    samples: list[Sample] = []
    left = max_tokens
    for group in range(workload.num_groups):
        prompt = workload.shortest_prompt if group else workload.longest_prompt
        left -= prompt
        for index in range(workload.num_generations):
            length = workload.completion_tokens
            if samples:
                length = min(length, left + 1)
            if length < 1:
                return samples
            samples.append(make_sample((group, index), prompt, length))
            left -= length - 1
    return samples


def fitting_budget(policy: Policy, workload: Workload) -> FittedBudget:
    """The budget `policy.max_tokens` if the largest micro-batch of `workload` fits into free
    memory, or else a smaller one, computed from small measurements and then verified.

    On CUDA the micro-batch is tried, forward and backward. On a CPU its memory is predicted, since
    the system would kill a process that uses too much. The memory is also predicted if weights are
    sharded over several processes. Raises ValueError if not even one completion fits.
    """
    asked = policy.max_tokens
    on_cpu = policy.device.type == "cpu"
    room = available_bytes(policy.device) - missing_bytes(policy)
    # The process with the least memory determines the budget of all. All measure at the same time.
    room = min(policy.world.all_gather_object(int(CPU_SHARE * room) if _predicts(policy) else room))
    largest = largest_micro_batch(policy, workload, asked)
    certain = on_cpu and generous_peak_bytes(policy, largest) < _CERTAIN_SHARE * room
    # A measurement would end a torch profile in progress.
    if certain or torch_compat.is_profiled() or _fits(policy, largest, room):
        return FittedBudget(asked)
    single = make_samples(workload.longest_prompt, workload.completion_tokens, 1)
    least, needed = count_tokens(policy, single), _needed(policy, single, room)
    if not _fits(policy, single, room):
        raise ValueError(
            f"training on one completion of {workload.completion_tokens:,} tokens after a prompt "
            f"of {workload.longest_prompt:,} takes {gigabytes(needed)}, and {gigabytes(room)} are "
            "left beside weights, gradients and optimizer; one must fit (max_completion_length, "
            "gradient_checkpointing, num_generations, max_tokens_per_micro_batch)"
        )
    size, most = count_tokens(policy, largest), _needed(policy, largest, room)
    slope = max(1.0, (most - needed) / max(1, size - least))
    budget = min(int(least + (room - needed) / slope), size - 1)
    while budget > least:
        if _fits(policy, largest_micro_batch(policy, workload, budget), room):
            break
        budget = int(0.9 * budget)
    reason = f"the largest one would take {gigabytes(most)}, and {gigabytes(room)} are left"
    return FittedBudget(max(budget, least), reason)


def missing_bytes(policy: Policy) -> int:
    """Bytes that the first step will allocate and keep: gradients, and optimizer state if there is
    none yet. State that is parked on the host does not count: it is fetched only after the
    activations are freed."""
    known = policy.stepper.optimizer.state or "optimizer" in policy.config.offload
    state = 0 if known else memory_estimate.optimizer_bytes(policy)
    return memory_estimate.gradient_bytes(policy) + state


def generous_peak_bytes(policy: Policy, samples: Sequence[Sample]) -> int:
    """An upper bound of `predicted_peak_bytes` that needs no measurement. It is the sum of several
    times the count of Korthikanti et al. 2022 for a layer, scores for all pairs of tokens in a row,
    six arrays of logits, and three times the weights."""
    text = policy.model.config.get_text_config()
    tokens = count_tokens(policy, samples)
    heads = largest_of_layers(text, "num_attention_heads") or 1
    attention = heads * head_size(text)
    inner = max(4 * text.hidden_size, largest_of_layers(text, "intermediate_size") or 0)
    inner *= getattr(text, "num_experts_per_tok", None) or 1
    row = max(len(s.prompt_ids) + len(s.token_ids) for s in samples)
    numbers = 40 * text.hidden_size + 30 * attention + 12 * inner + 4 * heads * row
    logits = 6 * min(tokens * text.vocab_size, 2 * CHUNK_ELEMENTS)
    activations = 4 * (tokens * text.num_hidden_layers * numbers + logits)
    return activations + 3 * memory_estimate.weight_bytes(policy.model)


def available_bytes(device: torch.device) -> int:
    """Bytes that this process can still allocate. On a GPU: free and cached device memory. On a
    CPU: the minimum of free memory, control group limits and address space limit."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    limits = [psutil.virtual_memory().available, *_control_groups()]
    process = psutil.Process()
    if hasattr(process, "rlimit"):  # Linux
        limit = process.rlimit(psutil.RLIMIT_AS)[0]
        if limit != psutil.RLIM_INFINITY:
            limits.append(limit - process.memory_info().vms)
    return max(0, min(limits))


def gigabytes(size: float) -> str:
    """Format bytes as `1.25 GB`; sizes below 1 GB in `MB`."""
    return f"{size / 1e9:.2f} GB" if abs(size) >= 1e9 else f"{size / 1e6:.1f} MB"


def _needed(policy: Policy, samples: Sequence[Sample], room: int) -> int:
    try:
        needed = predicted_peak_bytes(policy, samples)
    except torch.OutOfMemoryError:  # even at an eighth of the size
        needed = 8 * room
    return max(policy.world.all_gather_object(needed))


def _fits(policy: Policy, samples: Sequence[Sample], room: int) -> bool:
    return not policy.world.any_rank(not _fits_here(policy, samples, room))


def _predicts(policy: Policy) -> bool:
    """Whether memory is predicted, not tried. On a CPU a micro-batch that does not fit ends the
    process. With sharded weights or slices of rows it leaves other processes inside a
    collective."""
    return policy.device.type == "cpu" or (policy.in_lockstep and policy.world.size > 1)


def _fits_here(policy: Policy, samples: Sequence[Sample], room: int) -> bool:
    if _predicts(policy):
        return predicted_peak_bytes(policy, samples) <= room
    try:
        # The state that the first step allocates must fit too. The measurement includes the
        # gradients.
        state = missing_bytes(policy) - memory_estimate.gradient_bytes(policy)
        held = torch.empty(state, dtype=torch.uint8, device=policy.device)
        measured_peak_bytes(policy, samples)
        del held
    except torch.OutOfMemoryError:
        fits = False
    else:
        fits = True
    torch.cuda.empty_cache()
    return fits


def _control_groups(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[int]:
    """Bytes left in each control group (version 1 or 2) that limits this process's memory."""
    if not groups.exists():
        return []
    left = []
    for line in groups.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, names = (root / "memory", _GROUP_V1) if controllers else (root, _GROUP_V2)
        folder = base / path.strip("/")
        # In a container the path may be a path of the host. The container's group is then the root.
        for place in {folder, *folder.parents} if folder.exists() else {base}:
            if place.is_relative_to(base):
                left += _room_in_group(place, *names)
    return left


def _room_in_group(folder: Path, limit: str, usage: str, reclaimable: str) -> list[int]:
    if not (folder / limit).exists() or not (folder / usage).exists():
        return []
    text = (folder / limit).read_text().strip()
    if text == "max" or int(text) >= _UNLIMITED:
        return []
    cached = 0
    if (folder / "memory.stat").exists():
        rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = int(rows.get(reclaimable, 0))
    return [int(text) - int((folder / usage).read_text()) + cached]
