"""A finding is a cause: what follows is hidden, and a second never contradicts the first."""

import math
import random
from dataclasses import replace

import pytest

from rloo.addons.report.doctor.causes import EXPLAINS, causes_of
from rloo.addons.report.doctor.rules import RULES, diagnose
from rloo.addons.report.doctor.run_record import RecordedRun, Rule, RuleResult
from rloo.addons.report.doctor.training_rules import leap, noise_of_baselines
from rloo.tracking.before_after import since_first
from rloo.tracking.summary_text import summary_text, training_of

GROUP = {"groups/signal": 0.8, "baseline/variance": 0.1}
WELL = {
    "reward": 0.4, "reward_std": 0.48, "reward/standard_error": 0.05, "entropy": 0.6, "kl": 0.02,
    "completions/mean_length": 20.0, "completions/clipped_ratio": 0.0, "grad_norm": 1.0,
    "rewards/right/mean": 0.4, "update/changed_share": 1.0, "learning_rate": 1e-5, **GROUP,
}  # fmt: skip
TWELVE = range(12)
ONE_PROMPT = {"reward/standard_error": math.nan, "config": {"num_prompts": 1, "num_generations": 4}}


def run(number=12, *, evaluations=(), config=None, over=True, facts=None, **columns):
    """A run whose columns are lists, or one value in all rollouts; None leaves one out."""
    rows = []
    for at in range(number):
        row = {"step": at + 1, **WELL}
        row |= {n: v[at] if isinstance(v, list) else v for n, v in columns.items()}
        rows.append({name: value for name, value in row.items() if value is not None})
    return RecordedRun(rows, (), list(evaluations), config or {}, facts or {}, over=over)


def names(of):
    return [finding.name for finding in diagnose(of)]


# -- the relation ----------------------------------------------------------------------------------


def test_every_effect_comes_after_its_causes():
    order = list(EXPLAINS)
    assert order == [rule.name for rule in RULES]
    for cause, effects in EXPLAINS.items():
        assert cause not in causes_of(cause), "in a circle"
        assert all(order.index(effect) > order.index(cause) for effect in effects)


def test_what_follows_from_an_effect_follows_from_its_cause():
    assert "length_explosion" in EXPLAINS["gibberish"] and "truncation" in EXPLAINS["gibberish"]
    assert "few_generations" not in EXPLAINS["chat_template"]
    assert {"chat_template", "silent", "rewards_zero", "learning_rate_low"} <= causes_of(
        "few_generations"
    )
    assert causes_of("held_out_trained") == set()


def test_no_two_findings_change_one_option():
    """Here of rules that contradict each other, of which none follows from another."""
    rules = [
        Rule(name, "", "", "", "", lambda run, v=value: RuleResult("", "", {"beta": v}))
        for name, value in (("held_out_trained", 1.0), ("mismatch", 0.1), ("truncation", 3.0))
    ]
    assert [finding.name for finding in diagnose(RecordedRun([]), rules=rules)] == [
        "held_out_trained"
    ]


def test_no_two_findings_of_random_runs_contradict_each_other():
    draw, several = random.Random(3), 0
    values = {
        "reward": (0.0, 0.4, 1.0), "reward_std": (0.0, 1e-5, 0.5), "kl": (0.0, 0.5, 4.0, None),
        "entropy": (0.01, 0.6, 3.0), "update/changed_share": (0.0, 1e-4, 1.0),
        "groups/signal": (0.0, 0.05, 0.9), "completions/clipped_ratio": (0.0, 0.5, 1.0),
        "learning_rate": (0.0, 1e-8, 1e-2), "baseline/variance": (0.01, 0.2),
    }  # fmt: skip
    for _ in range(400):
        ends = {name: (draw.choice(of), draw.choice(of)) for name, of in values.items()}
        columns = {
            n: [a if at < 6 else b for at in TWELVE]
            for n, (a, b) in ends.items()
            if None not in (a, b)
        }
        options = {"beta": draw.choice((0.0, 9.0)), "num_generations": draw.choice((2, 4, 16))}
        findings = diagnose(run(config=options, **columns))
        changed = [name for finding in findings for name in finding.options]
        assert len(changed) == len(set(changed))
        told = {finding.name for finding in findings}
        assert not any(causes_of(name) & told for name in told)
        several += len(findings) > 1
    assert several > 20


# -- D2: hacking -----------------------------------------------------------------------------------


def measured(*points, name="judge"):
    """Evaluations of (trained reward, judge's reward), each within 0.1."""
    return [
        {
            "step": step, "name": "during", "reward": trained, "num_prompts": 48,
            "reward_interval": [trained - 0.1, trained + 0.1],
            "pass@1": trained, "pass@1_interval": [trained - 0.1, trained + 0.1],
            "rewards/right/mean": trained, f"rewards/{name}/mean": judge,
            f"rewards/{name}/mean_interval": [judge - 0.1, judge + 0.1],
        }
        for step, (trained, judge) in enumerate(points)
    ]  # fmt: skip


FAST = [0.15, 0.4, 0.8, *[0.6] * 9]  # learned before the first third is over


@pytest.mark.parametrize(
    ("rewards", "points", "expected"),
    [
        (FAST, ((0.19, 0.5), (0.63, 0.1)), ["hacking"]),  # D2
        (FAST, ((0.4, 0.5), (0.4, 0.1)), ["hacking"]),  # in training only, and early
        ([0.6] * 12, ((0.2, 0.5), (0.63, 0.1)), ["hacking"]),  # held out only
        ([0.6] * 12, ((0.2, 0.5), (0.5, 0.9), (0.6, 0.5)), ["hacking"]),  # since its best
        (FAST, ((0.19, 0.5), (0.63, 0.45)), []),  # within chance
        ([0.6] * 12, ((0.6, 0.5), (0.6, 0.1)), []),  # nothing rose
    ],
)
def test_hacking_is_a_fall_of_what_judges_beside_a_rise_at_any_time(rewards, points, expected):
    assert names(run(reward=rewards, evaluations=measured(*points))) == expected


def test_the_best_weights_are_those_of_the_set_that_is_judged():
    points = [{**row, "dataset": "hard"} for row in measured((0.19, 0.5), (0.63, 0.1))]
    (finding,) = diagnose(run(reward=FAST, evaluations=points))
    assert finding.options["metric_for_best_model"] == "hard_rewards/judge/mean"


def test_where_the_trained_reward_falls_too_the_policy_is_broken_and_not_hacked():
    lost = [0.4, 0.8, 0.9, 0.9, *[0.1] * 8]
    kl = [0.0, 0.01, 0.02, 0.1, *[4.0] * 8]
    of = run(reward=lost, kl=kl, evaluations=measured((0.5, 0.5), (0.1, 0.0)))
    assert names(of) == ["learning_rate_high"]


def test_a_fast_learner_is_compared_with_its_first_rollout():
    """Twice the larger of its own error and the usual one: 0.15 against 0.6 within 2 x 0.05 and
    0.05 / 2, of four rollouts at the end."""
    change = since_first([{"reward": r, "reward/standard_error": 0.05} for r in FAST])
    assert change.moved == 1 and change.before == 0.15 and change.after == pytest.approx(0.6)
    assert change.before_bounds[1] == pytest.approx(0.15 + 1.959964 * 0.1)
    assert change.after_bounds[1] == pytest.approx(0.6 + 1.959964 * 0.025)
    alone = [{"reward": r, "reward/standard_error": math.nan} for r in FAST]
    assert since_first(alone).before == pytest.approx(0.45)  # of three: their spread is the error
    assert since_first(alone[:5]).moved is None


def test_the_verdict_does_not_praise_a_training_reward_where_a_judge_fell():
    start, end = measured((0.19, 0.5), (0.63, 0.1))
    told = {
        "status": "finished", "steps": 12, "max_steps": 12, "start": start, "end": end,
        "wall_seconds": 5.0, "training": training_of(run().rows), "findings": [],
    }  # fmt: skip
    first, second, *_ = summary_text(told).split("\n")
    assert first == "judge, which only judges, fell from 0.5 to 0.1."
    assert second.startswith("So this is no progress: pass@1 was 19.0 % ")
    assert "larger than chance" not in summary_text(told)
    kept = summary_text(told | {"end": measured((0.63, 0.45))[0]})
    assert kept.startswith("pass@1 rose from 19.0 %")


# -- D3: a gradient of 0 is no rounding ------------------------------------------------------------

STILL = {"update/changed_share": 0.0, "update/no_signal": 0.0}


def still(**columns):
    return diagnose(run(**STILL, **columns))


def test_rewards_without_signal_are_the_cause_under_a_penalty_too():
    flat = {"reward_std": 0.0, "groups/signal": 0.0, "grad_norm": 0.0, "config": {"beta": 0.05}}
    for level, name in ((0.0, "rewards_zero"), (1.0, "rewards_equal")):
        (finding,) = still(reward=level, **flat)
        assert finding.name == name and not finding.options
    (finding,) = still(**{**flat, "reward_std": None, "grad_norm": 1e-4, "groups/signal": 0.0})
    assert finding.name == "groups_flat"


def test_a_reward_of_the_prompt_is_named_of_rollouts_of_one_prompt_too():
    """Each rollout has one reward: 0, 1 or 2, whose deviation is sqrt(2 / 3) = 0.816."""
    of_prompt = {
        "reward": [float(at % 3) for at in TWELVE],
        "reward_std": 0.0,
        "groups/signal": 0.0,
    }
    (finding,) = diagnose(run(**of_prompt, **STILL, **ONE_PROMPT, grad_norm=0.0))
    assert finding.name == "groups_flat" and "(deviation 0.816)" in finding.evidence


def test_a_gradient_of_0_is_told_from_a_step_that_is_rounded_away():
    (lost,) = still(grad_norm=0.0)
    assert "the gradient was 0, although 80.0 % of groups had signal" in lost.evidence
    assert not lost.options
    cut = {"completions/clipped_ratio": 1.0, "config": {"mask_truncated_completions": True}}
    assert names(run(**STILL, grad_norm=0.0, **cut))[0] == "missing_eos"
    half = {**cut, "completions/clipped_ratio": 0.9}
    (masked,) = still(grad_norm=0.0, **half)[:1]
    assert masked.options == {"max_completion_length": 1024}
    (rounded,) = still(learning_rate=1e-9)
    assert "lost in rounding" in rounded.evidence and rounded.options == {"learning_rate": 1e-6}
    (frozen,) = still(learning_rate=4e-4)
    assert "rounding" not in frozen.evidence and not frozen.options


# -- D4: rollouts of one prompt --------------------------------------------------------------------


def test_a_leap_is_what_no_rollout_before_had_and_nearly_all_after_keep():
    def up(old, new):
        return new > old + 1

    assert leap([0, 0, 5, 5, 5], 1, up) == 2
    assert leap([0, 5, 0, 5, 0], 1, up) is None
    assert leap([0, 0, 5, 5, 5, 5, 0], 1, up) == 2  # four of five
    assert leap([0, 0, 5, 5, 5, 0, 0], 1, up) is None
    assert leap([0, 5, 5, 5, 5], 2, up) is None
    assert leap([0, 0, 0, 5], 1, up) is None  # nothing follows it


@pytest.mark.parametrize("kl", [None, 0.0])
@pytest.mark.parametrize("seed", range(20))
def test_entropies_of_other_prompts_do_not_condemn_the_learning_rate(seed, kl):
    """One prompt a rollout, of which each has its own entropy and length."""
    draw = random.Random(seed)
    number = draw.choice((12, 18, 40))
    entropy = [draw.choice((0.1, 0.3, 0.6, 1.2, 2.0)) for _ in range(number)]
    length = [draw.choice((4.0, 8.0, 20.0, 60.0)) for _ in range(number)]
    reward = [draw.choice((0.0, 0.25, 0.5, 1.0)) for _ in range(number)]
    of = run(number, reward=reward, entropy=entropy, kl=kl, **ONE_PROMPT,
        **{"completions/mean_length": length})  # fmt: skip
    assert not {"learning_rate_high", "length_explosion"} & set(names(of))


def test_completions_that_grow_although_being_cut_costs_need_a_higher_limit():
    grown = {"completions/mean_length": [9.0] * 4 + [23.0] * 8}
    grown |= {"completions/clipped_ratio": [0.0] * 4 + [0.45] * 8, "reward": [0.2] * 4 + [0.5] * 8}
    of = run(**grown)
    assert names(of) == ["length_explosion"]

    def recorded(cut, whole):
        return [
            {
                "step": step,
                "completion": f"text {step}",
                "reward": reward,
                "finish": finish,
                "scores": {"right": reward},
            }
            for step in range(1, 13)
            for finish, reward in (("length", cut), ("stop", whole))
        ]

    for cut, whole, expected in (
        (0.0, 1.0, "truncation"), (1.0, 0.0, "length_explosion"), (0.5, 0.5, "length_explosion"),
    ):  # fmt: skip
        assert names(replace(of, completions=recorded(cut, whole))) == [expected]
    (finding,) = diagnose(replace(of, completions=recorded(0.0, 1.0)))
    assert finding.options == {"max_completion_length": 2048}
    fewer = replace(of, rows=[{**r, "completions/clipped_ratio": 0.33} for r in of.rows])
    (finding,) = diagnose(replace(fewer, completions=recorded(0.0, 1.0)))
    assert finding.options == {"max_completion_length": 1024}


def test_advice_reaches_what_it_is_for():
    """Each of these was followed in a run that stayed sick (benchmarks.broken_runs, seeds 302 and
    303)."""
    (slow,) = diagnose(run(kl=1e-9, learning_rate=1e-13))
    assert slow.options == {"learning_rate": 1e-6}
    (slow,) = diagnose(run(kl=1e-9, learning_rate=1e-13, config={"use_peft": True}))
    assert slow.options == {"learning_rate": 1e-5}
    jump = {"entropy": [0.6, 0.6, 0.6, *[2.0] * 9], "kl": None, "learning_rate": 0.1}
    (fast,) = diagnose(run(reward=[0.4] * 4 + [0.05] * 8, **jump))
    assert fast.options == {"learning_rate": 1e-3}
    (fast,) = diagnose(run(reward=[0.4] * 4 + [0.15] * 8, **jump))
    assert fast.options == {"learning_rate": 1e-2}
    form = {"rewards/format/mean": [0.1] * 4 + [0.9] * 8}
    (form_alone,) = diagnose(run(**form, **{"rewards/right/mean": 0.0}))
    assert form_alone.name == "only_form" and not form_alone.options
    (form_alone,) = diagnose(run(**form, **{"rewards/right/mean": 0.1}))
    assert form_alone.options == {"reward_weights": pytest.approx([1.0, 0.1])}


def test_hacking_is_named_where_the_policy_is_lost_after_it():
    """The reward was 0.12 at first, 0.9 by the fourth rollout, and fell from then on."""
    reward = [0.12, 0.5, 0.9, 0.9, 0.9, 0.8, 0.8, 0.6, 0.6, 0.5, 0.5, 0.4]
    judged = [
        {"step": step, "name": name, "reward": 0.15, "reward_interval": [0.08, 0.24],
         "rewards/judge/mean": value, "rewards/judge/mean_interval": bounds}
        for step, name, value, bounds in (
            (0, "start", 0.15, [0.08, 0.24]), (12, "end", 0.0, [0.0, 0.04]),
        )
    ]  # fmt: skip
    of = run(reward=reward, kl=[0.0, *[1.5] * 11], evaluations=judged)
    assert names(of)[0] == "hacking"
    lost = run(reward=[0.5] * 4 + [0.05] * 8, kl=[0.0, *[1.5] * 11], evaluations=judged)
    assert names(lost)[0] != "hacking"


def test_a_policy_that_is_broken_is_told_by_its_kl_or_by_an_entropy_that_stays():
    stays = [0.6, 0.7, 0.5, *[4.0] * 9]
    assert names(run(entropy=stays, kl=None))[0] == "learning_rate_high"
    assert names(run(entropy=stays, kl=0.001)) == []  # the policy is where it was
    assert names(run(kl=[0.0, *[3.0] * 11]))[0] == "learning_rate_high"
    assert names(run(entropy=stays, kl=None, **{"update/changed_share": 0.0})) == [
        "nothing_trained"
    ]


def test_a_short_try_of_a_published_rate_is_not_told_to_raise_it():
    for rate, adapter, number, expected in (
        (1e-6, False, 12, []), (1e-7, False, 12, ["learning_rate_low"]),
        (1e-5, True, 12, []), (1e-6, True, 12, []),
        (1e-6, False, 120, ["learning_rate_low"]),
    ):  # fmt: skip
        of = run(number, kl=1e-8, learning_rate=rate, config={"use_peft": adapter})
        assert names(of) == expected
    (finding,) = diagnose(run(kl=1e-6, learning_rate=1e-7))
    assert finding.options == {"learning_rate": pytest.approx(1e-5)}  # sqrt(1e-2 / 1e-6) times


def test_the_noise_of_baselines_is_counted_over_rollouts_of_one_prompt():
    """K 4: within 0.04 and means of 0 or 1, so that 0.25 - 0.04 / 4 lies between prompts, and
    0.04 / 3 of 0.24 + 0.04 / 3 is noise: 5.3 %. K = 4 is not too small."""
    means = [float(at % 2) for at in range(40)]
    wide = run(40, reward=means, reward_std=0.2, **ONE_PROMPT)
    assert noise_of_baselines(wide, 4) == pytest.approx(0.04 / 3 / (0.24 + 0.04 / 3))
    assert names(wide) == []
    alike = run(40, reward=[0.5] * 40, reward_std=0.5, **ONE_PROMPT)
    (finding,) = diagnose(alike)
    assert "100.0 % of the baselines' variance is sampling noise" in finding.evidence
    assert "of groups have signal" not in finding.evidence  # it is 80 %: no evidence for it
    half = {**ONE_PROMPT, "reward_std": 0.2, "groups/signal": 0.4}
    assert names(run(40, reward=means, **half)) == []  # 160 completions
    few = run(80, reward=means * 2, **half)
    (finding,) = diagnose(few)
    assert finding.name == "few_generations" and "noise" not in finding.evidence
    assert names(run(20, reward=[0.5] * 20, reward_std=0.5, **ONE_PROMPT)) == []  # 80 completions


def test_a_policy_that_has_not_moved_says_nothing_of_k_nor_do_a_few_groups_of_signal():
    """Of 12 rollouts x 4 prompts a share of 12.7 % is below 25 % beyond chance."""
    small = {"num_generations": 2}
    assert names(run(reward_std=1.0, config=small)) == ["few_generations"]
    assert names(run(reward_std=1.0, config=small, kl=1e-6)) == []
    for share, expected in ((0.13, []), (0.12, ["little_signal"])):
        assert names(run(**{"groups/signal": share}, config={"num_generations": 8})) == expected


def test_memory_is_saved_where_that_costs_least():
    said = {"out_of_memory": "OutOfMemoryError: tried to allocate 2 GiB"}
    for recomputes, changed in (
        (False, {"gradient_checkpointing": True}), (True, {"max_completion_length": 64})
    ):  # fmt: skip
        config = {"gradient_checkpointing": recomputes, "max_completion_length": 128}
        (finding,) = diagnose(run(config=config, facts=said))
        assert finding.options == changed and "tried to allocate 2 GiB" in finding.evidence


# -- D5, D6, D8 ------------------------------------------------------------------------------------


def test_rewards_that_differ_in_their_last_digits_are_the_cause():
    flat = {"reward": 1.0001, "reward_std": 6e-5, "config": {"beta": 0.05}}
    (finding,) = diagnose(run(**flat))
    assert finding.name == "rewards_alike" and finding.voids and not finding.options
    for word in ("temperature", "diverse prompts", "tell them apart"):
        assert word in finding.change
    rising = [1.0 + 1e-4 * at for at in TWELVE]
    learned = run(reward=rising, reward_std=6e-5, **{"reward/standard_error": 1e-5})
    assert names(learned) == []  # small, and learned from
    small = run(reward=1e-4, reward_std=6e-5, config={"beta": 0.05})
    assert names(small) == ["beta_high"]  # they tell completions apart


def test_a_cold_start_is_told_to_begin_with_examples():
    zero = {"reward": 0.0, "reward_std": 0.0, "groups/signal": 0.0}
    (finding,) = diagnose(run(**zero))
    assert "train it with examples first" in finding.change
    for size in (4, 16):
        of = run(reward=0.002, **{"groups/signal": 0.02}, config={"num_generations": size})
        assert "trained with examples first" in diagnose(of)[0].change


# -- advice that can help --------------------------------------------------------------------------


def advice(of):
    (finding,) = diagnose(of)[:1]
    return finding.name, dict(finding.options)


def test_advice_fits_what_is_seen():
    nan = {"update/nonfinite": 1.0, "reward/standard_error": math.nan}
    clipped = {"reward_clip_range": [-10.0, 10.0]}
    assert advice(run(reward=1e37, reward_std=2e37, **nan)) == ("steps_refused", clipped)
    assert advice(run(reward=1e37, reward_std=2e37, **nan, **STILL)) == ("nothing_trained", clipped)
    bf16 = {"bf16": True, "fp16": False}
    assert advice(run(**nan, config={"fp16": True})) == ("steps_refused", bf16)
    assert advice(run(**nan, **STILL, config={"fp16": True})) == ("nothing_trained", bf16)
    assert advice(run(**nan, **STILL)) == ("nothing_trained", {})
    leap = [0.0, *[1.5] * 11]
    for kl, rate in ((leap, 1e-3), ([2 * nats for nats in leap], 1e-4)):
        assert advice(run(kl=kl, learning_rate=1e-2)) == (
            "learning_rate_high",
            {"learning_rate": pytest.approx(rate)},
        )
    apart = {"mismatch/mean": 0.3}
    assert advice(run(**apart, config={"rollout_dtype": "bfloat16"}))[1] == {
        "rollout_dtype": "float32"
    }
    assert advice(run(**apart)) == ("mismatch", {})  # it is sampled as it is trained
    never = {"completions/clipped_ratio": 1.0}
    kwargs = {"generation_kwargs": {"eos_token_id": 0, "top_h": 1}}
    assert advice(run(**never, config=kwargs)) == (
        "missing_eos",
        {"generation_kwargs": {"top_h": 1}},
    )
    plain = {"chat_template": "unused", "prompt": "2 + 2"}
    for given, column in ((None, "{prompt}"), ("{question}?", "{question}?")):
        of = run(**never, facts=plain, config={"prompt_template": given})
        assert advice(of)[1]["prompt_template"][0]["content"] == column
