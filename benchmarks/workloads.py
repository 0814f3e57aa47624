"""The workloads: model, numbers of prompts, completions and tokens, and the sides.

Plain Python, since every environment imports it. Independent of the code of the sides.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

Kind = Literal["step", "sample"]


@dataclass(frozen=True)
class Workload:
    """One row of the benchmark.

    `model` is a model of `benchmarks.model` (trained) or `benchmarks.shapes` (random weights).
    `kind` is complete training steps or only sampling. `prompt_tokens` is the approximate length of
    prompts. `chat` applies the model's chat template. `endless` removes the end token, so that
    every completion has `max_tokens`. `mean_tokens` ends completions at random lengths with about
    this mean, independent of the text. `options` are trainer options with the same meaning on every
    side.

    Each side is measured for `rounds` steps with each of `seeds` seeds, unless the command has
    other numbers. If `alone`, a side ends before the next one starts, to save memory.
    """

    name: str
    title: str
    model: str
    num_prompts: int
    num_generations: int
    max_tokens: int
    sides: tuple[str, ...]
    kind: Kind = "step"
    prompt_tokens: int | None = None
    endless: bool = False
    mean_tokens: int | None = None
    lora: bool = False
    cuda: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    chat: bool = False
    rounds: int = 5
    seeds: int = 1
    alone: bool = False

    @property
    def num_rows(self) -> int:
        """The number of completions per rollout."""
        return self.num_prompts * self.num_generations


ALL = ("rloo", "trl", "generate", "vllm")
TRAINERS = ("rloo", "trl")
SAMPLERS = ("rloo", "generate", "vllm", "rloo:rollout_dtype=bfloat16", "vllm:dtype=bfloat16")
ON_GPU = ("rloo", "padded")
ONLY = ("rloo",)
# Sides of the main workloads, in several tables. A waiting side occupies memory, and a shortage
# would slow down sides that allocate much in each step. The last side takes so long that only one
# step is measured.
BF16 = ("rloo:bf16=true", "trl:bf16=true")
PEERS = (
    "rloo",
    "padded",
    "generate",
    "vllm",
    "rloo:rollout_dtype=bfloat16",
    "vllm:dtype=bfloat16",
)
SETTINGS = ("rloo", "trl", "trl:onednn=null", "trl:weights=bfloat16")
CONTINUOUS = ("rloo", "trl:use_transformers_continuous_batching=true")
_GPU_OPTIONS = {"bf16": True, "gradient_checkpointing": True, "use_cpu": False}


def _in_several_tables(workload: Workload) -> list[Workload]:
    """The workload NAME, and workloads NAME + letter with other sides."""
    return [
        replace(workload, sides=TRAINERS, rounds=10, seeds=3),
        replace(workload, name=workload.name + "B", sides=BF16, rounds=10, seeds=3),
        replace(workload, name=workload.name + "P", sides=PEERS),
        replace(workload, name=workload.name + "T", sides=SETTINGS),
        replace(workload, name=workload.name + "C", sides=CONTINUOUS, rounds=1),
    ]


def _growing_groups(size: int) -> Workload:
    title = f"3 M parameters, 8 prompts, K = {size}, 64 tokens each"
    return Workload(f"K{size}", title, "3m", 8, size, 64, ONLY, endless=True)


def _growing_answers(length: int) -> Workload:
    title = f"3 M parameters, 4 prompts, K = 8, {length} tokens each"
    long = length > 1024
    return Workload(
        f"LEN{length}",
        title,
        "3m",
        4,
        8,
        length,
        ONLY,
        endless=True,
        rounds=2 if long else 5,
        alone=long,
    )


def _growing_model(family: str, model: str, title: str) -> Workload:
    return Workload(
        f"{family}-{model}",
        f"{title}, random weights, 4 prompts of 64 tokens, K = 8, 64 tokens each",
        model,
        4,
        8,
        64,
        ONLY,
        prompt_tokens=64,
        endless=True,
    )


def _on_gpu(
    name: str, model: str, title: str, prompts: int = 32, size: int = 8, tokens: int = 1024
) -> Workload:
    what = f"{prompts} prompts, K = {size}, 512 + up to {tokens:,} tokens, bf16"
    return Workload(
        name,
        f"{title} shape, random weights, {what}",
        model,
        prompts,
        size,
        tokens,
        ON_GPU,
        prompt_tokens=512,
        mean_tokens=tokens // 2,
        cuda=True,
        options=_GPU_OPTIONS,
        alone=True,
    )


_TABLE = [
    *_in_several_tables(
        Workload("W1", "3 M parameters, 8 prompts, K = 8, up to 128 tokens", "3m", 8, 8, 128, ALL)
    ),
    *_in_several_tables(
        Workload("W2", "17 M parameters, 8 prompts, K = 8, up to 128 tokens", "17m", 8, 8, 128, ALL)
    ),
    Workload(
        "W3",
        "3 M parameters, 4 prompts of about 512 tokens, K = 16, up to 64 tokens",
        "3m",
        4,
        16,
        64,
        ALL,
        prompt_tokens=512,
    ),
    Workload("W4", "W2 with LoRA of rank 16", "17m", 8, 8, 128, TRAINERS, lora=True),
    Workload(
        "W5",
        "W1 with 2 passes over each rollout, clipped at 0.2",
        "3m",
        8,
        8,
        128,
        TRAINERS,
        options={"num_iterations": 2, "epsilon": 0.2},
    ),
    Workload(
        "W6",
        "17 M parameters, 4 prompts, K = 8, all of 96 tokens, the limit",
        "17m",
        4,
        8,
        96,
        TRAINERS,
        endless=True,
    ),
    Workload(
        "W7",
        "SmolLM2-135M-Instruct, 2 questions in its chat template, K = 8, up to 64 tokens",
        "smollm2",
        2,
        8,
        64,
        TRAINERS,
        chat=True,
        rounds=3,
    ),
    Workload(
        "W8",
        "Qwen3 shape of 153 M parameters, vocabulary 151,936, random weights, one prompt of 512 "
        "tokens, K = 8, 256 tokens each",
        "qwen3-150m",
        1,
        8,
        256,
        TRAINERS,
        prompt_tokens=512,
        endless=True,
        rounds=3,
    ),
    Workload(
        "S256",
        "sampling alone: 3 M parameters, 32 prompts, K = 8, up to 128 tokens",
        "3m",
        32,
        8,
        128,
        SAMPLERS,
        kind="sample",
    ),
    # For several processes: each has the rows of W1, or more.
    Workload("D1", "3 M parameters, 32 prompts, K = 8, up to 128 tokens", "3m", 32, 8, 128, ONLY),
    Workload("D2", "3 M parameters, 64 prompts, K = 16, up to 128 tokens", "3m", 64, 16, 128, ONLY),
    *map(_growing_groups, (4, 16, 64)),
    *map(_growing_answers, (128, 256, 512, 1024, 2048, 4096)),
    _growing_model("VOCAB", "3m-8k", "4 layers of 192, vocabulary 8,192"),
    _growing_model("VOCAB", "3m-32k", "4 layers of 192, vocabulary 32,768"),
    _growing_model("VOCAB", "3m-152k", "4 layers of 192, vocabulary 151,936"),
    _growing_model("SIZE", "3m-8k", "3 M parameters, vocabulary 8,192"),
    _growing_model("SIZE", "17m-8k", "17 M parameters, vocabulary 8,192"),
    _growing_model("SIZE", "47m-8k", "47 M parameters, vocabulary 8,192"),
    _growing_model("SIZE", "148m-8k", "148 M parameters, vocabulary 8,192"),
    _on_gpu("G1", "qwen3-0.6b", "Qwen3-0.6B"),
    _on_gpu("G2", "qwen3-4b", "Qwen3-4B"),
    _on_gpu("G3", "qwen3-1.7b", "Qwen3-1.7B", 16, 16, 2048),
    Workload(
        "TINY",
        "random weights, to try the benchmark itself",
        "tiny",
        2,
        4,
        12,
        ("rloo", "padded", "generate"),
        prompt_tokens=6,
        mean_tokens=8,
    ),
    Workload(
        "SG",
        "sampling alone: Qwen3-0.6B shape, random weights, 32 prompts, K = 8, 512 + up to 1,024 "
        "tokens, bf16",
        "qwen3-0.6b",
        32,
        8,
        1024,
        ("rloo", "generate"),
        kind="sample",
        prompt_tokens=512,
        mean_tokens=512,
        cuda=True,
        options=_GPU_OPTIONS,
    ),
]
WORKLOADS = {workload.name: workload for workload in _TABLE}
# Names of several workloads, whose sides alternate and are shown in one table.
FAMILIES = {
    "K": ("K4", "K16", "K64"),
    "LEN": ("LEN128", "LEN256", "LEN512", "LEN1024", "LEN2048", "LEN4096"),
    "VOCAB": ("VOCAB-3m-8k", "VOCAB-3m-32k", "VOCAB-3m-152k"),
    "SIZE": ("SIZE-3m-8k", "SIZE-17m-8k", "SIZE-47m-8k", "SIZE-148m-8k"),
}
DEFAULT = (
    *(f"W{number}" for number in range(1, 9)),
    *(name + letter for letter in "BPTC" for name in ("W1", "W2")),
    "S256",
    *FAMILIES,
)
# The options of every trainer: the same algorithm, with the fastest settings on the CPU.
SHARED_OPTIONS: dict[str, Any] = {
    "beta": 0.05,
    "temperature": 1.0,
    "learning_rate": 1e-6,
    "bf16": False,
    "gradient_checkpointing": False,
    "shuffle_dataset": False,  # equal prompts in equal order
    "use_cpu": True,
    "save_strategy": "no",
    "logging_steps": 1000,
    "report_to": "none",
    "disable_tqdm": True,
}
