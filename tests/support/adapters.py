"""Small models with an adapter of LoRA around them."""

import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from rloo import RLOOTrainer
from support.models import make_model


def make_lora(**options) -> LoraConfig:
    defaults = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "lora_dropout": 0.05}
    return LoraConfig(**{**defaults, **options})


def perturb(model, seed: int = 1) -> None:
    """Give every trained parameter a random push: an adapter with an effect."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))


def wrap(model, lora: LoraConfig) -> PeftModel:
    with warnings.catch_warnings():
        # peft asks by a name at which newer versions of transformers warn.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return get_peft_model(model, lora)


def make_adapted(name: str = "qwen3", *, effect: bool = True, base=None, **options) -> PeftModel:
    model = wrap(base or make_model(name), make_lora(**options))
    if effect:
        perturb(model)
    return model


def logits_of(model) -> torch.Tensor:
    ids = torch.arange(3, 33).reshape(2, 15)
    with torch.no_grad():
        return model.eval()(ids, use_cache=False).logits


def trained_weights(trainer: RLOOTrainer) -> dict[str, torch.Tensor]:
    return {
        n: p.detach().clone() for n, p in trainer.policy.model.named_parameters() if p.requires_grad
    }
