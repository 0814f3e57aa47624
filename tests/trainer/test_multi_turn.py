"""Runs with tools: what is trained, written down and refused."""

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from rloo import RLOOConfig, RLOOTrainer
from rloo.cli import main
from rloo.rewards import RewardSet
from rloo.trainer.multi_turn import MultiTurnSetup
from support.chat import (
    add,
    make_brace_tokenizer,
    make_talkative_model,
)
from support.episodes import FACTS
from support.training import make_config, metrics_of, weights

ROWS = Dataset.from_dict(
    {"prompt": [[{"role": "user", "content": f"{n} + 1"}] for n in range(6)], "n": list(range(6))}
)


def reward_of(completions, n, **_):
    """Sees messages: half a point for each of the model's, by its length."""
    assert all(m["role"] in ("assistant", "tool") for c in completions for m in c)
    return [
        sum(0.5 + 0.01 * len(m["content"]) for m in c if m["role"] == "assistant")
        for c in completions
    ]


def make_trainer(folder: Path, tools=(add,), rows=ROWS, reward=reward_of, **options):
    defaults = {"max_completion_length": 400, "max_steps": 2, "max_tool_calling_iterations": 2}
    tokenizer = make_brace_tokenizer()
    return RLOOTrainer(
        model=make_talkative_model(tokenizer),
        reward_funcs=reward,
        args=make_config(folder, **{**defaults, **options}),
        train_dataset=rows,
        processing_class=tokenizer,
        tools=list(tools),
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "hf"])
def test_a_run_trains_on_episodes_and_writes_them_down(tmp_path, engine):
    trainer = make_trainer(
        tmp_path, rollout_engine=engine, log_completions=True, logging_steps=1, eval_on_start=True,
        eval_split="train", eval_size=2, num_generations_eval=2,
    )  # fmt: skip
    assert trainer.tools == [add]
    before = weights(trainer)
    trainer.train()

    assert any((weights(trainer)[name] != before[name]).any() for name in before)
    for row in metrics_of(trainer.args):
        assert 1.0 < row["episodes/turns"] <= 3.0
        assert 0.0 < row["tools/call_frequency"] <= 4.0
        assert 0.9 < row["tools/failure_frequency"] <= 1.0  # random letters are no tool's name
        assert row["episodes/failed"] == 0.0
        assert row["tools/time"] >= 0.0
        assert row["mismatch/max"] < 1e-4
    lines = Path(trainer.args.output_dir, "completions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    longest = max(rows, key=lambda row: row["episode"]["turns"])
    assert [m["role"] for m in longest["completion"]][:3] == ["assistant", "tool", "assistant"]
    assert longest["episode"]["calls"] >= 1
    groups = Path(trainer.args.output_dir, "groups.jsonl").read_text().splitlines()
    for completion in json.loads(groups[0])["completions"]:
        told = [
            token
            for token, ours in zip(completion["tokens"], completion["trained"], strict=True)
            if not ours
        ]
        assert bool(told) == (completion["episode"]["turns"] > 1)
        if completion.get("mismatch"):
            known = [value is not None for value in completion["mismatch"]]
            assert known == [ours == 1 for ours in completion["trained"]]
    evaluation = json.loads(
        Path(trainer.args.output_dir, "evaluations.jsonl").read_text().splitlines()[0]
    )
    assert evaluation["episodes/turns"] > 1.0


def words_of(trainer) -> list:
    """The episodes of a run, without times."""
    lines = Path(trainer.args.output_dir, "completions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["prompt_id"], row["completion"], row["reward"], row["step"]) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"max_staleness": 1}, {"pilot": 2}],
    ids=["here", "in the background", "in two stages"],
)
def test_prompts_may_have_different_numbers_of_episodes(tmp_path, options):
    def for_odd_rows(completions, n, **_):
        both = zip(reward_of(completions, n), n, strict=True)
        return [value * (row % 2) for value, row in both]

    pilot = options.get("pilot")
    kwargs = {"max_generations": 7, "floor": 1.0, "column": "n", "pilot": pilot}
    options = {name: value for name, value in options.items() if name != "pilot"}
    trainer = make_trainer(
        tmp_path, reward=for_odd_rows, prompt_sampling="variance", prompt_sampling_kwargs=kwargs,
        max_steps=10, num_prompts=4, learning_rate=1e-4, logging_steps=1, **options,
    )  # fmt: skip
    trainer.train()
    rows = metrics_of(trainer.args)
    assert max(row["prompt_sampling/largest_group"] for row in rows) > 4
    if not options:
        assert all(row["mismatch/max"] < 1e-4 for row in rows)


@pytest.mark.slow
def test_in_the_background_at_staleness_0_the_episodes_are_those_of_one_process(tmp_path):
    options = {"log_completions": True, "logging_steps": 1, "max_steps": 3}
    here = make_trainer(tmp_path / "here", **options)
    there = make_trainer(tmp_path / "there", sampler_processes=1, **options)
    for trainer in (here, there):
        trainer.train()
    assert words_of(here) == words_of(there)
    for name, value in weights(here).items():
        torch.testing.assert_close(value, weights(there)[name], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_episodes_are_played_while_the_model_is_trained(tmp_path):
    """Groups in their order, each once, by weights that are at most two rollouts old."""
    trainer = make_trainer(
        tmp_path, max_staleness=2, max_steps=6, logging_steps=1, log_completions=True,
        num_prompts=2, async_kwargs={"reward_workers": 1},
    )  # fmt: skip
    trainer.train()
    lines = metrics_of(trainer.args)
    assert [line["groups/first"] for line in lines] == [0, 2, 4, 6, 8, 10]
    assert max(line["staleness/max"] for line in lines) in (1, 2)
    assert all(line["episodes/turns"] > 1 for line in lines)
    rows = Path(trainer.args.output_dir, "completions.jsonl").read_text().splitlines()
    prompts = [json.loads(row)["prompt_id"] for row in rows]
    assert sorted(set(prompts)) == list(range(6)) and len(prompts) == 6 * 2 * 4


def test_prompts_tell_of_the_tools(tmp_path):
    seen = []

    def reward(prompts, completions, **_):
        seen.extend(prompts)
        return [float(len(c)) for c in completions]

    trainer = make_trainer(tmp_path, reward=reward, max_steps=1)
    (prompt,) = trainer._source.all_prompts(1)
    assert '"name": "add"' in trainer.processing_class.decode(prompt.token_ids)
    trainer.train()
    assert all(prompt in list(ROWS["prompt"]) for prompt in seen)


def test_a_failed_episode_has_no_reward_and_reward_functions_do_not_see_it(tmp_path, monkeypatch):
    from rloo.episodes import multi_turn_engine

    failing = {2, 5}
    original = multi_turn_engine.EpisodeInProgress.completion
    count = iter(range(10_000))

    def completion(self):
        if next(count) % 12 in failing:
            self.lease.failed = "the tool has gone"
        return original(self)

    monkeypatch.setattr(multi_turn_engine.EpisodeInProgress, "completion", completion)
    sizes = []

    def reward(completions, log_extra, **_):
        sizes.append(len(completions))
        log_extra("messages", [len(c) for c in completions])
        return [float(len(str(c))) for c in completions]

    trainer = make_trainer(
        tmp_path, reward=reward, max_steps=1, log_completions=True, logging_steps=1
    )
    trainer.train()

    assert sizes == [10]
    (row,) = metrics_of(trainer.args)
    assert (row["episodes/failed"], row["reward/unscored"]) == (2.0, 2.0)
    lines = Path(trainer.args.output_dir, "completions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    lost = [row for row in rows if row["reward"] is None]
    assert len(lost) == 2
    for row in rows:
        assert (row["episode"]["failed"] is None) == (row["reward"] is not None)
        assert (row["extras"]["messages"] is None) == (row["reward"] is None)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs has tools"),
        ({"tools": ()}, "max_tool_calling_iterations is 2 and there are no tools"),
        ({"rows": Dataset.from_dict({"prompt": ["a", "b"], "n": [1, 2]})}, "prompt 0 is a text"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, options, reason):
    with pytest.raises(ValueError, match=reason):
        make_trainer(tmp_path, **options)


class Keeping:
    """A reward with a state."""

    def __call__(self, completions, **_):
        return [0.0 for _ in completions]

    def state_dict(self):
        return {}


@pytest.mark.parametrize(
    ("turns", "judging", "reason"),
    [
        (
            MultiTurnSetup(rollout_func=print),
            False,
            "keeps a state .* what rollout_func returns in another process",
        ),
        (MultiTurnSetup(rollout_func=print), True, "keeps a state"),
        (
            MultiTurnSetup(environments=object()),
            False,
            "keeps a state .* what environments have in another",
        ),
        (MultiTurnSetup(), False, None),  # tools alone: what it needs is sent to the main process
        (
            MultiTurnSetup(environments=object()),
            True,
            None,
        ),  # those have no environments in any case
    ],
)
def test_what_cannot_be_in_several_processes_is_refused(turns, judging, reason):
    stateful, other = RewardSet([Keeping()]), RewardSet([reward_of])
    trainer = SimpleNamespace(
        world=SimpleNamespace(size=2),
        rewards=other if judging else stateful,
        judging=SimpleNamespace(rewards=stateful if judging else None),
        policy=SimpleNamespace(parameters=[torch.zeros(1)]),
    )
    engine = SimpleNamespace(capabilities=FACTS)
    with pytest.raises(ValueError, match=reason) if reason else nullcontext():
        turns._check_processes(engine, trainer)
    trainer.world.size = 1
    turns._check_processes(engine, trainer)


def test_an_engine_that_gathers_weights_at_each_turn_is_refused():
    part = SimpleNamespace(device_mesh=None)  # as a tensor of which others have the rest
    trainer = SimpleNamespace(
        world=SimpleNamespace(size=2),
        rewards=RewardSet([reward_of]),
        judging=SimpleNamespace(rewards=None),
        policy=SimpleNamespace(parameters=[part]),
    )
    for copies in (True, False):
        engine = SimpleNamespace(capabilities=replace(FACTS, copies_weights=copies))
        with nullcontext() if copies else pytest.raises(ValueError, match="told gathers divided"):
            MultiTurnSetup()._check_processes(engine, trainer)


def test_options_about_tools_without_tools_are_refused(tmp_path):
    for name, value in (
        ("max_tool_calling_iterations", 2),
        ("tool_kwargs", {"max_response_length": 5}),
        ("tool_kwargs", {"timeout": 1.0}),
    ):
        options = {"max_tool_calling_iterations": None, name: value}
        with pytest.raises(ValueError, match=f"{name} is {value} and there are no tools"):
            make_trainer(tmp_path, tools=(), **options)


def test_options_have_ranges():
    with pytest.raises(ValueError, match="max_tool_calling_iterations is 0"):
        RLOOConfig(max_tool_calling_iterations=0)
    for name in ("max_response_length", "timeout"):
        with pytest.raises(ValueError, match=f"tool_kwargs.{name} is 0"):
            RLOOConfig(tool_kwargs={name: 0})


def test_a_template_that_is_not_fit_is_refused_before_the_first_sample(tmp_path):
    tokenizer = make_brace_tokenizer()
    tokenizer.response_template = None
    with pytest.raises(ValueError, match="none of the known formats"):
        RLOOTrainer(
            model=make_talkative_model(tokenizer),
            reward_funcs=reward_of,
            args=make_config(tmp_path),
            train_dataset=ROWS,
            processing_class=tokenizer,
            tools=[add],
        )


def test_a_run_without_tools_does_not_load_them(tmp_path):
    for name in [name for name in sys.modules if name.startswith("rloo.episodes")]:
        del sys.modules[name]
    trainer = make_trainer(tmp_path, tools=(), max_tool_calling_iterations=None, max_steps=1)
    trainer.train()
    assert not [name for name in sys.modules if name.startswith("rloo.episodes")]
    assert "episodes/turns" not in metrics_of(trainer.args)[0]


TOOL_FILE = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


def count(completions, **_):
    return [float(sum(m["role"] == "assistant" for m in c)) for c in completions]
'''


def test_the_command_takes_tools_by_name(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(TOOL_FILE)
    tokenizer = make_brace_tokenizer()
    make_talkative_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": row["prompt"]} for row in ROWS]
    lines = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "rows.jsonl").write_text(lines)
    options = [
        "--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "rows.jsonl"),
        "--reward", f"{tmp_path / 'mine.py'}:count", "--tools", f"{tmp_path / 'mine.py'}:add",
        "--max_steps", "1", "--num_generations", "2", "--num_prompts", "2", "--use_cpu", "true",
        "--max_completion_length", "300", "--output_dir", str(tmp_path / "run"), "--bf16", "false",
        "--max_tool_calling_iterations", "1", "--num_threads", "1",
    ]  # fmt: skip
    assert main(["train", *options]) == 0
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert row["episodes/turns"] > 1.0
    assert "the model may call add" in capsys.readouterr().out

    assert main(["train", *options, "--tools", f"{tmp_path / 'mine.py'}:sub"]) == 2
    assert "has no function 'sub'" in capsys.readouterr().err
