"""The loss that balances the router of a mixture of experts, from the logits of one forward."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from rloo.config.config import RLOOConfig


def balancing_coefficient(model: PreTrainedModel, config: RLOOConfig) -> float:
    """The weight of the balancing loss: the option's, else the model's own; 0 without such a loss.

    Raises ValueError if the option asks for a loss that the model does not have.
    """
    asked, settings = config.router_aux_loss_coef, model.config.get_text_config()
    own = getattr(settings, "router_aux_loss_coef", None)
    if own is None or not hasattr(settings, "num_experts_per_tok"):
        if asked:
            raise ValueError(
                f"router_aux_loss_coef is {asked} and {type(model).__name__} is no mixture of "
                "experts with a balancing loss; leave it out (router_aux_loss_coef)"
            )
        return 0.0
    return float(own if asked is None else asked)


def balancing_loss(
    model: PreTrainedModel, router_logits: tuple[Tensor, ...], multiplicity: Tensor
) -> Tensor:
    """Number of experts x sum over them of (share of choices) x (mean probability), over all layers
    at once: Switch Transformers (arXiv 2101.03961), equations 4 to 6, by transformers' own code.

    `router_logits`: per layer (tokens, experts). `multiplicity` (B, W) says how often each token
    counts: 0 for padding, and for a shared prompt the number of its completions. With perfect
    balance the loss equals k, the number of experts per token.
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
