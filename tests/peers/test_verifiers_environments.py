"""Runs in environments of `verifiers`: who plays them, what is trained, what they reward."""

import json
from pathlib import Path

import pytest
import torch
import verifiers as vf
from datasets import Dataset

from rloo import RLOOTrainer, from_verifiers
from support.chat import CHAT_ML, make_brace_tokenizer, make_chat_tokenizer, make_talkative_model
from support.training import make_config, metrics_of, weights

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

ROWS = Dataset.from_dict(
    {
        "prompt": [[{"role": "user", "content": f"Play {n}."}] for n in range(6)],
        "answer": [str(n) for n in range(6)],
        "info": [{"low": n} for n in range(6)],
    }
)
SEEN: list[dict] = []


async def a() -> str:
    """Call this letter."""
    return "fine <|im_end|>"


def scored(completion, answer, info, state) -> float:
    """Calls that were answered, and the row's number."""
    assert int(answer) == info["low"]
    called = sum(message.role == "tool" and "fine" in message.content for message in completion)
    steps = [step["tokens"] for step in state["trajectory"]]
    SEEN.append({"reward": called + 0.25 * info["low"], "steps": steps})
    return called + 0.25 * info["low"]


def make_tools(**options):
    return vf.ToolEnv(
        tools=[a], max_turns=3, dataset=ROWS, rubric=vf.Rubric(funcs=[scored]), **options
    )


class Counting(vf.MultiTurnEnv):
    """Says what it was told, and in some rollouts goes wrong."""

    def __init__(self, trouble="", rows=ROWS, **options):
        super().__init__(
            dataset=rows, max_turns=2, rubric=vf.Rubric(funcs=[self.length]), **options
        )
        self.trouble, self.count = trouble, 0

    async def length(self, completion) -> float:
        return float(len(completion[0].content))

    async def setup_state(self, state):
        self.count += 1
        state["number"] = self.count
        if self.trouble == "setup" and self.count % 6 == 5:
            raise ConnectionError("no server")
        return state

    async def env_response(self, messages, state, **_):
        if self.trouble and state["number"] % 6 == 5:
            if self.trouble == "infra":
                raise vf.InfraError("the sandbox is gone")
            if self.trouble == "rewritten":
                messages[0].content = "Play something else."
        return [{"role": "user", "content": "Go on <|im_end|> please."}]


def make_trainer(folder, environment, template=None, **options):
    tokenizer = make_brace_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    defaults = {
        "max_completion_length": 300, "max_steps": 1, "logging_steps": 1, "log_completions": True,
    }  # fmt: skip
    return RLOOTrainer(
        model=make_talkative_model(tokenizer),
        args=make_config(folder, **{**defaults, **options}),
        processing_class=tokenizer,
        **from_verifiers(environment),
    )


def rows_of(trainer):
    lines = Path(trainer.args.output_dir, "completions.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def watched(trainer):
    """What the rollout function returns, and how many rows each turn had."""
    play, go_on = trainer.engine._function, trainer.engine.go_on
    given, sizes = [], []

    def function(prompts, trainer):
        given.append(play(prompts, trainer))
        return given[-1]

    def sized(rows):
        sizes.append(len(rows))
        return go_on(rows)

    trainer.engine._function, trainer.engine.go_on = function, sized
    return given, sizes


def test_an_environment_with_tools_plays_and_rewards(tmp_path):
    SEEN.clear()
    trainer = make_trainer(tmp_path, make_tools())
    before = weights(trainer)
    given, sizes = watched(trainer)
    trainer.train()
    assert any(not torch.equal(weights(trainer)[n], before[n]) for n in before)
    (rollouts,) = given
    assert len(sizes) < 12 < sum(sizes), "those that wait are sampled together"
    assert sorted(rollouts["verifiers_reward"]) == sorted(one["reward"] for one in SEEN)
    assert len(set(rollouts["verifiers_reward"])) > 2 and any(len(one["steps"]) > 1 for one in SEEN)
    (row,) = metrics_of(trainer.args)
    assert row["rewards/rubric/mean"] == pytest.approx(sum(one["reward"] for one in SEEN) / 12)
    assert row["mismatch/max"] < 1e-4  # what tools say is not among the compared
    assert row["episodes/failed"] == 0.0


def test_tokens_are_those_that_were_sampled_and_what_is_put_behind_them(tmp_path):
    SEEN.clear()
    trainer = make_trainer(tmp_path, make_tools())
    given, _ = watched(trainer)
    trainer.train()
    tokenizer = trainer.processing_class
    ends = tokenizer.convert_tokens_to_ids("<|im_end|>")
    steps_of = {}
    for one in SEEN:
        sampled = [token for step in one["steps"] for token in step["completion_ids"]]
        steps_of[(*one["steps"][0]["prompt_ids"], *sampled)] = one["steps"]
    (rollouts,) = given
    lists = [rollouts[n] for n in ("prompt_ids", "completion_ids", "logprobs", "env_mask")]
    several = answered = 0
    for prompt, said, logprobs, mask in zip(*lists, strict=True):
        text = tokenizer.decode(prompt)
        assert '"name": "a"' in text and text.endswith("<|im_start|>assistant\n")
        steps = steps_of[(*prompt, *(t for t, ours in zip(said, mask, strict=True) if ours))]
        sampled = [x for x, ours in zip(logprobs, mask, strict=True) if ours]
        assert sampled == [x for step in steps for x in step["completion_logprobs"]]
        if len(steps) > 1:
            several += 1
            told = [token for token, m in zip(said, mask, strict=True) if not m]
            answered += tokenizer.decode(told).count("<tool_response>\nfine <|im_end|>\n")
            # What a tool says has none: each of the template's ends a message.
            assert told.count(ends) == len(steps) - 1
    assert several and answered


def test_draws_do_not_depend_on_who_asks_when(tmp_path):
    texts = []
    for name in ("one", "two"):
        trainer = make_trainer(tmp_path / name, make_tools(), seed=3)
        trainer.train()
        texts.append([(row["completion"], row["reward"]) for row in rows_of(trainer)])
    assert texts[0] == texts[1]


def test_an_environment_of_texts_goes_on_with_what_it_says(tmp_path):
    trainer = make_trainer(tmp_path, Counting(), max_steps=2)
    given, _ = watched(trainer)
    trainer.train()
    tokenizer = trainer.processing_class
    told = "<|im_start|>user\nGo on <|im_end|> please.<|im_end|>\n<|im_start|>assistant\n"
    for rollouts in given:
        for said, mask, reward in zip(
            rollouts["completion_ids"], rollouts["env_mask"], rollouts["verifiers_reward"],
            strict=True,
        ):  # fmt: skip
            first, behind = mask.index(0), [t for t, m in zip(said, mask, strict=True) if not m]
            turn = tokenizer.decode(said[:first]).removesuffix("<|im_end|>")
            assert reward == len(turn)
            ended = tokenizer.decode(said[first - 1]) == "<|im_end|>"
            assert tokenizer.decode(behind) == ("\n" if ended else "<|im_end|>\n") + told
            assert behind.count(tokenizer.eos_token_id) == (1 if ended else 2)


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("infra", "InfraError"),
        ("setup", "raised ConnectionError('no server')"),
        ("rewritten", "no continuation of those before it"),
    ],
)
def test_a_rollout_that_goes_wrong_has_no_reward(tmp_path, trouble, reason):
    trainer = make_trainer(tmp_path, Counting(trouble))
    trainer.train()
    (row,) = metrics_of(trainer.args)
    assert (row["episodes/failed"], row["reward/unscored"]) == (2.0, 2.0)
    lost = [row for row in rows_of(trainer) if row["reward"] is None]
    assert len(lost) == 2
    assert all(reason in row["episode"]["failed"] for row in lost), lost


def test_a_turn_without_room_ends_a_rollout_and_it_is_rewarded(tmp_path):
    trainer = make_trainer(tmp_path, Counting(), max_completion_length=30)
    given, _ = watched(trainer)
    trainer.train()
    assert all(len(said) <= 30 for said in given[0]["completion_ids"])
    assert all(set(mask) == {1} for mask in given[0]["env_mask"])
    assert metrics_of(trainer.args)[0]["episodes/failed"] == 0.0


def test_rewards_of_a_group_are_scored_together(tmp_path):
    def best(completions) -> list[float]:
        lengths = [len(str(completion)) for completion in completions]
        return [float(length == max(lengths)) for length in lengths]

    environment = vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[best]))
    trainer = make_trainer(tmp_path, environment)
    given, _ = watched(trainer)
    trainer.train()
    rewards = given[0]["verifiers_reward"]
    groups = [rewards[n : n + 4] for n in range(0, 12, 4)]
    assert all(max(group) == 1.0 for group in groups) and {0.0} < set(rewards)


def test_rows_of_a_group_of_environments_are_played_by_their_own(tmp_path):
    tools = vf.ToolEnv(
        tools=[a], dataset=ROWS, max_turns=2, rubric=vf.Rubric(funcs=[lambda completion: 7.0])
    )
    counting = Counting(rows=ROWS.remove_columns(["info"]))
    trainer = make_trainer(tmp_path, vf.EnvGroup([tools, counting], ["tools", "counting"]))
    assert len(trainer.train_dataset) == 12
    given, _ = watched(trainer)
    trainer.train()
    decode = trainer.processing_class.decode
    told = ['"name": "a"' in decode(ids) for ids in given[0]["prompt_ids"]]
    assert set(told) == {True, False}
    rewards = zip(told, given[0]["verifiers_reward"], strict=True)
    assert all(reward == 7.0 for with_tools, reward in rewards if with_tools)


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has sampling_args {'temperature': 0.5}"):
        from_verifiers(make_tools(sampling_args={"temperature": 0.5}))

    environment = make_tools()
    trainer = make_trainer(tmp_path, environment, template=CHAT_ML.replace("m.tool_calls", "[]"))
    with pytest.raises(ValueError, match="does not show calls and answers of tools"):
        trainer.train()


def test_a_template_that_renders_what_was_said_in_another_way_is_refused(tmp_path):
    template = make_chat_tokenizer().chat_template.replace(
        "{{ '<|im_start|>assistant\n' + m.content }}",
        "{{ '<|im_start|>assistant\n' + ('' if messages[-1].role == 'user' else m.content) }}",
    )
    trainer = make_trainer(tmp_path, Counting(), template=template)
    trainer.train()
    (row,) = metrics_of(trainer.args)
    lost = [row for row in rows_of(trainer) if row["reward"] is None]
    assert row["episodes/failed"] == len(lost) >= 6  # the others have said nothing at first
    assert all("renders what was said in another way" in row["episode"]["failed"] for row in lost)
