"""The performance of GPUs, the shares of it that a run achieves, and the sources of the numbers."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

# GPUs that NVLink connects in one machine.
IN_A_MACHINE = 8


@dataclass(frozen=True, slots=True)
class GPU:
    """The maker's figures for a GPU: bytes of memory (as torch reports them: a GPU of 80 GB has
    79.2 GiB), dense 16-bit operations per second with sums in float32, and bytes per second of the
    memory, of NVLink in one direction, and of the network in a usual machine with eight GPUs.
    `nvlink` is the rate of PCIe for cards on PCIe: none has NVLink but the RTX 3090, whose bridge
    (56.25e9 in one direction) connects no more than two cards, and is not assumed. `attention` is
    the operations per second of FlashAttention-2 on the GPU, `host` the bytes per second of PCIe in
    one direction. `bf16` is false for a GPU whose 16-bit operations are fp16 only. `source` is the
    title of the maker's document, with its version or year if known."""

    name: str
    memory: float
    operations: float
    bandwidth: float
    nvlink: float
    network: float
    attention: float
    source: str
    host: float = 32e9
    bf16: bool = True


_GIB = 2**30
# The share of the dense rate that FlashAttention-2 has on an A100. It is assumed for GPUs of which
# no rate is published. On a T4 FlashAttention-2 does not run; half of the share is assumed.
_ATTENTION = 225 / 312
# The network of a machine with cards on PCIe: 100 Gb/s (assumed).
_ETHERNET = 12.5e9


def _card(
    name: str, gib: float, operations: float, bandwidth: float, source: str, **more: Any
) -> GPU:
    """A card on PCIe: memory in GiB as torch's out-of-memory errors report it, dense operations in
    10^12 per second, bandwidth in 10^9 bytes per second."""
    host = more.get("host", 32e9)
    rate = operations * 1e12
    share = _ATTENTION if more.get("bf16", True) else _ATTENTION / 2
    facts = (gib * _GIB, rate, bandwidth * 1e9, host, _ETHERNET, share * rate)
    return GPU(name, *facts, source, **more)


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU(
            "a100",
            85e9,
            312e12,
            2.039e12,
            300e9,
            25e9,
            225e12,
            "NVIDIA A100 Tensor Core GPU data sheet (1758950-r4), 80GB SXM; DGX A100",
        ),
        GPU(
            "h100",
            85e9,
            989e12,
            3.35e12,
            450e9,
            50e9,
            350e12,
            "NVIDIA H100 Tensor Core GPU data sheet, SXM; DGX H100",
            64e9,
        ),
        GPU(
            "h200",
            150e9,
            989e12,
            4.8e12,
            450e9,
            50e9,
            350e12,
            "NVIDIA H200 Tensor Core GPU data sheet, SXM; DGX H200",
            64e9,
        ),
        GPU(
            "b200",
            191e9,
            2250e12,
            8e12,
            900e9,
            50e9,
            350e12,
            "NVIDIA DGX B200 data sheet, an eighth of it",
            64e9,
        ),
        # GeForce cards multiply 16-bit matrices at half of their rate if the sums are float32, as
        # in training. The tables of these papers have both rates; these are the ones with float32.
        _card("rtx3090", 23.69, 71, 936, "NVIDIA Ampere GA102 GPU Architecture, V2.0, RTX 3090"),
        _card("rtx4090", 23.64, 165.2, 1008, "NVIDIA Ada GPU Architecture, V2.01, RTX 4090"),
        _card(
            "rtx5090",
            31.37,
            209.5,
            1792,
            "NVIDIA RTX Blackwell GPU Architecture (2025), RTX 5090",
            host=64e9,
        ),
        # The data sheets of L4, L40S and A10 also have rates with sparsity. The dense rate of L40S
        # is the one of its sheet; half of its rate with sparsity is 366.5.
        _card("l4", 22.03, 121, 300, "NVIDIA L4 Tensor Core GPU data sheet (2023): 242 sparse"),
        _card("l40s", 44.4, 362.05, 864, "NVIDIA L40S data sheet (2023): 362.05 dense, 733 sparse"),
        _card("a10", 21.99, 125, 600, "NVIDIA A10 Tensor Core GPU data sheet (2021): 250 sparse"),
        # fp16 only: Turing has no bf16. The sheet has 300+ GB/s.
        _card(
            "t4",
            14.56,
            65,
            320,
            "NVIDIA T4 Tensor Core GPU data sheet; its memory has 256 bits of 10 Gb/s",
            host=16e9,
            bf16=False,
        ),
    )
}

# The source of fitted rates.
FITTED = "seven times published by prime-rl and SkyRL (python -m benchmarks.published --fit)"


@dataclass(frozen=True, slots=True)
class Assumption:
    """A number that a plan relies on and that can be overridden. The kind is `source` (published by
    others), `fitted` (to published times), `measured` (by this project) or `assumed` (there is no
    figure)."""

    value: float
    kind: Literal["measured", "source", "fitted", "assumed"]
    meaning: str
    source: str


RATES = MappingProxyType(
    {
        "training_share": Assumption(
            0.65,
            "assumed",
            "of the GPU's bf16 operations that products with weights have",
            "five sixths of a large product's share on an H100 (docs/benchmarks.md: 774 of 989 "
            "TFLOP/s); the fitted rates compensate for other values",
        ),
        "attention_speed": Assumption(
            1.0,
            "source",
            "speed of attention in training, relative to FlashAttention-2",
            "FlashAttention-2, arXiv 2307.08691: 225 TFLOP/s on A100; FlashAttention-3, arXiv "
            "2407.08608: 350 on H100, and 1.5 to 2.0 times as fast itself; B200 is assumed as H100",
        ),
        "layer_bytes": Assumption(
            215.0,
            "fitted",
            "bytes that other kernels of a layer move per token, pass and unit of width",
            FITTED,
        ),
        "vocabulary_bytes": Assumption(
            150.0,
            "fitted",
            "bytes that log-probs and entropy move per token, pass and vocabulary entry",
            FITTED,
        ),
        "expert_bytes": Assumption(
            130.0,
            "fitted",
            "bytes that a chosen expert moves per token, pass and unit of width",
            FITTED,
        ),
        "adapter_bytes": Assumption(
            14.0,
            "fitted",
            "bytes that an adapter moves per token, pass and input or output of its matrix",
            FITTED,
        ),
        "micro_batch_overhead": Assumption(
            0.1,
            "assumed",
            "seconds of a micro-batch in which the GPU waits for the host",
            "no published figure for this use; the fitted rates compensate for other values",
        ),
        "decoding_share": Assumption(
            0.6,
            "assumed",
            "of the memory's bandwidth that decoding has",
            "no published figure for this use; measure an engine and give it",
        ),
        "decoding_overhead": Assumption(
            0.002,
            "assumed",
            "seconds of a decoding step beside the GPU's work",
            "no published figure for this use; measure an engine and give it",
        ),
        "native_share": Assumption(
            0.51,
            "measured",
            "of the memory's bandwidth that the native engine has with its copy of the weights",
            "docs/benchmarks.md: with this share, the plan's formulas give the 9.0 s of 256 "
            "completions on one H100 (0.6 B parameters)",
        ),
        "layer_overhead": Assumption(
            0.001,
            "assumed",
            "seconds of a layer and decoding step in which the native engine without a copy "
            "launches kernels",
            "no published figure for this use; measure an engine and give it",
        ),
        "server_memory": Assumption(
            1.5e9,
            "assumed",
            "bytes that a vLLM server on the trainer's GPU has beside weights and cache, also "
            "while it sleeps",
            "no published figure for this use; a run measures it before the first step",
        ),
        "network_share": Assumption(
            0.7,
            "assumed",
            "of the rate of NVLink, PCIe or the network that is reached",
            "no published figure for this use; measure with nccl-tests and give it",
        ),
        "weight_rate": Assumption(
            8.6e9,
            "source",
            "bytes a second at which weights reach servers on other GPUs over NCCL",
            "verl: 30 B parameters in bf16 in about 7 s; MoonshotAI's checkpoint-engine reaches "
            "70 GB/s: 235 B in 6.75 s on 8 H800",
        ),
        "file_rate": Assumption(
            2.4e9,
            "measured",
            "bytes a second of a version of the weights that the main process writes as files",
            "benchmarks/weights.py --steps 6: 0.42 CPU seconds per GB in the mean of five deltas "
            "and the complete version after them, on one core of this project's machine",
        ),
        "load_rate": Assumption(
            1.6e9,
            "measured",
            "bytes a second of a version of the weights that a server reads from files",
            "benchmarks/weights.py --steps 6: 0.6 CPU seconds per GB in the mean of six versions, "
            "a complete one and its five deltas, on one core; the copy to the GPU is not included",
        ),
        "reading": Assumption(
            1.5e-6,
            "measured",
            "seconds of the main process for each token that others have sampled",
            "benchmarks/dispatch.py with 4 and 100 tokens, and json.loads of 43 bytes a token, on "
            "one core of this project's machine",
        ),
        "failure_hours": Assumption(
            50_700.0,
            "source",
            "hours of one GPU between two failures",
            "Llama 3, arXiv 2407.21783: 419 unexpected interruptions in 54 days on 16,384 H100",
        ),
        "restart": Assumption(
            300.0,
            "assumed",
            "seconds until a server or the trainer is back",
            "no published figure for this use; it is of the cluster",
        ),
    }
)
