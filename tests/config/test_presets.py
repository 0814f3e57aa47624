"""The presets compute the numbers that the systems compute (their formulas, read in their code).

`tests/peers/` runs the systems' own functions; here are literal cases worked out by hand.
"""

import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rloo.algorithm.estimator_input import EstimatorInput
from rloo.algorithm.reward_shaping import make_training_samples
from rloo.algorithm.token_kl import token_penalty
from rloo.config.config import RLOOConfig
from rloo.config.estimator_config import ARGUMENTS, PAPER, estimator_config_of
from rloo.config.parsing import parse_command_line
from rloo.config.presets import (
    BASE,
    PRESETS,
    LossForm,
    describe_preset,
    differences,
    preset_options,
    preset_parts,
    remarks,
)
from rloo.config.show import render_resolved
from rloo.model.logprobs import TokenScores
from rloo.types import Completion, Group, Prompt
from support.fixed_logprobs import Rollout, ours
from support.terms import advantages, rollout_of, terms_of


def form(preset: str, **options) -> RLOOConfig:
    return RLOOConfig(**{"preset": preset, "num_generations": 4, "num_prompts": 1, **options})


def advantages_of(config, rewards, lengths=None, penalties=None) -> list[float]:
    """Of one group; `rewards` are those before shaping, `penalties` beta * KL of each token."""
    lengths = lengths or [1] * len(rewards)
    members = [Completion([7] * n, "stop", [0.0] * n, [0.0] * n) for n in lengths]
    group = Group(Prompt(0, [1], "x"), members, ["text"] * len(rewards), rewards)
    samples = make_training_samples(rollout_of([group]), config)
    kept = torch.tensor([len(s.token_ids) for s in samples])
    paid = [0.0] * int(kept.sum()) if penalties is None else penalties
    returns = EstimatorInput(
        torch.tensor([s.reward for s in samples], dtype=torch.float64),
        torch.tensor(paid, dtype=torch.float64),
        torch.arange(len(samples)).repeat_interleave(kept),
        torch.zeros(len(samples), dtype=torch.long),
        torch.zeros(len(samples), dtype=torch.bool),
    )
    return advantages(returns, config).tolist()


@pytest.mark.parametrize("name", ["paper", "trl", "ms_swift", "verl", "openrlhf"])
def test_leave_one_out_of_a_missing_reward(name):
    # ms-swift itself takes a missing reward as 0: [1, -1/3, -1/3, -1/3].
    kept = [0] if name == "trl" else []  # where it counts in the mean over completions
    assert advantages_of(form(name), [1, None, 0, 0]) == [1, *kept, -0.5, -0.5]


def test_areal_s_documented_recipe_leaves_out_one_token():
    config = form("areal_docs", beta=0.0)
    assert advantages_of(config, [1, 0], [1, 3]) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    long = advantages_of(config, [1, 0, 0, 0], [100] * 4)
    assert (long[0], long[-1]) == pytest.approx((0.7519, -0.2506), abs=5e-5)
    assert advantages_of(form("paper"), [1, 0, 0, 0]) == pytest.approx([1] + [-1 / 3] * 3)


def test_areal_s_printed_objective_is_a_mean_over_tokens_of_clipped_token_ratios():
    """1/G sum_i 1/|o_i| sum_t min(r A, clip(r, 0.8, 1.2) A) of two answers, of 1 and 3 tokens."""
    rollout = Rollout(
        group=[0, 0],
        rewards=[1, 0],
        now=[torch.tensor([r], dtype=torch.float64).log() for r in (1.5,)]
        + [torch.tensor([0.5, 1.0, 1.1], dtype=torch.float64).log()],
        old=[torch.zeros(n, dtype=torch.float64) for n in (1, 3)],
        reference=[torch.zeros(n, dtype=torch.float64) for n in (1, 3)],
        sampler=[torch.zeros(n, dtype=torch.float64) for n in (1, 3)],
    )
    found = ours(rollout, preset="areal_page")
    assert found.advantages.tolist() == [[1, 0, 0], [-1, -1, -1]]
    assert found.loss == pytest.approx(-(1.2 + (-0.8 - 1.0 - 1.1) / 3) / 2)
    # By log-probs: clipped ratios have none, the others -ratio * A / (2 * length).
    expected = torch.tensor([[0, 0, 0], [0, 1 / 6, 1.1 / 6]], dtype=torch.float64)
    assert torch.allclose(found.gradient, expected, atol=1e-12)


def test_areal_s_shipped_recipe_whitens_over_tokens_after_leaving_out_answers():
    # 10 * (r - 0.5): 5, -5; left out: 10, -10; four tokens: 10, -10, -10, -10.
    result = advantages_of(form("areal"), [1, 0], [1, 3])
    tokens = [10.0, -10.0, -10.0, -10.0]
    mean, deviation = statistics.fmean(tokens), statistics.stdev(tokens)
    assert result == pytest.approx([(x - mean) / (deviation + 1e-5) for x in tokens])


def test_openrlhf_clips_after_the_baseline_and_pays_kl_to_come():
    result = advantages_of(form("openrlhf"), [30, 0], [2, 1], penalties=[0.1, 0.2, 0.5])
    assert result == pytest.approx([10 - 0.3, 10 - 0.2, -10 - 0.5])


def test_nemo_rl_divides_by_the_deviation_of_the_others():
    rewards = [1, 0, 0, 1]
    expected = []
    for i, r in enumerate(rewards):
        others = [x for j, x in enumerate(rewards) if j != i]
        expected.append((r - statistics.fmean(others)) / (statistics.stdev(others) + 1e-6))
    assert advantages_of(form("nemo_rl"), rewards) == pytest.approx(expected)
    # With two, the deviation of one other is none: nothing is divided.
    assert advantages_of(form("nemo_rl"), [1, 0]) == [1, -1]


def test_grpo_divides_by_the_group_s_own_deviation():
    expected = [0.5, -0.5, -0.5, 0.5]
    scaled = [x / (statistics.stdev([1, 0, 0, 1]) + 1e-4) for x in expected]
    assert advantages_of(form("grpo"), [1, 0, 0, 1]) == pytest.approx(scaled)
    assert advantages_of(form("dr_grpo"), [1, 0, 0, 1]) == expected


def test_reinforce_plus_plus_whitens_returns_over_tokens():
    # Returns to go: 1 - 0.3, 1 - 0.2 and 0 - 0.5.
    values = [0.7, 0.8, -0.5]
    result = advantages_of(form("reinforce_pp"), [1, 0], [2, 1], penalties=[0.1, 0.2, 0.5])
    mean, variance = statistics.fmean(values), statistics.variance(values)
    assert result == pytest.approx([(x - mean) / math.sqrt(variance + 1e-8) for x in values])


def test_reinforce_plus_plus_with_baseline_whitens_what_is_above_the_group_s_mean():
    # 1 - 0.3 and 0 - 0.5 about their mean 0.1, on two tokens and on one.
    values = [0.6, 0.6, -0.6]
    result = advantages_of(form("reinforce_pp_baseline"), [1, 0], [2, 1], [0.1, 0.2, 0.5])
    mean, variance = statistics.fmean(values), statistics.variance(values)
    assert result == pytest.approx([(x - mean) / math.sqrt(variance + 1e-8) for x in values])


def test_kl_to_go_inside_the_baseline_gives_back_what_was_paid_before():
    config = form("paper", kl_placement="reward_to_go", importance_sampling_level="token", beta=0.1)
    result = advantages_of(config, [1, 0], [2, 1], penalties=[0.1, 0.2, 0.5])
    # Others' whole returns: 1 - 0.3 = 0.7 and 0 - 0.5 = -0.5.
    assert result == pytest.approx([0.7 + 0.5, 0.8 + 0.5, -0.5 - 0.7])


def test_trl_s_masked_completions_pay_no_kl_under_its_preset_only():
    reward = torch.tensor([1.0, 0.0], dtype=torch.float64)
    penalty = torch.tensor([0.25, 0.5], dtype=torch.float64)
    index, group = torch.arange(2), torch.zeros(2, dtype=torch.long)
    truncated = torch.tensor([False, True])
    for name, baseline in (("trl", 0.0), ("paper", -0.5)):
        config = form(name, mask_truncated_completions=True)
        result = advantages(EstimatorInput(reward, penalty, index, group, truncated), config)
        assert result.tolist() == [0.75 - baseline, 0.0]


def test_a_whole_completion_s_kl_comes_off_each_of_its_tokens_after_a_baseline_over_tokens():
    config = form("areal_docs", kl_placement="reward", estimator_kwargs={"kl_in_baseline": False})
    result = advantages_of(config, [1, 0], [2, 1], penalties=[0.1, 0.2, 0.5])
    # Tokens 1, 1, 0; of the others 0.5, 0.5, 1.
    assert result == pytest.approx([0.5 - 0.3, 0.5 - 0.3, -1 - 0.5])


def test_the_penalty_of_a_token_is_bounded_where_the_preset_says_so():
    zero = torch.tensor([0.0])
    scores = TokenScores(zero, zero, None, torch.tensor([-50.0]))
    for preset, penalty in {"openrlhf": 0.1, "paper": 2.5}.items():
        found = token_penalty(scores, torch.tensor([0]), terms_of(form(preset)))
        assert found.tolist() == pytest.approx([penalty])


def test_an_option_beside_a_preset_wins_and_the_resolved_file_reads_back():
    config = form("verl", beta=0.5, loss_aggregation="sequence")
    assert (config.beta, config.loss_aggregation, config.delta) == (0.5, "sequence", 3.0)
    assert RLOOConfig(**config.to_dict()) == config
    assert parse_command_line(["--preset", "grpo", "--epsilon", "0.3"]).epsilon == 0.3


def test_a_preset_on_the_command_line_wins_over_the_file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(render_resolved(form("areal", learning_rate=0.5)))
    config = parse_command_line([str(file), "--preset", "grpo", "--epsilon", "0.3"])
    assert (config.preset, config.kl_placement, config.reward_scaling) == ("grpo", "loss", 1.0)
    assert (config.epsilon, config.learning_rate, config.num_generations) == (0.3, 0.5, 4)


def test_every_preset_is_a_valid_configuration_and_its_own_description():
    for name, preset in PRESETS.items():
        config = form(name)
        assert set(preset.options) <= set(BASE)
        composed = preset.options.get("estimator", "composed") == "composed"
        assert set(preset.arguments) <= (set(ARGUMENTS) if composed else {"leave1out"})
        assert preset_options(name)["estimator_kwargs"] == (dict(preset.arguments) or None)
        for option, value in preset_options(name).items():
            if option != "loss_constant":
                assert getattr(config, option) == value
        assert config.loss_form == preset.loss_form
        text = "\n".join(describe_preset(name))
        assert preset.formula in text and preset.source in text and f": {preset.bias}" in text
        for option, value in preset.options.items():
            if option == "kl_kwargs":
                assert all(f"kl_kwargs.{key} {one}" in text for key, one in value.items())
            elif value != BASE[option]:
                assert f"{option} {value}" in text
        for argument, value in preset.arguments.items():
            assert f"estimator_kwargs.{argument} {value}" in text
    with pytest.raises(ValueError, match=r"preset is 'veri'.*did you mean verl"):
        RLOOConfig(preset="veri")


def test_the_arguments_of_a_preset_are_those_of_its_estimator():
    assert form("opo").estimator_kwargs == {"leave1out": False}
    assert form("opo", estimator_kwargs={"leave1out": True}).estimator_kwargs["leave1out"]
    assert form("opo", estimator="rloo").estimator_kwargs is None
    assert form("opo", estimator="composed").estimator_kwargs is None
    copy = RLOOConfig(**form("optimal_token_baseline").to_dict())
    assert copy == form("optimal_token_baseline")


def test_the_base_holds_the_default_of_every_option_that_presets_set():
    plain = RLOOConfig()
    assert {name: getattr(plain, name) for name in BASE} == BASE
    assert plain.loss_form == LossForm()
    assert estimator_config_of(plain) == PAPER


def test_arguments_beside_a_preset_win_one_by_one_and_are_read_back():
    config = form("areal", estimator_kwargs={"kl_in_baseline": True}, beta=0.1)
    assert config.estimator_kwargs == {"kl_in_baseline": True, "normalize_over": "tokens"}
    assert RLOOConfig(**config.to_dict()) == config
    assert replace(config, beta=0.2).estimator_kwargs == config.estimator_kwargs
    command = ["--preset", "areal", "--beta", "0.1", "--estimator_kwargs.kl_in_baseline", "true"]
    assert parse_command_line(command).estimator_kwargs == config.estimator_kwargs


def test_the_form_of_the_loss_goes_with_the_preset_into_files_and_copies(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(render_resolved(form("trl")))
    for config in (parse_command_line([str(file)]), replace(form("trl"), beta=0.3)):
        assert config.loss_form == LossForm(all_completions=True)
    assert parse_command_line([str(file), "--preset", "paper"]).loss_form == LossForm()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"mean_ovr": "tokens"}, "unknown argument mean_ovr of the estimator composed; did you me"),
        ({"mean_over": "token"}, "estimator_kwargs.mean_over is 'token'; it must be one of compl"),
        ({"kl_in_baseline": 3}, "estimator_kwargs.kl_in_baseline is 3; it must be true or false"),
    ],
)
def test_arguments_that_are_none_are_refused(arguments, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        RLOOConfig(estimator_kwargs=arguments)


TOKEN = {"importance_sampling_level": "token"}


def composed(**arguments) -> dict:
    return {"estimator_kwargs": arguments}


def test_what_does_not_do_what_its_name_says_is_remarked():
    assert "one token, not one completion" in remarks(form("areal_docs"))[0]
    over_tokens = {
        "importance_sampling_level": "token",
        "estimator_kwargs": {"mean_over": "tokens"},
    }
    assert "one token, not one completion" in remarks(RLOOConfig(**over_tokens))[0]
    in_loss = form("areal", beta=0.1, kl_placement="loss", kl_estimator="k1")
    assert "k1 as KL in the loss has a zero gradient" in remarks(in_loss)[0]
    in_reward = form("areal", beta=0.1, kl_estimator="k3")
    assert "k3 as KL in the reward_to_go has a wrong gradient" in remarks(in_reward)[0]
    warned = {name for name in PRESETS if remarks(form(name))}
    assert warned == {"areal_docs", "opo", "optimal_token_baseline"}
    assert not remarks(form("opo", estimator_kwargs={"leave1out": True}))
    (note,) = remarks(RLOOConfig(estimator="shrinkage", dynamic_sample=True))
    assert "without them the gradient is biased" in note
    plain = RLOOConfig(estimator="length_weighted", estimator_kwargs={"leave1out": False})
    assert remarks(plain)[0].startswith("each completion is in its own baseline, which is biased")


CONTRADICTIONS = [
    ({"kl_placement": "loss"}, "preset areal or areal_docs does it all the same"),
    ({"use_bias_correction_kl": True}, "it is for KL in the loss"),
    (
        {"use_bias_correction_kl": True, "kl_placement": "loss", "kl_estimator": "k2"},
        "which is a KL for k1 and k3",
    ),
    ({"kl_estimator": "k3"}, "preset areal or areal_docs does it all the same"),
    ({"kl_estimator": "k2", "preset": "trl"}, "gets the gradient of its value only if that is k1"),
    ({"kl_placement": "reward_to_go"}, "importance_sampling_level token"),
    (
        {**composed(normalize_over="tokens"), "normalize_advantages": True},
        "importance_sampling_level token",
    ),
    (composed(mean_over="tokens"), "importance_sampling_level token"),
    (
        {**composed(normalize_over="tokens"), **TOKEN},
        "estimator_kwargs.normalize_over is tokens but has no effect without normalize_advantages",
    ),
    (
        {
            "kl_placement": "reward_to_go",
            "importance_sampling_level": "token",
            "normalize_advantages": True,
        },
        "normalize_over tokens",
    ),
    ({"preset": "areal_docs", "std_level": "group"}, "no deviation of its own"),
    ({"preset": "areal_docs", "mean_level": "batch"}, "it must be group"),
    ({"preset": "areal_docs", "normalize_advantages": True}, "normalize_over tokens"),
    (
        {"estimator_kwargs": {"running_decay": 0.5}},
        "running_decay is 0.5 but has no effect without mean_level running; set",
    ),
    (
        {"kl_kwargs": {"horizon": 100}},
        "kl_kwargs.horizon is 100 but has no effect without kl_kwargs.target",
    ),
    ({"prompt_sampling_kwargs": {"max_resample_times": 5}}, "has no effect without dynamic_sample"),
    ({"rollout_importance_sampling_threshold": 3.0}, "without rollout_importance_sampling_mode"),
    ({"preset": "grpo", **composed(kl_in_baseline=False)}, "no effect without a KL in the reward"),
    (
        {"kl_kwargs": {"target": 0.1, "horizon": 7}},
        "horizon is 7, below the 8 completions of a rollout",
    ),
    (composed(std_leave1out=True), "has no effect without std_level"),
    (composed(epsilon_in_variance=True), "without std_level or normalize_advantages"),
    (composed(kl_of_truncated=False), "has no effect without mask_truncated_completions"),
    (
        {"preset": "paper", **composed(kl_of_truncated=False)},
        "has no effect without mask_truncated_completions",
    ),
    ({"kl_kwargs": {"target": 0.1}, "beta": 0.0}, "give a beta above 0"),
    (
        {"kl_kwargs": {"target": 0.1}, "preset": "grpo"},
        "kl_kwargs.target adapts the KL in the reward",
    ),
    (
        {"kl_estimator": "exact", "kl_placement": "loss", "use_bias_correction_kl": True},
        "the ratio would add noise only",
    ),
    ({"kl_estimator": "exact", "parallel": "zero3"}, "DeepSpeed gathers the two models in turn"),
    ({"kl_estimator": "exact", "std_level": "group"}, "std_level group scales the penalty"),
    ({"kl_estimator": "exact", "normalize_advantages": True}, "normalize_advantages scales the"),
    ({"kl_estimator": "exact", "mean_leave1out": False}, "mean_leave1out false scales the"),
    (
        {"kl_estimator": "exact", **composed(advantage_clip_range=[-1, 1])},
        "estimator_kwargs.advantage_clip_range scales the penalty",
    ),
    (
        {"kl_estimator": "exact", **composed(mean_over="tokens"), **TOKEN},
        "estimator_kwargs.mean_over tokens scales the penalty",
    ),
    ({"kl_estimator": "exact", "estimator": "grpo"}, "estimator grpo scales the penalty"),
    ({"kl_estimator": "exact", "preset": "opo", "beta": 0.1}, "leave1out false scales the penalty"),
    ({"delta": 1.1}, "inside the clipping range"),
    ({"sync_ref_model": True, "beta": 0.0}, "there is no reference to move"),
    ({"sync_ref_model": True, "use_peft": True}, "which must not move"),
    ({"rollout_importance_sampling_mode": "token_mask"}, "has no weights by token"),
    ({"rollout_importance_sampling_min": 0.5}, "a lower bound is for the modes that mask"),
    (
        {
            "rollout_importance_sampling_mode": "sequence_mask",
            "rollout_importance_sampling_min": 3.0,
        },
        "not below the upper bound",
    ),
    ({"normalize_rewards": "batch", "mean_level": "running"}, "both take a mean"),
    ({"num_generations": 1, "num_prompts": 4}, "leave-one-out needs at least 2"),
    (
        {"num_generations": 1, "num_prompts": 4, "mean_level": "none", "dynamic_sample": True},
        "groups of at least 2",
    ),
]


@pytest.mark.parametrize(("options", "expected"), CONTRADICTIONS)
def test_combinations_without_sense_are_refused_with_the_reason(options, expected):
    with pytest.raises(ValueError) as error:
        RLOOConfig(**options)
    assert expected in str(error.value)


def test_what_a_preset_sets_for_another_case_may_stay_idle():
    for options in (
        {"preset": "areal", "rollout_importance_sampling_mode": None},
        {"preset": "areal", "normalize_advantages": False},
        {"preset": "areal", "beta": 0.1, "kl_placement": "loss", "kl_estimator": "k3"},
        {"preset": "nemo_rl", "std_level": "none"},
        {"preset": "grpo", "kl_estimator": "exact"},
        {"preset": "openrlhf", "kl_estimator": "exact"},
        {"std_level": "group", "kl_estimator": "exact", **composed(kl_in_baseline=False)},
        {"std_level": "group", "kl_estimator": "exact", "beta": 0.0, "parallel": "zero3"},
        {"preset": "verl", "kl_placement": "loss", "kl_estimator": "k3"},
        {"preset": "trl"},
    ):
        config = RLOOConfig(**options)
        assert RLOOConfig(**config.to_dict()) == config


def test_options_of_trl_that_wait_for_another_are_remarked():
    config = RLOOConfig(ref_model_sync_steps=64, ref_model_mixup_alpha=0.5)
    assert len(remarks(config)) == 2
    assert "ref_model_sync_steps is 64 and has no effect: sync_ref_model" in remarks(config)[1]
    assert not remarks(RLOOConfig(sync_ref_model=True, ref_model_sync_steps=64))


def test_the_documented_table_is_that_of_the_presets():
    text = (Path(__file__).parents[2] / "docs/algorithm.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    for name, preset in PRESETS.items():
        cells = rows[name].split(" | ")
        assert preset.formula in rows[name] and preset.source in rows[name]
        assert cells[2] == (differences(preset_parts(name), preset_parts("paper")) or "none")
        scale, cosine = (cell.strip("| ") for cell in cells[3:])
        assert str(preset.bias) == f"scale {scale}, cosine {cosine}"
