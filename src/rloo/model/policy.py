"""The policy: the trained model with its forward pass, reference, optimizer and files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from rloo.config.compat import deepspeed_config
from rloo.config.config import RLOOConfig
from rloo.config.validation import sharding_named
from rloo.data.images import tokenizer_of
from rloo.distributed import World
from rloo.distributed.sharded_tensor import is_sharded, shape_of
from rloo.kernels.bf16_rounding import reduced_precision
from rloo.model import prepare_model
from rloo.model.exact_kl import ReferenceStates
from rloo.model.forward import LogprobModel, balancing_coefficient
from rloo.model.logprobs import CHUNK_ELEMENTS, TokenScores
from rloo.model.lora import LoRAAdapter
from rloo.model.micro_batch import MicroBatch, make_sample, pack, pad, shortened, split
from rloo.model.model_loading import num_embedded, stop_tokens_of
from rloo.model.offload import activations_on_host
from rloo.model.optimizer_step import PolicyOptimizer
from rloo.model.optimizers import Given, Scheduler, make_optimizers
from rloo.model.parallel import deepspeed_zero, fsdp2
from rloo.model.parallel.deepspeed_optimizer import ZeroOptimizer
from rloo.model.parallel.sequence_parallel import SequenceParallel
from rloo.model.parallel.tensor_parallel import TensorParallel
from rloo.model.quantization import count_parameters
from rloo.model.reference import ReferenceModel, has_plain_head, make_reference
from rloo.model.save_load import ModelFiles
from rloo.model.training_state import WeightsVersion, digest
from rloo.types import Engine, Sample

# Under sequence parallelism the first forward passes are compared on so many tokens of a prompt and
# of a completion.
_CHECKED_TOKENS = 256


def describe_parameters(policy: Policy) -> str:
    """The parameter count, such as `1,893,120` or `20,480 trained of 1,913,600 (LoRA, rank 8)`."""
    trained = sum(shape_of(p).numel() for p in policy.parameters)
    total = count_parameters(policy.model)
    if trained == total:
        return f"{total:,}"
    kind = f" ({policy.adapter.describe()})" if policy.adapter else ""
    return f"{trained:,} trained of {total:,}{kind}"


class ScheduledMicroBatch(NamedTuple):
    """A micro-batch, whether its loss counts, and whether it is the last one of the step."""

    batch: MicroBatch
    is_ours: bool
    is_last: bool


class Policy:
    """A causal language model in training, which may also read images.

    Parameters are always float32; `bf16` and `fp16` are the precision of the computation
    (autocast), since bf16 parameters lose updates at RLOO's learning rates. For a PeftModel the
    adapter is trained, `model` is the transformers model that contains it, and the reference
    computes with the same module. `scorer` computes log-probs, `reference` computes those for the
    KL penalty, `stepper` holds the optimizer, and `files` saves and loads. `processing_class` is
    the model's tokenizer, or the processor that contains it.
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
        self.device: torch.device = world.device
        group, tensors = world.sequence_group, world.tensor_group
        self.sequence_parallel: SequenceParallel | None = SequenceParallel(group) if group else None
        self.tensor_parallel: TensorParallel | None = TensorParallel(tensors) if tensors else None
        self.divides: bool = config.parallel != "replicate" or tensors is not None
        # Whether processes exchange data in the midst of a forward or a backward.
        self.in_lockstep: bool = self.divides or group is not None
        prepared = prepare_model.prepare(model, config, self.device)
        self.model: PreTrainedModel = prepared.model
        self.adapter: LoRAAdapter | None = prepared.adapter
        pad, vocabulary = self.tokenizer.pad_token_id, num_embedded(self.model)
        known = pad is not None and pad < vocabulary  # padding is masked, so any token will do
        self.pad_token_id: int = int(pad) if known else self.stop_token_ids[0]
        self.packed: bool = prepared.packed
        self.checked: bool = False
        self.peaks: dict[object, int] = {}  # see `memory_estimate.predicted_peak_bytes`
        self.initial_weights: str = prepared.initial_weights
        self.notes: list[str] = prepared.notes
        self.why_threads = "as torch has chosen"
        self.aux_loss_weight: float = balancing_coefficient(self.model, config)
        self.scorer: LogprobModel = LogprobModel(
            self.model, temperature=config.temperature, balanced=self.aux_loss_weight != 0
        )
        self.reference: ReferenceModel = make_reference(self.scorer, self.adapter, config)
        self.notes += prepare_model.enable_checkpointing(self.model, config)
        self.start: str = digest(list(self.model.parameters()))
        if self.divides:
            self._divide()
        if self.sequence_parallel:
            self.sequence_parallel.check(self.scorer, self.device)
        self.parameters: list[torch.nn.Parameter] = [
            p for p in self.model.parameters() if p.requires_grad
        ]
        optimizer, scheduler = make_optimizers(optimizers, self.model, config, num_training_steps)
        self._version = WeightsVersion(self.model, optimizer, world)
        self.stepper: PolicyOptimizer = self._make_stepper(optimizer, scheduler)
        self.files: ModelFiles = ModelFiles(
            self.model, self.adapter, self.reference, processing_class, world, self.in_step
        )
        self.files.dtype = getattr(torch, config.save_dtype) if config.save_dtype else None
        if "paged" in config.optim and self.device.type == "cpu":
            self.notes.append(f"optim is {config.optim}; on a CPU nothing is paged (optim)")
        self.max_tokens: int = config.max_tokens_per_micro_batch or (
            config.parallel_options.sp_size
            * prepare_model.token_budget(self.model, self.device, config)
        )

    def _divide(self) -> None:
        config = self.config
        if any(map(is_sharded, self.model.parameters())):
            raise ValueError(
                f"{sharding_named(config)} and the model has been divided for another "
                "trainer; give this one a model of its own (parallel, model)"
            )
        if self.tensor_parallel:
            if self.adapter is not None:
                raise ValueError(
                    f"tp_size is {config.parallel_options.tp_size} and the model has an adapter, "
                    "whose matrices are not in the model's plan of shards (tp_size, use_peft)"
                )
            self.reference.divide(self.tensor_parallel.shard)
            self.tensor_parallel.shard(self.scorer)
            return
        fsdp2.check(self.model, config.parallel)
        self.scorer.copies_head = True
        if config.kl_estimator == "exact" and not has_plain_head(self.model):
            raise ValueError(
                f"kl_estimator is exact, {sharding_named(config)} and an adapter changes the "
                "output head, of which the reference needs a whole copy; leave it out of the "
                "adapter, or use kl_estimator k1 (kl_estimator, parallel, peft_config)"
            )
        few_bits = any(not p.is_floating_point() for p in self.model.parameters())
        if few_bits and config.parallel == "fsdp2":
            self.notes.append(
                "the base of few bits stays whole in every process; the rest is divided (parallel)"
            )
        if config.parallel != "fsdp2":
            deepspeed_zero.prepare(self.world)
            if config.parallel == "zero3":
                settings = deepspeed_config.complete(config)
                divide = partial(deepspeed_zero.divide, settings=settings, device=self.device)
                self.reference.divide(partial(divide, frozen=True))
                divide(self.scorer)
            return
        shard = partial(fsdp2.shard, world=self.world, on_host="params" in config.offload)
        self.reference.divide(shard)
        shard(self.scorer)
        # FSDP2's first forward determines which weights have gradients. It also makes the first
        # called module the root.
        blank = [make_sample((0, 0), 1, 1)]
        first = (
            self.batch(blank)
            if self.sequence_parallel
            else pad(blank, self.device, self.pad_token_id)
        )
        self.score(first)
        if self.reference.model is not None:
            self.reference_logprobs(first)

    def _make_stepper(
        self, optimizer: torch.optim.Optimizer, scheduler: Scheduler
    ) -> PolicyOptimizer:
        if self.config.parallel not in ("replicate", "fsdp2"):
            settings = deepspeed_config.complete(self.config)
            return ZeroOptimizer(
                self.scorer, optimizer, scheduler, self.config, self.world, settings
            )
        return PolicyOptimizer(self.model, optimizer, scheduler, self.config, self.world)

    def in_step(self, *, forward: bool = True) -> AbstractContextManager[None]:
        """`World.in_step` if weights are sharded, or under sequence parallelism. Every computation
        with sharded weights or slices of rows must be inside this context. If `forward` is false,
        the context contains no forward pass of training and does nothing if weights are not
        sharded."""
        needed = self.in_lockstep if forward else self.divides
        return self.world.in_step() if needed else nullcontext()

    def batch(self, samples: Sequence[Sample]) -> MicroBatch:
        """A micro-batch on the policy's device, packed if the policy's attention supports
        packing."""
        if self.packed:
            return pack(samples, self.device)
        return pad(samples, self.device, self.pad_token_id)

    def micro_batches(
        self, dealt: Sequence[Sequence[Sample]], *, whole_groups: bool
    ) -> Iterator[ScheduledMicroBatch]:
        """Yield the micro-batches (see `split`) of this process's samples. `dealt` has the samples
        of every row group (see `deal`). With sharded weights all processes need the same number: a
        process with fewer micro-batches yields additional small ones whose loss does not count."""

        def cut(samples: Sequence[Sample]) -> list[list[Sample]]:
            return split(samples, self.max_tokens, whole_groups=whole_groups, packed=self.packed)

        mine = cut(dealt[self.world.row_group])
        in_step = self.divides and self.world.size > 1
        turns = max(len(cut(samples)) for samples in dealt) if in_step else len(mine)
        replicated = self.config.parallel_options.dp_shard_size is not None
        for turn in range(turns):
            if replicated:
                fsdp2.sum_over_replicas(self.scorer, now=turn == turns - 1)
            is_ours = turn < len(mine)
            part = mine[turn] if is_ours else [make_sample((0, 0), 1, 1)]
            yield ScheduledMicroBatch(self.batch(part), is_ours, turn == turns - 1)

    def logprobs(
        self,
        batch: MicroBatch,
        *,
        reference: bool = False,
        collision: bool = False,
        chunk_elements: int = CHUNK_ELEMENTS,
    ) -> TokenScores:
        """Scores of the batch's completion tokens at the sampling temperature, with gradients if
        they are enabled. With `reference`, the result includes `reference_logprobs`, and the KL
        over the vocabulary if `kl_estimator` is exact; with `collision`, the collision
        probabilities. `chunk_elements`: see `token_logprobs`."""
        exact = reference and self.config.kl_estimator == "exact"

        def score(batch: MicroBatch) -> TokenScores:
            states = self._reference_states(batch) if exact else None
            with self._autocast(), self._offloading():
                return self.scorer(
                    batch, chunk_elements=chunk_elements, reference=states, collision=collision
                )

        scores = (
            self.sequence_parallel.scores(score, batch) if self.sequence_parallel else score(batch)
        )
        if exact or not reference:
            return scores
        return scores._replace(reference=self.reference_logprobs(batch))

    def score(self, batch: MicroBatch, temperature: float | None = None) -> Tensor:
        """The log-probs (T,) of the completion tokens, without gradients and without entropies.
        `temperature` replaces the policy's temperature."""
        with self._autocast():
            return self._in_slices(partial(self.scorer.logprobs, temperature=temperature), batch)

    def reference_logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probs (T,) under the frozen reference. Raises ValueError if there is none (beta is
        0)."""
        # The policy cannot use casts made without gradients (see `autocast_cache`).
        with self._autocast(keeps=False):
            return self._in_slices(self.reference.logprobs, batch)

    def _reference_states(self, batch: MicroBatch) -> ReferenceStates:
        with self._autocast(keeps=False):
            return self.reference.states(batch)

    def _in_slices(self, compute: Callable[[MicroBatch], Tensor], batch: MicroBatch) -> Tensor:
        sliced = self.sequence_parallel
        return sliced.logprobs(compute, batch) if sliced else compute(batch)

    def _autocast(self, *, keeps: bool = True) -> AbstractContextManager[Any]:
        if dtype := reduced_precision(self.config):
            # With sharded weights the cache would hold the full copies of all layers.
            keeps = keeps and not self.divides
            return torch.autocast(self.device.type, dtype=dtype, cache_enabled=keeps)
        return nullcontext()

    def _offloading(self) -> AbstractContextManager[Any]:
        if self.config.activation_offloading and torch.is_grad_enabled():
            return activations_on_host(self.model.parameters(), self.device)
        return nullcontext()

    def check_forward(self, samples: Sequence[Sample]) -> None:
        """Run `prepare_model.check_forward` on real samples. If packing changes the result, updates
        use padding instead, with a note. If the result of our output head is wrong, updates use the
        model's own logits."""
        self.checked = True
        if self.sequence_parallel:  # a row that needs several processes does not fit into one
            samples = [shortened(sample, _CHECKED_TOKENS, _CHECKED_TOKENS) for sample in samples]
        reason = prepare_model.check_forward(
            self.scorer, samples, self.device, self.pad_token_id, packed=self.packed
        )
        if self.scorer.own_logits:
            self.notes.append(
                f"log-probs come from {type(self.model).__name__}'s own logits, which take more "
                "memory: what it does between hidden states and logits is not known here"
            )
        if reason is not None:
            self.notes.append(prepare_model.without_packing(self.config, reason))
            self.packed = False

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values of the model's weights, which may be sharded. An adapter is merged into
        its base; merging gathers sharded weights."""
        if self.adapter is not None:
            return self.adapter.weights()
        named = self.model.named_parameters()
        return ((name, p if is_sharded(p) else p.detach()) for name, p in named)

    def load_into(self, engine: Engine) -> None:
        """Load the weights into an engine. A collective if weights are sharded."""
        version = self.version
        with self.in_step(forward=False) if engine.capabilities.shares_memory else nullcontext():
            engine.load(self.weights, version)

    @contextmanager
    def gathered_weights(self, *, in_turn: bool = False) -> Iterator[None]:
        """Within this context, each process can compute with all weights independently, without
        gradients. With `in_turn` all processes must run the same computation with `model` itself;
        sharded weights are then gathered layer by layer (under DeepSpeed all at once)."""
        if in_turn:
            with self.in_step(forward=False), self._gathered(layers=False):
                yield
            return
        with ExitStack() as stack:
            with self.in_step(forward=False):
                stack.enter_context(self._gathered())
            yield

    def _gathered(self, *, layers: bool = True) -> AbstractContextManager[None]:
        if isinstance(self.stepper, ZeroOptimizer):
            return self.stepper.zero.whole()
        if self.tensor_parallel:
            return self.tensor_parallel.whole(self.scorer)
        return fsdp2.whole(self.scorer, layers=layers)

    @property
    def version(self) -> int:
        """The version number of the current weights: it differs after every change
        (`WeightsVersion`)."""
        return self._version.read()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a completion: those of the model, then those of the tokenizer."""
        return stop_tokens_of(self.model, self.tokenizer)
