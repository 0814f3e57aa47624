"""What does not combine with weighted prompts is refused, with the reason and the knob."""

import pytest

from rloo.config.config import RLOOConfig

VARIANCE = {"prompt_sampling": "variance"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"prompt_sampling": "varianc"}, "it must be one of uniform, variance"),
        ({**VARIANCE, "dynamic_sample": True}, "dynamic_sample is True and prompt_sampling is var"),
        ({**VARIANCE, "shuffle_dataset": False}, "shuffle_dataset is False and prompt_sampling is"),
        ({**VARIANCE, "loss_aggregation": "token_mean"}, "the number of tokens, which depends on"),
        ({**VARIANCE, "preset": "verl"}, "loss_aggregation is token_mean and prompt_sampling is"),
        ({**VARIANCE, "mean_level": "batch"}, "whose baseline is a mean over the drawn prompts"),
        ({**VARIANCE, "mean_level": "running"}, "mean_level is running and prompt_sampling is var"),
        ({**VARIANCE, "std_level": "batch"}, "whose deviation is over the drawn prompts"),
        ({**VARIANCE, "normalize_advantages": True}, "normalize_advantages is True and prompt_sam"),
        ({**VARIANCE, "normalize_rewards": "running"}, "normalize_rewards is running and prompt_s"),
        (
            {**VARIANCE, "dataset": "gym:gcd", "dataset_kwargs": {"curriculum": True}},
            r"dataset_kwargs.curriculum is True and .* \(dataset_kwargs.curriculum, or prom",
        ),
        ({**VARIANCE, "kl_kwargs": {"target": 0.1}}, "adapts beta to the KL of the drawn prompts"),
        (
            {**VARIANCE, "max_staleness": 1, "async_kwargs": {"ess_guard": True}},
            "async_kwargs.ess_guard is True and prompt_sampling is variance",
        ),
        ({"prompt_sampling_kwargs": {"floor": 0.5}}, "no effect without prompt_sampling variance"),
        ({"prompt_sampling_kwargs": {"column": "a"}}, "prompt_sampling_kwargs.column is a but has"),
        (
            {**VARIANCE, "prompt_sampling_kwargs": {"max_resample_times": 5}},
            "max_resample_times is 5 but has no effect without dynamic_sample",
        ),
        (
            {**VARIANCE, "prompt_sampling_kwargs": {"floors": 0.5}},
            "unknown key floors of prompt_sampling_kwargs; did you mean floor",
        ),
        (
            {**VARIANCE, "prompt_sampling_kwargs": {"floor": 0.0}},
            "prompt_sampling_kwargs.floor is 0.0; it must be above 0 and at most 1",
        ),
        (
            {**VARIANCE, "prompt_sampling_kwargs": {"half_life": 0}},
            "prompt_sampling_kwargs.half_life is 0.0; it must be above 0",
        ),
    ],
)
def test_what_does_not_combine_is_refused(options, expected):
    with pytest.raises(ValueError, match=expected):
        RLOOConfig(**options)


SIZED = {
    **VARIANCE,
    "num_generations": 4,
    "num_prompts": 2,
    "prompt_sampling_kwargs": {"max_generations": 8},
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"prompt_sampling": "uniform"}, "max_generations is 8 but has no effect without prompt_"),
        (
            {"prompt_sampling_kwargs": {"max_generations": 2000}},
            "prompt_sampling_kwargs.max_generations is 2000; it must be at most 1,024",
        ),
        ({"num_generations": 2}, "num_generations is 2; each prompt has at least 2 completions"),
        ({"num_generations": 8}, "num_generations is 8, the mean number of completions; the larg"),
        ({"estimator": "grpo"}, "estimator is grpo and prompt_sampling_kwargs.max_generations is"),
        ({"preset": "dr_grpo"}, "mean_leave1out is False and prompt_sampling_kwargs.max_generati"),
        ({"std_level": "group"}, "std_level is group and prompt_sampling_kwargs.max_generations "),
        (
            {"estimator": "length_weighted", "estimator_kwargs": {"leave1out": False}},
            "estimator_kwargs.leave1out is False and prompt_sampling_kwargs.max_generations is 8",
        ),
        (
            {"estimator_kwargs": {"mean_over": "tokens"}, "importance_sampling_level": "token"},
            "estimator_kwargs.mean_over is tokens and prompt_sampling_kwargs.max_generations is 8",
        ),
        (
            {"estimator_kwargs": {"advantage_clip_range": [-1.0, 1.0]}},
            r"advantage_clip_range is .* which clips advantages, whose distribution depends on",
        ),
    ],
)
def test_objectives_that_depend_on_the_number_of_completions_are_refused(options, expected):
    RLOOConfig(**SIZED)
    with pytest.raises(ValueError, match=expected):
        RLOOConfig(**SIZED | options)


@pytest.mark.parametrize(
    ("pilot", "options", "expected"),
    [
        (
            2,
            {"prompt_sampling_kwargs": {"pilot": 2}},
            "pilot is 2 but has no effect without prompt",
        ),
        (1, {}, "pilot is 1; the baseline of a pilot's completion is the mean reward of the pilot"),
        (3, {}, "pilot is 3 and num_generations is 4; each prompt has at least 1 further completi"),
        (4, {}, r"none is left for another prompt \(prompt_sampling_kwargs.pilot at most num_gen"),
        (2, {"max_staleness": 1}, "pilot is 2 and max_staleness is 1; other processes sample the "),
        (2, {"sampler_processes": 1}, "pilot is 2 and sampler_processes is 1; other processes sam"),
        (2, {"estimator": "grpo"}, "estimator is grpo and prompt_sampling_kwargs.max_generations"),
    ],
)
def test_a_pilot_without_a_choice_or_in_another_process_is_refused(pilot, options, expected):
    kwargs = {"prompt_sampling_kwargs": {"max_generations": 8, "pilot": pilot}}
    with pytest.raises(ValueError, match=expected):
        RLOOConfig(**SIZED | kwargs | options)
    kwargs["prompt_sampling_kwargs"]["pilot"] = 2
    assert RLOOConfig(**SIZED | kwargs).prompt_options.pilot == 2


@pytest.mark.parametrize(
    "options",
    [
        {"mean_level": "none"},
        {"preset": "trl"},
        {"preset": "ms_swift"},
        {"estimator": "length_weighted"},
        {"estimator": "optimal_token", "importance_sampling_level": "token"},
    ],
)
def test_objectives_that_do_not_depend_on_it_combine(options):
    assert RLOOConfig(**SIZED | options).prompt_options.max_generations == 8


@pytest.mark.parametrize(
    "batch",
    [{"num_prompts": 1}, {"per_device_train_batch_size": 6, "steps_per_generation": 2}],
)
def test_a_step_of_one_prompt_or_of_parts_of_prompts_is_refused(batch):
    options = {**SIZED, "num_prompts": None, **batch}
    with pytest.raises(ValueError, match="completions among two or more whole prompts"):
        RLOOConfig(**options)
    assert RLOOConfig(**options | {"prompt_sampling_kwargs": None}).num_generations == 4


@pytest.mark.parametrize("preset", ["paper", "trl", "ms_swift", "grpo", "dr_grpo", "areal_page"])
def test_objectives_of_single_groups_combine(preset):
    assert RLOOConfig(**VARIANCE, preset=preset).prompt_options.floor == 0.25
