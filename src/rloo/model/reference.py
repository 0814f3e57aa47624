"""The reference model of the KL penalty: a frozen copy, or the base of an adapter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rloo.config.config import RLOOConfig
from rloo.config.file_checks import quiet
from rloo.distributed.sharded_tensor import lerp
from rloo.kernels.bf16_rounding import reduced_precision
from rloo.model.exact_kl import ReferenceStates
from rloo.model.forward import LogprobModel
from rloo.model.lora import LoRAAdapter
from rloo.model.micro_batch import MicroBatch
from rloo.model.model_loading import load_weights
from rloo.model.offload import keep_on_host

# The folder in a checkpoint for a reference that `sync_ref_model` updates.
FOLDER = "reference"
_NONE = "beta is 0; there is no reference model to compare with (beta)"


class ReferenceModel:
    """The reference model of the KL penalty. An instance of this base class means that there is no
    reference (beta is 0). `model` is the reference's copy of the weights, or None."""

    model: PreTrainedModel | None = None
    moves = False
    collected: dict[str, Tensor] | None = None

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """The log-probs (T,) under the reference, without gradients. Raises ValueError if there is
        no reference."""
        raise ValueError(_NONE)

    def states(self, batch: MicroBatch) -> ReferenceStates:
        """The hidden states and the head of the reference, without gradients, for an exact KL.
        Raises ValueError if there is no reference."""
        raise ValueError(_NONE)

    def offload(self, device: torch.device) -> None:
        """Keep a copy's layers in host memory, except for the layer that computes. Raises
        ValueError if the reference is not a copy."""
        raise ValueError(
            "offload has reference and the reference is no copy of the weights: beta is 0, or "
            "it is the base of an adapter, which is there anyway (offload)"
        )

    def move(self, share: float) -> None:
        """Set reference = (1 - share) * reference + share * policy, for all weights (TR-DPO, arXiv
        2404.09656, equation 6). Raises ValueError if the reference is not a copy."""
        raise ValueError("the reference is no copy of its own; only a copy moves (sync_ref_model)")

    def divide(self, by: Callable[[LogprobModel], object]) -> None:
        """Shard a copy's weights over the processes with the function `by`."""

    def collect(self, state_of: Callable[[PreTrainedModel], dict[str, Tensor]]) -> None:
        """Store the result of `state_of(model)`, which `save` writes if the copy is sharded."""

    def save(self, checkpoint: str | Path) -> None:
        """Write the copy to a folder in the checkpoint if `sync_ref_model` updates it, since a
        resumed run cannot recompute it."""

    def load(self, checkpoint: str | Path) -> None:
        """Load the copy that `save` wrote."""


class AdapterDisabledReference(ReferenceModel):
    """The policy's module with the adapter in its state before training: see
    `LoRAAdapter.as_reference`."""

    def __init__(self, scorer: LogprobModel, adapter: LoRAAdapter) -> None:
        self._scorer = scorer
        self._adapter = adapter

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """The log-probs (T,), without gradients, with the adapter as it was before training."""
        with self._adapter.as_reference():
            return self._scorer.logprobs(batch)

    def states(self, batch: MicroBatch) -> ReferenceStates:
        """See `ReferenceModel`."""
        with self._adapter.as_reference():
            hidden, head = self._scorer.states(batch)
        if has_plain_head(self._scorer.model):
            return ReferenceStates(hidden, head)

        def original(hidden: Tensor) -> Tensor:
            with self._adapter.as_reference():
                return head(hidden)

        return ReferenceStates(hidden, original)


class FrozenCopy(ReferenceModel):
    """A copy of the policy, made when the instance is created. Checkpoints contain the copy if
    `moves` is true: training then updates it. `precision` is the dtype of the stored matrices (see
    `frozen_copy`)."""

    model: PreTrainedModel

    def __init__(
        self, policy: LogprobModel, *, moves: bool, precision: torch.dtype | None = None
    ) -> None:
        self.model = frozen_copy(policy.model, precision)
        self._scorer = LogprobModel(self.model, temperature=policy.temperature)
        self._policy = policy
        self.moves = moves

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """The log-probs (T,) under the copy, without gradients."""
        self._scorer.own_logits = self._policy.own_logits
        return self._scorer.logprobs(batch)

    def states(self, batch: MicroBatch) -> ReferenceStates:
        """See `ReferenceModel`."""
        self._scorer.own_logits = self._policy.own_logits
        self._scorer.copies_head = self._policy.copies_head
        return self._scorer.states(batch)

    @torch.no_grad()
    def move(self, share: float) -> None:
        """Set copy = (1 - share) * copy + share * policy, for all weights."""
        pairs = zip(self._scorer.model.parameters(), self._policy.model.parameters(), strict=True)
        for frozen, parameter in pairs:
            lerp(frozen, parameter.to(frozen.device), share)

    def offload(self, device: torch.device) -> None:
        """See `ReferenceModel`."""
        keep_on_host(self.model, device)

    def divide(self, by: Callable[[LogprobModel], object]) -> None:
        """See `ReferenceModel`."""
        by(self._scorer)

    def collect(self, state_of: Callable[[PreTrainedModel], dict[str, Tensor]]) -> None:
        """See `ReferenceModel`."""
        self.collected: dict[str, Tensor] | None = state_of(self.model) if self.moves else None

    def save(self, checkpoint: str | Path) -> None:
        """Write the copy to a folder in the checkpoint, if `moves` is true."""
        if self.moves:
            with quiet():
                folder = Path(checkpoint, FOLDER)
                self.model.save_pretrained(folder, state_dict=self.collected)

    def load(self, checkpoint: str | Path) -> None:
        """Load the copy if the checkpoint has one."""
        folder = Path(checkpoint, FOLDER)
        if folder.is_dir():
            load_weights(self._scorer.model, folder)


def has_plain_head(model: PreTrainedModel) -> bool:
    """Whether the output head is a linear layer in floating point without an adapter."""
    head = model.get_output_embeddings()
    return isinstance(head, nn.Linear) and head.weight.is_floating_point()


def frozen_copy(model: PreTrainedModel, precision: torch.dtype | None = None) -> PreTrainedModel:
    """Return a frozen copy of `model` in evaluation mode. `precision` is the dtype of autocast. The
    float32 matrices of linear layers are stored in this dtype. The results do not change, since
    autocast would round the matrices in each product. If another module, such as an embedding,
    shares a matrix, that module has the matrix in float32."""
    if precision is None:
        return copy.deepcopy(model).eval().requires_grad_(False)
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    own = {id(p): p for m in linear for p in m.parameters() if p.dtype == torch.float32}
    others = {
        id(p)
        for m in model.modules()
        if not isinstance(m, nn.Linear)
        for p in m._parameters.values()
    }
    rounded = {key: _frozen(p.detach().to(precision)) for key, p in own.items()}
    # deepcopy does not copy the parameters in its memo.
    known = {key: p for key, p in rounded.items() if key not in others}
    copied = copy.deepcopy(model, dict(known)).eval().requires_grad_(False)
    pairs = zip(model.modules(), copied.modules(), strict=True)
    for module, twin in pairs:
        if isinstance(module, nn.Linear):
            for name, parameter in module._parameters.items():
                if id(parameter) in rounded:
                    setattr(twin, name, rounded[id(parameter)])
    return copied


def _frozen(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def make_reference(
    scorer: LogprobModel, adapter: LoRAAdapter | None, config: RLOOConfig
) -> ReferenceModel:
    """Return the reference that the options request. It is made from the policy `scorer`, which
    must not have been trained yet. Raises ValueError if the options offload the reference and it is
    not a copy."""
    reference = _made(scorer, adapter, config)
    if "reference" in config.offload:
        reference.offload(scorer.model.device)
    return reference


def _made(scorer: LogprobModel, adapter: LoRAAdapter | None, config: RLOOConfig) -> ReferenceModel:
    if config.beta == 0:
        return ReferenceModel()
    if adapter is not None:
        return AdapterDisabledReference(scorer, adapter)
    precision = reduced_precision(config)
    # Small updates of a moving reference are lost in 16 bits. Sharding needs a single precision.
    if config.sync_ref_model or config.parallel != "replicate":
        precision = None
    return FrozenCopy(scorer, moves=config.sync_ref_model, precision=precision)
