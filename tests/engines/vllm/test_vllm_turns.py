"""Episodes of several turns on servers that speak vLLM's protocol."""

import itertools
from dataclasses import replace

import pytest
import torch

from rloo.algorithm.advantages import compute_advantages
from rloo.algorithm.reward_shaping import make_training_samples
from rloo.algorithm.update import micro_batch_loss
from rloo.distributed import World
from rloo.engines.vllm.server_pool import ServerPool
from rloo.episodes.multi_turn_engine import EpisodeLimits, EpisodeSetup, MultiTurnEngine
from rloo.episodes.renderer_check import find_renderer
from rloo.episodes.tools import ToolSet
from rloo.model.policy import Policy
from rloo.types import Group, Prompt, Sampling
from support.chat import add, make_brace_tokenizer, make_talkative_model
from support.engines import make_prompts
from support.fake_vllm import Status
from support.models import CPU
from support.policies import gradients, make_policy_config
from support.terms import rollout_of, terms_of
from support.vllm_engines import (
    COMPLETIONS,
    SAMPLING,
    TOKENS,
    change,
    made_on_fakes,
    make_policy,
    wait_until_all_sample,
)

made = pytest.fixture(made_on_fakes)
TOKENIZER = make_brace_tokenizer()
TOOLS = ToolSet([add], characters=100)
CONTENT = [{"role": "user", "content": "1 + 2?"}]
TEMPERATURE = 0.8
EPISODES = Sampling(400, (TOKENIZER.eos_token_id,), temperature=TEMPERATURE)


def make_speaker(**options) -> Policy:
    config = make_policy_config(temperature=TEMPERATURE, beta=0.0, num_prompts=1, **options)
    model = make_talkative_model(TOKENIZER)
    return Policy(model, TOKENIZER, config, world=World(CPU), num_training_steps=4)


def play(made, policy, samples=8, before=lambda engine, servers: None, **settings):
    """The episodes of a prompt, on servers that had other weights before."""
    engine, servers, _ = made(
        policy, served=lambda: (make_talkative_model(TOKENIZER, boost=1.0), TOKENIZER), **settings
    )
    policy.load_into(engine)
    dialect = find_renderer(TOKENIZER, [TOKENIZER.eos_token_id], {"tools": TOOLS.schemas})
    ids = dialect.template.encode(f"<|im_start|>user\n{CONTENT[0]['content']}<|im_end|>\n")
    prompt = Prompt(7, ids, CONTENT)
    before(engine, servers)
    around = MultiTurnEngine(engine, {None: EpisodeSetup(TOOLS, dialect)}, EpisodeLimits(rounds=2))
    (episodes,) = around.sample([prompt], samples, EPISODES, 4)
    return prompt, episodes, servers


def own_logprobs(model, prompt, episode) -> torch.Tensor:
    """Of all tokens of an episode, alone."""
    ids = torch.tensor([[*prompt.token_ids, *episode.token_ids]])
    begin = len(prompt.token_ids)
    logits = model(ids, use_cache=False).logits[0, begin - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(1, ids[0, begin:, None])[:, 0]


def require_logprobs(policy, prompt, episodes) -> None:
    for episode in episodes:
        with torch.no_grad():
            expected = own_logprobs(policy.model, prompt, episode)
        ours, drawn = torch.tensor(episode.trained), torch.tensor(episode.policy_logprobs)
        torch.testing.assert_close(drawn[ours], expected[ours], atol=1e-5, rtol=0)
        assert not drawn[~ours].any()
        assert episode.behavior_logprobs == episode.policy_logprobs


@pytest.mark.parametrize("scale_out", [False, True])
def test_a_turn_sends_all_tokens_so_far_and_asks_for_as_many_as_may_follow(made, scale_out):
    policy = make_speaker()
    prompt, episodes, (server,) = play(made, policy, scale_out=scale_out)

    require_logprobs(policy, prompt, episodes)
    longest = max(episodes, key=lambda e: e.episode.turns)
    assert longest.episode.turns == 3
    asked = [body for route, body in server.bodies if route in (COMPLETIONS, TOKENS)]
    asked = [(b.get("prompt") or b["token_ids"], b.get("sampling_params", b)) for b in asked]
    asked = [a for a in asked if a[0][: len(prompt.token_ids)] == prompt.token_ids]
    first, later = asked[:8], asked[8:]
    assert [ids for ids, _ in first] == [prompt.token_ids] * 8
    assert len(later) == sum(e.episode.turns - 1 for e in episodes)
    whole = [*prompt.token_ids, *longest.token_ids]
    sent = {tuple(ids): how for ids, how in later}
    starts = [n for n in range(1, len(whole)) if tuple(whole[:n]) in sent]
    begins = [
        len(prompt.token_ids) + n
        for n, (one, two) in enumerate(itertools.pairwise(longest.trained), start=1)
        if two and not one
    ]
    assert starts == begins
    for ids, how in asked:
        assert how["n"] == 1
        assert how["max_tokens"] == EPISODES.max_tokens - (len(ids) - len(prompt.token_ids))
    seeds = {how["seed"] for _, how in asked}
    assert len(seeds) == len(asked)


@pytest.mark.slow
def test_rows_of_equal_text_draw_each_for_itself(made):
    """And not what the first turn drew, nor what another length would."""
    policy = make_policy()
    engine, _, _ = made(policy)
    policy.load_into(engine)
    (prompt,) = make_prompts((7,))
    rows = [replace(prompt, offset=offset) for offset in (0, 2, 3) for _ in range(4)]
    numbers = [range(k, k + 1) for _ in range(3) for k in range(4)]
    long = replace(SAMPLING, max_tokens=9, stop_token_ids=())
    drawn = [tuple(c.token_ids[:6]) for (c,) in engine.sample(rows, numbers, long, 1)]
    assert len(set(drawn)) == 12
    again = [tuple(c.token_ids[:6]) for (c,) in engine.sample(rows, numbers, long, 1)]
    assert drawn == again


@pytest.mark.slow
@pytest.mark.parametrize("scale_out", [False, True])
def test_a_server_that_is_lost_between_turns_leaves_them_to_the_others(made, scale_out):
    policy = make_speaker()
    lost = []

    def lose(engine, servers):
        route = TOKENS if scale_out else COMPLETIONS

        def fail(body, answer):
            tokens = body.get("prompt") or body["token_ids"]
            if len(tokens) < 120 or lost:  # a prompt, or that with which servers are verified
                return answer
            lost.append(body)
            raise Status(500, "gone")

        for server in servers:
            server.faults[route] = fail

    prompt, episodes, _ = play(made, policy, servers=2, before=lose, scale_out=scale_out)

    assert len(lost) == 1
    assert max(e.episode.turns for e in episodes) == 3
    require_logprobs(policy, prompt, episodes)
    expected = play(made, policy, scale_out=scale_out)[1]
    assert [e.token_ids for e in episodes] == [e.token_ids for e in expected]


@pytest.mark.slow
def test_an_episode_stays_with_the_server_that_has_its_beginning(made, monkeypatch):
    asked, original = {}, ServerPool._ask

    def ask(self, member, request):
        if request.prompt.id == 7:
            asked.setdefault(request.numbers.start, []).append(member.url)
        return original(self, member, request)

    monkeypatch.setattr(ServerPool, "_ask", ask)
    _, episodes, servers = play(
        made, make_speaker(), samples=24, before=wait_until_all_sample, servers=3
    )

    turns = [e.episode.turns for e in episodes]
    assert sum(n > 1 for n in turns) > 5
    assert [len(asked[k]) for k in range(24)] == turns
    assert all(len(set(urls)) == 1 for urls in asked.values())
    assert {url for (url, *_) in asked.values()} == {server.url for server in servers}


def test_servers_sleep_behind_the_last_turn_and_not_between_turns(made):
    policy = make_speaker()
    _, episodes, (server,) = play(made, policy, sleep_level=1)
    assert max(e.episode.turns for e in episodes) == 3
    calls = [call.split()[0] for call in server.calls]
    asked = [n for n, call in enumerate(calls) if call == COMPLETIONS]
    sleeps = [n for n, call in enumerate(calls) if call == "/sleep"]
    first, last = sleeps  # behind the first weights, and behind the last turn
    assert sum(n > first for n in asked) > 3
    assert asked[-1] < last


# -- what is trained ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def group():
    """Four episodes that servers sampled, up to an answer of a tool's."""
    for making in made_on_fakes():
        prompt, episodes, _ = play(making, make_speaker(), samples=16)
        cut = []
        for e in episodes:
            if False in e.trained and len(cut) < 4:
                end = len(e.trained) - e.trained[::-1].index(False)
                cut.append(
                    replace(
                        e, token_ids=e.token_ids[:end], policy_logprobs=e.policy_logprobs[:end],
                        behavior_logprobs=e.behavior_logprobs[:end], trained=e.trained[:end],
                    )
                )  # fmt: skip
        whole = [e for e in episodes if False in e.trained][:4]
    rewards = [0.3, 1.0, -0.5, 0.1]
    return Group(prompt, cut, ["x"] * 4, rewards), Group(prompt, whole, ["x"] * 4, rewards)


def flipped(group: Group, place: int) -> Group:
    first = group.completions[0]
    ids = list(first.token_ids)
    ids[place] = (ids[place] + 1) % 90
    return replace(group, completions=[replace(first, token_ids=ids), *group.completions[1:]])


def production(group: Group, packing: bool) -> dict[str, torch.Tensor]:
    """The gradient of weights that have moved since, with the weights of that correction."""
    policy = make_speaker(packing=packing, rollout_importance_sampling_mode="sequence_truncate")
    change(policy)
    assert policy.packed == packing
    terms, samples = (
        terms_of(policy.config),
        make_training_samples(rollout_of([group]), policy.config),
    )
    credit = compute_advantages(samples, policy, terms)
    loss, _ = micro_batch_loss(policy, policy.batch(samples), credit, terms, len(samples))
    loss.backward()
    return gradients(policy.model)


def by_hand(group: Group) -> dict[str, torch.Tensor]:
    """Each episode alone: the log-prob of its trained tokens, times min(2, how much likelier these
    have become), times the leave-one-out advantage."""
    policy = make_speaker()
    change(policy)
    advantages = [r - (sum(group.rewards) - r) / 3 for r in group.rewards]
    loss = 0.0
    for advantage, e in zip(advantages, group.completions, strict=True):
        ours = torch.tensor(e.trained)
        now = own_logprobs(policy.model, group.prompt, e)[ours]
        then = torch.tensor(e.policy_logprobs)[ours]
        weight = (now.detach() - then).sum().exp().clamp(max=2.0)
        loss -= advantage * weight * now.sum() / 4
    loss.backward()
    return gradients(policy.model)


@pytest.mark.parametrize("packing", [True, False])
def test_an_answers_token_changes_no_gradient_but_as_context(group, packing):
    cut, whole = group
    answers = [n for n, ours in enumerate(cut.completions[0].trained) if not ours]
    before = production(cut, packing)
    for place in (answers[-1], answers[-4]):
        after = production(flipped(cut, place), packing)
        assert all(torch.equal(before[name], after[name]) for name in before)
    other = flipped(whole, answers[-1])
    for episodes in (whole, other):
        found, expected = production(episodes, packing), by_hand(episodes)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            apart = (found[name] - gradient).norm()
            assert apart <= 5e-5 * gradient.norm() + 1e-8, name
    changed = production(whole, packing), production(other, packing)
    assert any(not torch.equal(changed[0][name], changed[1][name]) for name in before)
