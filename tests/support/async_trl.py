"""Given completions and rewards, and what TRL's trainers and our update make of them."""

import random

import torch
from datasets import Dataset

from rloo.algorithm.advantages import compute_advantages
from rloo.algorithm.loss import loss_denominator
from rloo.algorithm.reward_shaping import make_training_samples
from rloo.algorithm.update import micro_batch_loss
from rloo.config.config import RLOOConfig
from rloo.distributed import World
from rloo.model.policy import Policy
from rloo.types import Completion, Group, Prompt
from support.models import CPU, VOCAB_SIZE, make_model
from support.terms import rollout_of, terms_of
from support.text import make_tokenizer

K, PROMPTS = 4, 3


def make_rollout(missing: bool = False, cut: bool = False):
    rng = random.Random(1)
    prompts, completions, rewards = [], [], []
    for _ in range(PROMPTS):
        prompts += [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(3, 9))]] * K
    for _ in range(PROMPTS * K):
        length = rng.randrange(1, 12)
        completions.append([rng.randrange(3, VOCAB_SIZE) for _ in range(length)] + [2])
        rewards.append(rng.random() * 4 - 1)
    if missing:
        rewards[1] = None
    if cut:  # without an end-of-sequence token
        completions[2] = completions[2][:-1]
        completions[K] = completions[K][:-1]
    return prompts, completions, rewards


def perturb(model, seed: int, scale: float = 0.02) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)


def theirs(tmp_path, rollout, options, method="RLOO"):
    """Advantages, loss and gradients of TRL's trainer of that name. Needs TRL."""
    import trl

    prompts, completions, rewards = rollout
    folder = str(tmp_path / "model")  # TRL loads its reference from where the model came from
    make_model("qwen3").save_pretrained(folder)
    arguments = getattr(trl, f"{method}Config")(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=PROMPTS * K,
        num_generations=K,
        max_completion_length=16,
        bf16=False,
        use_cpu=True,
        report_to="none",
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        **options,
    )
    trainer = getattr(trl, f"{method}Trainer")(
        model=folder,
        reward_funcs=lambda completions, **_: rewards,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * PROMPTS}),
        processing_class=make_tokenizer(),
    )
    if trainer.ref_model is not None:
        perturb(trainer.ref_model, seed=2)
    texts = ["text"] * len(completions)
    generated = {
        "RLOO": (prompts, completions, texts),
        "GRPO": (prompts, completions, None, texts, None, {}, None, None),
    }
    trainer._generate = lambda _: generated[method]
    trainer.current_gradient_accumulation_steps = 1  # set by Trainer's loop
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([{"prompt": "x"}] * (PROMPTS * K))
    # "old" was taken before this; the update is measured at other weights, so that ratios matter.
    perturb(trainer.model, seed=3, scale=0.05)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    # A completion without any token in the mask has an advantage there, and a constant in the loss.
    seen = inputs["completion_mask"].any(dim=1)
    constant = torch.where(seen, 0.0, inputs["advantages"]).sum().item() / len(completions)
    return torch.where(seen, inputs["advantages"], 0.0), loss.item() + constant, gradients


def judge(model, rollout, change, **options):
    """Our advantages, loss and gradients. `change(policy, seed)` moves weights as TRL's were moved:
    seed 2 before anything is computed, 3 between "old" and the update."""
    prompts, completions, rewards = rollout
    config = RLOOConfig(
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        num_generations=K,
        num_prompts=PROMPTS,
        max_completion_length=16,
        num_iterations=2,  # "old" is what the first pass saw
        **options,
    )
    policy = Policy(model, make_tokenizer(), config, world=World(CPU), num_training_steps=1)
    change(policy, 2)
    groups = []
    for number in range(PROMPTS):
        part = slice(number * K, (number + 1) * K)
        groups.append(
            Group(
                Prompt(number, prompts[number * K], "x"),
                [
                    Completion(
                        c, "stop" if c[-1] == 2 else "length", [0.0] * len(c), [0.0] * len(c)
                    )
                    for c in completions[part]
                ],
                ["text"] * K,
                rewards[part],
            )
        )
    samples = make_training_samples(rollout_of(groups), config)
    given = compute_advantages(samples, policy, terms_of(config))
    if not given.old_logprobs:
        _, parts = micro_batch_loss(policy, policy.batch(samples), given, terms_of(config), 1.0)
        given = given.after_first_step(parts)
    change(policy, 3)
    batch = policy.batch(samples)
    denominator = loss_denominator(
        config.loss_aggregation,
        num_sequences=len(completions),  # TRL counts the unscored ones, too
        num_tokens=sum(map(len, completions)),
        constant=config.loss_constant,
    )
    loss, _ = micro_batch_loss(policy, batch, given, terms_of(config), denominator=denominator)
    loss.backward()
    advantages = torch.zeros(len(completions), dtype=torch.float64)
    for (group, index), value in given.by_completion.items():
        advantages[group * K + index] = value[0]
    trained = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    return advantages, loss.item(), {name: p.grad for name, p in trained.items()}
