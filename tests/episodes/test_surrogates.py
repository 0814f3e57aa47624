"""Half of a surrogate pair, which JSON can spell and no tokenizer takes, becomes U+FFFD."""

import json
from contextlib import nullcontext

import pytest
from datasets import IterableDataset

from rloo.data.dataset_loading import load_rows
from rloo.data.iterable_dataset import as_table
from rloo.episodes.environments import EnvironmentPool
from rloo.episodes.multi_turn_engine import EpisodeLimits, EpisodeSetup, MultiTurnEngine
from rloo.episodes.renderer import ToolCall
from rloo.episodes.renderer_check import find_renderer
from rloo.episodes.tools import ToolRequest, ToolSet
from rloo.types import Prompt, Sampling, sound
from support.chat import make_chat_tokenizer
from support.episodes import Told
from support.training import make_config, make_trainer

HALF, WHOLE = "\ud83d", "\U0001f600"


def echo(text: str, raises: bool = False) -> str:
    """Say it again.

    Args:
        text: What to say.
        raises: Whether as an error.
    """
    if raises:
        raise ValueError(text)
    return text


@pytest.mark.parametrize(
    "given, expected",
    [
        (HALF, "\ufffd"),
        (f"a{HALF}b", "a\ufffdb"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ud83d" + "\ude00", WHOLE),
        ({HALF: [HALF, (1, HALF)]}, {"\ufffd": ["\ufffd", (1, "\ufffd")]}),
        ("plain \xe9", "plain \xe9"),
        (3.5, 3.5),
    ],
)
def test_a_half_is_replaced_and_a_pair_is_kept(given, expected):
    assert sound(given) == expected


@pytest.mark.parametrize("raises, said", [(False, "\ufffd!"), (True, "error: ValueError: \ufffd!")])
def test_what_tools_say_and_raise_is_sound(raises, said):
    tools = ToolSet([echo], characters=100)
    call = ToolCall("echo", {"text": HALF + "!", "raises": raises})
    (answer,) = tools.call([ToolRequest(call, 1.0)])
    assert answer.text == said
    (unknown,) = tools.call([ToolRequest(ToolCall(f"no{HALF}"), 1.0)])
    unknown.text.encode()


def test_an_episode_goes_on_behind_a_half_that_the_model_wrote():
    tokenizer = make_chat_tokenizer()
    tools = ToolSet([echo], characters=100)
    dialect = find_renderer(tokenizer, [tokenizer.eos_token_id], {"tools": tools.schemas})
    call = (
        '<tool_call>\n{"name": "echo", "arguments": {"text": "\\ud83d!"}}\n</tool_call><|im_end|>'
    )
    turns = [tokenizer(t, add_special_tokens=False)["input_ids"] for t in (call, "ok<|im_end|>")]
    content = [{"role": "user", "content": "x"}]
    opened = dialect.template.encode(dialect.template.text(content))

    def say(prompt, k):
        return turns[tokenizer.decode(prompt.token_ids).count("<|im_start|>assistant") - 1]

    inner = Told(say, (tokenizer.eos_token_id,))
    engine = MultiTurnEngine(inner, {None: EpisodeSetup(tools, dialect)}, EpisodeLimits())
    sampling = Sampling(1000, (tokenizer.eos_token_id,))
    ((episode,),) = engine.sample([Prompt(1, opened, content)], 1, sampling, 0)
    assert episode.finish == "stop" and episode.episode.turns == 2
    assert [m["content"] for m in episode.episode.messages][1:] == ["\ufffd!", "ok"]
    json.dumps(episode.episode.messages, ensure_ascii=False).encode()


def test_what_an_environment_says_at_its_beginning_is_sound():
    class World:
        def reset(self):
            return f"look {HALF}"

    with EnvironmentPool({None: World}).acquire([Prompt(0, [1], "x")], [2], 0, 1.0) as (
        (lease, _),
    ):
        assert lease.said == "look \ufffd"


def test_rows_of_files_and_streams_are_sound(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "w1 \\ud83d", "said": {"a": ["\\ud83d\\ude00"]}}\n')
    expected = {"prompt": "w1 \ufffd", "said": {"a": [WHOLE]}}
    assert load_rows(path)[0] == expected
    row = {"prompt": f"w1 {HALF}", "said": {"a": [WHOLE]}}
    assert as_table([row], IterableDataset.from_generator(lambda: iter([row])))[0] == expected


@pytest.mark.parametrize("raises", [False, True])
def test_what_a_reward_logs_or_raises_does_not_end_a_run(raises, tmp_path):
    def reward(completions, log_extra, **_):
        if raises:
            raise ValueError(HALF)
        log_extra(f"seen{HALF}", [f"a{HALF}"] * len(completions))
        return [float(len(c)) for c in completions]

    options = {"log_completions": True, "logging_steps": 1, "reward_on_error": "missing"}
    trainer = make_trainer(make_config(tmp_path, max_steps=1, **options), reward)
    with pytest.warns(UserWarning, match="ValueError") if raises else nullcontext():
        trainer.train()
    assert trainer.state.global_step == 1
