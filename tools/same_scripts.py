"""Runs of `tools/same_run.py` that need a script, with arguments that TRL's scripts pass as
objects. Models, tokenizers and tools are from the part of `tests/support/` that does not import
rloo."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, Image, List, Value
from same_rewards import graded, of_environments, spoken

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
TOLD = [5, 6, 7]
SIZES = [[(30, 24)], [(16, 40), (40, 40)], [], [(64, 12)]]


def run(name: str, folder: str, resume: bool) -> None:
    """Start a run in `folder`, or resume the run there."""
    from rloo import RLOOConfig, RLOOTrainer

    given = SCRIPTS[name]()
    options = {
        "num_prompts": 3, "num_generations": 4, "max_completion_length": 20, "max_steps": 4,
        "warmup_steps": 1, "learning_rate": 0.001, "bf16": False, "gradient_checkpointing": False,
        "save_steps": 2, "logging_steps": 2, "log_completions": True, "num_threads": 1,
        "max_tokens_per_micro_batch": 2048, "disable_tqdm": True, "seed": 7, "use_cpu": True,
        "eval_strategy": "no",
    }  # fmt: skip
    options |= given.pop("options", {})
    trainer = RLOOTrainer(args=RLOOConfig(folder, **options), **given)
    trainer.train("auto" if resume else None)


def _played(**given: Any) -> dict[str, Any]:
    from support.chat import make_brace_tokenizer, make_talkative_model

    tokenizer = make_brace_tokenizer()
    rows = [{"prompt": [{"role": "user", "content": f"Play {n}."}], "low": n} for n in range(12)]
    return {
        "model": make_talkative_model(tokenizer),
        "processing_class": tokenizer,
        "reward_funcs": spoken,
        "train_dataset": Dataset.from_list(rows),
        **given,
    }


def a(x: str = "") -> str:
    """Say a letter.

    Args:
        x: What is added to it.
    """
    return "ok" + x


class Letters:
    """Counts how often its letter is called."""

    def reset(self, low: int) -> str | None:
        """Begin."""
        self.called = low
        return f" You have {low}." if low % 2 else None

    def a(self) -> str:
        """Call this letter."""
        self.called += 1
        return "ok"


def tools() -> dict[str, Any]:
    return _played(tools=[a], options={"max_completion_length": 60})


def environment() -> dict[str, Any]:
    options = {"max_completion_length": 60, "rollout_engine": "hf"}
    return _played(environment_factory=Letters, reward_funcs=of_environments, options=options)


def rollout_func() -> dict[str, Any]:
    from support.rollouts import speak_twice

    def two_turns(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        texts = [
            trainer.processing_class.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=False
            )
            for prompt in prompts
        ]
        ids = [trainer.processing_class(text)["input_ids"] for text in texts]
        return speak_twice(ids, trainer, TOLD, (4, 3))[1]

    return _played(rollout_func=two_turns, reward_funcs=told)


def told(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward: the number of different tokens."""
    return [len(set(ids)) / 8 for ids in completion_ids]


def images() -> dict[str, Any]:
    from support.vision_models import make_image, make_processor, make_vision_model

    pictures = [
        [make_image(10 * row + n, size) for n, size in enumerate(sizes)]
        for row, sizes in enumerate(SIZES)
    ]
    content = ["what is it?", "and these?", "nothing here", "one more"]
    rows = Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": c}] for c in content], "images": pictures},
        features=Features(
            {
                "prompt": List({"role": Value("string"), "content": Value("string")}),
                "images": List(Image()),
            }
        ),
    )
    return {
        "model": make_vision_model("gemma3"),
        "processing_class": make_processor("gemma3"),
        "reward_funcs": told,
        "train_dataset": rows,
        "options": {"rollout_engine": "hf", "max_prompt_length": None},
    }


def stream() -> dict[str, Any]:
    """Prompts of an iterable dataset."""
    rows = [{"prompt": f"Say {n}."} for n in range(40)]
    given = optimizers()
    del given["optimizers"]
    return given | {"train_dataset": Dataset.from_list(rows).to_iterable_dataset(num_shards=2)}


def optimizers() -> dict[str, Any]:
    """A model, a user-defined optimizer and schedule, and two rewards."""
    from support.chat import make_chat_tokenizer, make_talkative_model

    tokenizer = make_chat_tokenizer()
    model = make_talkative_model(tokenizer)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {
        "model": model,
        "processing_class": tokenizer,
        "reward_funcs": [graded, told],
        "train_dataset": Dataset.from_dict({"prompt": [f"Say {n}." for n in range(12)]}),
        "optimizers": (optimizer, schedule),
        "options": {"beta": 0.01},
    }


SCRIPTS: dict[str, Callable[[], dict[str, Any]]] = {
    function.__name__.replace("_", "-"): function
    for function in (tools, environment, rollout_func, images, stream, optimizers)
}
