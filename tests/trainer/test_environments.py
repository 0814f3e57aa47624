"""Runs in environments: what begins an episode, what rewards it, what becomes of failed ones."""

import json
from pathlib import Path

import pytest
from datasets import Dataset

from rloo import RLOOTrainer
from rloo.cli import main
from support.chat import add, make_brace_tokenizer, make_talkative_model
from support.training import make_config, metrics_of

ROWS = Dataset.from_dict(
    {"prompt": [[{"role": "user", "content": "Play."}]] * 6, "low": list(range(6))}
)


class Letters:
    """Counts how often its letter is called: a talkative model does that soon."""

    def reset(self, seed: int, low: int) -> str:
        """Begin."""
        self.called = low
        return f" You have {low}."

    def get_reward(self) -> float:
        """As many as were called."""
        return float(self.called)

    def a(self) -> str:
        """Call this letter."""
        self.called += 1
        return "ok"


def make_trainer(folder: Path, factory=Letters, reward=None, rows=ROWS, **options):
    tokenizer = make_brace_tokenizer()
    defaults = {
        "max_completion_length": 300, "max_steps": 1, "max_tool_calling_iterations": 2,
        "logging_steps": 1, "log_completions": True,
    }  # fmt: skip
    given = {name: options.pop(name) for name in ("tools", "eval_reward_funcs") if name in options}
    return RLOOTrainer(
        model=make_talkative_model(tokenizer),
        reward_funcs=reward,
        args=make_config(folder, **{**defaults, **options}),
        train_dataset=rows,
        processing_class=tokenizer,
        environment_factory=factory,
        **given,
    )


def rows_of(trainer) -> list[dict]:
    lines = Path(trainer.args.output_dir, "completions.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_staleness": 1}], ids=["sync", "background"])
def test_an_environment_begins_answers_and_rewards(tmp_path, options):
    trainer = make_trainer(tmp_path, **options)
    assert trainer.reward_func_names == ["Letters"]
    trainer.train()

    (row,) = metrics_of(trainer.args)
    assert row["rewards/Letters/mean"] == row["reward"]
    assert row["tools/failure_frequency"] < 1.0  # some letters were called
    rows = rows_of(trainer)
    for row in rows:
        low = int(row["prompt"][-1]["content"].removeprefix("Play. You have ").removesuffix("."))
        answered = sum(m["role"] == "tool" and m["content"] == "ok" for m in row["completion"])
        assert row["reward"] == low + answered
    starts = {}
    for row in rows:
        starts.setdefault(row["prompt_id"], set()).add(row["episode"]["start"])
    assert all(len(some) == 1 for some in starts.values())
    assert len(set.union(*starts.values())) == len(starts)


def test_reward_functions_get_the_environments_and_weigh_beside_their_own_reward(tmp_path):
    def twice(environments, completions, **_):
        assert all(type(e) is Letters for e in environments)
        return [2.0 * e.called for e in environments]

    trainer = make_trainer(tmp_path, reward=twice, reward_weights=[0.5])
    trainer.train()
    (row,) = metrics_of(trainer.args)
    assert row["rewards/twice/mean"] == 2 * row["rewards/Letters/mean"]
    assert row["reward"] == pytest.approx(2 * row["rewards/Letters/mean"])


def test_functions_and_environments_are_tools_together(tmp_path):
    trainer = make_trainer(tmp_path, tools=[add])
    (prompt,) = trainer._source.all_prompts(1)
    text = trainer.processing_class.decode(prompt.token_ids)
    assert '"name": "add"' in text and '"name": "a"' in text and '"name": "reset"' not in text
    assert trainer.tools == [add]


class Broken(Letters):
    count = iter(range(10_000))

    def reset(self, seed: int, low: int) -> str:
        """Begin, but for every sixth time."""
        if next(self.count) % 6 == 5:
            raise ConnectionError("the server is away")
        return super().reset(seed, low)


@pytest.mark.parametrize("preset", [None, "trl"])
def test_episodes_that_cannot_begin_have_no_reward_and_the_run_goes_on(tmp_path, preset):
    trainer = make_trainer(tmp_path, Broken, max_steps=2, preset=preset)
    trainer.train()
    for row in metrics_of(trainer.args):
        assert (row["episodes/failed"], row["reward/unscored"]) == (2.0, 2.0)
    lost = [row for row in rows_of(trainer) if row["reward"] is None]
    assert len(lost) == 4
    assert all("server is away" in row["episode"]["failed"] for row in lost)


class Other:
    """Without a reward of its own."""

    def reset(self, seed: int) -> None:
        """Begin."""

    def z(self) -> str:
        """Call this letter."""
        return "z"


def test_rows_choose_among_several_environments(tmp_path):
    rows = ROWS.add_column("environment", ["letters", "other"] * 3)

    def one(completions, **_):
        return [float(len(c)) for c in completions]

    trainer = make_trainer(tmp_path, {"letters": Letters, "other": Other}, one, rows, max_steps=2)
    trainer.train()
    rows = rows_of(trainer)
    assert {"Letters", "one"} == set(rows[0]["scores"])
    kinds = {row["scores"]["Letters"] is None for row in rows}
    assert kinds == {True, False}
    for row in rows:
        assert (row["scores"]["Letters"] is None) == (row["prompt"][-1]["content"] == "Play.")


def test_what_does_not_go_together_is_refused(tmp_path):
    def judge(environments, **_):
        return [0.0 for _ in environments]

    with pytest.raises(ValueError, match="requires the parameter 'environments'"):
        make_trainer(tmp_path, eval_reward_funcs=[judge], eval_on_start=True, eval_split="train")
    clashing = ROWS.add_column("environments", ["a"] * 6)
    with pytest.raises(ValueError, match="has a column environments"):
        make_trainer(tmp_path, rows=clashing)
    with pytest.raises(ValueError, match="two have the same: add"):
        make_trainer(tmp_path, type("Adds", (Other,), {"add": add}), add_reward, tools=[add])
    with pytest.raises(ValueError, match="prompt 0 is for the environment None"):
        make_trainer(tmp_path, {"other": Other}, add_reward)
    named = ROWS.add_column("environment", ["other"] * 3 + ["chess"] + ["other"] * 2)
    with pytest.raises(ValueError, match="prompt 3 is for the environment 'chess'"):
        make_trainer(tmp_path, {"other": Other}, add_reward, rows=named)


class Says(Letters):
    """Says the whole prompt itself."""

    def reset(self, seed: int, low: int = 0) -> str:
        """Begin."""
        self.called = low + seed % 3
        return f"There are {self.called}."


@pytest.mark.slow
def test_an_environment_may_say_the_whole_prompt(tmp_path):
    """As in TRL: without a dataset, and with rows that have no prompt."""
    for name, rows in (
        ("none", None),
        ("rows", ROWS.remove_columns("prompt")),
        ("stream", ROWS.remove_columns("prompt").to_iterable_dataset()),
    ):
        trainer = make_trainer(tmp_path / name, Says, rows=rows, max_steps=1)
        trainer.train()
        prompts = [row["prompt"][-1]["content"] for row in rows_of(trainer)]
        assert all(p.startswith("There are ") for p in prompts) and len(set(prompts)) > 1
        if rows is None:
            assert len(trainer.train_dataset) == 3  # prompts of a rollout
    for given in ({"max_steps": -1}, {"factory": {"one": Says}}):
        with pytest.raises(ValueError, match="there is no dataset"):
            make_trainer(tmp_path / "length", **{"factory": Says, "rows": None, **given})
    with pytest.raises(ValueError, match="no column 'prompt'"):
        RLOOTrainer(
            make_talkative_model(make_brace_tokenizer()), add_reward, make_config(tmp_path),
            ROWS.remove_columns("prompt"), processing_class=make_brace_tokenizer(),
        )  # fmt: skip


def add_reward(completions, **_):
    return [0.0 for _ in completions]


FILE = '''
class Counting:
    def reset(self, seed):
        self.number = seed % 7

    def get_reward(self):
        return float(self.number)

    def look(self) -> int:
        """Look."""
        return self.number
'''


def test_the_command_takes_a_class_by_name_and_needs_no_other_reward(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(FILE)
    tokenizer = make_brace_tokenizer()
    make_talkative_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    lines = "\n".join(json.dumps({"prompt": row["prompt"]}) for row in ROWS)
    (tmp_path / "rows.jsonl").write_text(lines)
    options = [
        "--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "rows.jsonl"),
        "--environment_factory", f"{tmp_path / 'mine.py'}:Counting", "--max_steps", "1",
        "--num_generations", "2", "--num_prompts", "4", "--use_cpu", "true", "--bf16", "false",
        "--max_completion_length", "200", "--output_dir", str(tmp_path / "run"),
        "--max_tool_calling_iterations", "1", "--num_threads", "1",
    ]  # fmt: skip
    assert main(["train", *options]) == 0
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert 0.0 < row["rewards/Counting/mean"] <= 6.0
    assert row["groups/signal"] == 0.0  # all of a group begin with the same number
    assert "the model may call look" in capsys.readouterr().out
