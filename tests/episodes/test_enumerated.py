"""The theorem for episodes: averaged over every group of every episode that a policy can have with
a tool, the production path, from the engine to the optimizer, has the exact gradient."""

from dataclasses import replace
from functools import cached_property

import pytest
import torch

from support.episodes import ANSWER, CALL, END, every_episode
from support.markers import slow
from support.policies import make_policy_config
from support.production import PROMPTS, Production, compare

LONGEST = 4


class Episodes(Production):
    """`Production` of episodes: the policy's probability of one is that of the tokens it chose."""

    @cached_property
    def episodes(self):
        return every_episode(LONGEST)

    @cached_property
    def completions(self):
        return [list(episode.token_ids) for episode in self.episodes]

    def logprobs(self, model, prompt):
        found = []
        for episode, ids in zip(self.episodes, self.completions, strict=True):
            logits = model(torch.tensor([PROMPTS[prompt] + ids])).logits[0, -len(ids) - 1 : -1]
            chosen = [place for place, ours in enumerate(episode.trained) if ours]
            picked = [ids[place] for place in chosen]
            found.append(logits.log_softmax(-1)[chosen, picked])
        return found

    @cached_property
    def prompts(self):
        result = []
        for prompt in range(self.config.num_prompts or 1):
            with torch.no_grad():
                own = self.logprobs(self.policy.model, prompt)
            members = []
            for episode, values in zip(self.episodes, own, strict=True):
                known = iter(values.tolist())
                whole = [next(known) if ours else 0.0 for ours in episode.trained]
                members.append(replace(episode, policy_logprobs=whole, behavior_logprobs=whole))
            result.append((members, [values.sum().exp().item() for values in own]))
        return result


def make(**options) -> Episodes:
    config = make_policy_config(
        num_generations=2, num_prompts=1, max_completion_length=LONGEST, **options
    )
    number = len(every_episode(LONGEST))
    rewards = torch.sin(torch.arange(number, dtype=torch.float64) * 2.3).tolist()
    return Episodes(config, rewards=[rewards])


def test_the_episodes_are_all_there_are():
    production = make(beta=0.0)
    told = {tuple(e.token_ids): (e.finish, e.episode.turns) for e in production.episodes}
    assert len(told) == len(production.episodes) == 33
    # The answer stands behind the call's turn, and the next turn has the one token that is left.
    assert told[CALL, END, ANSWER, END] == ("stop", 2)
    assert told[CALL, END, ANSWER, CALL] == ("length", 2)
    # Behind three tokens and an answer no turn would have room.
    assert told[CALL, CALL, END] == ("length", 1)
    # The policy may draw an answer's token itself.
    assert told[ANSWER, END] == ("stop", 1)
    chances = production.prompts[0][1]
    assert sum(chances) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("beta", "packing"), [slow(0.0, False), (0.3, True), slow(0.0, True), slow(0.3, False)]
)
def test_the_mean_gradient_over_all_groups_of_episodes_is_exact(beta, packing):
    production = make(beta=beta, packing=packing)
    exact = production.exact(beta)

    found = production.expected()

    assert (found - exact).norm() < 1e-6 * exact.norm()  # a few parts are float32


@pytest.mark.slow
def test_token_ratios_and_kl_to_go_are_exact_too():
    production = make(beta=0.3, importance_sampling_level="token", kl_placement="reward_to_go")
    exact = production.exact(0.3)
    assert (production.expected() - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.slow
def test_training_the_answers_too_is_another_gradient():
    production = make(beta=0.0)
    members, chances = production.prompts[0]
    everything = [replace(c, trained=None) for c in members]
    production.__dict__["prompts"] = [(everything, chances)]
    scale, cosine = compare(production.expected(), production.exact(0.0))
    assert cosine < 0.999 or abs(scale - 1) > 1e-3
