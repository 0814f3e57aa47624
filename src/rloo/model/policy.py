"""The model that is trained: weights, reference, optimizer, and what they compute."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from rloo.config.config import RLOOConfig
from rloo.config.objective_checks import FIXED_REFERENCE
from rloo.data.images import tokenizer_of
from rloo.model import adapters, attention, offload, quantization
from rloo.model.adapters import Adapter
from rloo.model.batch import MicroBatch, pack, pad
from rloo.model.experts import balancing_coefficient, balancing_loss
from rloo.model.forward import (
    copy_frozen,
    enable_checkpointing,
    ensure_float32,
    hidden_states,
    output_head,
    own_logprobs,
    remove_dropout,
    routed_states,
    token_budget,
)
from rloo.model.loading import quiet
from rloo.model.logprobs import CHUNK_ELEMENTS, TokenScores, score_tokens, token_logprobs
from rloo.model.offload import ParkedState, activations_on_host
from rloo.model.optimizers import Given, make_optimizers
from rloo.model.state import load_optimizer
from rloo.types import Sample

# Largest difference between two float32 computations of a log-prob that counts as rounding.
TOLERANCE = 1e-4
# 16-bit logits around 32 are 0.125 or 0.25 apart (a frozen base of 16 bits under an adapter).
LOW_PRECISION_TOLERANCE = 0.5
# The folder of a checkpoint for a reference that `sync_ref_model` moves.
REFERENCE_FOLDER = "reference"


class Policy:
    """A causal language model in training, which may also read images.

    Parameters are always float32; `bf16` and `fp16` are the precision of the computation
    (autocast), since bf16 parameters lose updates at RLOO's learning rates.

    For a PeftModel the adapter is trained, and `model` is the transformers model that contains it.
    The reference is then the same module, and the base is not copied.

    `processing_class` is the model's tokenizer, or the processor that contains it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        config: RLOOConfig,
        *,
        device: torch.device,
        num_training_steps: int,
        optimizers: Given = (None, None),
    ) -> None:
        self.config = config
        self.processing_class = processing_class
        self.tokenizer: PreTrainedTokenizerBase = tokenizer_of(processing_class)
        self.device = device
        self.notes: list[str] = []
        self._check_precision()
        offload.check(config, self.device)
        self.adapter = Adapter(model) if adapters.is_adapted(model) else None
        if self.adapter is None:
            adapters.refuse_loose_layers(model)
        else:
            model = self.adapter.model
        self.model = model
        self.notes += quantization.prepare(model, config, adapted=self.adapter is not None)
        nn.Module.to(model, self.device)
        self.notes += ensure_float32(model, adapted=self.adapter is not None)
        self.reference: PreTrainedModel | None = None
        if config.beta != 0 and self.adapter is not None:
            if config.sync_ref_model:
                raise ValueError(FIXED_REFERENCE)
            self.adapter.keep_reference()
        dropout = remove_dropout(model)
        if dropout > 0:
            self.notes.append(f"dropout (up to {dropout:g}) is set to 0 for training")
        self.packed = self._install_attention()
        self.checked = False
        if config.beta != 0 and self.adapter is None:
            self.reference = copy_frozen(model)
        if config.gradient_checkpointing:
            enable_checkpointing(model, config.gradient_checkpointing_kwargs)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.initial_weights = self._hash_start()
        self.optimizer, self.scheduler = make_optimizers(
            optimizers, model, config, num_training_steps
        )
        if "paged" in config.optim and self.device.type == "cpu":
            self.notes.append(f"optim is {config.optim}; on a CPU nothing is paged (optim)")
        self._parked = (
            ParkedState(self.optimizer, self.device) if config.offload_optimizer else None
        )
        self.scaler = torch.amp.GradScaler("cuda") if config.fp16 else None
        self.max_tokens = config.max_tokens_per_micro_batch or token_budget(model, self.device)
        self.aux_loss_weight = balancing_coefficient(model, config)
        self._head = output_head(model)
        self._vocab_size = model.config.get_text_config().vocab_size

    # -- computing -------------------------------------------------------------------------------

    def batch(self, samples: Sequence[Sample]) -> MicroBatch:
        if self.packed:
            return pack(samples, self.device)
        return self._pad(samples)

    def _pad(self, samples: Sequence[Sample]) -> MicroBatch:
        return pad(samples, self.device, self.pad_token_id)

    def logprobs(self, batch: MicroBatch, *, chunk_elements: int = CHUNK_ELEMENTS) -> TokenScores:
        """Scores of the batch's completion tokens at the sampling temperature, with gradients if
        they are enabled. `chunk_elements`: see `token_logprobs`."""
        balance = None
        with self.autocast(), self._offloading():
            if self.aux_loss_weight:
                hidden, router_logits = routed_states(self.model, batch)
                balance = balancing_loss(self.model, router_logits, batch.multiplicity)
            else:
                hidden = hidden_states(self.model, batch)
            logprobs, entropy = token_logprobs(
                self._head,
                hidden,
                batch.target_T,
                temperature=self.config.temperature,
                vocab_size=self._vocab_size,
                chunk_elements=chunk_elements,
            )
        return TokenScores(logprobs, entropy, balance)

    def score(self, batch: MicroBatch) -> Tensor:
        """Only the log-probs, without gradients: (T,)."""
        return self._score(self.model, self._head, batch)

    def reference_logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probs (T,) under the frozen reference. Raises ValueError without one (beta 0)."""
        if self.config.beta == 0:
            raise ValueError("beta is 0; there is no reference model to compare with (beta)")
        if self.adapter is not None:
            with self.adapter.as_reference():
                return self._score(self.model, self._head, batch)
        assert self.reference is not None
        return self._score(self.reference, output_head(self.reference), batch)

    @torch.no_grad()
    def _score(
        self, model: PreTrainedModel, head: Callable[[Tensor], Tensor], batch: MicroBatch
    ) -> Tensor:
        with self.autocast():
            return score_tokens(
                head,
                hidden_states(model, batch),
                batch.target_T,
                temperature=self.config.temperature,
                vocab_size=self._vocab_size,
            )

    def autocast(self) -> AbstractContextManager[Any]:
        if self.config.bf16 or self.config.fp16:
            dtype = torch.bfloat16 if self.config.bf16 else torch.float16
            return torch.autocast(self.device.type, dtype=dtype)
        return nullcontext()

    def _offloading(self) -> AbstractContextManager[Any]:
        if self.config.activation_offloading and torch.is_grad_enabled():
            return activations_on_host(self.model.parameters(), self.device)
        return nullcontext()

    # -- learning --------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def step(self) -> dict[str, float]:
        """One optimizer step on the gradients gathered so far. A gradient that is not finite is
        refused: the weights stay as they are, and `update/nonfinite` is 1."""
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        limit = self.config.max_grad_norm or math.inf
        # With fp16, overflows are expected while the loss scale is adapted.
        searching = self.scaler is not None and self.scaler.get_scale() > 1
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit)
        finite = bool(norm.isfinite())
        stats: dict[str, float] = {
            "grad_norm": norm.item(),
            "learning_rate": float(self.scheduler.get_last_lr()[0]),
            "update/nonfinite": float(not finite and not searching),
            "update/scale_lowered": float(not finite and searching),
            "update/changed_share": 0.0,
        }
        if finite:
            before = _probe(self.parameters)
            with self._parked.fetched() if self._parked else nullcontext():
                if self.scaler:
                    self.scaler.step(self.optimizer)
                else:
                    self.optimizer.step()
            stats["update/changed_share"] = (
                (_probe(self.parameters) != before).float().mean().item()
            )
        if self.scaler:
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.advance_schedule()
        return stats

    def load_optimizer(self, tensors: dict[str, Tensor], meta: Any) -> None:
        """Restore an optimizer's saved state; see `rloo.model.state.load_optimizer`."""
        load_optimizer(self.optimizer, tensors, meta)
        if self._parked:
            self._parked.park()

    def advance_schedule(self) -> None:
        """Advance the schedule, which also counts steps that changed no weight."""
        with warnings.catch_warnings():
            # torch warns if the very first step was such a step.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.scheduler.step()

    # -- weights and tokens ----------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values of the model's weights; an adapter is merged into its base."""
        if self.adapter is not None:
            yield from self.adapter.weights()
            return
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    @property
    def pad_token_id(self) -> int:
        if self.tokenizer.pad_token_id is not None:
            return int(self.tokenizer.pad_token_id)
        return self.stop_token_ids[0]

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a completion: the tokenizer's and the model's."""
        listed = self.model.generation_config.eos_token_id if self.model.generation_config else None
        listed = [listed] if isinstance(listed, int) else list(listed or [])
        if self.tokenizer.eos_token_id is not None:
            listed.append(self.tokenizer.eos_token_id)
        if not listed:
            raise ValueError(
                "neither the tokenizer nor the model has an end-of-sequence token; a completion "
                "could never end (tokenizer.eos_token)"
            )
        return tuple(dict.fromkeys(listed))

    @torch.no_grad()
    def move_reference(self, share: float) -> None:
        """reference = (1 - share) * reference + share * policy, for all weights (TR-DPO, arXiv
        2404.09656, equation 6)."""
        assert self.reference is not None, "checked at the start (sync_ref_model)"
        for frozen, parameter in zip(
            self.reference.parameters(), self.model.parameters(), strict=True
        ):
            frozen.lerp_(parameter.detach(), share)

    def save_pretrained(self, path: str | Path) -> None:
        """Write model and tokenizer in Hugging Face format (safetensors); for an adapted model only
        the adapter, in peft's format."""
        if self.adapter is not None:
            self.adapter.save(path)
        else:
            # With the adapter of an earlier run in the folder, the model would pass for its base.
            for name in adapters.FILES:
                Path(path, name).unlink(missing_ok=True)
            with quiet():
                self.model.save_pretrained(path)
        self.processing_class.save_pretrained(path)

    def load_pretrained(self, path: str | Path) -> None:
        """Load the weights that `save_pretrained` wrote, bit for bit."""
        if self.adapter is not None:
            self.adapter.load(path)
            return
        _load_weights(self.model, path)

    def save_checkpoint(self, path: str | Path) -> None:
        """`save_pretrained`; a reference that moves is written to the folder `reference`."""
        self.save_pretrained(path)
        if self.config.sync_ref_model and self.reference is not None:
            with quiet():
                self.reference.save_pretrained(Path(path, REFERENCE_FOLDER))

    def load_checkpoint(self, path: str | Path) -> None:
        """Load what `save_checkpoint` wrote."""
        self.load_pretrained(path)
        folder = Path(path, REFERENCE_FOLDER)
        if self.reference is not None and folder.is_dir():
            _load_weights(self.reference, folder)

    # -- start-up --------------------------------------------------------------------------------

    @torch.no_grad()
    def check_forward(self, samples: Sequence[Sample]) -> None:
        """Compare our log-probs, padded and packed, with the model's own logits on real samples.

        If packing changes the result, updates fall back to padding, with a note. Raises ValueError
        if our computation of the output head differs.
        """
        self.checked = True
        precise = self.model.dtype.itemsize >= 4
        tolerance = TOLERANCE if precise else LOW_PRECISION_TOLERANCE
        temperature = self.config.temperature
        samples = sorted(samples, key=lambda sample: sample.key)
        padded = self._pad(samples)
        # With images, the standard is each sample alone, without joining inputs.
        apart = [[s] for s in samples] if any(s.pixels for s in samples) else [samples]
        alone = [own_logprobs(self.model, self._pad(part), temperature) for part in apart]
        expected = torch.cat(alone)
        difference = self._difference(padded, expected)
        if not difference <= tolerance:
            raise ValueError(
                f"log-probs from {type(self.model).__name__}'s hidden states differ from its "
                f"logits by {difference:.1e}; its output head does something not known here, or "
                "its images are put together in another way"
            )
        if self.packed:
            try:
                difference = self._difference(pack(samples, self.device), expected)
            except (TypeError, RuntimeError) as error:  # the model's forward rejects packed inputs
                self._refuse_packing(f"packed it fails with {error}")
                return
            if not difference <= tolerance:
                self._refuse_packing(f"packed log-probs differ by {difference:.1e}")

    def _difference(self, batch: MicroBatch, expected: Tensor) -> float:
        """The largest difference of a log-prob, in float32 whatever the precision of training."""
        logprobs = score_tokens(
            self._head,
            hidden_states(self.model, batch),
            batch.target_T,
            temperature=self.config.temperature,
            vocab_size=self._vocab_size,
        )
        return (logprobs - expected).abs().max().item()

    def _install_attention(self) -> bool:
        if self.config.packing is False:
            return False
        reason = attention.incompatibility(self.model)
        if reason is not None:
            self._refuse_packing(reason)
            return False
        attention.install(self.model)
        return True

    def _refuse_packing(self, reason: str) -> None:
        if self.config.packing:
            raise ValueError(f"packing is True, but {reason}; leave it out or set it to False")
        self.packed = False
        self.notes.append(f"updates are padded, not packed: {reason}")

    def _hash_start(self) -> str:
        """A hash of the weights at the start; an adapter without effect does not count."""
        parameters = list(self.model.parameters())
        if self.adapter is not None and not self.adapter.has_effect:
            parameters = [p for p in parameters if not p.requires_grad]
        return hashlib.sha256(_probe(parameters).float().cpu().numpy().tobytes()).hexdigest()

    def _check_precision(self) -> None:
        if self.config.fp16 and self.device.type == "cpu":
            raise ValueError(
                "fp16 is True on a CPU, whose float16 arithmetic is a hundred times "
                "slower than float32; use bf16 or neither (fp16)"
            )


def _load_weights(model: PreTrainedModel, path: str | Path) -> None:
    weights = type(model).from_pretrained(path, dtype=next(model.parameters()).dtype)
    model.load_state_dict(weights.state_dict())


def _probe(parameters: Sequence[Tensor]) -> Tensor:
    """A fixed sample of parameters: up to 1,024 numbers of each."""
    return torch.cat([p.detach().flatten()[:1024] for p in parameters])
