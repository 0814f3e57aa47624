"""A script with tools and an environment, as it was written for TRL's GRPOTrainer, under both."""

import pytest
from datasets import Dataset

from support.chat import make_brace_tokenizer, make_talkative_model

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("default"),  # TRL and accelerate warn about each other
]

ROWS = Dataset.from_dict(
    {"prompt": [[{"role": "user", "content": "Play."}]] * 4, "level": [1, 2, 3, 4]}
)


def play(trainer_class, config_class, folder, rows=ROWS, **options):
    """The script; returns what it has seen."""
    seen = {"reset": [], "reward": [], "messages": []}

    class Game:
        def reset(self, **kwargs) -> str:
            seen["reset"].append(kwargs)
            self.level, self.calls = kwargs.get("level", 0), 0
            return f" Level {self.level}."

        def a(self) -> str:
            """Call this letter."""
            self.calls += 1
            return "ok" if self.level % 2 else "ko"

        def get_reward(self) -> float:
            return float(self.calls)

    async def e() -> str:
        """Call that letter."""
        return "well"

    def longest(completions, environments, log_extra, log_metric, trainer_state, **kwargs):
        assert all(type(environment) is Game for environment in environments)
        assert kwargs.get("level", [0] * len(completions)) == [x.level for x in environments]
        seen["reward"].append({*kwargs} - {"environment"})
        seen["messages"] += completions
        log_extra("calls", [environment.calls for environment in environments])
        log_metric("calls", sum(x.calls for x in environments) / len(environments))
        return [
            0.1 * len(completion) + 0.01 * trainer_state.global_step for completion in completions
        ]

    tokenizer = make_brace_tokenizer()
    trainer = trainer_class(
        model=make_talkative_model(tokenizer),
        reward_funcs=[longest],
        args=config_class(
            output_dir=str(folder), max_steps=1, per_device_train_batch_size=8, num_generations=4,
            max_completion_length=200, max_tool_calling_iterations=3, bf16=False, use_cpu=True,
            report_to="none", logging_steps=1, save_strategy="no", **options,
        ),
        train_dataset=rows,
        processing_class=tokenizer,
        tools=[e],
        environment_factory=Game,
    )  # fmt: skip
    trainer.train()
    (logged,) = [row for row in trainer.state.log_history if "reward" in row]
    return seen, logged


def shapes(completions) -> set:
    """Which roles follow each other, and what a message of each has."""
    return {
        (*(m["role"] for m in pair), *sorted(pair[-1]))
        for completion in completions
        for pair in zip([{"role": "user"}, *completion], completion, strict=False)
    }


@pytest.mark.parametrize("rows", (ROWS, None), ids=("rows", "no dataset"))
def test_a_script_sees_the_same_under_trls_grpo_trainer(tmp_path, rows, monkeypatch):
    from trl import GRPOConfig, GRPOTrainer

    from rloo import RLOOConfig, RLOOTrainer

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    theirs, logged = play(GRPOTrainer, GRPOConfig, tmp_path / "trl", rows)
    ours, known = play(RLOOTrainer, RLOOConfig, tmp_path / "rloo", rows)

    assert len(ours["reset"]) == len(theirs["reset"]) == 8
    assert {*theirs["reset"][0]} <= {*ours["reset"][0]} == {*theirs["reset"][0], "seed"}
    assert ours["reward"][0] == theirs["reward"][0]
    assert ("assistant", "tool", "content", "name", "role") in shapes(theirs["messages"])
    assert shapes(ours["messages"]) == shapes(theirs["messages"])
    for name in ("rewards/longest/mean", "rewards/Game/mean", "calls", "tools/call_frequency",
                 "tools/failure_frequency", "completions/mean_length"):  # fmt: skip
        assert name in known and name in logged


def make_rollouts(trainer_class, config_class, folder):
    """A script whose rollouts are its own, of tokens that are always the same; what it has seen."""
    seen = {}

    def rollout_func(prompts, trainer):
        seen["prompts"] = [prompt[0]["content"] for prompt in prompts]
        count = len(prompts)
        ids = trainer.processing_class.apply_chat_template(
            prompts, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        return {
            "prompt_ids": ids,
            "completion_ids": [[40, 41, 42, 5 + n % 2] for n in range(count)],
            "logprobs": [[-4.0, 0.0, 0.0, -4.0]] * count,
            "env_mask": [[1, 0, 0, 1]] * count,
            "place": [*range(count)],
            "kind": "own",
        }

    def judge(prompts, completions, completion_ids, place, kind, level, **kwargs):
        seen["reward"] = [completion_ids, place, kind, level, [p[0]["content"] for p in prompts]]
        return [float(n % 2) for n in place]

    tokenizer = make_brace_tokenizer()
    texts = [[{"role": "user", "content": f"Play {n}."}] for n in range(4)]
    trainer = trainer_class(
        model=make_talkative_model(tokenizer),
        reward_funcs=judge,
        args=config_class(
            output_dir=str(folder), max_steps=1, per_device_train_batch_size=8, num_generations=4,
            max_completion_length=8, bf16=False, use_cpu=True, report_to="none",
            save_strategy="no", shuffle_dataset=False,
        ),
        train_dataset=ROWS.remove_columns("prompt").add_column("prompt", texts),
        processing_class=tokenizer,
        rollout_func=rollout_func,
    )  # fmt: skip
    trainer.train()
    return seen


def test_a_rollout_func_sees_the_same_under_trls_grpo_trainer(tmp_path, monkeypatch):
    from trl import GRPOConfig, GRPOTrainer

    from rloo import RLOOConfig, RLOOTrainer

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    theirs = make_rollouts(GRPOTrainer, GRPOConfig, tmp_path / "trl")
    ours = make_rollouts(RLOOTrainer, RLOOConfig, tmp_path / "rloo")
    assert theirs["prompts"] == ["Play 0."] * 4 + ["Play 1."] * 4
    assert ours == theirs
