"""Only what an engine drew is trained: an answer changes gradients as context, and in no other
way."""

from dataclasses import replace

import pytest
import torch

from rloo.algorithm.advantages import compute_advantages
from rloo.algorithm.reward_shaping import make_training_samples
from rloo.algorithm.update import micro_batch_loss
from rloo.types import Completion, Group, Prompt
from support.models import VOCAB_SIZE
from support.policies import gradients, make_policy_config, make_policy_of
from support.terms import rollout_of, terms_of

LENGTHS = ((4, 3, 5), (2, 6, 1), (7, 2, 2), (3, 3, 3))


def make_group(seed: int = 0) -> Group:
    """Four episodes: a turn, an answer, a turn."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()

    completions = []
    for said, told, then in LENGTHS:
        trained = (True,) * said + (False,) * told + (True,) * then
        logprobs = [-1.0 if ours else 0.0 for ours in trained]
        completions.append(
            Completion(tokens(len(trained)), "stop", logprobs, logprobs, trained=trained)
        )
    return Group(Prompt(0, tokens(6), "x"), completions, ["x"] * 4, [0.3, 1.0, -0.5, 0.1])


def flipped(group: Group, place: int) -> Group:
    """The same, but with another token at that place of the first episode's answer."""
    first = group.completions[0]
    assert not first.trained[place]
    ids = list(first.token_ids)
    ids[place] = 3 + (ids[place] - 2) % (VOCAB_SIZE - 3)
    return replace(group, completions=[replace(first, token_ids=ids), *group.completions[1:]])


def production(group: Group, **options) -> dict[str, torch.Tensor]:
    """The gradient of the loss of one group, as a run computes it."""
    config = make_policy_config(num_prompts=1, **options)
    policy = make_policy_of(config)
    assert policy.packed == options.get("packing", True)
    samples = make_training_samples(rollout_of([group]), config)
    credit = compute_advantages(samples, policy, terms_of(config))
    loss, _ = micro_batch_loss(
        policy, policy.batch(samples), credit, terms_of(config), len(samples)
    )
    loss.backward()
    return gradients(policy.model)


def by_hand(group: Group, beta: float) -> dict[str, torch.Tensor]:
    """Each episode alone, without padding: sum over its trained tokens of log-prob times the
    leave-one-out advantage of reward less KL."""
    policy = make_policy_of(make_policy_config(num_prompts=1, beta=beta))

    def logprobs(model, completion) -> torch.Tensor:
        ids = torch.tensor([[*group.prompt.token_ids, *completion.token_ids]])
        begin = len(group.prompt.token_ids)
        all_of_them = model(ids, use_cache=False).logits[0, begin - 1 : -1].log_softmax(-1)
        chosen = all_of_them.gather(1, ids[0, begin:, None])[:, 0]
        return chosen[torch.tensor(completion.trained)].sum()

    own = [logprobs(policy.model, c) for c in group.completions]
    shaped = torch.tensor(group.rewards)
    if beta:
        with torch.no_grad():
            then = torch.stack([logprobs(policy.reference.model, c) for c in group.completions])
        shaped = shaped - beta * (torch.stack(own).detach() - then)
    advantages = [shaped[k] - (shaped.sum() - shaped[k]) / 3 for k in range(4)]
    loss = -sum(a * x for a, x in zip(advantages, own, strict=True)) / 4
    loss.backward()
    return gradients(policy.model)


def assert_same(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (found[name] - gradient).norm()
        assert difference <= 2e-5 * gradient.norm() + 1e-8, name


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_the_gradient_is_that_of_the_trained_tokens_behind_their_context(beta, packing):
    group = make_group()
    assert_same(production(group, beta=beta, packing=packing), by_hand(group, beta))
    other = flipped(group, 5)
    assert_same(production(other, beta=beta, packing=packing), by_hand(other, beta))


def at_the_end(group: Group) -> Group:
    """The same without the last turns, so that nothing is behind the answers."""
    cut = []
    for c, (said, told, _) in zip(group.completions, LENGTHS, strict=True):
        end = said + told
        cut.append(
            Completion(
                c.token_ids[:end], "stop", c.policy_logprobs[:end], c.policy_logprobs[:end],
                trained=c.trained[:end],
            )
        )  # fmt: skip
    return replace(group, completions=cut)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("place", [4, 6])
def test_an_answers_token_with_nothing_behind_it_changes_no_entry(place, beta, packing):
    """To the last bit: it is no target, and nothing that is trained attends to it."""
    group = at_the_end(make_group())
    before = production(group, beta=beta, packing=packing)
    after = production(flipped(group, place), beta=beta, packing=packing)
    for name in before:
        assert torch.equal(before[name], after[name]), name


def test_with_all_tokens_trained_the_same_flip_does_change_the_gradient():
    group = at_the_end(make_group())
    group = replace(group, completions=[replace(c, trained=None) for c in group.completions])
    other = group.completions[0]
    ids = [*other.token_ids[:-1], 3 + (other.token_ids[-1] - 2) % (VOCAB_SIZE - 3)]
    changed = replace(group, completions=[replace(other, token_ids=ids), *group.completions[1:]])
    before, after = production(group, beta=0.0), production(changed, beta=0.0)
    assert any(not torch.equal(before[name], after[name]) for name in before)
