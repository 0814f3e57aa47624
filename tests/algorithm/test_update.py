"""What the loss consists of, against autograd on the model's own logits."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rloo.algorithm.advantages import compute_advantages
from rloo.algorithm.kl_estimate import kl_estimate
from rloo.algorithm.update import micro_batch_loss, update
from rloo.model.micro_batch import pad
from rloo.model.policy import Policy
from support.fixed_logprobs import Rollout, ours
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
    given = compute_advantages(samples, policy, terms_of(config))
    assert not any(given.has_reward_variance(s.key) for s in samples)
    micro_batch_loss(policy, policy.batch(samples), given, terms_of(config), denominator=12.0)[
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
    loss, sums = micro_batch_loss(
        policy, batch, compute_advantages(samples, policy, terms_of(config)), terms_of(config), 12.0
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
        given = compute_advantages(samples, policy, terms_of(config))
        micro_batch_loss(policy, policy.batch(chosen), given, terms_of(config), 12.0)[0].backward()
        return gradients(policy)

    assert_same(gradient_of(samples), gradient_of([s for s in samples if not s.truncated]))


def test_the_decoupled_objective_weighs_tokens_by_trainer_over_sampler():
    config = make_policy_config(
        preset="areal",
        normalize_advantages=False,
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
        replace(s, behavior_logprobs=part.tolist())
        for s, part in zip(samples, sampler, strict=True)
    ]
    given = compute_advantages(samples, policy, terms_of(config))
    loss, sums = micro_batch_loss(
        policy, policy.batch(samples), given, terms_of(config), float(len(chosen))
    )
    loss.backward()
    found = gradients(policy)
    weights = torch.exp(-shift)
    weights[0] = 0.0
    advantages = torch.cat([given.by_completion[s.key] for s in samples]).float()
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
        config = make_policy_config(beta=0.0, preset="trl" if counted else "paper")
        policy, terms = make_policy_of(config), terms_of(config)
        losses[counted] = update(
            policy, samples, compute_advantages(samples, policy, terms), terms
        )["loss"]
    assert losses[True] == pytest.approx(losses[False] * 6 / 12)


def test_completions_without_signal_are_computed_where_another_term_needs_them():
    flat = [replace(s, reward=1.0) for s in make_samples()]
    filtered = [replace(s, behavior_logprobs=[-1.0] * len(s.token_ids)) for s in flat]
    cases = (
        ({}, flat, 0.0),
        ({"entropy_coef": 0.1}, flat, 1.0),
        ({"preset": "trl"}, flat, 1.0),
        ({}, filtered, 1.0),
    )
    for options, samples, share in cases:
        config = make_policy_config(**{**options, "beta": 0.0})
        policy = make_policy_of(config)
        given = compute_advantages(samples, policy, terms_of(config))
        assert update(policy, samples, given, terms_of(config))["update/computed_share"] == share


def step_by_adamw(policy, before, first, number, rate) -> dict[str, torch.Tensor]:
    """The weights `before` after step `number` of AdamW (Loshchilov and Hutter 2019, algorithm 2)
    if the gradient was `first` in step 1 and 0 since."""
    expected = {}
    names = {id(p): name for name, p in policy.model.named_parameters()}
    for group in policy.stepper.optimizer.param_groups:
        one, two = group["betas"]
        for name in (names[id(p)] for p in group["params"]):
            mean = (1 - one) * one ** (number - 1) * first[name] / (1 - one**number)
            square = (1 - two) * two ** (number - 1) * first[name] ** 2 / (1 - two**number)
            decayed = before[name] * (1 - rate * group["weight_decay"])
            expected[name] = decayed - rate * mean / (square.sqrt() + group["eps"])
    return expected


@pytest.mark.parametrize("preset", ["paper", "trl"])
def test_a_step_without_signal_is_made_as_trl_makes_it_under_its_preset_only(preset):
    """Step 1 has signal; in step 2 rewards are equal, in step 3 all are missing."""
    config = make_policy_config(
        preset=preset, beta=0.0, learning_rate=0.1, weight_decay=0.1, max_grad_norm=0.0
    )
    policy, terms, samples = make_policy_of(config), terms_of(config), make_samples()
    first: dict[str, torch.Tensor] = {}
    policy.stepper.before_step = lambda: (
        first or first.update({n: p.grad.clone() for n, p in policy.model.named_parameters()})
    )
    samples = [replace(s, policy_logprobs=[-0.5] * len(s.token_ids)) for s in samples]
    flat, missing = ([replace(s, reward=r) for s in samples] for r in (1.0, math.nan))
    steps = (samples, flat, missing if preset == "trl" else [])
    for number, counted in enumerate(steps, start=1):
        before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
        rate = policy.stepper.learning_rate
        row = update(policy, counted, compute_advantages(counted, policy, terms), terms)
        after = {n: p.detach() for n, p in policy.model.named_parameters()}
        assert row["learning_rate"] == rate and rate > policy.stepper.learning_rate
        if number == 1:
            assert row["grad_norm"] > 0 and len(first) == len(before)
            continue
        assert (row["loss"], row["grad_norm"], row["clip_ratio/region_mean"]) == (0, 0, 0)
        if preset == "paper":
            assert all(torch.equal(after[n], before[n]) for n in before)
            assert row["update/no_signal"] == 1 and row["update/nonfinite"] == 0
            assert row.get("entropy", 0.5) == 0.5
            assert ("entropy" in row) == bool(counted)
            continue
        assert row["update/changed_share"] > 0 and row["update/no_signal"] == 0
        for name, value in step_by_adamw(policy, before, first, number, rate).items():
            torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("parts", [1, 3])
def test_kl_and_entropy_are_means_over_the_completions_that_the_form_names(parts):
    """One is cut and one has no score: TRL leaves the first out and counts the second, the paper's
    form does the opposite. Advantages come from this pass, or from one before it."""
    samples = make_samples()
    cut, missing = samples[0].key, samples[1].key
    for preset, absent in (("trl", cut), ("paper", missing)):
        config = make_policy_config(
            preset=preset, beta=0.3, mask_truncated_completions=True, steps_per_generation=parts
        )
        policy, terms = make_policy_of(config), terms_of(config)
        kept = [
            replace(s, truncated=s.key == cut, reward=math.nan if s.key == missing else s.reward)
            for s in samples
            if preset == "trl" or s.key != missing
        ]
        counted = [s for s in kept if s.key != absent]
        logprobs, _, targets = own_logits(policy, counted)
        chosen = logprobs.gather(-1, targets[:, None])[:, 0]
        kl = (chosen - policy.reference_logprobs(policy.batch(counted))).detach()
        entropy = -(logprobs.exp() * logprobs).sum(-1).detach()
        row = update(policy, kept, compute_advantages(kept, policy, terms), terms)
        assert row["kl"] == pytest.approx(kl.mean().item(), abs=1e-6)
        assert row["kl/sequence"] == pytest.approx(kl.sum().item() / len(counted), abs=1e-5)
        assert row["entropy"] == pytest.approx(entropy.mean().item(), abs=1e-5)


def test_without_beta_the_entropy_is_still_that_of_all_completions():
    """Two of three groups have equal rewards, and a policy of their own."""
    samples = [replace(s, policy_logprobs=[-float(s.key[0])] * len(s.token_ids)) for s in
               make_samples()]  # fmt: skip
    samples = [replace(s, reward=s.reward if s.key[0] == 0 else 1.0) for s in samples]
    config = make_policy_config(beta=0.0)
    policy, terms = make_policy_of(config), terms_of(config)
    row = update(policy, samples, compute_advantages(samples, policy, terms), terms)
    values = [float(s.key[0]) for s in samples for _ in s.token_ids]
    assert row["update/computed_share"] == pytest.approx(1 / 3)
    assert row["entropy"] == pytest.approx(sum(values) / len(values))


def test_token_credit_is_the_same_from_the_update_s_own_pass_and_from_one_before():
    options = {"preset": "openrlhf", "beta": 0.3}
    samples = make_samples()
    before, config = (
        make_policy_config(**options, steps_per_generation=3),
        make_policy_config(**options),
    )
    policy = make_policy_of(config)
    stored = compute_advantages(samples, policy, terms_of(before))
    from_this_pass = compute_advantages(samples, policy, terms_of(config))
    assert (stored.from_update, from_this_pass.from_update) == (False, True)
    losses = [
        micro_batch_loss(policy, policy.batch(samples), given, terms_of(config), 10.0)[0]
        for given in (stored, from_this_pass)
    ]
    found = []
    for loss in losses:
        loss.backward()
        found.append(gradients(policy))
    assert_same(*found)
    assert stored.by_completion[samples[0].key].shape == (len(samples[0].token_ids),)


def test_only_trained_tokens_are_learned_from_and_all_are_read():
    """What a tool said is context: its tokens have no term, and the others' terms are unchanged."""
    config = make_policy_config(
        beta=0.0, loss_aggregation="token_mean", importance_sampling_level="token"
    )
    policy, terms = make_policy_of(config), terms_of(config)
    samples = [s for s in make_samples() if len(s.token_ids) > 2]
    masks = [tuple(place % 3 != 1 for place in range(len(s.token_ids))) for s in samples]
    masked = [replace(s, trained=mask) for s, mask in zip(samples, masks, strict=True)]
    credit = compute_advantages(masked, policy, terms)
    whole, batch = policy.batch(samples), policy.batch(masked)
    assert batch.lengths == [sum(mask) for mask in masks]
    kept = torch.tensor([kept for mask in masks for kept in mask])
    logprobs = policy.logprobs(whole).logprobs
    assert torch.equal(policy.logprobs(batch).logprobs, logprobs[kept])

    loss, sums = micro_batch_loss(policy, batch, credit, terms, denominator=float(kept.sum()))
    loss.backward()
    found = gradients(policy)

    lengths = torch.tensor([len(s.token_ids) for s in samples])
    advantages = torch.cat([credit.by_completion[s.key] for s in samples]).float()
    assert len(advantages) == kept.sum() and sums["tokens"] == kept.sum()
    of_token = torch.zeros(int(lengths.sum()))
    of_token[kept] = advantages
    (-(of_token * logprobs).sum() / kept.sum()).backward()
    assert_same(found, gradients(policy))


class Asked(TorchDispatchMode):
    """How often the host asks for a value, outside of the optimizer's step."""

    def __init__(self):
        super().__init__()
        self.times = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.times += func.name() in ("aten::_local_scalar_dense", "aten::nonzero")
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_host_asks_no_more_often_for_more_micro_batches(beta, monkeypatch):
    """Of a GPU each question waits for all that was begun; what is told stays the same."""
    # With KL in the loss, correction and token ratios: every sum there is.
    options = {
        "beta": beta, "kl_placement": "loss", "kl_estimator": "k3", "entropy_coef": 0.1,
        "rollout_importance_sampling_mode": "sequence_truncate",
    }  # fmt: skip
    config = make_policy_config(**options)
    samples = [replace(s, reward=float(n)) for n, s in enumerate(make_samples())]
    found = []
    for size in (10**6, 1):
        policy = make_policy_of(config)
        policy.max_tokens = size
        monkeypatch.setattr(policy.stepper, "step", lambda scale=1.0: {})
        credit = compute_advantages(samples, policy, terms_of(config))
        batches = list(policy.micro_batches([samples], whole_groups=credit.from_update))
        with Asked() as asked:
            metrics = update(policy, samples, credit, terms_of(config))
        found.append((len(batches), asked.times, metrics))
    (one, few, once), (several, same, parts) = found
    assert one == 1 < several
    assert few == same
    assert once.keys() == parts.keys()
    for name, value in once.items():
        assert parts[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
