"""The model that is trained: what computes with it, what it learns by, and its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from rloo.config.config import RLOOConfig
from rloo.config.files import quiet
from rloo.data.images import tokenizer_of
from rloo.dist import World
from rloo.model import adapters, preparation, sharding
from rloo.model.batch import MicroBatch, make_sample, pack, pad, split
from rloo.model.loading import load_weights, num_embedded
from rloo.model.logprobs import CHUNK_ELEMENTS, TokenScores
from rloo.model.offload import activations_on_host
from rloo.model.optimizers import Given, make_optimizers
from rloo.model.parts import has_parts, read_parts
from rloo.model.reference import make_reference
from rloo.model.scorer import Scorer, balancing_coefficient
from rloo.model.sharding import full
from rloo.model.state import Version, digest
from rloo.model.stepper import Stepper
from rloo.types import Engine, Sample


class Policy:
    """A causal language model in training, which may also read images.

    Parameters are always float32; `bf16` and `fp16` are the precision of the computation
    (autocast), since bf16 parameters lose updates at RLOO's learning rates. For a PeftModel the
    adapter is trained, `model` is the transformers model that contains it, and the reference is the
    same module. `scorer` computes, `reference` is what it is compared with, `stepper` is how it
    learns. `processing_class` is the model's tokenizer, or the processor that contains it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin,
        config: RLOOConfig,
        *,
        world: World,
        num_training_steps: int,
        optimizers: Given = (None, None),
    ) -> None:
        self.config = config
        self.world = world
        self.processing_class = processing_class
        self.tokenizer: PreTrainedTokenizerBase = tokenizer_of(processing_class)
        self.device = world.device
        self.divides = config.parallel == "fsdp2"
        prepared = preparation.prepare(model, config, self.device)
        self.model, self.adapter = prepared.model, prepared.adapter
        pad, vocabulary = self.tokenizer.pad_token_id, num_embedded(self.model)
        known = pad is not None and pad < vocabulary  # what is padded is masked, so any will do
        self.pad_token_id = int(pad) if known else self.stop_token_ids[0]
        self.packed, self.checked = prepared.packed, False
        self._collected: dict[str, Tensor] | None = None
        self.initial_weights = prepared.initial_weights
        self.notes = prepared.notes
        self.aux_loss_weight = balancing_coefficient(self.model, config)
        self.scorer = Scorer(
            self.model, temperature=config.temperature, balanced=self.aux_loss_weight != 0
        )
        self.reference = make_reference(self.scorer, self.adapter, config)
        if config.gradient_checkpointing:
            preparation.enable_checkpointing(self.model, config.gradient_checkpointing_kwargs)
        self.start = digest(list(self.model.parameters()))
        if self.divides:
            self._divide()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        optimizer, scheduler = make_optimizers(optimizers, self.model, config, num_training_steps)
        self._version = Version(self.model, optimizer, world)
        self.stepper = Stepper(self.model, optimizer, scheduler, config, world)
        if "paged" in config.optim and self.device.type == "cpu":
            self.notes.append(f"optim is {config.optim}; on a CPU nothing is paged (optim)")
        self.max_tokens = config.max_tokens_per_micro_batch or preparation.token_budget(
            self.model, self.device
        )

    def _divide(self) -> None:
        self.reference.divide(self.world)
        sharding.shard(self.scorer, self.world)
        # Which weights take gradients is settled at the first forward, and what is called first is
        # what is called as a whole.
        first = pad([make_sample((0, 0), 1, 1)], self.device, self.pad_token_id)
        self.score(first)
        if self.reference.model is not None:
            self.reference_logprobs(first)

    def in_step(self) -> AbstractContextManager[None]:
        """`World.in_step` where weights are divided: for all that computes with them."""
        return self.world.in_step() if self.divides else nullcontext()

    def batch(self, samples: Sequence[Sample]) -> MicroBatch:
        """A micro-batch on the policy's device, packed where its attention can."""
        if self.packed:
            return pack(samples, self.device)
        return pad(samples, self.device, self.pad_token_id)

    def micro_batches(
        self, dealt: Sequence[Sequence[Sample]], *, whole_groups: bool
    ) -> Iterator[tuple[MicroBatch, bool]]:
        """This process's micro-batches (see `split`) of what was dealt, and whether each counts.
        Where weights are divided all processes compute in step: those that have fewer take part
        in the others' with one that does not count."""

        def cut(samples: Sequence[Sample]) -> list[list[Sample]]:
            return split(samples, self.max_tokens, whole_groups=whole_groups, packed=self.packed)

        mine = cut(dealt[self.world.rank])
        for part in mine:
            yield self.batch(part), True
        if self.divides and self.world.size > 1:
            most = max(len(cut(samples)) for samples in dealt)
            for _ in range(most - len(mine)):
                yield self.batch([make_sample((0, 0), 1, 1)]), False

    def logprobs(self, batch: MicroBatch, *, chunk_elements: int = CHUNK_ELEMENTS) -> TokenScores:
        """Scores of the batch's completion tokens at the sampling temperature, with gradients if
        they are enabled. `chunk_elements`: see `token_logprobs`."""
        with self._autocast(), self._offloading():
            return self.scorer(batch, chunk_elements=chunk_elements)

    def score(self, batch: MicroBatch) -> Tensor:
        """Only the log-probs, without gradients: (T,)."""
        with self._autocast():
            return self.scorer.logprobs(batch)

    def reference_logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probs (T,) under the frozen reference. Raises ValueError without one (beta 0)."""
        with self._autocast():
            return self.reference.logprobs(batch)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.bf16 or self.config.fp16:
            dtype = torch.bfloat16 if self.config.bf16 else torch.float16
            # Of divided weights, copies that are kept would be those of all layers.
            return torch.autocast(self.device.type, dtype=dtype, cache_enabled=not self.divides)
        return nullcontext()

    def _offloading(self) -> AbstractContextManager[Any]:
        if self.config.activation_offloading and torch.is_grad_enabled():
            return activations_on_host(self.model.parameters(), self.device)
        return nullcontext()

    def check_forward(self, samples: Sequence[Sample]) -> None:
        """`preparation.check_forward` on real samples. If packing changes the result, updates fall
        back to padding, with a note. Raises ValueError if our output head differs."""
        self.checked = True
        reason = preparation.check_forward(
            self.scorer, samples, self.device, self.pad_token_id, packed=self.packed
        )
        if reason is not None:
            self.notes.append(preparation.without_packing(self.config, reason))
            self.packed = False

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values of the model's weights, which may be divided; an adapter is merged into
        its base, which gathers what is divided."""
        if self.adapter is not None:
            return self.adapter.weights()
        return ((name, parameter.detach()) for name, parameter in self.model.named_parameters())

    def load_into(self, engine: Engine) -> None:
        """Have an engine take the weights; where they are divided a collective."""
        with self.in_step():
            engine.load(self.weights, self.version)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, each process computes with all weights by itself, without gradients."""
        with self.in_step():
            context = sharding.whole(self.scorer)
            context.__enter__()
        try:
            yield
        finally:
            context.__exit__(None, None, None)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Inside, the main process can save; a collective at its start. Of divided weights it has
        the whole there, on the host, of an adapted model those of the adapter."""
        if not self.divides or self._collected is not None:
            yield
            return
        with self.in_step():
            self._collected = self._collect(self.model)
            self.reference.collect(self._collect)
        try:
            yield
        finally:
            self._collected = None
            self.reference.collected = None

    def _collect(self, model: nn.Module) -> dict[str, Tensor]:
        """The state of `model`, in the main process; one tensor after the other."""
        found: dict[str, Tensor] = {}
        whole: dict[int, Tensor] = {}  # tied ones stay so
        for name, tensor in self._saved_of(model):
            if id(tensor) not in whole:
                gathered = full(tensor)
                whole[id(tensor)] = gathered.cpu() if self.world.is_main else gathered[:0]
            found[name] = whole[id(tensor)]
        return found

    def _saved_of(self, model: nn.Module) -> list[tuple[str, Tensor]]:
        saved = model.state_dict(keep_vars=True).items()
        return [(n, t) for n, t in saved if self.adapter is None or t.requires_grad]

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint in parts keeps of weights: the live tensors, divided or whole."""
        models: dict[str, nn.Module] = {"model": self.model}
        if self.reference.moves and self.reference.model is not None:
            models["reference"] = self.reference.model
        named = {
            id(tensor): (f"{kind}/{name}", tensor.detach())
            for kind, model in models.items()
            for name, tensor in self._saved_of(model)
        }
        return dict(named.values())

    @property
    def version(self) -> int:
        """Of the weights as they are now: another number where they have changed (`Version`)."""
        return self._version.read()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a completion: the tokenizer's and the model's."""
        listed = self.model.generation_config.eos_token_id if self.model.generation_config else None
        listed = list(listed or []) if isinstance(listed, (list, tuple, type(None))) else [listed]
        if self.tokenizer.eos_token_id is not None:
            listed.append(self.tokenizer.eos_token_id)
        if wrong := [token for token in listed if not isinstance(token, int)]:
            raise ValueError(
                f"the model's eos_token_id has {wrong[0]!r}; it must be a token's number "
                "(generation_config.json of the model)"
            )
        vocabulary = num_embedded(self.model)
        drawn = [token for token in listed if token < vocabulary]
        if not drawn:
            raise ValueError(
                "neither the tokenizer nor the model has an end-of-sequence token that the model "
                "can draw; a completion could never end (tokenizer.eos_token)"
            )
        return tuple(dict.fromkeys(drawn))

    def save_pretrained(self, path: str | Path) -> None:
        """Write the model (of an adapted one the adapter, as peft does) and its tokenizer. Where
        weights are divided, within `collected`."""
        if self.adapter is not None:
            self.adapter.save(path, self._collected)
        else:
            adapters.remove(path)
            with quiet():
                self.model.save_pretrained(path, state_dict=self._collected)
        self.processing_class.save_pretrained(path)

    def load_pretrained(self, path: str | Path) -> None:
        """Load the weights that `save_pretrained` or `write_parts` wrote, bit for bit."""
        if has_parts(path):
            read_parts(path, self.tensors(), self.world)
        elif self.adapter is not None:
            self.adapter.load(path)
        else:
            load_weights(self.model, path)

    def save_checkpoint(
        self, path: str | Path, save_model: Callable[[str], object] | None = None
    ) -> None:
        """`save_pretrained` or what `save_model` does instead, and a reference that moves in the
        folder `reference`. Raises ValueError for a `save_model` that has written no weights."""
        (save_model or self.save_pretrained)(str(path))
        if not any(Path(path).glob("*.safetensors")):
            raise ValueError(
                "save_model has written no weights, without which nothing can go on from a "
                "checkpoint (call super().save_model(output_dir))"
            )
        self.reference.save(path)

    def load_checkpoint(self, path: str | Path) -> None:
        """Load what `save_checkpoint` wrote."""
        self.load_pretrained(path)
        self.reference.load(path)

    def save_description(self, path: str | Path) -> None:
        """Write what a model's folder has beside weights: configuration and tokenizer."""
        self.model.config.save_pretrained(path)
        self.processing_class.save_pretrained(path)
