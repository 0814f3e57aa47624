"""Policies without a run around them, and their gradients computed another way."""

from types import SimpleNamespace

import torch

from rloo.config.config import RLOOConfig
from rloo.distributed import World, make_world
from rloo.model.policy import Policy
from support.models import CPU, make_model
from support.text import make_tokenizer

TEMPERATURE = 0.7


def make_policy(model, **options) -> Policy:
    defaults = {"bf16": False, "beta": 0.0, "gradient_checkpointing": False, "use_cpu": True}
    config = RLOOConfig(**{**defaults, "temperature": TEMPERATURE, **options})
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=2, save_pretrained=lambda path: None)
    world = make_world(use_cpu=config.use_cpu)
    return Policy(model, tokenizer, config, world=world, num_training_steps=10)


def weights_of(count: int) -> torch.Tensor:
    return torch.linspace(-1, 1, count)


def gradients(model) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def one_by_one(model, samples) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The oracle: every completion alone, without padding, through the model's own logits."""
    model.zero_grad()
    parts = []
    for sample in samples:
        ids = torch.tensor([[*sample.prompt_ids, *sample.token_ids]])
        logprobs = (model(ids, use_cache=False).logits[0] / TEMPERATURE).log_softmax(-1)
        start = len(sample.prompt_ids) - 1
        parts.append(logprobs[start:-1].gather(1, ids[0, start + 1 :, None])[:, 0])
    joined = torch.cat(parts)
    (joined * weights_of(len(joined))).sum().backward()
    return joined.detach(), gradients(model)


def make_policy_config(**options) -> RLOOConfig:
    """Four completions of three prompts, and what a test of one update leaves alone."""
    defaults = {
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "num_generations": 4,
        "num_prompts": 3,
    }
    return RLOOConfig(**{**defaults, **options})


def make_policy_of(config: RLOOConfig, world: World | None = None) -> Policy:
    """A small policy; its reference, where it has one, has moved away from it."""
    policy = Policy(
        make_model("llama"),
        make_tokenizer(),
        config,
        world=world or World(CPU),
        num_training_steps=4,
    )
    if policy.reference.model is not None:
        torch.manual_seed(1)
        for parameter in policy.reference.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return policy
