"""Episodes for runs of one process and of several: tools, an environment, a rollout_func, and what
goes wrong with them on the second process."""

import os

from datasets import Dataset

from support.chat import add, make_brace_tokenizer, make_talkative_model
from support.rollouts import speak_twice

ROWS = Dataset.from_dict(
    {
        "prompt": [[{"role": "user", "content": f"Play {n}."}] for n in range(12)],
        "low": [*range(12)],
    }
)
TOLD = [5, 6, 7]


class Letters:
    """Counts how often its letter is called: a talkative model does that soon."""

    def reset(self, seed: int, low: int) -> str | None:
        """Begin, but for one of the rows."""
        if low == 5:
            raise ConnectionError("no server")
        self.called, self.first = low, seed % 3
        return f" You have {seed % 1000}." if low % 2 else None

    def a(self) -> str:
        """Call this letter."""
        self.called += 1
        return "ok" * self.first

    def get_reward(self) -> float:
        """As many as were called."""
        return float(self.called)


class Apart(Letters):
    """In another state on the second process."""

    def reset(self, seed: int, low: int) -> None:
        """Begin."""
        self.called = low
        self.board = f"board {os.environ.get('RANK')}"


def of_environments(environments, completions, log_metric, **_):
    """Sees environments, and what was said."""
    log_metric("called", sum(e.called for e in environments) / len(environments))
    pairs = zip(environments, completions, strict=True)
    return [0.1 * e.called + 0.01 * len(str(c)) for e, c in pairs]


def of_messages(completions, **_):
    """By the length of what the model has said."""
    said = [[m["content"] for m in c if m["role"] == "assistant"] for c in completions]
    return [sum(map(len, texts)) / 10 for texts in said]


def two_turns(prompts, trainer):
    """See `speak_twice`."""
    ids = [trainer.processing_class(text)["input_ids"] + [4] for text in prompts]
    both, given = speak_twice(ids, trainer, TOLD, (3, 2))
    return given | {"turns": both}  # which could not be sent


def failing(prompts, trainer):
    """As `two_turns`, but for the second process."""
    if os.environ.get("RANK") == "1":
        raise ConnectionError("no rollout today")
    return two_turns(prompts, trainer)


def of_turns(completion_ids, turns, **_):
    """Sees what the function has returned."""
    return [
        len(a.token_ids) - 0.1 * (b.token_ids[0] % 7) + 0.01 * len(ids)
        for ids, (a, b) in zip(completion_ids, turns, strict=True)
    ]


CALLING = {
    "max_completion_length": 160, "max_tool_calling_iterations": 2, "log_completions": True,
    "logging_steps": 1, "num_prompts": 4, "max_steps": 2, "eval_steps": 2,
}  # fmt: skip
# Reward, options, and what the trainer is given.
CASES = {
    "tools, one group over all": (of_messages, CALLING | {"num_prompts": 1}, {"tools": [add]}),
    "environments": (of_environments, CALLING, {"environment_factory": Letters}),
    "rollout_func": (
        of_turns,
        {"beta": 0.05, "max_steps": 2, "eval_steps": 2},
        {"rollout_func": two_turns},
    ),
}
# Whose words, too, may stay where they were said.
FAR = ("tools, one group over all", "environments")
# What ends them on all processes.
ENDS = {
    "two states": (
        of_environments, CALLING | {"num_prompts": 1}, {"environment_factory": Apart}
    ),
    "a function that fails": (of_turns, {}, {"rollout_func": failing}),
}  # fmt: skip


def parts(name: str):
    """The model, tokenizer and rows of a case that has its own; None where it has none."""
    given = {**CASES, **ENDS}[name][2]
    if "rollout_func" in given:
        return None
    tokenizer = make_brace_tokenizer()
    return make_talkative_model(tokenizer), tokenizer, ROWS
