"""TRL's own RLOOTrainer, and its GRPOTrainer, and ours on the same completions and weights."""

import math
import random

import pytest
import torch
from datasets import Dataset
from models import VOCAB_SIZE, make_model
from terms import terms_of
from text import make_tokenizer

from rloo.algorithm import objective
from rloo.algorithm.advantages import FirstPass, credit
from rloo.algorithm.shaping import countable_samples
from rloo.algorithm.update import micro_loss
from rloo.config.config import RLOOConfig
from rloo.model.policy import Policy
from rloo.types import Completion, Group, Prompt

CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("default"),  # TRL and accelerate warn about each other
]

K, PROMPTS = 4, 3
# As TRL's GRPOTrainer divides by default.
SCALED = {"std_level": "group"}


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


def ours(rollout, options, packing):
    def change(policy, seed):
        if seed == 3:
            perturb(policy.model, seed=3, scale=0.05)
        elif policy.reference.model is not None:
            perturb(policy.reference.model, seed=2)

    return judge(make_model("qwen3"), rollout, change, packing=packing, **options)


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
    policy = Policy(model, make_tokenizer(), config, device=CPU, num_training_steps=1)
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
    samples = countable_samples(groups, config)
    given, record = credit(samples, policy, terms_of(config)), FirstPass()
    if given.old_logprobs is None:
        _, parts = micro_loss(
            policy, policy.batch(samples), given, config, denominator=1.0, record=record
        )
        given = record.complete(given, parts)
    change(policy, 3)
    batch = policy.batch(samples)
    denominator = objective.loss_denominator(
        config.loss_aggregation,
        num_sequences=len(completions),  # TRL counts the unscored ones, too
        num_tokens=sum(map(len, completions)),
        constant=config.loss_constant,
    )
    loss, _ = micro_loss(policy, batch, given, terms_of(config), denominator=denominator)
    loss.backward()
    advantages = torch.zeros(len(completions), dtype=torch.float64)
    for (group, index), value in given.advantages.items():
        advantages[group * K + index] = value[0]
    trained = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    return advantages, loss.item(), {name: p.grad for name, p in trained.items()}


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.05},
        {"beta": 0.0},
        {"beta": 0.5, "reward_clip_range": (-0.5, 1.5)},
        {"beta": 0.05, "normalize_advantages": True},
        {"beta": 0.05, "temperature": 0.7, "epsilon": 0.05, "epsilon_high": 0.1},
        {"beta": 0.05, "missing": True},
        {"beta": 0.5, "mask_truncated_completions": True, "cut": True},
    ],
    ids=str,
)
def test_advantages_loss_and_every_gradient_equal_trl(tmp_path, options, packing):
    options = dict(options)
    rollout = make_rollout(missing=options.pop("missing", False), cut=options.pop("cut", False))
    expected = theirs(tmp_path, rollout, options)
    compare(ours(rollout, {"preset": "trl", **options}, packing), expected)


@pytest.mark.parametrize(
    ("options", "preset"),
    [
        (
            {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
            {"preset": "grpo"},
        ),
        (
            {"loss_type": "grpo", "beta": 0.3, "delta": 1.3},
            {"preset": "grpo", "delta": 1.3, "use_bias_correction_kl": True},
        ),
        ({"loss_type": "grpo", "epsilon_high": 0.05}, {"preset": "grpo", "epsilon_high": 0.05}),
        ({"loss_type": "dr_grpo", "scale_rewards": "none"}, {"preset": "dr_grpo"}),
        ({"loss_type": "grpo", "scale_rewards": "batch"}, {"preset": "grpo", "std_level": "batch"}),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
            {"preset": "grpo", "importance_sampling_level": "sequence_mean"},
        ),
        (
            {"loss_type": "dr_grpo", "importance_sampling_level": "sequence"},
            {"preset": "dr_grpo", "importance_sampling_level": "sequence_mean", **SCALED},
        ),
    ],
    ids=str,
)
def test_grpo_and_its_relatives_equal_trl_s_grpo_trainer(tmp_path, options, preset):
    rollout = make_rollout()
    common = {"beta": 0.0, "epsilon": 0.1}
    # With one iteration it would take "old" to be "now".
    expected = theirs(tmp_path, rollout, {**common, **options, "num_iterations": 2}, "GRPO")
    beta = options.get("beta", 0.0)
    compare(ours(rollout, {**common, **preset, "beta": beta}, packing=True), expected)


def compare(result, expected) -> None:
    advantages, loss, gradients = result
    their_advantages, their_loss, their_gradients = expected
    assert advantages.abs().max() > 0.1
    assert (advantages - their_advantages).abs().max() < 1e-6 * max(1, advantages.abs().max())
    assert math.isclose(loss, their_loss, rel_tol=1e-5)
    assert gradients.keys() == their_gradients.keys()
    for name, gradient in gradients.items():
        theirs_here = their_gradients[name]
        assert theirs_here.norm() > 0, name
        assert (gradient - theirs_here).norm() <= 1e-5 * theirs_here.norm(), name
