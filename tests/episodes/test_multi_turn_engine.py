"""Turns and answers, one after the other, in one row of tokens."""

import time
from dataclasses import replace

import pytest
import torch

from rloo.episodes.multi_turn_engine import EpisodeLimits, EpisodeSetup, MultiTurnEngine
from rloo.episodes.renderer_check import find_renderer
from rloo.episodes.tools import ToolSet
from rloo.types import Prompt, Sampling
from support.chat import (
    add,
    make_brace_tokenizer,
    make_chat_tokenizer,
    make_talkative_model,
)
from support.engines import ENGINES
from support.episodes import Told

TOKENIZER = make_chat_tokenizer()
CONTENT = [{"role": "user", "content": "What is 1 + 2?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
ANSWERED = (
    "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
FINAL = "It is 3.<|im_end|>"


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def slow() -> str:
    """Be slow."""
    time.sleep(0.3)
    return "done"


TOOLS = ToolSet([add, slow], characters=100)
DIALECT = find_renderer(TOKENIZER, [TOKENIZER.eos_token_id], {"tools": TOOLS.schemas})
CASTS = {None: EpisodeSetup(TOOLS, DIALECT)}
OPENED = encode(DIALECT.template.text(CONTENT))
PROMPT = Prompt(7, OPENED, CONTENT)


def play(*turns: str, samples: int = 1, max_tokens: int = 1000, **limits):
    """Episodes in which the model says these turns, one after the other."""

    def say(prompt: Prompt, k: int) -> list[int]:
        spoken = TOKENIZER.decode(prompt.token_ids).count("<|im_start|>assistant") - 1
        return encode(turns[spoken])

    inner = Told(say, (TOKENIZER.eos_token_id,))
    engine = MultiTurnEngine(inner, CASTS, EpisodeLimits(**limits))
    sampling = Sampling(max_tokens, (TOKENIZER.eos_token_id,))
    return engine.sample([PROMPT], samples, sampling, 0)[0], inner


def test_an_episode_is_one_row_of_which_the_models_tokens_are_trained():
    (episode,), inner = play(CALL, FINAL)

    assert TOKENIZER.decode(episode.token_ids) == CALL + ANSWERED + FINAL
    said, told, final = map(len, map(encode, (CALL, ANSWERED, FINAL)))
    assert episode.trained == (True,) * said + (False,) * told + (True,) * final
    assert episode.num_trained == said + final
    assert episode.finish == "stop"
    for ours, logprob in zip(episode.trained, episode.policy_logprobs, strict=True):
        assert (logprob < 0) == ours
    assert [len(rows) for rows in inner.asked] == [1, 1]
    assert inner.asked[0] == [(PROMPT, 0)]
    ((again, k),) = inner.asked[1]
    assert (again.offset, k, again.noise_id) == (said + told, 0, PROMPT.noise_id)


def test_what_is_appended_is_what_the_template_renders_of_the_messages():
    (episode,), inner = play(CALL, FINAL)
    ((again, _),) = inner.asked[1]
    conversation = [*CONTENT, *episode.episode.messages[:2]]
    assert again.token_ids == encode(DIALECT.template.text(conversation))
    assert [m["role"] for m in episode.episode.messages] == ["assistant", "tool", "assistant"]
    assert episode.episode.messages[1] == {"role": "tool", "name": "add", "content": "3"}
    assert (episode.episode.turns, episode.episode.calls, episode.episode.errors) == (2, 1, 0)


def test_several_calls_of_a_turn_are_answered_in_their_order():
    second = CALL.replace('"a": 1', '"a": 5').removesuffix("<|im_end|>")
    (episode,), _ = play(f"{second}\n{CALL}", FINAL)
    assert [m.get("content") for m in episode.episode.messages] == ["", "7", "3", "It is 3."]


def test_a_call_that_cannot_be_read_goes_back_to_the_model_and_is_counted():
    (episode,), _ = play("<tool_call>\nadd 1 and 2\n</tool_call><|im_end|>", CALL, FINAL)
    told = episode.episode.messages[1]
    assert told["role"] == "tool"
    assert "error: the call cannot be read" in told["content"]
    assert (episode.episode.turns, episode.episode.calls, episode.episode.errors) == (3, 2, 1)
    assert "error: the call cannot be read" in TOKENIZER.decode(episode.token_ids)


@pytest.mark.parametrize(("rounds", "turns"), [(1, 2), (2, 3), (None, 4)])
def test_calls_beyond_the_limit_are_not_answered(rounds, turns):
    (episode,), _ = play(CALL, CALL, CALL, FINAL, rounds=rounds)
    assert episode.episode.turns == turns
    assert episode.episode.calls == turns - 1
    assert episode.finish == "stop"
    assert episode.trained[-1]


def test_an_answer_without_room_for_a_turn_behind_it_is_left_out():
    room = len(encode(CALL)) + len(encode(ANSWERED))
    (episode,), _ = play(CALL, FINAL, max_tokens=room + 1)
    assert (episode.finish, episode.num_trained) == ("length", len(encode(CALL)) + 1)
    (episode,), _ = play(CALL, FINAL, max_tokens=room)
    assert TOKENIZER.decode(episode.token_ids) == CALL
    assert (episode.finish, len(episode.episode.messages)) == ("length", 1)


def test_a_turn_that_is_cut_off_calls_nothing():
    (episode,), _ = play(CALL, FINAL, max_tokens=len(encode(CALL)) - 1)
    assert (episode.finish, episode.episode.calls) == ("length", 0)


def test_an_episode_whose_tools_take_too_long_has_failed():
    wait = CALL.replace("add", "slow").replace('{"a": 1, "b": 2}', "{}")
    began = time.perf_counter()
    (episode,), _ = play(wait, FINAL, seconds=30.0)
    assert episode.episode.failed is None
    assert 0.3 <= episode.episode.seconds <= time.perf_counter() - began
    (episode,), inner = play(wait, wait, wait, FINAL, seconds=0.5)
    assert episode.episode.failed == "slow did not end within 0.5 s (tool_kwargs.timeout)"
    assert len(inner.asked) == 2


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (replace(PROMPT, content="What is 1 + 2?"), "prompt 7 is a text"),
        (replace(PROMPT, content=[*CONTENT, {"role": "assistant", "content": "It"}]),
         "prompt 7 ends within the assistant's turn"),
        (replace(PROMPT, pixels=dict), "prompt 7 has images"),
    ],
)  # fmt: skip
def test_prompts_that_no_episode_can_begin_with_are_refused(prompt, reason):
    engine = MultiTurnEngine(Told(lambda *_: [], ()), CASTS, EpisodeLimits())
    with pytest.raises(ValueError, match=reason):
        engine.sample([prompt], 1, Sampling(10, ()), 0)


def make_brace_engine(name: str, **limits) -> tuple[MultiTurnEngine, Prompt]:
    """Around an engine of a random model in float64, whose calls random letters are."""
    tokenizer = make_brace_tokenizer()
    dialect = find_renderer(tokenizer, [tokenizer.eos_token_id], {"tools": TOOLS.schemas})
    inner = ENGINES[name](make_talkative_model(tokenizer).double(), pad_token_id=0)
    prompt = replace(PROMPT, token_ids=encode(dialect.template.text(CONTENT)))
    return MultiTurnEngine(
        inner, {None: EpisodeSetup(TOOLS, dialect)}, EpisodeLimits(**limits)
    ), prompt


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_engines_go_on_behind_answers_as_the_model_itself_would(name):
    engine, prompt = make_brace_engine(name)
    sampling = Sampling(600, (TOKENIZER.eos_token_id,))
    prompts = [prompt, replace(prompt, id=8)]
    model = make_talkative_model(make_brace_tokenizer()).double()
    begin = len(prompt.token_ids)

    groups = engine.sample(prompts, 8, sampling, 3)
    alone = engine.sample([prompts[1]], [range(2, 3)], sampling, 3)

    episodes = [episode for group in groups for episode in group]
    assert sum(episode.episode.turns > 1 for episode in episodes) >= 3
    assert alone[0][0].token_ids == groups[1][2].token_ids  # whatever else is in the batch
    for episode in episodes:
        ids = torch.tensor([[*prompt.token_ids, *episode.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, begin - 1 : -1].log_softmax(-1)
        expected = logits.gather(1, ids[0, begin:, None])[:, 0]
        trained = torch.tensor(episode.trained)
        drawn = torch.tensor(episode.policy_logprobs)
        torch.testing.assert_close(drawn[trained], expected[trained].float(), atol=1e-4, rtol=0)
        assert not drawn[~trained].any()


def test_the_native_engine_computes_a_prompt_once_in_an_episode(monkeypatch):
    engine, prompt = make_brace_engine("native")
    computed, prefill = [], engine._inner._prefill
    monkeypatch.setattr(engine._inner, "_prefill", lambda p: computed.append(len(p)) or prefill(p))
    (group,) = engine.sample([prompt], 8, Sampling(600, (TOKENIZER.eos_token_id,)), 3)
    assert max(episode.episode.turns for episode in group) > 1
    assert computed == [1]


def test_hf_and_native_have_the_same_episodes():
    found = []
    for name in ("native", "hf"):
        engine, prompt = make_brace_engine(name, rounds=2)
        groups = engine.sample([prompt], 6, Sampling(400, (TOKENIZER.eos_token_id,)), 1)
        found.append([(e.token_ids, e.trained, e.finish) for e in groups[0]])
    assert found[0] == found[1]
