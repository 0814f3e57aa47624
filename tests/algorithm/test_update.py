"""What the loss consists of, against autograd on the model's own logits."""

import math
from dataclasses import replace

import pytest
import torch

from rloo.algorithm.advantages import Credit, credit
from rloo.algorithm.objective import kl_estimate
from rloo.algorithm.update import micro_loss, update
from rloo.model.batch import pad
from rloo.model.policy import Policy
from support.given_logprobs import Rollout, ours
from support.models import VOCAB_SIZE, make_samples
from support.policies import make_policy_config, make_policy_of
from support.terms import terms_of


def own_logits(policy: Policy, samples) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """log-softmax (T, V), lengths and targets of all completion tokens, from plain forwards."""
    batch = pad(samples, policy.device, policy.pad_token_id)
    logits = policy.model(**batch.inputs, use_cache=False).logits.flatten(0, 1)[batch.source_T]
    return (logits / policy.config.temperature).log_softmax(-1), batch.lengths, batch.target_T


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}
    policy.model.zero_grad()
    return found


def assert_same(first, second) -> None:
    assert first.keys() == second.keys()
    for name, expected in second.items():
        assert (first[name] - expected).norm() <= 2e-5 * expected.norm() + 1e-9, name


@pytest.mark.parametrize("aggregation", ["sequence", "sequence_token_mean"])
def test_the_entropy_bonus_has_the_gradient_of_the_mean_entropy(aggregation):
    config = make_policy_config(
        beta=0.0, entropy_coef=0.3, temperature=0.7, loss_aggregation=aggregation
    )
    policy, samples = make_policy_of(config), [replace(s, reward=1.0) for s in make_samples()]
    given = credit(samples, policy, terms_of(config))
    assert not any(given.has_signal(s.key) for s in samples)
    micro_loss(policy, policy.batch(samples), given, terms_of(config), denominator=12.0)[
        0
    ].backward()
    found = gradients(policy)
    logprobs, lengths, _ = own_logits(policy, samples)
    entropies = (-(logprobs.exp() * logprobs).sum(-1)).split(lengths)
    pick = torch.sum if aggregation == "sequence" else torch.mean
    (-0.3 * sum(pick(e) for e in entropies) / 12).backward()
    assert_same(found, gradients(policy))


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}], ids=str)
def test_the_entropy_bonus_is_the_same_in_chunks_and_with_checkpointing(options, chunks):
    config = make_policy_config(beta=0.0, entropy_coef=0.3, temperature=0.7, **options)
    found = []
    for number in (1, chunks):
        policy, samples = make_policy_of(config), make_samples()
        batch = policy.batch(samples)
        rows = -(-len(batch.target_T) // number)
        scores = policy.logprobs(batch, chunk_elements=rows * VOCAB_SIZE)
        (scores.logprobs.sum() - 0.3 * scores.entropy.square().sum()).backward()
        found.append(gradients(policy))
    assert_same(*found)


@pytest.mark.parametrize("corrected", [False, True])
def test_kl_in_the_loss_has_the_gradient_of_its_estimate(corrected):
    config = make_policy_config(
        beta=0.5, kl_placement="loss", kl_estimator="k3", use_bias_correction_kl=corrected
    )
    policy, samples = make_policy_of(config), [replace(s, reward=1.0) for s in make_samples()]
    batch = policy.batch(samples)
    loss, sums = micro_loss(
        policy, batch, credit(samples, policy, terms_of(config)), terms_of(config), 12.0
    )
    loss.backward()
    found = gradients(policy)
    logprobs, _, targets = own_logits(policy, samples)
    chosen = logprobs.gather(-1, targets[:, None])[:, 0]
    reference = policy.reference_logprobs(batch)
    kl = kl_estimate(chosen, reference, estimator="k3")
    if corrected:
        kl = kl * (chosen - chosen.detach()).exp()
    (0.5 * kl.sum() / 12).backward()
    assert_same(found, gradients(policy))
    assert sums["kl"] == pytest.approx((chosen.detach() - reference).sum().item(), abs=1e-4)


def test_masked_completions_have_neither_kl_nor_entropy_in_the_loss():
    config = make_policy_config(
        beta=0.5,
        kl_placement="loss",
        kl_estimator="k3",
        entropy_coef=0.1,
        mask_truncated_completions=True,
    )
    policy = make_policy_of(config)
    samples = [replace(s, reward=1.0, truncated=s.key[1] == 0) for s in make_samples()]

    def gradient_of(chosen):
        given = credit(samples, policy, terms_of(config))
        micro_loss(policy, policy.batch(chosen), given, terms_of(config), 12.0)[0].backward()
        return gradients(policy)

    assert_same(gradient_of(samples), gradient_of([s for s in samples if not s.truncated]))


def test_the_decoupled_objective_weighs_tokens_by_trainer_over_sampler():
    config = make_policy_config(
        preset="areal",
        normalize_advantages=False,
        normalize_over="completions",
        beta=0.0,
        rollout_importance_sampling_threshold=1.2,
    )
    policy, samples = make_policy_of(config), make_samples()
    logprobs, lengths, targets = own_logits(policy, samples)
    chosen = logprobs.gather(-1, targets[:, None])[:, 0]
    # The sampler was off by 0.1 either way, and by so much at the first token that it is dropped.
    shift = torch.tensor([0.1, -0.1]).repeat(len(chosen))[: len(chosen)]
    shift[0] = -1.0
    sampler = (chosen.detach() + shift).split(lengths)
    samples = [
        replace(s, sampling_logprobs=part.tolist())
        for s, part in zip(samples, sampler, strict=True)
    ]
    given = credit(samples, policy, terms_of(config))
    loss, sums = micro_loss(
        policy, policy.batch(samples), given, terms_of(config), float(len(chosen))
    )
    loss.backward()
    found = gradients(policy)
    weights = torch.exp(-shift)
    weights[0] = 0.0
    advantages = torch.cat([given.advantages[s.key] for s in samples]).float()
    (-(weights * advantages * chosen).sum() / len(chosen)).backward()
    assert_same(found, gradients(policy))
    assert sums["weight"] == pytest.approx(weights.sum().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("level", "low", "high"), [("sequence", 3 / 8, 1 / 8), ("token", (1 + 2 + 8) / 36, 4 / 36)]
)
def test_clip_ratios_are_the_shares_cut_below_and_above_the_range(level, low, high):
    """Below where the advantage is negative (0, 1 and 7), above where it is positive (3)."""
    ratios = [0.5, 0.5, 2.0, 2.0, 0.5, 1.0, 1.0, 0.5]
    zeros = [torch.zeros(length, dtype=torch.float64) for length in range(1, 9)]
    rollout = Rollout(
        group=[0, 0, 0, 0, 1, 1, 1, 1],
        rewards=[0, 0, 0, 3, 3, 3, 3, 0],  # less the others' mean: -1 -1 -1 3, 1 1 1 -3
        now=[values + math.log(ratio) for values, ratio in zip(zeros, ratios, strict=True)],
        old=zeros,
        reference=zeros,
        sampler=zeros,
    )
    options = {"beta": 0.0, "epsilon": 0.2, "importance_sampling_level": level}
    metrics = ours(rollout, **options).metrics
    assert metrics["clip_ratio/low_mean"] == pytest.approx(low)
    assert metrics["clip_ratio/high_mean"] == pytest.approx(high)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(low + high)


def test_unscored_completions_count_in_the_mean_only_where_asked():
    samples = make_samples()[:6]
    losses = {}
    for counted in (False, True):
        config = make_policy_config(beta=0.0, count_unscored=counted)
        policy = make_policy_of(config)
        losses[counted] = update(
            policy, samples, credit(samples, policy, terms_of(config)), terms_of(config)
        )["loss"]
    assert losses[True] == pytest.approx(losses[False] * 6 / 12)


def test_completions_without_signal_are_computed_where_another_term_needs_them():
    samples = [replace(s, reward=1.0) for s in make_samples()]
    for options, share in (({}, 0.0), ({"entropy_coef": 0.1}, 1.0)):
        config = make_policy_config(beta=0.0, **options)
        policy = make_policy_of(config)
        given = credit(samples, policy, terms_of(config))
        assert update(policy, samples, given, terms_of(config))["update/computed_share"] == share


def test_token_credit_is_the_same_from_the_update_s_own_pass_and_from_one_before():
    options = {"preset": "openrlhf", "beta": 0.3}
    samples = make_samples()
    before, config = (
        make_policy_config(**options, steps_per_generation=3),
        make_policy_config(**options),
    )
    policy = make_policy_of(config)
    stored = credit(samples, policy, terms_of(before))
    assert credit(samples, policy, terms_of(config)) == Credit(None, None)
    losses = [
        micro_loss(policy, policy.batch(samples), given, terms_of(config), 10.0)[0]
        for given in (stored, Credit(None, None))
    ]
    found = []
    for loss in losses:
        loss.backward()
        found.append(gradients(policy))
    assert_same(*found)
    assert stored.advantages[samples[0].key].shape == (len(samples[0].token_ids),)
