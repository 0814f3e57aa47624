"""Train a small reward model on pairs, then a policy against it: under a minute on two CPU cores.

The pairs follow a rule: of two answers to a Countdown problem, the better one ends with a correct
attempt that hits the target. The reward model learns the rule only from pairs (Bradley-Terry
likelihood). The policy is trained only on the reward model's scores. The improvement of the policy
according to the rule is also printed.
"""

import random

import torch
from datasets import Dataset
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rloo import RLOOConfig, RLOOTrainer
from rloo.data.tasks.countdown import (
    base_model_path,
    countdown_reward,
    list_attempts,
    make_problems,
)

FOLDER = "runs/reward_model"


def load_rows(split, count):
    """Problems. The space at the end separates prompt and completion in the reward model's text."""
    rows = make_problems(split)[:count]
    return [{**row, "prompt": row["prompt"] + " "} for row in rows]


def make_pair(row, rng):
    """(better, worse) answers: the same attempts, followed by a hit or by another text."""
    attempts = list_attempts(row["numbers"])
    hits = [attempt for attempt in attempts if attempt.value == row["target"]]
    misses = [attempt for attempt in attempts if attempt.value != row["target"]]
    start = [str(attempt) for attempt in rng.sample(misses, rng.randrange(4))]
    miss = rng.choice(misses)
    # Half of the worse answers claim the target by an attempt with another value.
    last = rng.choice([miss, miss._replace(value=row["target"])])
    better, worse = [*start, str(rng.choice(hits))], [*start, str(last)]
    return " ; ".join(better), " ; ".join(worse)


def train_reward_model(folder, *, steps):
    """Write a reward model to `folder`. Returns its accuracy on held-out pairs."""
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(base_model_path(), padding_side="right")
    model = AutoModelForSequenceClassification.from_pretrained(base_model_path(), num_labels=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def margins(rows):
        """The score of the better answer minus the score of the worse one, for each row: (B,)."""
        pairs = [make_pair(row, rng) for row in rows]
        texts = [
            row["prompt"] + answers[place]
            for place in (0, 1)
            for row, answers in zip(rows, pairs, strict=True)
        ]
        encoded = tokenizer(texts, padding=True, return_tensors="pt")
        better, worse = model(**encoded).logits[:, 0].chunk(2)
        return better - worse

    rows = load_rows("train", None)
    for step in range(1, steps + 1):
        loss = -logsigmoid(margins(rng.sample(rows, 32))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"reward model, step {step}: loss {loss.item():.3f}")
    with torch.inference_mode():
        right = (margins(load_rows("heldout", 256)) > 0).float().mean().item()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return right


def train_policy(reward_model, *, steps):
    """Train with RLOO only on the scores. Returns the evaluations before and after."""
    args = RLOOConfig(
        f"{FOLDER}/policy",
        num_generations=8,
        num_prompts=16,
        max_completion_length=60,
        max_steps=steps,
        learning_rate=4e-4,
        lr_scheduler_type="constant",
        beta=0.01,
        logging_steps=5,
        save_strategy="no",
        overwrite_output_dir=True,
        num_generations_eval=2,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        reward_weights=[1.0, 0.0],  # the rule is only logged
    )
    trainer = RLOOTrainer(
        model=str(base_model_path()),
        reward_funcs=[reward_model, countdown_reward],
        args=args,
        train_dataset=Dataset.from_list(load_rows("train", None)),
        eval_dataset=Dataset.from_list(load_rows("heldout", 64)),
    )
    before = trainer.evaluate()
    trainer.train()
    return before, trainer.evaluate()


def main(*, reward_model_steps=100, policy_steps=16):
    right = train_reward_model(f"{FOLDER}/judge", steps=reward_model_steps)
    print(f"the reward model orders {right:.1%} of held-out pairs as the rule does")
    before, after = train_policy(f"{FOLDER}/judge", steps=policy_steps)
    for what, name in (("mean reward", "judge"), ("solved", "countdown_reward")):
        values = [metrics[f"eval_rewards/{name}/mean"] for metrics in (before, after)]
        print(f"{what}: {values[0]:.3f} before, {values[1]:.3f} after")
    return right, before, after


if __name__ == "__main__":
    main()
