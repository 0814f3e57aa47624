"""Prepares a model for training (precision, quantisation, adapter, dropout, attention) and checks
that its log-probs are right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rloo.config.config import RLOOConfig
from rloo.config.loss_validation import FIXED_REFERENCE
from rloo.kernels import cpu_matmul, fused_layers, fused_lora, torch_compat
from rloo.model import attention, lora, offload, quantization
from rloo.model.forward import LogprobModel
from rloo.model.lora import LoRAAdapter
from rloo.model.micro_batch import MicroBatch, pack, pad
from rloo.model.token_memory import activation_bytes, tokens_at_once
from rloo.model.training_state import digest
from rloo.types import Sample

# Names of module attributes that make a forward random.
NOISE = re.compile("dropout|pdrop|jitter|layerdrop")
# Largest difference between two float32 computations of a log-prob that counts as rounding.
TOLERANCE = 1e-4
# The tolerance for a frozen 16-bit base under an adapter. Around 32, neighbouring 16-bit values of
# a logit differ by 0.125 or 0.25.
LOW_PRECISION_TOLERANCE = 0.5
# TF32 operands have 10 mantissa bits, 3 more than bf16.
TF32_TOLERANCE = LOW_PRECISION_TOLERANCE / 8


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """The result of `prepare`: a transformers model on its device, its adapter, whether its
    attention supports packed rows, a hash of its weights, and notes on the changes made."""

    model: PreTrainedModel
    adapter: LoRAAdapter | None
    packed: bool
    initial_weights: str
    notes: list[str]


def prepare(model: PreTrainedModel, config: RLOOConfig, device: torch.device) -> PreparedModel:
    """Prepare a model or PeftModel in place. Raises ValueError if options do not fit the model."""
    if config.fp16 and device.type == "cpu":
        raise ValueError(
            "fp16 is True on a CPU, whose float16 arithmetic is a hundred times "
            "slower than float32; use bf16 or neither (fp16)"
        )
    if config.tf32 and device.type == "cpu":
        raise ValueError(
            "tf32 is true and training runs on a CPU, which has no such arithmetic; it is for GPUs "
            "(tf32, use_cpu)"
        )
    offload.check(config, device)
    adapter = LoRAAdapter(model) if lora.is_adapted(model) else None
    if adapter is None:
        lora.refuse_loose_layers(model)
    else:
        model = adapter.model
    notes = quantization.prepare(model, config, adapted=adapter is not None)
    if config.parallel == "replicate":
        nn.Module.to(model, device)  # else sharding moves weights by layer
    notes += [*precision_note(config, device), *unused_gpu_note(config, device)]
    notes += ensure_float32(model, adapted=adapter is not None)
    if config.beta != 0 and adapter is not None:
        if config.sync_ref_model:
            raise ValueError(FIXED_REFERENCE)
        adapter.keep_reference()  # before remove_dropout, since the copy may have dropout too
    dropout = remove_dropout(model)
    if dropout > 0:
        notes.append(f"dropout (up to {dropout:g}) is set to 0 for training")
    reason = None if config.packing is False else attention.unavailable_reason(model)
    if reason is not None:
        notes.append(without_packing(config, reason))
    packed = config.packing is not False and reason is None
    if packed:
        attention.install(model)
    if config.cpu_options.onednn != [] or config.bf16:
        cpu_matmul.install(model)
    if adapter is not None and device.type == "cpu":
        fused_lora.install(model)
    if config.torch_compile or (config.cpu_options.kernels is not False and device.type == "cpu"):
        fused_layers.install(model)
    # The weights of an adapter without effect do not identify the model.
    inert = adapter is not None and not adapter.has_effect
    initial = digest([p for p in model.parameters() if not (inert and p.requires_grad)])
    return PreparedModel(model, adapter, packed, initial, notes)


def without_packing(config: RLOOConfig, reason: str) -> str:
    """Return the note that updates are padded. Raises ValueError if the options need packing."""
    if (size := config.parallel_options.sp_size) > 1:
        raise ValueError(
            f"sp_size is {size}, and only packed rows are divided into slices, but "
            f"{reason} (sp_size)"
        )
    if config.packing:
        raise ValueError(f"packing is True, but {reason}; leave it out or set it to False")
    return f"updates are padded, not packed: {reason}"


def remove_dropout(model: PreTrainedModel) -> float:
    """Remove dropout and return the largest probability found. With dropout, the importance ratio
    of the first step would differ from 1, and the KL from 0. The model stays in evaluation mode."""
    found = 0.0
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            found, module.p = max(found, module.p), 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and value > 0 and NOISE.search(name):
                found = max(found, value)
                setattr(module, name, 0.0)
    return found


def ensure_float32(model: PreTrainedModel, *, adapted: bool) -> list[str]:
    """Convert trained parameters to float32; return notes. Raises ValueError for trained 16-bit
    parameters of an adapted model, because its base keeps the dtype in which it was loaded."""
    trained = ((name, p.dtype) for name, p in model.named_parameters() if p.requires_grad)
    small = [x for x in trained if x[1] not in (torch.float32, torch.float64)]
    if not small:
        return []
    name, dtype = small[0]
    if adapted:
        raise ValueError(
            f"parameter {name} is {dtype}; trained parameters must be float32, and the base of an "
            "adapter stays as it is (load the model with dtype=torch.float32; bf16 is the "
            "precision of the computation)"
        )
    model.float()
    return [
        f"the model was loaded in {dtype}; its weights are float32 now, since smaller ones lose "
        "updates at these learning rates (bf16 is the precision of the computation)"
    ]


def enable_checkpointing(model: PreTrainedModel, config: RLOOConfig) -> list[str]:
    """Enable gradient checkpointing if the options request it, or return a note why it is not
    possible. Only checkpointed layers are set to training mode, which transformers requires to
    recompute."""
    if not config.gradient_checkpointing:
        return []
    if not model.supports_gradient_checkpointing:
        return [
            f"activations are kept for the backward: {type(model).__name__} cannot compute them "
            "again (gradient_checkpointing)"
        ]
    options = config.gradient_checkpointing_kwargs or {}
    # transformers 5.2x renamed the argument and warns about the old name.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False, **options})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
    return []


def token_budget(model: PreTrainedModel, device: torch.device, config: RLOOConfig) -> int:
    """Input tokens of a micro-batch whose activations take a quarter of the free memory. Per token,
    a layer stores about 34 numbers per hidden unit for the backward (Korthikanti et al. 2022,
    without the attention scores), and the output head stores a few numbers per vocabulary entry."""
    text_config = model.config.get_text_config()
    layers, width = text_config.num_hidden_layers, text_config.hidden_size
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        again = config.gradient_checkpointing and model.supports_gradient_checkpointing
        half = config.bf16 or config.fp16
        a_token = activation_bytes(layers, width, half=bool(half), checkpointing=again)
        return tokens_at_once(free, a_token)
    # Larger micro-batches are not faster on a CPU, and exceed its caches.
    return max(1024, min(8192, 2**32 // (4 * 34 * width * layers)))


def precision_note(config: RLOOConfig, device: torch.device) -> list[str]:
    """A note if a GPU multiplies float32 matrices without its tensor cores; else empty."""
    settled = config.bf16 or config.fp16 or config.tf32 is not None
    if device.type != "cuda" or settled or torch_compat.uses_tf32(device):
        return []
    return [
        "float32 products on this GPU are computed without its tensor cores, in full precision: "
        "tf32 true is several times faster and rounds their operands to 10 bits, bf16 to 7 (tf32, "
        "bf16)"
    ]


def unused_gpu_note(config: RLOOConfig, device: torch.device) -> list[str]:
    """A note if a Mac has a GPU, on which this package was not tested; else empty."""
    if device.type != "cpu" or config.use_cpu or not torch.backends.mps.is_available():
        return []
    return [
        "this Mac's GPU (MPS) is not used: rloo computes on its CPU, or on a CUDA device (use_cpu)"
    ]


@torch.no_grad()
def check_forward(
    scorer: LogprobModel,
    samples: Sequence[Sample],
    device: torch.device,
    pad_token_id: int,
    *,
    packed: bool,
) -> str | None:
    """Compare the log-probs of `samples`, padded and (if `packed`) packed, with log-probs from the
    logits that the model itself computes, in float32. Returns how packing changes the result, or
    None if it does not. If our output head differs from the model's, sets `scorer.own_logits`.
    Raises ValueError if the log-probs of samples with images depend on the other samples of a
    batch."""
    model = scorer.model
    tolerance = rounding_of(model)
    samples = sorted(samples, key=lambda sample: sample.key)
    # With images, the expected log-probs come from each sample in a batch of one.
    apart = [[s] for s in samples] if any(s.pixels for s in samples) else [samples]
    alone = [pad(part, device, pad_token_id) for part in apart]
    expected = torch.cat([scorer.logprobs_by_logits(batch) for batch in alone])

    def difference(batch: MicroBatch) -> float:
        return (scorer.logprobs(batch) - expected).abs().max().item()

    padded = pad(samples, device, pad_token_id)
    scorer.own_logits = scorer.own_logits or not difference(padded) <= tolerance
    if scorer.own_logits and not (found := difference(padded)) <= tolerance:
        raise ValueError(
            f"log-probs of {type(model).__name__} for samples with images differ by {found:.1e} "
            "between several together and each by itself: they are put together in a way that is "
            "not known here (model)"
        )
    if not packed:
        return None
    try:
        found = difference(pack(samples, device))
    except (TypeError, RuntimeError) as error:  # the model's forward rejects packed inputs
        return f"packed it fails with {error}"
    return None if found <= tolerance else f"packed log-probs differ by {found:.1e}"


def rounding_of(model: PreTrainedModel) -> float:
    """The largest difference of a log-prob between two computations that counts as rounding."""
    if model.dtype.itemsize < 4:
        return LOW_PRECISION_TOLERANCE
    return TF32_TOLERANCE if torch_compat.uses_tf32(model.device) else TOLERANCE
