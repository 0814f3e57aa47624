"""The model that is trained: weights, reference, optimizer, and what they compute.

The only file that knows devices, precision and transformers' model classes. Knows nothing of
rewards, groups or advantages.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_pt_utils import get_parameter_names
from transformers.utils import logging as hf_logging

from rloo import attention
from rloo.batch import MicroBatch, Sample, pack, pad
from rloo.config import RLOOConfig
from rloo.logprobs import score_tokens, token_logprobs
from rloo.tasks import resolve_model
from rloo.training_arguments import to_training_arguments

# Largest difference of a log-prob between packed and padded that is still rounding, by precision.
PACKING_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05}
# Names of parameters that weight decay leaves alone, as in transformers' Trainer.
NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


class Policy:
    """A causal language model in training.

    Parameters stay float32 whatever the precision; `bf16` and `fp16` are the precision of the
    computation (autocast), since bf16 parameters lose updates at RLOO's learning rates.
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
        self.model = model
        nn.Module.to(model, self.device)
        _require_float32(model)
        self._remove_dropout()
        self.packed = self._install_attention()
        self.reference = _frozen_copy(model) if config.beta != 0 else None
        if config.gradient_checkpointing:
            _enable_checkpointing(model, config.gradient_checkpointing_kwargs)
        self.model.train()
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = _build_optimizer(model, config)
        self.scheduler = transformers.get_scheduler(
            config.lr_scheduler_type,
            self.optimizer,
            num_warmup_steps=_warmup_steps(config, num_training_steps),
            num_training_steps=num_training_steps,
            scheduler_specific_kwargs=config.lr_scheduler_kwargs or {},
        )
        self.scaler = torch.amp.GradScaler("cuda") if config.fp16 else None
        self.max_tokens = config.max_tokens_per_micro_batch or _token_budget(model, self.device)
        self._head = _output_head(model)
        self._vocab_size = model.config.get_text_config().vocab_size

    # -- what it computes ------------------------------------------------------------------------

    def batch(self, samples: Sequence[Sample]) -> MicroBatch:
        if self.packed:
            return pack(samples, self.device)
        return pad(samples, self.device, self.pad_token_id)

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs of the batch's completion tokens at the sampling temperature, and entropies:
        both (T,), float32, in nats. With gradients where they are enabled."""
        with self.autocast():
            return token_logprobs(
                self._head,
                _hidden_states(self.model, batch),
                batch.target_T,
                temperature=self.config.temperature,
                vocab_size=self._vocab_size,
            )

    def score(self, batch: MicroBatch) -> Tensor:
        """The log-probs alone, without gradients: (T,)."""
        return self._score(self.model, self._head, batch)

    def reference_logprobs(self, batch: MicroBatch) -> Tensor:
        """The same under the frozen reference: (T,). Raises ValueError without one (beta 0)."""
        if self.reference is None:
            raise ValueError("beta is 0; there is no reference model to compare with (beta)")
        return self._score(self.reference, _output_head(self.reference), batch)

    @torch.no_grad()
    def _score(
        self, model: PreTrainedModel, head: Callable[[Tensor], Tensor], batch: MicroBatch
    ) -> Tensor:
        with self.autocast():
            return score_tokens(
                head,
                _hidden_states(model, batch),
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
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit)
        stats = {
            "grad_norm": norm.item(),
            "learning_rate": self.scheduler.get_last_lr()[0],
            "update/nonfinite": float(not norm.isfinite()),
            "update/changed_share": 0.0,
        }
        if norm.isfinite():
            before = self._probe()
            if self.scaler:
                self.scaler.step(self.optimizer)
            else:
                self.optimizer.step()
            self.scheduler.step()
            stats["update/changed_share"] = (self._probe() != before).float().mean().item()
        if self.scaler:
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return stats

    def _probe(self) -> Tensor:
        """A fixed sample of the parameters: up to 1,024 numbers of each."""
        return torch.cat([p.detach().flatten()[:1024].clone() for p in self.parameters])

    # -- what others take from it ----------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
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

    @property
    def context_length(self) -> int | None:
        """Positions the model can see, prompt and completion together; None if it has no limit."""
        text_config = self.model.config.get_text_config()
        return getattr(text_config, "max_position_embeddings", None)

    def save_pretrained(self, path: str | Path) -> None:
        """Write model and tokenizer in Hugging Face format (safetensors)."""
        with _quiet():
            self.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)

    # -- start-up --------------------------------------------------------------------------------

    @torch.no_grad()
    def check_packing(self, samples: Sequence[Sample]) -> None:
        """Compare packed and padded on real samples with the model's own full computation; fall
        back to padding, with a note, where packing changes the result. Raises ValueError if the
        output head is one that we do not compute right."""
        tolerance = PACKING_TOLERANCE[self._compute_dtype()]
        padded = pad(samples, self.device, self.pad_token_id)
        with self.autocast():
            logits = self.model(**padded.inputs, use_cache=False).logits
        chosen = logits.flatten(0, 1)[padded.source_T].float() / self.config.temperature
        expected = chosen.log_softmax(-1).gather(-1, padded.target_T[:, None])[:, 0]
        difference = (self.score(padded) - expected).abs().max().item()
        if not difference <= tolerance:
            raise ValueError(
                f"log-probs from {type(self.model).__name__}'s hidden states differ from its "
                f"logits by {difference:.1e}; its output head does something not known here"
            )
        if self.packed:
            packed = self.score(pack(samples, self.device))
            difference = (packed - expected).abs().max().item()
            if not difference <= tolerance:
                self._refuse_packing(f"packed log-probs differ by {difference:.1e}")

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

    def _compute_dtype(self) -> torch.dtype:
        if self.config.bf16:
            return torch.bfloat16
        return torch.float16 if self.config.fp16 else torch.float32

    def _check_precision(self) -> None:
        if self.config.fp16 and self.device.type == "cpu":
            raise ValueError(
                "fp16 is True on a CPU, whose float16 arithmetic is a hundred times "
                "slower than float32; use bf16 or neither (fp16)"
            )

    def _remove_dropout(self) -> None:
        """Dropout would make the ratio differ from 1 and the KL at step 0 from 0."""
        found = 0.0
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                found = max(found, module.p)
                module.p = 0.0
            rate = getattr(module, "attention_dropout", 0.0)
            if isinstance(rate, float) and rate > 0:
                found = max(found, rate)
                module.attention_dropout = 0.0  # type: ignore[assignment]
        if found > 0:
            self.notes.append(f"dropout (up to {found:g}) is set to 0 for training")


def load_model(
    config: RLOOConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of `config.model`, a hub id or a folder; the model in float32.

    Raises ValueError when there is no tokenizer that transformers can load.
    """
    options = {"dtype": torch.float32, **(config.model_init_kwargs or {})}
    name, trust = resolve_model(str(config.model)), config.trust_remote_code
    if tokenizer is None:
        _require_tokenizer_files(Path(name))
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                name, revision=options.get("revision", "main"), trust_remote_code=trust
            )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{name} has no tokenizer that can be loaded (model): {error}"
            ) from error
    with _quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            name, trust_remote_code=trust, **options
        )
    return model, tokenizer


def _require_tokenizer_files(folder: Path) -> None:
    # transformers makes up an empty tokenizer for some architectures whose folder has none.
    if folder.is_dir() and not any(folder.glob("*token*")) and not any(folder.glob("*.model")):
        raise ValueError(
            f"{folder} has no tokenizer that can be loaded (model): it has no tokenizer.json"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars, which a small model shows for a blink."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _require_float32(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"parameter {name} is {parameter.dtype}; trained parameters must be float32, since "
                "smaller ones lose updates at these learning rates (load the model with "
                "dtype=torch.float32; bf16 is the precision of the computation)"
            )


def _frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    frozen = copy.deepcopy(model).eval()
    return frozen.requires_grad_(False)


def _enable_checkpointing(model: PreTrainedModel, options: dict[str, Any] | None) -> None:
    # The name changed in transformers 5.2x; the old one warns there.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False, **(options or {})})


def _build_optimizer(model: PreTrainedModel, config: RLOOConfig) -> torch.optim.Optimizer:
    arguments = to_training_arguments(config)
    optimizer_class, options = transformers.Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    decayed = set(get_parameter_names(model, [nn.LayerNorm], NO_DECAY))
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for n, p in trained if n in decayed],
            "weight_decay": config.weight_decay,
        },
        {"params": [p for n, p in trained if n not in decayed], "weight_decay": 0.0},
    ]
    return optimizer_class(groups, **options)


def _warmup_steps(config: RLOOConfig, num_training_steps: int) -> int:
    """A number below 1 is a share of the run (transformers 5)."""
    steps = config.warmup_steps
    return math.ceil(steps * num_training_steps) if 0 < steps < 1 else int(steps)


def _token_budget(model: PreTrainedModel, device: torch.device) -> int:
    """Input tokens of a micro-batch, from memory: activations may take a quarter of what is free.

    A layer keeps about 34 numbers per hidden unit for the backward (Korthikanti et al. 2022,
    without the attention scores), and the output head a few per vocabulary entry.
    """
    text_config = model.config.get_text_config()
    numbers = 34 * text_config.hidden_size * text_config.num_hidden_layers
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        return max(1024, min(65536, free // 4 // (4 * numbers)))
    # Beyond this a CPU gains nothing, and loses its caches.
    return max(1024, min(8192, 2**32 // (4 * numbers)))


def _hidden_states(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """(T, D): the states that predict the batch's completion tokens."""
    hidden = model.base_model(**batch.inputs, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, batch.source_T)


def _output_head(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Hidden states to logits, with the scalings that some architectures apply after the matrix."""
    text_config = model.config.get_text_config()
    matrix = model.get_output_embeddings()
    softcap = getattr(text_config, "final_logit_softcapping", None)
    multiplier = getattr(text_config, "logit_scale", None) or 1.0
    multiplier /= getattr(text_config, "logits_scaling", None) or 1.0

    def head(hidden: Tensor) -> Tensor:
        logits: Tensor = matrix(hidden)
        if multiplier != 1.0:
            logits = logits * multiplier
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return logits

    return head
