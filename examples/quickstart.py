"""Train a model on products of two numbers, with a user-defined reward."""

from datasets import Dataset

from rloo import RLOOConfig, RLOOTrainer

pairs = [(a, b) for a in range(12, 60) for b in range(3, 10)]
asked = [[{"role": "user", "content": f"{a} * {b} = ? Say only the number."}] for a, b in pairs]
rows = Dataset.from_dict({"prompt": asked, "product": [str(a * b) for a, b in pairs]})
train, test = rows.train_test_split(test_size=64, seed=0).values()


def is_right(completions, product):
    return [float(c[0]["content"].strip() == p) for c, p in zip(completions, product, strict=True)]


args = RLOOConfig("runs/quickstart", num_generations=8, num_prompts=16, max_steps=50)
model = "Qwen/Qwen2.5-0.5B-Instruct"
trainer = RLOOTrainer(model, is_right, args=args, train_dataset=train, eval_dataset=test)
trainer.train()
print(trainer.evaluate())
trainer.save_model("runs/quickstart/final")
