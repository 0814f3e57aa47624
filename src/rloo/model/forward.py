"""The forward pass: log-probs of a micro-batch's completion tokens, in the caller's precision
(autocast)."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from rloo.config.config import RLOOConfig
from rloo.kernels.cpu_matmul import Matrix, matrix_of
from rloo.kernels.fused_lm_head import LogprobRequest
from rloo.model.exact_kl import ReferenceStates, ScoreRequest, exact_scores
from rloo.model.logprobs import CHUNK_ELEMENTS, Head, TokenScores, score_tokens, token_logprobs
from rloo.model.micro_batch import MicroBatch

# Configuration keys of a factor that multiplies the logits, in Cohere and in FalconH1.
_FACTORS = ("logit_scale", "lm_head_multiplier")
# Configuration keys of Inkling: the divisor of the hidden states before the head, and the number of
# rows of the head that are used.
_DIVISOR, _ROWS = "logits_mup_width_multiplier", "unpadded_vocab_size"
# Keys for the soft cap of logits: those of Gemma, RecurrentGemma and xLSTM.
_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# Models whose `logits_scaling` multiplies the logits. In Granite the same key is a divisor.
_MULTIPLIES = ("hyperclovax",)
# Models whose routers score keys; a pair of keys is an expert.
_ROUTES_BY_KEYS = ("doge",)


class LogprobModel(nn.Module):
    """A causal language model that returns scores of given tokens at a temperature.

    `forward` computes everything from the input tokens to the balancing loss. A wrapper of this
    module (FSDP2, DeepSpeed) therefore covers a complete forward pass, and its hooks enclose every
    use of the weights. `balanced` adds the balancing loss of a mixture of experts. With
    `own_logits` the model computes its logits itself, because its output head is not supported
    here. With `copies_head` the result of `states` has a copy of the head's weights, because they
    are sharded, and gathered during a forward only.
    """

    own_logits = False
    copies_head = False

    def __init__(
        self, model: PreTrainedModel, *, temperature: float, balanced: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.head: OutputHead = OutputHead(model)
        self._body = _path_of_body(model)
        self.temperature = temperature
        self._balanced = balanced
        self._vocab_size: int = model.config.get_text_config().vocab_size

    def forward(
        self,
        batch: MicroBatch,
        *,
        only: Literal["logprobs", "own_logprobs", "states"] | None = None,
        chunk_elements: int = CHUNK_ELEMENTS,
        temperature: float | None = None,
        reference: ReferenceStates | None = None,
        collision: bool = False,
    ) -> TokenScores | ReferenceStates:
        """Scores of the batch's T completion tokens, with gradients if they are enabled.

        With `only` logprobs there are no gradients, no entropies (their shape is (0,)) and no
        balancing loss, and the head computes about half as much. With `only` own_logprobs there are
        only log-probs, from the logits that the model itself computes, as a check of our output
        head. With `only` states, the result is this model as a `reference` of another, whose scores
        then include the exact KL. `chunk_elements`: see `token_logprobs`. `temperature` replaces
        the policy's temperature. `collision`: whether to compute the collision probabilities, too.
        """
        temperature = temperature or self.temperature
        if only == "own_logprobs":
            logprobs = own_logprobs(self.model, batch, temperature)
            return TokenScores(logprobs, logprobs.new_empty(0), None)
        options: dict[str, Any] = {"temperature": temperature, "vocab_size": self._vocab_size}
        if only is not None:
            _, hidden, head = self._run(batch)
            if only == "states":
                return ReferenceStates(hidden, self.head.copied() if self.copies_head else head)
            logprobs = score_tokens(head, hidden, batch.target_T, **options)
            return TokenScores(logprobs, logprobs.new_empty(0), None)
        routing = {"output_router_logits": True} if self._balanced else {}
        outputs, hidden, head = self._run(batch, **routing)
        balance = None
        if self._balanced:
            balance = balancing_loss(self.model, outputs.router_logits, batch.multiplicity)
        if reference is not None:
            wanted = ScoreRequest(
                batch.target_T, chunk_elements=chunk_elements, collision=collision, **options
            )
            return exact_scores(head, hidden, reference, wanted)._replace(balance=balance)
        found = None
        if collision:
            dtype = torch.promote_types(hidden.dtype, torch.float32)
            found = hidden.new_empty(len(hidden), dtype=dtype)
        asked = LogprobRequest(batch.target_T, temperature, chunk_elements, collision=found)
        logprobs, entropy = token_logprobs(head, hidden, asked, vocab_size=self._vocab_size)
        return TokenScores(logprobs, entropy, balance, collision=found)

    def _run(self, batch: MicroBatch, **options: Any) -> tuple[Any, Tensor, Head]:
        """The model's outputs, the hidden states that predict the completion tokens, and their
        head."""
        if self.own_logits:
            outputs = self.model(**batch.inputs, use_cache=False, **options)
            # A clone, because the caller overwrites logits.
            return outputs, completion_outputs(outputs.logits, batch), torch.clone
        # Looked up by name at each call: sharding may replace the module.
        body = self.model.get_submodule(self._body)
        outputs = body(**batch.inputs, use_cache=False, **options)
        return outputs, completion_outputs(outputs.last_hidden_state, batch), self.head

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch, temperature: float | None = None) -> Tensor:
        """The log-probs (T,) of the completion tokens, without gradients and without entropies."""
        return self(batch, only="logprobs", temperature=temperature).logprobs

    @torch.no_grad()
    def states(self, batch: MicroBatch) -> ReferenceStates:
        """The hidden states (T, D) that predict the completion tokens, without gradients: after the
        last norm, or with `own_logits` the logits. And the head that maps them to logits."""
        return self(batch, only="states")

    @torch.no_grad()
    def logprobs_by_logits(self, batch: MicroBatch) -> Tensor:
        """The log-probs (T,) of the completion tokens, from the logits that the model itself
        computes."""
        return self(batch, only="own_logprobs").logprobs


def _path_of_body(model: PreTrainedModel) -> str:
    """The name of the module in `model` that computes the hidden states. Llama 4's text model has
    no module under its `base_model_prefix`, so its first PreTrainedModel child is used."""
    known: nn.Module | None = model.base_model
    if known is model:
        known = next((m for m in model.children() if isinstance(m, PreTrainedModel)), None)
    names = [name for name, module in model.named_modules() if module is known]
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no module of its own that ends in hidden states, from "
            "which log-probs are computed (model)"
        )
    return names[0]


def completion_outputs(outputs: Tensor, batch: MicroBatch) -> Tensor:
    """Select from outputs (B, W, D) those that predict the completion tokens: (T, D)."""
    return outputs.flatten(0, 1).index_select(0, batch.source_T)


def own_logprobs(model: PreTrainedModel, batch: MicroBatch, temperature: float) -> Tensor:
    """Log-probs (T,) of the batch's completion tokens from the logits that the model computes."""
    logits = model(**batch.inputs, use_cache=False).logits.flatten(0, 1)
    chosen = logits[batch.source_T].float() / temperature
    return chosen.log_softmax(-1).gather(-1, batch.target_T[:, None])[:, 0]


class OutputHead:
    """The function from hidden states to logits, including the scaling of some architectures. With
    `direct` the call bypasses the hooks of the output module."""

    def __init__(self, model: PreTrainedModel, *, direct: bool = False) -> None:
        text_config = model.config.get_text_config()
        self._module = model.get_output_embeddings()
        self._call = self._module.forward if direct else self._module
        caps = (getattr(text_config, name, None) for name in _SOFT_CAPS)
        self._softcap = next((cap for cap in caps if cap is not None), None)
        factors = [getattr(text_config, name, None) or 1.0 for name in _FACTORS]
        divisor = getattr(text_config, "logits_scaling", None) or 1.0
        if text_config.model_type in _MULTIPLIES:
            divisor = 1.0 / divisor
        divisor *= getattr(text_config, _DIVISOR, None) or 1.0
        self._multiplier = math.prod(factors) / divisor
        self._rows: int | None = getattr(text_config, _ROWS, None)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states."""
        logits: Tensor = self._call(hidden)[..., : self._rows]
        if self._multiplier != 1.0:
            logits = logits * self._multiplier
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def copied(self) -> OutputHead:
        """This function with a copy of the weights as they are now."""
        twin, bias = copy.copy(self), self._module.bias
        weight, bias = self._module.weight.clone(), None if bias is None else bias.clone()
        twin._call = partial(functional.linear, weight=weight, bias=bias)
        return twin

    def matrix(self) -> Matrix | None:
        """See `HasMatrix`."""
        plain = self._multiplier == 1.0 and self._softcap is None and self._rows is None
        return matrix_of(self._module) if plain else None


def balancing_coefficient(model: PreTrainedModel, config: RLOOConfig) -> float:
    """The coefficient of the balancing loss: the option's value if set, otherwise the value in the
    model's configuration; 0 for a model without such a loss. Raises ValueError if the option is not
    0 and the model has no balancing loss that is supported here, or tokens are in slices."""
    asked, settings = config.router_aux_loss_coef, model.config.get_text_config()
    own = getattr(settings, "router_aux_loss_coef", None)
    # Doge has these settings even where its layers have no experts.
    mixed = hasattr(settings, "num_experts_per_tok") and getattr(settings, "is_moe", True)
    if own is None or not mixed:
        if asked:
            raise ValueError(
                f"router_aux_loss_coef is {asked} and {type(model).__name__} is no mixture of "
                "experts with a balancing loss; leave it out (router_aux_loss_coef)"
            )
        return 0.0
    if settings.model_type in _ROUTES_BY_KEYS and asked != 0:
        raise ValueError(
            f"{type(model).__name__} chooses experts by products of keys, whose balancing loss is "
            "not known here; set router_aux_loss_coef to 0"
        )
    coefficient = float(own if asked is None else asked)
    if coefficient and (size := config.parallel_options.sp_size) > 1:
        raise ValueError(
            f"sp_size is {size} and router_aux_loss_coef is {coefficient}; the balancing "
            "loss needs the experts of all tokens, and a process has those of a slice: set "
            "router_aux_loss_coef to 0 (sp_size, router_aux_loss_coef)"
        )
    return coefficient


def balancing_loss(
    model: PreTrainedModel, router_logits: tuple[Tensor, ...], multiplicity: Tensor
) -> Tensor:
    """The balancing loss: number of experts x sum over experts of (share of choices) x (mean
    probability), for all layers together. See Switch Transformers (arXiv 2101.03961), equations 4
    to 6. The code of transformers computes it.

    `router_logits`: per layer (tokens, experts). `multiplicity` (B, W): how often each token
    counts. With perfect balance the loss equals k, the number of experts per token.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    loss = load_balancing_loss_func(
        router_logits,  # type: ignore[arg-type] # annotated as a tuple of one
        router_logits[0].shape[-1],
        model.config.get_text_config().num_experts_per_tok,
        multiplicity,
    )
    assert isinstance(loss, Tensor)
    return loss
