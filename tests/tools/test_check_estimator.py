"""`rloo check-estimator`: what it measures against theory, and what it says."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from rloo import cli
from rloo.algorithm.estimator_registry import LoadedEstimator, load_estimator
from rloo.config.config import RLOOConfig
from rloo.tools import check_estimator
from rloo.tools.exact_gradient import (
    TabularPolicy,
    all_draws,
    draw_error,
    logits_table,
    measure,
    pilot_error,
)
from rloo.tools.probe_sampling import PROBES, all_probe_draws, make_probe_sampler

EXAMPLE = Path(__file__).parents[2] / "examples" / "estimator.py"
MINE = """
import torch
from rloo.algorithm.estimators import batch_scope

@batch_scope
def other_prompts(returns):
    # The mean return of the other prompts is a baseline that no completion has a part in.
    total_N, group_N = returns.return_N, returns.group_N
    others = torch.stack([total_N[group_N != group].mean() for group in group_N])
    return total_N - others

@batch_scope
def all_prompts(returns):
    return returns.return_N - returns.return_N.mean()

def twice(returns):
    return 2 * returns.return_N

@batch_scope
def first_prompt_twice(returns):
    return other_prompts(returns) * (1 + (returns.group_N == 0))

def single(returns):
    if returns.num_completions > 2:
        raise RuntimeError("pairs only")
    return returns.reward_N - returns.reward_N.flip(0)
"""


@pytest.fixture
def pairs(monkeypatch):
    """Groups of two completions alone."""
    monkeypatch.setattr(check_estimator, "SIZES", (2,))


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def bandit_of(number: int, num_tokens: int = 3) -> TabularPolicy:
    sequences = 1 + num_tokens * (num_tokens - 1)
    rewards = torch.cos(torch.arange(sequences, dtype=torch.float64) * (1 + number))
    return TabularPolicy(
        logits_table(number, num_tokens), logits_table(number + 1, num_tokens), rewards
    )


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("exact_kl", [False, True])
def test_a_pilot_does_not_change_the_gradient_of_leave_one_out(beta, exact_kl):
    bandits = [bandit_of(number, 2) for number in range(2)]
    budget, estimator = check_estimator.PILOT, load_estimator(RLOOConfig())
    assert pilot_error(estimator, bandits, beta, budget, exact_kl=exact_kl) < 1e-12


def test_an_error_of_a_pilot_is_found():
    """By an estimator whose expected gradient depends on the size of a group; and a baseline of the
    pilot that includes the second stage."""

    class OneBaseline(LoadedEstimator):
        advantages = LoadedEstimator.compute

    bandits = [bandit_of(number, 2) for number in range(2)]
    left_in, usual = (load_estimator(RLOOConfig(estimator=name)) for name in ("grpo", "rloo"))
    assert pilot_error(left_in, bandits, 0.0, check_estimator.PILOT) > 1e-2
    one = OneBaseline(usual.name, usual.function, usual.over_rollout, usual.smallest_group)
    assert pilot_error(one, bandits, 0.0, check_estimator.PILOT) > 1e-4


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_the_variance_of_leave_one_out_is_that_of_theory(beta):
    """A U-statistic of order 2 (Hoeffding 1948): (4 (K - 2) z1 + 2 z2) / (K (K - 1)), where z1 and
    z2 are of the kernel (R1 - R2)(s1 - s2) / 2, over all pairs."""
    bandit = bandit_of(0)
    logprobs = bandit.logprob_S(bandit.logits)
    p = logprobs.exp()
    total = bandit.reward_S - beta * (logprobs - bandit.logprob_S(bandit.reference))
    scores = torch.autograd.functional.jacobian(bandit.logprob_S, bandit.logits).flatten(1)
    pairs = list(itertools.product(range(len(p)), repeat=2))
    kernel = {(i, j): (total[i] - total[j]) * (scores[i] - scores[j]) / 2 for i, j in pairs}
    mean = sum(p[i] * p[j] * kernel[i, j] for i, j in pairs)
    z2 = sum(p[i] * p[j] * kernel[i, j].square().sum() for i, j in pairs) - mean.square().sum()
    given = [sum(p[j] * kernel[i, j] for j in range(len(p))) for i in range(len(p))]
    z1 = sum(p[i] * given[i].square().sum() for i in range(len(p))) - mean.square().sum()
    assert torch.allclose(mean, bandit.exact_gradient(beta).flatten(), atol=1e-12)
    estimator = load_estimator(RLOOConfig(estimator="rloo"))
    for size in (2, 3, 4):
        (found,) = measure(estimator, [bandit], size, beta)
        expected = (4 * (size - 2) * z1 + 2 * z2) / (size * (size - 1))
        assert found.variance == pytest.approx(expected.item(), rel=1e-9)
        assert found.error < 1e-12


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_an_estimator_of_the_batch_is_enumerated_over_all_prompts_together(mine, beta):
    bandits = [bandit_of(0, 2), bandit_of(2, 2)]
    exact = load_estimator(RLOOConfig(estimator=f"{mine}:other_prompts"))
    # Its own part in the baseline takes a quarter of four completions off.
    shorter = load_estimator(RLOOConfig(estimator=f"{mine}:all_prompts"))
    for found in measure(exact, bandits, 2, beta):
        assert found.error < 1e-12 and found.scale == pytest.approx(1, abs=1e-12)
    for found in measure(shorter, bandits, 2, beta):
        assert (found.scale, found.cosine) == pytest.approx((0.75, 1), abs=1e-12)


def check(capsys, *arguments: str) -> list[str]:
    assert cli.main(["check-estimator", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_the_example_is_exact_in_every_case(capsys):
    lines = check(capsys, f"{EXAMPLE}:length_weighted")
    number = EXAMPLE.read_text().split("def length_weighted")[0].count("\n") + 1
    assert f"{EXAMPLE}, line {number}), given one group at a time" in lines[0]
    assert lines[-1] == "exact: the expected gradient is the exact one in all 24 cases"
    rows = [line.split() for line in lines if line.startswith(("binary", "graded"))]
    assert len(rows) == 24
    assert {tuple(row[:4]) for row in rows} == {
        (kind, beta, size, prompt)
        for kind in ("binary", "graded")
        for beta in ("0", "0.3")
        for size in "234"
        for prompt in "12"
    }
    # Of two, the other one is the baseline, whatever its length.
    assert all(row[6] == row[7] for row in rows if row[2] == "2")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["composed"], "exact: the expected gradient is the exact one in all 8 cases"),
        (["composed", "--prompt_sampling", "variance"], "exact: the weighted draws have the expe"),
        (["rloo", "--kl_placement", "loss", "--kl_estimator", "k3"], "one in all 4 cases"),
        (["{example}:opo"], "biased: cosine down to 0.9940, scale 0.4683 to 0.5478"),
        (["grpo"], "biased: cosine down to 0.9623"),
        (["grpo", "--estimator_kwargs.epsilon", "1e6"], "exact up to a factor: 0.0000 for K = 2"),
        (["shrinkage"], "exact: the expected gradient is the exact one in all 8 cases"),
        (["regression"], "exact: the expected gradient is the exact one in all 8 cases"),
        (["length_weighted"], "exact: the expected gradient is the exact one in all 8 cases"),
        (["optimal_token"], "exact: the expected gradient is the exact one in all 8 cases"),
        (
            ["length_weighted", "--estimator_kwargs.leave1out", "false"],
            "biased: cosine down to 0.9940, scale 0.4683 to 0.5478",
        ),
        (["optimal_token", "--estimator_kwargs.leave1out", "false"], "biased: cosine down to 0."),
        (["{mine}:twice"], "exact up to a factor: 2.0000 for K = 2"),
        (["composed", "--mean_leave1out", "false"], "exact up to a factor: 0.5000 for K = 2"),
        (
            ["{mine}:first_prompt_twice"],
            "biased: the direction is exact at each prompt, but the prompts have different weights "
            "(scale 1.0000 to 2.0000)",
        ),
    ],
)
def test_the_verdict(mine, capsys, pairs, arguments, expected):
    given = [a.replace("{example}", str(EXAMPLE)).replace("{mine}", str(mine)) for a in arguments]
    assert expected in check(capsys, *given)[-1]


def test_a_large_scale_stays_in_its_column(tmp_path, capsys, pairs):
    path = tmp_path / "large.py"
    path.write_text(
        "def large(returns):\n    return 1e5 * (returns.return_N - returns.return_N.flip(0))"
    )
    rows = [row for row in check(capsys, f"{path}:large") if row.startswith(("rewards", "binary"))]
    assert len({len(row) for row in rows}) == 1 and "  1e+05   1.0000" in rows[1]


def test_with_weighted_prompts_all_draws_are_enumerated():
    estimator = load_estimator(RLOOConfig(estimator="rloo"))
    found = measure(estimator, [bandit_of(0)], 2, 0.3) + measure(estimator, [bandit_of(2)], 2, 0.3)
    cases = [
        check_estimator.EstimatorComparison("graded", 0.3, 2, n, one, one)
        for n, one in enumerate(found, start=1)
    ]
    lines = list(check_estimator.report_draws(cases, floor=0.25))
    assert lines[-1] == "exact: the weighted draws have the expected gradient of uniform drawing"
    rows = [line.split() for line in lines[-6:-2]]
    assert [row[:2] for row in rows] == [["1", "1"], ["1", "0"], ["0", "1"], ["0.9", "0.1"]]
    assert all(float(error) < 1e-12 for *_, error in rows)


@pytest.mark.parametrize(
    ("estimator", "verdict"),
    [
        ("rloo", "exact: the numbers of completions do not change the expected gradient"),
        ("grpo", "biased: the expected gradient depends on the numbers of completions, by up to"),
    ],
)
def test_numbers_of_completions_are_enumerated(estimator, verdict):
    loaded, cases = load_estimator(RLOOConfig(estimator=estimator)), []
    for size in (2, 3, 4):
        found = [measure(loaded, [bandit_of(n, 2)], size, 0.3)[0] for n in (0, 2)]
        cases += [
            check_estimator.EstimatorComparison("graded", 0.3, size, n, one, one)
            for n, one in enumerate(found, start=1)
        ]
    lines = list(check_estimator.report_sizes(cases, floor=0.25))
    assert lines[-1].startswith(verdict)
    errors = [float(line.split()[-1]) for line in lines[-6:-2]]
    # Equal deviations give equal numbers, which no estimator is biased by.
    assert errors[0] < 1e-12
    assert max(errors) < 1e-12 if estimator == "rloo" else min(errors[1:]) > 1e-3


def test_draws_without_their_weights_would_be_biased():
    """By hand: of two prompts with gradients 1 and 2 the first has 3/4 of the draws."""
    gradients = [torch.tensor([1.0]).double(), torch.tensor([2.0]).double()]
    for num in (1, 2, 3):
        assert draw_error(all_draws([1.5, 0.5], num), gradients) < 1e-12
        chances = [sum(c * sum(n == x for n, _ in draws) for c, draws in all_draws([1.5, 0.5], num))
                   for x in (0, 1)]  # fmt: skip
        assert chances == pytest.approx([0.75 * num, 0.25 * num], abs=1e-12)


@pytest.mark.parametrize("kind", ["text", "policy"])
def test_the_draws_of_a_probe_are_enumerated(pairs, capsys, kind):
    probed = ("--prompt_sampling", "variance", "--prompt_sampling_kwargs.probe", kind)
    lines = check(capsys, "rloo", *probed)
    assert lines[-1] == "exact: a probe does not change the expected gradient"
    rows = [line.rsplit(maxsplit=2) for line in lines[-5:-2]]
    assert [row[0] for row in rows] == [*PROBES]
    knows, nothing, wrong = (float(row[1]) for row in rows)
    # The probe decides on the prompts that were never drawn.
    assert knows > nothing + 0.1 and nothing > wrong + 0.05
    assert all(float(row[2]) < 1e-12 for row in rows)


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("num", [1, 2, 3])
def test_an_error_of_the_draws_of_a_probe_is_found(probe, num):
    """Of draws without weights, and of weights that count all prompts, not the candidates."""
    sampler = make_probe_sampler(probe, 6, floor=0.25)
    drawn = list(all_probe_draws(sampler, num))
    gradients = [torch.eye(6).double()[n] for n in range(6)]
    assert sum(chance for chance, _ in drawn) == pytest.approx(1.0, abs=1e-12)
    assert draw_error(drawn, gradients) < 1e-12
    plain = [(chance, [(n, 1.0) for n, _ in draws]) for chance, draws in drawn]
    assert draw_error(plain, gradients) > 1e-2
    if num < 3:
        factor = 2 * num / 6
        over_all = [(chance, [(n, factor * w) for n, w in draws]) for chance, draws in drawn]
        assert draw_error(over_all, gradients) > 0.3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["{mine}:all_prompts", "--prompt_sampling", "variance"],
            "mine.py:all_prompts and prompt_sampling is variance, whose advantages depend on other",
        ),
        ([], "check-estimator takes a name (rloo) or a function (my.py:function)"),
        (["--estimator", "rloo"], "check-estimator takes a name"),
        (["rlo"], "unknown estimator 'rlo'; did you mean rloo?"),
        (["{mine}:single"], "mine.py, line 25: RuntimeError: pairs only; it must do with every"),
        (
            ["rloo", "--std_level", "group"],
            "std_level is group but has no effect without estimator composed",
        ),
    ],
)
def test_what_cannot_be_checked_has_status_2_and_one_line(mine, capsys, arguments, expected):
    assert cli.main(["check-estimator", *(a.replace("{mine}", str(mine)) for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


def test_an_exact_kl_is_exact_with_less_variance_than_k1(pairs, capsys):
    assert cli.main(["check-estimator", "rloo", "--kl_estimator", "exact"]) == 0
    *table, _, verdict = capsys.readouterr().out.splitlines()
    assert verdict == "exact: the expected gradient is the exact one in all 8 cases"
    rows = [line.split() for line in table if line.startswith(("binary", "graded"))]
    ratios = {float(row[1]): [] for row in rows}
    for row in rows:
        ratios[float(row[1])].append(float(row[6]) / float(row[7]))
    assert ratios[0.0] == [1.0] * 4 and max(ratios[0.3]) < 0.9
