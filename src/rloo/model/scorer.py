"""What one forward pass computes: the log-probs of a micro-batch's completion tokens.

Knows nothing of precision (autocast is the caller's), optimizers or rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rloo.model.batch import MicroBatch
from rloo.model.experts import balancing_loss
from rloo.model.logprobs import CHUNK_ELEMENTS, TokenScores, score_tokens, token_logprobs


class Scorer(nn.Module):
    """A causal language model up to the scores of given tokens at a temperature.

    Hidden states, output head, chunks of the vocabulary and the balancing loss of a mixture of
    experts are all computed inside `forward`, so that whatever is wrapped around this module sees
    the whole of a forward pass, and its hooks enclose every use of the weights. With `balanced`,
    the balancing loss is computed; the model must be a mixture of experts then.
    """

    def __init__(
        self, model: PreTrainedModel, *, temperature: float, balanced: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.head = output_head(model)
        self.temperature = temperature
        self._balanced = balanced
        self._vocab_size: int = model.config.get_text_config().vocab_size

    def forward(
        self,
        batch: MicroBatch,
        *,
        logprobs_only: bool = False,
        chunk_elements: int = CHUNK_ELEMENTS,
    ) -> TokenScores:
        """Scores of the batch's T completion tokens, with gradients where they are enabled.

        With `logprobs_only` there are no gradients, no entropies (of shape (0,)) and no balancing
        loss, for about half the work at the head. `chunk_elements`: see `token_logprobs`.
        """
        options: dict[str, Any] = {"temperature": self.temperature, "vocab_size": self._vocab_size}
        if logprobs_only:
            hidden = hidden_states(self.model, batch)
            logprobs = score_tokens(self.head, hidden, batch.target_T, **options)
            return TokenScores(logprobs, logprobs.new_empty(0), None)
        balance = None
        if self._balanced:
            hidden, router_logits = routed_states(self.model, batch)
            balance = balancing_loss(self.model, router_logits, batch.multiplicity)
        else:
            hidden = hidden_states(self.model, batch)
        logprobs, entropy = token_logprobs(
            self.head, hidden, batch.target_T, chunk_elements=chunk_elements, **options
        )
        return TokenScores(logprobs, entropy, balance)

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor:
        """(T,): the log-probs alone, without gradients."""
        scores: TokenScores = self(batch, logprobs_only=True)
        return scores.logprobs


def hidden_states(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """The hidden states (T, D) that predict the batch's completion tokens."""
    return _states(model.base_model(**batch.inputs, use_cache=False), batch)


def routed_states(model: PreTrainedModel, batch: MicroBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The hidden states of a mixture of experts, and router logits, per layer (tokens, experts)."""
    outputs = model.base_model(**batch.inputs, use_cache=False, output_router_logits=True)
    return _states(outputs, batch), outputs.router_logits


def _states(outputs: Any, batch: MicroBatch) -> Tensor:
    hidden: Tensor = outputs.last_hidden_state
    return hidden.flatten(0, 1).index_select(0, batch.source_T)


def output_head(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """The function from hidden states to logits, including the scaling of some architectures."""
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
