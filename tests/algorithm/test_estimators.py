"""What estimators are given, what those of the package compute, and what none may return."""

from __future__ import annotations

import statistics
from dataclasses import fields, replace

import pytest
import torch

from rloo import plugins
from rloo.algorithm.advantages import compute_advantages
from rloo.algorithm.baselines import leave_one_out
from rloo.algorithm.estimator_input import EstimatorInput
from rloo.algorithm.estimator_registry import load_estimator, require_estimator
from rloo.algorithm.estimators import composed, grpo, reinforce_pp, rloo
from rloo.algorithm.group_baselines import length_weighted
from rloo.algorithm.reward_shaping import make_training_samples
from rloo.algorithm.token_baselines import optimal_token
from rloo.algorithm.update import update
from rloo.config.config import RLOOConfig
from rloo.config.estimator_config import EstimatorConfig
from rloo.types import Completion, Group, Prompt
from support.models import make_samples
from support.policies import make_policy_config, make_policy_of
from support.terms import advantages, make_returns, rollout_of, terms_of


def one_at_a_time(returns: EstimatorInput) -> list[EstimatorInput]:
    """Each group alone."""
    parts = []
    for group in returns.group_N.unique():
        rows = (returns.group_N == group).nonzero()[:, 0]
        tokens = torch.isin(returns.sequence_T, rows)
        parts.append(
            EstimatorInput(
                returns.reward_N[rows],
                returns.penalty_T[tokens],
                returns.sequence_T[tokens] - rows[0],
                torch.zeros_like(rows),
                returns.truncated_N[rows],
                None if returns.score_norm_T is None else returns.score_norm_T[tokens],
                None,
                None if returns.coefficient_N2 is None else returns.coefficient_N2[rows],
            )
        )
    return parts


def test_returns_by_hand():
    returns = EstimatorInput(
        torch.tensor([1.0, 0.5]),
        torch.tensor([0.1, 0.2, 0.4]),
        torch.tensor([0, 0, 1]),
        torch.tensor([0, 0]),
        torch.tensor([False, True]),
    )
    assert returns.num_completions == 2
    assert returns.length_N.tolist() == [2, 1]
    assert returns.penalty_N.tolist() == pytest.approx([0.3, 0.4])
    assert returns.return_N.tolist() == pytest.approx([0.7, 0.1])
    assert returns.penalty_to_go_T.tolist() == pytest.approx([0.3, 0.2, 0.4])
    assert returns.per_token(returns.reward_N).tolist() == [1, 1, 0.5]
    assert returns.per_token(returns.penalty_T) is returns.penalty_T


GROUP_FORMS = {
    "rloo": rloo,
    "grpo": grpo,
    "length_weighted": length_weighted,
    "optimal_token": optimal_token,
    "composed": composed,
    "deviation of the others": EstimatorConfig(std_level="group", std_leave1out=True),
    "KL to go": EstimatorConfig(kl_placement="reward_to_go"),
    "KL after the baseline": EstimatorConfig(
        kl_in_baseline=False, advantage_clip_range=(-0.3, 0.2)
    ),
    "over tokens": EstimatorConfig(mean_over="tokens", kl_placement="reward_to_go"),
    "no baseline": EstimatorConfig(mean_level="none", mask_truncated_completions=True),
}


@pytest.mark.parametrize("name", GROUP_FORMS)
def test_an_estimator_of_groups_looks_at_one_group_only(name):
    """All groups at once, as training calls those of the package, and each alone: the same bits,
    but for sums to go, which are differences of sums over all tokens."""
    form = GROUP_FORMS[name]
    to_go = form is optimal_token or getattr(form, "kl_placement", "reward") == "reward_to_go"
    rounding = 1e-12 if to_go else 0.0

    def estimate(returns):
        return composed(returns, form) if isinstance(form, EstimatorConfig) else form(returns)

    for seed in range(30):
        returns = make_returns(seed, norms=True)
        parts = [estimate(part) for part in one_at_a_time(returns)]
        assert torch.allclose(torch.cat(parts), estimate(returns), rtol=0.0, atol=rounding)


@pytest.mark.parametrize("kl", [True, False])
def test_what_is_named_is_what_its_options_compose(kl):
    to_go = {"kl_placement": "reward_to_go", "normalize_over": "tokens"}
    whole = {"advantage_epsilon": 1e-8, "epsilon_in_variance": True, "normalize_advantages": True}
    forms = {
        rloo: EstimatorConfig(),
        grpo: EstimatorConfig(mean_leave1out=False, std_level="group"),
        reinforce_pp: EstimatorConfig(mean_level="none", **to_go, **whole),
    }
    for estimator, form in forms.items():
        for seed in range(30):
            returns = make_returns(seed, kl=kl)
            found, expected = estimator(returns), composed(returns, form)
            assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12), estimator
            assert estimator is reinforce_pp or torch.equal(found, expected)


def test_the_default_is_rloo_itself_and_rloo_is_leave_one_out():
    """With equal bits, `composed` with default options computes the same."""
    assert load_estimator(RLOOConfig()).compute is rloo
    for level in ("sequence", "token"):
        config = RLOOConfig(importance_sampling_level=level)
        for seed in range(30):
            returns = make_returns(seed)
            expected = composed(returns, EstimatorConfig())
            assert torch.equal(rloo(returns), expected)
            assert torch.equal(leave_one_out(returns.return_N, returns.group_N), expected)
            wanted = returns.per_token(expected) if level == "token" else expected
            assert torch.equal(advantages(returns, config), wanted)
    assert load_estimator(RLOOConfig(std_level="group")).compute is not rloo


# -- a user's own ----------------------------------------------------------------------------------

MINE = """
import statistics
import torch
from rloo.algorithm.estimators import batch_scope

SEEN = []

def mine(returns, power=1.0):
    SEEN.append(returns)
    centre = returns.return_N - returns.return_N.mean()
    return centre.sign() * centre.abs() ** power

@batch_scope
def whole(returns):
    SEEN.append(returns)
    return (returns.return_N - returns.return_N.mean()) / returns.return_N.std()

def by_token(returns):
    return returns.per_token(returns.reward_N) - returns.penalty_to_go_T

def in_place(returns):
    returns.reward_N.sub_(100.0)
    returns.penalty_T.zero_()
    return returns.reward_N

def nothing(returns):
    pass

def too_few(returns):
    return returns.reward_N[1:]

def a_table(returns):
    return returns.reward_N[:, None]

def whole_numbers(returns):
    return returns.group_N

def not_finite(returns):
    return returns.reward_N / (returns.num_completions - 2)

def attached(returns):
    return returns.reward_N * torch.ones((), requires_grad=True)

def failing(returns):
    scale = 3
    return helper(returns)

def helper(returns):
    return statistics.fmean([])

misplaced = lambda returns: returns.reward_N
misplaced.scope = "rollout"
constant = 3
"""


@pytest.fixture
def mine(tmp_path):
    """The path of a file of estimators."""
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def config_of(estimator: str, **options) -> RLOOConfig:
    return make_policy_config(estimator=estimator, **options)


def line_of(text: str) -> int:
    return MINE.splitlines().index(text) + 1


def seen_by(config: RLOOConfig) -> list[EstimatorInput]:
    return load_estimator(config).function.func.__globals__["SEEN"]


def test_an_estimator_of_groups_is_given_one_group_at_a_time(mine):
    config, returns = config_of(f"{mine}:mine"), make_returns(3, norms=True)
    found = advantages(returns, config)
    parts = one_at_a_time(returns)
    assert len(seen_by(config)) == len(parts) > 1
    for seen, part in zip(seen_by(config), parts, strict=True):
        assert seen.pilot_N is part.pilot_N is None
        for name in {field.name for field in fields(EstimatorInput)} - {"pilot_N"}:
            assert torch.equal(getattr(seen, name), getattr(part, name)), name
    expected = [part.return_N - part.return_N.mean() for part in parts]
    assert torch.equal(found, torch.cat(expected))


def test_an_estimator_of_the_batch_is_given_all_groups_at_once(mine):
    config, returns = config_of(f"{mine}:whole"), make_returns(3)
    found = advantages(returns, config)
    assert [len(seen.reward_N) for seen in seen_by(config)] == [len(returns.reward_N)]
    assert found.mean().item() == pytest.approx(0, abs=1e-12)
    assert found.std().item() == pytest.approx(1, abs=1e-12)


def test_advantages_by_token_need_token_ratios_and_others_are_spread_over_them(mine):
    returns = make_returns(3)
    token = {"importance_sampling_level": "token"}
    found = advantages(returns, config_of(f"{mine}:by_token", **token))
    assert torch.allclose(found, returns.reward_N[returns.sequence_T] - returns.penalty_to_go_T)
    spread = advantages(returns, config_of(f"{mine}:mine", **token))
    plain = advantages(returns, config_of(f"{mine}:mine"))
    assert torch.equal(spread, plain[returns.sequence_T])
    with pytest.raises(
        ValueError, match=r"mine.py, line \d+\) returned one advantage for each"
    ) as e:
        advantages(returns, config_of(f"{mine}:by_token"))
    assert "importance_sampling_level is sequence" in str(e.value)


def test_truncated_completions_are_masked_whatever_the_estimator_says(mine):
    returns = make_returns(3)
    for level in ("sequence", "token"):
        options = {"mask_truncated_completions": True, "importance_sampling_level": level}
        found = advantages(returns, config_of(f"{mine}:in_place", **options))
        index = returns.sequence_T if level == "token" else torch.arange(len(found))
        assert torch.equal(found == 0, returns.truncated_N[index])


def test_what_an_estimator_does_to_its_returns_stays_its_own(mine):
    returns, untouched = make_returns(3), make_returns(3)
    advantages(returns, config_of(f"{mine}:in_place"))
    assert torch.equal(returns.reward_N, untouched.reward_N)
    assert torch.equal(returns.penalty_T, untouched.penalty_T)


def test_arguments_reach_the_estimator_and_wrong_ones_are_refused_with_its_line(mine):
    returns = make_returns(3)
    squared = advantages(returns, config_of(f"{mine}:mine", estimator_kwargs={"power": 2}))
    plain = advantages(returns, config_of(f"{mine}:mine"))
    assert torch.allclose(squared, plain.sign() * plain**2)
    line = line_of("def mine(returns, power=1.0):")
    for arguments in ({"powr": 2}, {"returns": 2}):
        with pytest.raises(ValueError, match="cannot be called with its returns") as error:
            load_estimator(config_of(f"{mine}:mine", estimator_kwargs=arguments))
        assert f"mine.py, line {line})" in str(error.value)
        assert "(arguments: power)" in str(error.value)
    epsilon = advantages(returns, config_of("grpo", estimator_kwargs={"epsilon": 0.5}))
    assert torch.equal(epsilon, grpo(returns, epsilon=0.5))


WRONG = {
    "nothing": ("nothing", "returned a NoneType; it must be a tensor of 5 numbers, one for each"),
    "too_few": ("too_few", "returned a tensor of 4; it must be a tensor of 5 numbers"),
    "a_table": ("a_table", "returned a tensor of 5 x 1; it must be a tensor of 5 numbers"),
    "whole_numbers": ("whole_numbers", "returned numbers of type torch.int64; advantages are"),
    "not_finite": ("not_finite", "for completion 0 of a group of 2 completions; advantages"),
    "attached": ("attached", "returned a tensor with a gradient attached; advantages are constant"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_advantage_is_refused_with_the_estimator_s_line(mine, name):
    function, expected = WRONG[name]
    config, returns = config_of(f"{mine}:{function}"), make_returns(3)
    if name == "not_finite":
        # Groups of 2 give infinities.
        returns = next(r for r in map(make_returns, range(99)) if 2 in r.group_N.bincount()[:1])
    else:
        returns = next(r for r in map(make_returns, range(99)) if r.group_N.bincount()[0] == 5)
    with pytest.raises(ValueError) as error:
        advantages(returns, config)
    assert expected in str(error.value)
    line = line_of(f"def {function}(returns):")
    assert f"the estimator {mine}:{function} ({mine.resolve()}, line {line})" in str(error.value)


def test_an_exception_in_an_estimator_names_the_line_where_it_happened(mine):
    with pytest.raises(ValueError) as error:
        advantages(make_returns(3), config_of(f"{mine}:failing"))
    line = line_of("    return statistics.fmean([])")
    assert f"{mine}:failing failed in {mine.resolve()}, line {line}: " in str(error.value)
    assert "StatisticsError" in str(error.value) and "every group of 2 or more" in str(error.value)
    assert isinstance(error.value.__cause__, statistics.StatisticsError)


def test_memory_that_does_not_suffice_is_not_taken_for_a_fault_of_the_estimator(mine):
    config = config_of(f"{mine}:mine")

    def hungry(centre):
        raise torch.OutOfMemoryError("no memory")

    load_estimator(config).function.func.__globals__["SEEN"] = type(
        "Full", (), {"append": staticmethod(hungry)}
    )
    with pytest.raises(torch.OutOfMemoryError):
        advantages(make_returns(3), config)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("rlo", r"unknown estimator 'rlo'; did you mean rloo\? \(there are composed, rloo, grpo"),
        ("{mine}", r"mine.py' names no function; write .*mine.py:function"),
        ("{mine}:mne", "has no function 'mne'; did you mean 'mine'"),
        ("{mine}:constant", "'constant' of .*mine.py is not a function but 3"),
        (
            "other.py:mine",
            r"there is no file .*other.py \(estimators are given as file.py:function",
        ),
        ("no_such_module:mine", "there is no module 'no_such_module'"),
        ("{mine}:misplaced", r"mine.py, line \d+\) has the scope 'rollout'; it must be 'group'"),
    ],
)
def test_an_estimator_that_is_not_there_is_refused(mine, estimator, expected):
    with pytest.raises(ValueError, match=expected):
        load_estimator(config_of(estimator.replace("{mine}", str(mine))))


def test_an_estimator_may_be_a_function_of_a_module():
    returns = make_returns(3)
    found = advantages(returns, config_of("rloo.algorithm.estimators:rloo"))
    assert torch.equal(found, rloo(returns))


def test_groups_of_one_are_for_estimators_of_the_batch(mine):
    single = {"num_generations": 1, "num_prompts": 4}
    with pytest.raises(ValueError, match="looks at one group; it needs at least 2 completions"):
        load_estimator(config_of(f"{mine}:mine", **single))
    for estimator, expected in ((f"{mine}:whole", 1), (f"{mine}:mine", 0), ("rloo", 0)):
        config = config_of(estimator, **(single if expected else {}))
        alone = Group(Prompt(0, [1], "x"), [Completion([7], "stop", [0.0], [0.0])], ["x"], [1.0])
        assert len(make_training_samples(rollout_of([alone]), config)) == expected


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("name", ["mine", "whole"])
def test_a_batch_cut_in_three_ways_has_the_same_update(mine, name, beta):
    """Micro-batches of one completion, of some, of all: by the gradient that they add up to."""
    samples, moved = make_samples(3, 4), []
    for max_tokens in (10, 100, 10_000):
        config = config_of(
            f"{mine}:{name}",
            beta=beta,
            optim="sgd",
            learning_rate=1.0,
            max_grad_norm=0,
            max_tokens_per_micro_batch=max_tokens,
        )
        policy = make_policy_of(config)
        before = torch.cat([p.detach().flatten() for p in policy.parameters])
        terms = terms_of(config)
        update(policy, samples, compute_advantages(samples, policy, terms), terms)
        moved.append(torch.cat([p.detach().flatten() for p in policy.parameters]) - before)
    assert moved[0].norm() > 1e-2
    for other in moved[1:]:
        assert (other - moved[0]).norm() < 1e-5 * moved[0].norm()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"mean_level": "batch"},
            "mean_level is batch but has no effect without estimator composed",
        ),
        (
            {"mean_leave1out": False},
            "mean_leave1out is False but has no effect without estimator composed",
        ),
        ({"std_level": "group"}, "std_level is group but has no effect without estimator composed"),
        ({"advantage_epsilon": 0.1}, r"composed \(estimator is rloo\)"),
        ({"estimator_kwargs": {"advantage_clip_range": (-1, 1)}}, "advantage_clip_range is"),
        ({"normalize_advantages": True}, "normalize_advantages is True but has no effect without"),
        (
            {"kl_placement": "reward_to_go"},
            "kl_placement is reward_to_go but has no effect without",
        ),
    ],
)
def test_parts_of_the_composed_estimator_are_refused_beside_another(options, expected):
    with pytest.raises(ValueError, match=expected):
        config_of("rloo", **options)
    assert config_of("rloo", kl_placement="loss", kl_estimator="k3").estimator == "rloo"
    epsilon = config_of("rloo", advantage_epsilon=0.1, normalize_rewards="batch")
    assert epsilon.advantage_epsilon == 0.1


def test_what_a_preset_sets_for_its_own_estimator_stays_idle_beside_another(mine):
    config = config_of(f"{mine}:mine", preset="reinforce_pp")
    assert RLOOConfig(**config.to_dict()) == config
    assert not load_estimator(config).over_rollout
    assert replace(config, beta=0.7).estimator == f"{mine}:mine"


def test_a_run_is_refused_before_its_model_is_loaded_for_an_estimator_that_is_not_there():
    from rloo import RLOOTrainer

    with pytest.raises(ValueError, match="unknown estimator 'leave_one'"):
        RLOOTrainer("no/such-model", [len], args=RLOOConfig(estimator="leave_one", use_cpu=True))


@pytest.mark.parametrize("estimator", ["optimal_token", "reinforce_pp"])
def test_an_advantage_for_each_token_is_refused_early_for_ratios_of_completions(estimator):
    config = config_of(estimator)
    with pytest.raises(ValueError, match=f"{estimator} gives every token an advantage of its own"):
        require_estimator(config)
    require_estimator(replace(config, importance_sampling_level="token"))


def test_every_estimator_of_the_package_is_in_the_help_of_the_option():
    (option,) = (field for field in fields(RLOOConfig) if field.name == "estimator")
    for name in plugins.BUILT_IN["estimators"]:
        found = plugins.load("estimators", name)
        assert found.__name__ == name and found.__module__.startswith("rloo.algorithm.")
        assert name in option.metadata["help"]
