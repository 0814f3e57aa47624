from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rloo.algorithm.advantages import compute_advantages
from rloo.algorithm.rank_rollout import RewardScorer
from rloo.algorithm.reward_shaping import make_training_samples
from rloo.algorithm.state import minibatches
from rloo.algorithm.update import micro_batch_loss, update
from rloo.config.batch_sizes import batches_of
from rloo.distributed import World
from rloo.rewards import RewardSet
from rloo.types import Completion, Group, Prompt
from support.models import CPU, make_samples
from support.policies import make_policy_config, make_policy_of
from support.terms import rollout_of, terms_of
from support.text import make_tokenizer
from support.training import make_config, make_trainer


def completion(*tokens: int, finish="stop") -> Completion:
    return Completion(list(tokens), finish, [0.0] * len(tokens), [0.0] * len(tokens))


def judge_of(reward) -> RewardScorer:
    return RewardScorer(RewardSet([reward]), make_tokenizer(), World(CPU))


def make_group(rewards, number=0) -> Group:
    members = [completion(5 + i, 2) for i in range(len(rewards))]
    return Group(Prompt(number, [7, 8], "w4 w5"), members, ["w1"] * len(rewards), rewards)


def test_only_scored_completions_of_groups_with_two_scores_count():
    groups = [
        make_group([1.0, None, 3.0]),
        make_group([None, 2.0, None]),
        make_group([None] * 3),
        make_group([-9.0, 0.5, 9.0]),
    ]
    samples = make_training_samples(
        rollout_of(groups), make_policy_config(reward_clip_range=[-1.0, 2.0])
    )
    assert [s.key for s in samples] == [(0, 0), (0, 2), (3, 0), (3, 1), (3, 2)]
    assert [s.reward for s in samples] == [1, 2, -1, 0.5, 2]


def test_a_shaped_reward_beyond_float32_is_refused():
    with pytest.raises(ValueError, match=r"a shaped reward is 1e\+300, beyond float32 \(reward_sc"):
        make_training_samples(
            rollout_of([make_group([0.0, 1.0])]), make_policy_config(reward_scaling=1e300)
        )


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_where_all_completions_count_those_without_a_baseline_have_no_advantage(level):
    """Under TRL's preset; no estimator sees them, a user's neither."""
    groups = [make_group([1.0, None, 3.0]), make_group([None, 2.0, None], number=1)]
    example = Path(__file__).parents[2] / "examples" / "estimator.py"
    for options in ({}, {"estimator": f"{example}:opo"}, {"normalize_rewards": "batch"}):
        config = make_policy_config(
            preset="trl", beta=0.0, importance_sampling_level=level, **options
        )
        samples = make_training_samples(rollout_of(groups), config)
        assert [s.reward for s in samples if s.reward == s.reward] == pytest.approx(
            [-(0.5**0.5), 0.5**0.5] if "normalize_rewards" in options else [1, 3], abs=1e-3
        )
        known = compute_advantages(samples, None, terms_of(config)).by_completion
        assert {key for key, value in known.items() if value.any()} == {(0, 0), (0, 2)}
        lengths = [len(s.token_ids) if level == "token" else 1 for s in samples]
        assert [len(value) for value in known.values()] == lengths
        assert all(value.isfinite().all() for value in known.values())


def test_rewards_get_what_belongs_to_each_completion():
    seen = {}

    def reward(prompts, completions, completion_ids, level, **_):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, level=level)
        return [float(len(ids)) for ids in completion_ids]

    prompts = [
        Prompt(0, [4], "w0", {"level": "easy"}),
        Prompt(1, [5], [{"role": "user", "content": "hi"}], {"level": "hard"}),
    ]
    sampled = [[completion(6, 2), completion(6, 7, 2)], [completion(8, 2)]]
    groups, _ = judge_of(reward).score(prompts, sampled)
    assert seen["prompts"] == ["w0", "w0", [{"role": "user", "content": "hi"}]]
    assert seen["completions"] == ["w2", "w2 w3", [{"role": "assistant", "content": "w4"}]]
    assert seen["ids"] == [[6, 2], [6, 7, 2], [8, 2]]
    assert seen["level"] == ["easy", "easy", "hard"]
    assert [group.rewards for group in groups] == [[2, 3], [2]]
    assert groups[0].scores == {"reward": [2, 3]}


def test_a_begun_assistant_message_is_continued():
    content = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I say "}]
    judge = judge_of(lambda completions: [0.0])
    groups, _ = judge.score([Prompt(0, [4], content)], [[completion(6, 2)]])
    assert groups[0].texts == [[{"role": "assistant", "content": "I say w2"}]]


def by_hand(samples, config, policy) -> dict:
    """Advantages from log-probs of whole sequences: the definition, one group at a time."""
    shaped = {}
    with torch.no_grad():
        for sample in samples:
            batch = policy.batch([sample])
            kl = policy.logprobs(batch)[0].sum() - policy.reference_logprobs(batch).sum()
            shaped[sample.key] = sample.reward - config.beta * kl.item()
    result = {}
    for key, value in shaped.items():
        others = [v for k, v in shaped.items() if k[0] == key[0] and k != key]
        result[key] = value - sum(others) / len(others)
    return result


@pytest.mark.parametrize(
    "options", [{"steps_per_generation": 3}, {"max_tokens_per_micro_batch": 10}]
)
def test_stored_credit_equals_the_definition(options):
    config = make_policy_config(beta=0.5, **options)
    policy, samples = make_policy_of(config), make_samples()
    given = compute_advantages(samples, policy, terms_of(config))
    assert given.by_completion == pytest.approx(by_hand(samples, config, policy), abs=1e-4)


def gradient_of(policy, samples, given, config) -> dict:
    policy.model.zero_grad()
    loss, _ = micro_batch_loss(
        policy, policy.batch(samples), given, terms_of(config), denominator=3.0
    )
    loss.backward()
    return {n: p.grad.clone() for n, p in policy.model.named_parameters()}


def test_one_pass_and_stored_credit_have_the_same_gradient():
    samples = make_samples()
    results = []
    for parts in (1, 3):
        config = make_policy_config(beta=0.5, steps_per_generation=parts)
        policy = make_policy_of(config)
        given = compute_advantages(samples, policy, terms_of(config))
        assert given.from_update == (parts == 1)
        results.append(gradient_of(policy, samples, given, config))
    for name, gradient in results[0].items():
        assert (gradient - results[1][name]).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_the_first_step_on_a_whole_rollout_leaves_what_a_pass_before_it_would(beta):
    samples = make_samples()
    config = make_policy_config(beta=beta, num_iterations=2)
    policy = make_policy_of(config)
    before = compute_advantages(
        samples, policy, terms_of(make_policy_config(beta=beta, steps_per_generation=3))
    )
    given = compute_advantages(samples, policy, terms_of(config))

    after = given.after_first_step(update(policy, samples, given, terms_of(config)))

    for key, value in before.by_completion.items():
        assert after.by_completion[key].item() == pytest.approx(value.item(), abs=1e-5)
    assert after.stats == pytest.approx(before.stats, abs=1e-6)
    for key, logprobs in before.old_logprobs.items():
        assert torch.allclose(after.old_logprobs[key], logprobs, atol=1e-6)
    now = policy.score(policy.batch(samples))
    assert not torch.allclose(now, after.old(policy.batch(samples), now), atol=1e-6)


def test_without_a_penalty_no_pass_is_made_for_credit():
    config = make_policy_config(beta=0.0)
    policy = make_policy_of(config)
    policy.logprobs = None
    given = compute_advantages(make_samples(), policy, terms_of(config))
    assert given.old_logprobs == {}
    assert abs(sum(given.by_completion.values()).item()) < 1e-12


@pytest.mark.parametrize("parts", [1, 3])
def test_truncated_completions_leave_the_gradient_but_not_the_baseline(parts):
    samples = make_samples(2, 4)
    cut = [sample if i % 3 else replace(sample, truncated=True) for i, sample in enumerate(samples)]
    config = make_policy_config(
        beta=0.5, mask_truncated_completions=True, steps_per_generation=parts
    )
    policy = make_policy_of(config)
    expected = by_hand(cut, config, policy)
    gradient = gradient_of(policy, cut, compute_advantages(cut, policy, terms_of(config)), config)
    policy.model.zero_grad()
    total = 0.0
    for sample in cut:
        if not sample.truncated:
            logprobs = policy.logprobs(policy.batch([sample]))[0].sum()
            total = total - expected[sample.key] * logprobs / 3.0
    total.backward()
    for name, parameter in policy.model.named_parameters():
        assert (gradient[name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), name


def test_optimizer_steps_are_cut_by_place_whatever_is_missing():
    config = make_policy_config(num_prompts=1, steps_per_generation=3, num_iterations=2)
    samples = [s for s in make_samples(3, 4) if s.key != (1, 2)]
    parts = [
        [s.key for s in part] for part in minibatches(samples, batches_of(config, world_size=1))
    ]
    assert parts[0] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert parts[1] == [(1, 0), (1, 1), (1, 3)]
    assert parts[2] == [(2, 0), (2, 1), (2, 2), (2, 3)]
    assert parts[3:] == parts[:3]


def test_the_denominator_counts_completions_without_signal():
    """Twice the completions, half of them without signal: half the gradient."""
    samples = make_samples(1, 4)
    silent = [replace(s, key=(1, s.key[1]), reward=0.0) for s in samples]
    moved = []
    for batch in (samples, samples + silent):
        config = make_policy_config(beta=0.0, optim="sgd", learning_rate=1.0, max_grad_norm=0)
        policy = make_policy_of(config)
        before = torch.cat([p.detach().flatten() for p in policy.parameters])
        update(policy, batch, compute_advantages(batch, policy, terms_of(config)), terms_of(config))
        moved.append(torch.cat([p.detach().flatten() for p in policy.parameters]) - before)
    assert moved[0].norm() > 1e-3
    assert torch.allclose(moved[1], moved[0] / 2, atol=1e-6)


def test_two_draws_of_a_row_in_different_epochs_have_different_noise():
    assert Prompt(3, [1], "x").noise_id == 3
    assert Prompt(3, [1], "x", epoch=2).noise_id not in (3, 2, 5)


def test_samples_know_their_place_and_the_weights_that_sampled_them():
    """Places count every completion that was sampled, scored or not, in groups of any size."""
    prompt = Prompt(1, [3], "p")
    ragged = [[1.0, None, 0.0], [None, 2.0], [1.0, 0.0]]
    groups = [
        Group(prompt, [Completion([5], "stop", [0.0], [0.0])] * len(r), ["x"] * len(r), r)
        for r in ragged
    ]
    rollout = replace(rollout_of(groups), version=7)
    samples = make_training_samples(rollout, make_policy_config())
    assert [(s.key, s.place) for s in samples] == [
        ((0, 0), 0),
        ((0, 2), 2),
        ((2, 0), 5),
        ((2, 1), 6),
    ]
    assert {s.weight_versions for s in samples} == {((7, 1),)}
    stale = replace(groups[0].completions[0], weight_versions=((5, 1),))
    groups = [replace(groups[0], completions=[stale] * 3)]
    assert {
        s.weight_versions for s in make_training_samples(rollout_of(groups), make_policy_config())
    } == {((5, 1),)}


def test_a_rollout_s_noise_is_numbered_by_its_own_first_step(tmp_path):
    """Not by the trainer's state, which may be ahead or behind where rollouts wait in a queue."""
    config = make_config(tmp_path, steps_per_generation=2)
    trainers = [make_trainer(config) for _ in range(2)]
    (first, _), (second, _) = (trainer.make_parts() for trainer in trainers)
    trainers[1].state.global_step = 99
    for step in (0, 2):
        assert first.rollouts.step == second.rollouts.step == step
        one, other = first.rollouts.next(), second.rollouts.next()
        assert [g.completions for g in one.groups] == [g.completions for g in other.groups]
    resumed = make_trainer(config).make_parts()[0].rollouts
    resumed.load_state_dict(one.position, step=4)
    assert resumed.next().groups[0].completions == first.rollouts.next().groups[0].completions
