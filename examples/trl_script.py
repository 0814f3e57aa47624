"""A script for TRL's RLOOTrainer. Only the import of the trainer is changed.

Two tasks on the embedded model, on the CPU: `solve` asks for the target, `brief` for one attempt.
A reward that does not apply to a row returns None for it.
"""

from datasets import Dataset

from rloo import RLOOConfig, RLOOTrainer
from rloo.data.tasks.countdown import base_model_path, countdown_reward, make_problems

problems = make_problems("train")[:256]
rows = [{**row, "task": ("solve", "brief")[i % 4 == 3]} for i, row in enumerate(problems)]
split = Dataset.from_list(rows).train_test_split(test_size=16, seed=0)


def solved(completions, numbers, target, task, **kwargs):
    scores = countdown_reward(completions, numbers, target)
    return [score if name == "solve" else None for score, name in zip(scores, task, strict=True)]


def brief(completions, task, log_metric, **kwargs):
    attempts = [1 + completion.count(";") for completion in completions]
    log_metric("attempts", sum(attempts) / len(attempts))
    return [1 / n if name == "brief" else None for n, name in zip(attempts, task, strict=True)]


async def complete(completions, **kwargs):
    return [float(completion.strip()[-1:].isdigit()) for completion in completions]


args = RLOOConfig(
    output_dir="runs/trl_script",
    num_generations=4,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    max_completion_length=60,
    max_steps=4,
    learning_rate=2e-4,
    beta=0.01,
    epsilon=0.2,
    num_iterations=2,
    normalize_advantages=True,
    reward_weights=[1.0, 0.5, 0.25],
    reward_clip_range=(-1.0, 1.0),
    mask_truncated_completions=True,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    bf16=False,
)
trainer = RLOOTrainer(
    model=str(base_model_path()),
    reward_funcs=[solved, brief, complete],
    args=args,
    train_dataset=split["train"],
    eval_dataset=split["test"],
)
before = trainer.evaluate()
trainer.train()
after = trainer.evaluate()
for name in ("reward", "rewards/solved/mean", "rewards/brief/mean", "rewards/complete/mean"):
    print(f"{name:22} {before[f'eval_{name}']:7.3f} -> {after[f'eval_{name}']:7.3f}")
trainer.save_model("runs/trl_script/final")
