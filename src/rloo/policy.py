"""The model that is trained: weights, reference, optimizer, and what they compute.

The only file that knows devices, precision and transformers' model classes. Knows nothing of
rewards, groups or advantages.
"""

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
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rloo import adapters, attention
from rloo.adapters import Adapter
from rloo.batch import MicroBatch, Sample, pack, pad
from rloo.config import RLOOConfig
from rloo.logprobs import CHUNK_ELEMENTS, score_tokens, token_logprobs
from rloo.modeling import (
    copy_frozen,
    enable_checkpointing,
    hidden_states,
    output_head,
    quiet,
    remove_dropout,
    require_float32,
    token_budget,
)
from rloo.optimizers import build_optimizer, build_scheduler

# Largest difference of a log-prob between two float32 computations that is still rounding.
TOLERANCE = 1e-4
# 16-bit logits around 32 are 0.125 or 0.25 apart (a frozen base of 16 bits under an adapter).
LOW_PRECISION_TOLERANCE = 0.5


class Policy:
    """A causal language model in training.

    Parameters stay float32 whatever the precision; `bf16` and `fp16` are the precision of the
    computation (autocast), since bf16 parameters lose updates at RLOO's learning rates.

    Of a PeftModel the adapter is trained: `model` is the transformers model that it is in. The
    reference is then the same module, and no copy of the base is made.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: RLOOConfig,
        *,
        num_training_steps: int,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.device = torch.device(
            "cuda" if torch.cuda.is_available() and not config.use_cpu else "cpu"
        )
        self.notes: list[str] = []
        self._check_precision()
        self.adapter = Adapter(model) if adapters.is_adapted(model) else None
        if self.adapter is None:
            adapters.refuse_loose_layers(model)
        else:
            model = self.adapter.model
        self.model = model
        nn.Module.to(model, self.device)
        require_float32(model)
        self.reference: PreTrainedModel | None = None
        if config.beta != 0 and self.adapter is not None:
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
        self.optimizer = build_optimizer(model, config)
        self.scheduler = build_scheduler(self.optimizer, config, num_training_steps)
        self.scaler = torch.amp.GradScaler("cuda") if config.fp16 else None
        self.max_tokens = config.max_tokens_per_micro_batch or token_budget(model, self.device)
        self._head = output_head(model)
        self._vocab_size = model.config.get_text_config().vocab_size

    # -- what it computes ------------------------------------------------------------------------

    def batch(self, samples: Sequence[Sample]) -> MicroBatch:
        if self.packed:
            return pack(samples, self.device)
        return pad(samples, self.device, self.pad_token_id)

    def logprobs(
        self, batch: MicroBatch, *, chunk_elements: int = CHUNK_ELEMENTS
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of the batch's completion tokens at the sampling temperature, and entropies:
        both (T,), float32, in nats. With gradients where they are enabled. `chunk_elements`: see
        `token_logprobs`."""
        with self.autocast():
            return token_logprobs(
                self._head,
                hidden_states(self.model, batch),
                batch.target_T,
                temperature=self.config.temperature,
                vocab_size=self._vocab_size,
                chunk_elements=chunk_elements,
            )

    def score(self, batch: MicroBatch) -> Tensor:
        """The log-probs alone, without gradients: (T,)."""
        return self._score(self.model, self._head, batch)

    def reference_logprobs(self, batch: MicroBatch) -> Tensor:
        """The same under the frozen reference: (T,). Raises ValueError without one (beta 0)."""
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

    # -- how it learns ---------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def step(self) -> dict[str, float]:
        """One optimizer step on the gradients gathered so far. A gradient that is not finite is
        refused: the weights stay as they are, and `update/nonfinite` is 1."""
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        limit = self.config.max_grad_norm or math.inf
        # While the scale is still being found, an overflow is part of the method.
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

    def advance_schedule(self) -> None:
        """The schedule counts the run's steps, also those that changed no weight."""
        with warnings.catch_warnings():
            # torch warns when the first step of all was such a one.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.scheduler.step()

    # -- what others take from it ----------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values of the model's weights; an adapter is merged into its base's."""
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
        """Every token that ends a completion: the tokenizer's and all of the model's."""
        listed = self.model.generation_config.eos_token_id if self.model.generation_config else None
        listed = [listed] if isinstance(listed, int) else list(listed or [])
        if self.tokenizer.eos_token_id is not None:
            listed.append(self.tokenizer.eos_token_id)
        if not listed:
            raise ValueError(
                "the tokenizer has no eos_token and the model names none; a completion "
                "could never end (tokenizer.eos_token)"
            )
        return tuple(dict.fromkeys(listed))

    def save_pretrained(self, path: str | Path) -> None:
        """Write model and tokenizer in Hugging Face format (safetensors); of an adapted model the
        adapter alone, in peft's."""
        if self.adapter is not None:
            self.adapter.save(path)
        else:
            # Beside an adapter of an earlier run the model would be taken for its base.
            for name in adapters.FILES:
                Path(path, name).unlink(missing_ok=True)
            with quiet():
                self.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)

    def load_pretrained(self, path: str | Path) -> None:
        """Take on the weights that `save_pretrained` wrote, to the last bit."""
        if self.adapter is not None:
            self.adapter.load(path)
            return
        dtype = next(self.model.parameters()).dtype
        weights = type(self.model).from_pretrained(path, dtype=dtype)
        self.model.load_state_dict(weights.state_dict())

    # -- start-up --------------------------------------------------------------------------------

    @torch.no_grad()
    def check_forward(self, samples: Sequence[Sample]) -> None:
        """Compare our log-probs, padded and packed, with the model's own logits on real samples.

        Where packing changes the result, fall back to padding, with a note. Raises ValueError if
        the output head is one that we do not compute right.
        """
        self.checked = True
        precise = self.model.dtype.itemsize >= 4
        tolerance = TOLERANCE if precise else LOW_PRECISION_TOLERANCE
        padded = pad(samples, self.device, self.pad_token_id)
        logits = self.model(**padded.inputs, use_cache=False).logits
        chosen = logits.flatten(0, 1)[padded.source_T].float() / self.config.temperature
        expected = chosen.log_softmax(-1).gather(-1, padded.target_T[:, None])[:, 0]
        difference = self._difference(padded, expected)
        if not difference <= tolerance:
            raise ValueError(
                f"log-probs from {type(self.model).__name__}'s hidden states differ from its "
                f"logits by {difference:.1e}; its output head does something not known here"
            )
        if self.packed:
            try:
                difference = self._difference(pack(samples, self.device), expected)
            except (TypeError, RuntimeError) as error:  # what a model's forward does not expect
                self._refuse_packing(f"packed it fails with {error}")
                return
            if not difference <= tolerance:
                self._refuse_packing(f"packed log-probs differ by {difference:.1e}")

    def _difference(self, batch: MicroBatch, expected: Tensor) -> float:
        """Largest difference of a log-prob, in float32 whatever the precision of training."""
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
        """What tells the weights at the start from others: an adapter without effect is none."""
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


def _probe(parameters: Sequence[Tensor]) -> Tensor:
    """A fixed sample of parameters: up to 1,024 numbers of each."""
    return torch.cat([p.detach().flatten()[:1024] for p in parameters])
